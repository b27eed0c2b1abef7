//! Reads and writes of limits and usage as rows.

use rusqlite::{Connection, Row as Columns, named_params};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::usage::{Window, Windows};
use tidegate_core::time::Stamp;

use super::errors::CallError;
use crate::shared_engine::bucket_table::Row;
use crate::tables::{MeterRow, column, shape_columns};

/// All limits of a subject.
pub(super) fn meters_of(connection: &Connection, subject: i64) -> Result<Vec<Meter>, CallError> {
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

fn meter(columns: &Columns<'_>) -> Result<Meter, CallError> {
    let row: String = columns.get(0)?;
    let shape = [columns.get(1)?, columns.get(2)?, columns.get(3)?];
    let (full_at, part) = (columns.get(4)?, columns.get(5)?);
    let (version, consumed) = (columns.get(6)?, columns.get(7)?);
    Ok(MeterRow { row: &row, shape, full_at, part, version, consumed }.meter()?)
}

/// Writes the limits of a subject that differ from `written`.
pub(super) fn write_meters(
    connection: &Connection,
    subject: i64,
    rows: &[Row],
    written: &mut Vec<Meter>,
) -> Result<(), CallError> {
    let is_in_place = |(row, written): (&Row, &Meter)| row.meter.rule().row() == written.rule().row();
    if written.len() > rows.len() || !rows.iter().zip(written.iter()).all(is_in_place) {
        // Limits that callers supplied were dropped to make space.
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
    let ([amount, period, burst], full_at) = (shape_columns(meter.rule().shape()), meter.bucket().full_at());
    write.execute(named_params! {
        ":subject": subject,
        ":row": meter.rule().row(),
        ":amount": amount,
        ":period": period,
        ":burst": burst,
        ":full_at": full_at.whole.cast_signed(),
        ":part": column(full_at.part),
        ":version": column(meter.version().number()),
        ":consumed": meter.consumed(),
    })?;
    Ok(())
}

/// Adds used units to the stored sums, which saturate at the largest integer.
pub(super) fn write_usage(
    connection: &Connection,
    subject: i64,
    name: &LimitName,
    usage: &Windows,
) -> Result<(), CallError> {
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
