//! Limits and usage as rows of tables.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, Row as Columns, named_params};
use tidegate_core::bucket::{Bucket, Shape, Span};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::Rule;
use tidegate_core::limit::usage::{Window, Windows};
use tidegate_core::time::Stamp;

use super::trouble::{Trouble, column, number};
use crate::desk::shelf::Row;
use crate::error::StoreError;

/// Every limit of a subject.
pub(super) fn meters_of(connection: &Connection, subject: i64) -> Result<Vec<Meter>, Trouble> {
    let mut rows = connection.prepare_cached(
        "SELECT row, amount, period, burst, full_at, part, version, consumed FROM meters WHERE subject = ?1",
    )?;
    let mut rows = rows.query([subject])?;
    let mut meters = Vec::new();
    while let Some(columns) = rows.next()? {
        meters.push(meter(columns)?);
    }
    Ok(meters)
}

fn meter(columns: &Columns<'_>) -> Result<Meter, Trouble> {
    let row: String = columns.get(0)?;
    let what = || format!("the limit `{row}`");
    let read = |place: usize| -> Result<u64, Trouble> { Ok(number(columns.get(place)?, &what())?) };
    // What stands behind `~` is the shape of a limit that was given with a call; no name holds one.
    let (name, is_of_call) = row.split_once('~').map_or((row.as_str(), false), |(name, _)| (name, true));
    let corrupt = |why: String| StoreError::Corrupt { what: format!("the limit `{row}`: {why}") };
    let name = LimitName::new(name).map_err(|error| corrupt(error.to_string()))?;
    let (amount, period, burst) = (read(1)?, Duration::from_micros(read(2)?), read(3)?);
    let shape = Shape::new(amount, period, burst).map_err(|error| corrupt(error.to_string()))?;
    // A debt of ages is a time beyond what a column holds as a number above zero; all its bits are kept.
    let full_at = Span { whole: columns.get::<_, i64>(4)?.cast_unsigned(), part: read(5)? };
    if full_at.part >= amount {
        return Err(corrupt(format!("{} parts of {amount}", full_at.part)).into());
    }
    let rule = Rule::stored(name, shape);
    let rule = if is_of_call { rule.of_call() } else { rule };
    if rule.row() != row {
        return Err(corrupt(format!("its shape is that of `{}`", rule.row())).into());
    }
    let (version, consumed) = (Version::new(read(6)?), columns.get(7)?);
    Ok(Meter::restored(Bucket::from_full_at(full_at), Arc::new(rule), version, consumed))
}

/// Writes the limits of a subject that are not as they were `written`.
pub(super) fn write_meters(
    connection: &Connection,
    subject: i64,
    rows: &[Row],
    written: &mut Vec<Meter>,
) -> Result<(), Trouble> {
    let is_in_place = |(row, written): (&Row, &Meter)| row.meter.rule().row() == written.rule().row();
    if written.len() > rows.len() || !rows.iter().zip(written.iter()).all(is_in_place) {
        // Limits that were given with calls were forgotten to make room.
        for gone in written.drain(..) {
            if !rows.iter().any(|row| row.meter.rule().row() == gone.rule().row()) {
                let mut delete =
                    connection.prepare_cached("DELETE FROM meters WHERE subject = ?1 AND row = ?2")?;
                delete.execute((subject, gone.rule().row()))?;
            }
        }
    }
    for (place, row) in rows.iter().enumerate() {
        if written.get(place) != Some(&row.meter) {
            write_meter(connection, subject, &row.meter)?;
        }
    }
    written.clear();
    written.extend(rows.iter().map(|row| row.meter.clone()));
    Ok(())
}

fn write_meter(connection: &Connection, subject: i64, meter: &Meter) -> rusqlite::Result<()> {
    let mut write = connection.prepare_cached(
        "INSERT INTO meters (subject, row, amount, period, burst, full_at, part, version, consumed)
         VALUES (:subject, :row, :amount, :period, :burst, :full_at, :part, :version, :consumed)
         ON CONFLICT (subject, row) DO UPDATE SET amount = :amount, period = :period, burst = :burst,
             full_at = :full_at, part = :part, version = :version, consumed = :consumed",
    )?;
    let (shape, full_at) = (meter.rule().shape(), meter.bucket().full_at());
    write.execute(named_params! {
        ":subject": subject,
        ":row": meter.rule().row(),
        ":amount": column(shape.amount()),
        ":period": column(u64::try_from(shape.period().as_micros()).unwrap_or(u64::MAX)),
        ":burst": column(shape.burst()),
        ":full_at": full_at.whole.cast_signed(),
        ":part": column(full_at.part),
        ":version": column(meter.version().number()),
        ":consumed": meter.consumed(),
    })?;
    Ok(())
}

/// Adds what was used to what the file has counted. A sum stops at the largest number that a column holds.
pub(super) fn write_usage(
    connection: &Connection,
    subject: i64,
    name: &LimitName,
    usage: &Windows,
) -> Result<(), Trouble> {
    let mut write = connection.prepare_cached(
        "INSERT INTO usage (subject, name, span, start, units, own, leases)
         VALUES (:subject, :name, :span, :start, :units, :own, :leases)
         ON CONFLICT (subject, name, span, start) DO UPDATE SET
             units = MIN(units, 9223372036854775807 - :units) + :units,
             own = MIN(own, 9223372036854775807 - :own) + :own,
             leases = MIN(leases, 9223372036854775807 - :leases) + :leases",
    )?;
    for window in Window::ALL {
        for (start, tally) in usage.within(window, &(Stamp::ZERO..Stamp::MAX)) {
            write.execute(named_params! {
                ":subject": subject,
                ":name": name.as_str(),
                ":span": window as i64,
                ":start": column(start.as_micros()),
                ":units": column(tally.units),
                ":own": column(tally.own),
                ":leases": column(tally.leases),
            })?;
        }
    }
    Ok(())
}
