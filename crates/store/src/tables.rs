//! Columns of tables, shared by the SQL engines.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::bucket::{Bucket, Shape, Span};
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{EndRecord, Ending, LeaseId, Record, Shortfall};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Scope, Version};
use tidegate_core::limit::rule::Rule;
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;

use crate::codec::levels_from_text;
use crate::error::StoreError;
use crate::shared_engine::LeaseState;

/// A number as a column, saturated. No real value comes near the bound.
pub(crate) fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A column that cannot be negative.
pub(crate) fn number(column: i64, what: &str) -> Result<u64, StoreError> {
    u64::try_from(column).map_err(|_| StoreError::Corrupt { what: format!("{what} is {column}, below zero") })
}

pub(crate) fn scope(kind: i64, entity: &str, resource: &str) -> Result<Scope, StoreError> {
    let corrupt = |error: &dyn std::error::Error| StoreError::Corrupt { what: format!("a policy: {error}") };
    match kind {
        0 => Ok(Scope::System),
        1 => Ok(Scope::Resource(ResourceName::stored(resource).map_err(|error| corrupt(&error))?)),
        2 => Ok(Scope::Entity(EntityId::stored(entity).map_err(|error| corrupt(&error))?)),
        3 => Ok(Scope::Subject(subject(entity, resource)?)),
        other => Err(StoreError::Corrupt { what: format!("a policy of the kind {other}") }),
    }
}

/// The key of a stored bucket.
pub(crate) fn subject(entity: &str, resource: &str) -> Result<Subject, StoreError> {
    Subject::stored(entity, resource).map_err(|error| StoreError::Corrupt { what: error.to_string() })
}

/// A limit as columns: its row name, its amount, period and burst, when it is full, the newest version that a
/// caller has brought, and the units consumed.
pub(crate) struct MeterRow<'a> {
    pub(crate) row: &'a str,
    pub(crate) shape: [i64; 3],
    pub(crate) full_at: i64,
    pub(crate) part: i64,
    pub(crate) version: i64,
    pub(crate) consumed: i64,
}

impl MeterRow<'_> {
    /// Parses the columns.
    pub(crate) fn meter(&self) -> Result<Meter, StoreError> {
        let row = self.row;
        let read = |column: i64| number(column, &format!("the limit `{row}`"));
        // A `~` separates the shape of a limit given with a call. Names do not contain it.
        let (name, is_of_call) = row.split_once('~').map_or((row, false), |(name, _)| (name, true));
        let corrupt = |why: String| StoreError::Corrupt { what: format!("the limit `{row}`: {why}") };
        let name = LimitName::new(name).map_err(|error| corrupt(error.to_string()))?;
        let [amount, period, burst] = self.shape;
        let (amount, period, burst) = (read(amount)?, Duration::from_micros(read(period)?), read(burst)?);
        let shape = Shape::new(amount, period, burst).map_err(|error| corrupt(error.to_string()))?;
        // A huge debt exceeds the positive range of a column, so all 64 bits are used.
        let full_at = Span { whole: self.full_at.cast_unsigned(), part: read(self.part)? };
        if full_at.part >= amount {
            return Err(corrupt(format!("{} parts of {amount}", full_at.part)));
        }
        let rule = Rule::stored(name, shape);
        let rule = if is_of_call { rule.of_call() } else { rule };
        if rule.row() != row {
            return Err(corrupt(format!("its shape is that of `{}`", rule.row())));
        }
        let version = Version::new(read(self.version)?);
        Ok(Meter::restored(Bucket::from_full_at(full_at), Arc::new(rule), version, self.consumed))
    }

    /// Parses the columns with a known rule.
    pub(crate) fn of_rule(&self, rule: &Arc<Rule>) -> Result<Meter, StoreError> {
        let full_at = Span { whole: self.full_at.cast_unsigned(), part: number(self.part, "a part")? };
        let version = Version::new(number(self.version, "a version")?);
        Ok(Meter::restored(Bucket::from_full_at(full_at), Arc::clone(rule), version, self.consumed))
    }
}

/// A shape as columns: amount, period in microseconds, and burst.
pub(crate) fn shape_columns(shape: &Shape<Stamp>) -> [i64; 3] {
    let period = u64::try_from(shape.period().as_micros()).unwrap_or(u64::MAX);
    [column(shape.amount()), column(period), column(shape.burst())]
}

/// An ending as a number.
pub(crate) const fn ending_number(how: Ending) -> i64 {
    match how {
        Ending::Settled => 0,
        Ending::Cancelled => 1,
        Ending::Expired => 2,
    }
}

pub(crate) fn ending(how: i64) -> Result<Ending, StoreError> {
    match how {
        0 => Ok(Ending::Settled),
        1 => Ok(Ending::Cancelled),
        2 => Ok(Ending::Expired),
        other => Err(StoreError::Corrupt { what: format!("an unknown ending {other}") }),
    }
}

pub(crate) fn stamp(column: i64) -> Result<Stamp, StoreError> {
    Ok(Stamp::from_micros(number(column, "a time")?))
}

/// The on-expiry setting from a number.
pub(crate) fn on_expiry(number: i64) -> Result<OnExpiry, StoreError> {
    match number {
        0 => Ok(OnExpiry::Settle),
        1 => Ok(OnExpiry::Return),
        other => Err(StoreError::Corrupt { what: format!("an unknown on-expiry setting {other}") }),
    }
}

/// A line of usage from its entity, resource and limit, and the start of its window, the units of all leases, the
/// entity's own, and the number of leases.
pub(crate) fn usage_line(
    window: Window,
    [entity, resource, limit]: [&str; 3],
    [start, units, own, leases]: [i64; 4],
) -> Result<Usage, StoreError> {
    let count = |column: i64| number(column, "a sum of usage");
    let tally = Tally { units: count(units)?, own: count(own)?, leases: count(leases)? };
    let limit = LimitName::new(limit).map_err(|error| StoreError::Corrupt { what: error.to_string() })?;
    Ok(Usage { subject: subject(entity, resource)?, limit, window, start: stamp(start)?, tally })
}

/// The row of a lease, without the units it holds. It is open until `how` says how it ended.
pub(crate) struct LeaseRow<'a> {
    pub(crate) levels: Option<&'a str>,
    pub(crate) step: u32,
    /// When it drew, its last step, and its deadline.
    pub(crate) times: [i64; 3],
    pub(crate) on_expiry: i64,
    pub(crate) how: Option<i64>,
    pub(crate) ended_at: Option<i64>,
    pub(crate) digest: Option<i64>,
}

/// The units that a lease holds of each limit, and what its buckets did not take.
pub(crate) type Holding = (Units, Box<[Shortfall]>);

impl LeaseRow<'_> {
    /// Parses the columns. `holding` parses what an open lease of these levels holds; `None` if that is missing.
    pub(crate) fn state(
        &self,
        holding: impl FnOnce(&Levels) -> Result<Option<Holding>, StoreError>,
    ) -> Result<LeaseState, StoreError> {
        if let Some(how) = self.how {
            let at = stamp(self.ended_at.unwrap_or(0))?;
            let digest = self.digest.unwrap_or(0).cast_unsigned();
            return Ok(LeaseState::Ended(EndRecord { how: ending(how)?, step: self.step, at, digest }));
        }
        let corrupt = || StoreError::Corrupt { what: "it is open without levels or units".to_owned() };
        let levels = levels_from_text(self.levels.ok_or_else(corrupt)?)?;
        let (held, shortfalls) = holding(&levels)?.ok_or_else(corrupt)?;
        if held.len() != levels.names().len() {
            let what = format!("it holds {} of {} limits", held.len(), levels.names().len());
            return Err(StoreError::Corrupt { what });
        }
        let [drawn_at, stepped_at, deadline] = self.times;
        let (drawn_at, stepped_at, deadline) = (stamp(drawn_at)?, stamp(stepped_at)?, stamp(deadline)?);
        let on_expiry = on_expiry(self.on_expiry)?;
        let record = Record::restored(self.step, held, drawn_at, stepped_at, deadline, on_expiry);
        Ok(LeaseState::Open(record.with_shortfalls(shortfalls), Arc::new(levels)))
    }
}

/// Adds the lease to an error about its row.
pub(crate) fn in_lease(lease: LeaseId, error: StoreError) -> StoreError {
    match error {
        StoreError::Corrupt { what } => StoreError::Corrupt { what: format!("the lease {lease}: {what}") },
        other => other,
    }
}

/// The start below which windows have ended by `before`.
pub(crate) fn ended_by(window: Window, before: Stamp) -> i64 {
    column(window.around(before).start.as_micros())
}

/// The units that a lease holds of each limit, `-` for a limit that is not part of it, and the shortfalls by
/// level and name: `12,-,500` and `12,-,500;1.0=7`.
pub(crate) fn holding_to_text(record: &Record) -> String {
    let units = |units: &Option<u64>| units.map_or_else(|| "-".to_owned(), |units| units.to_string());
    let mut text = record.held().iter().map(units).collect::<Vec<_>>().join(",");
    for Shortfall { level, name, units } in record.shortfalls() {
        // Writing to a string does not fail.
        let _ = write!(text, ";{level}.{name}={units}");
    }
    text
}

pub(crate) fn holding_from_text(text: &str) -> Result<Holding, StoreError> {
    let mut parts = text.split(';');
    let units = |part: &str| match part {
        "-" => Some(None),
        part => part.parse().ok().map(Some),
    };
    let held: Option<Units> = parts.next().unwrap_or_default().split(',').map(units).collect();
    let shortfall = |part: &str| {
        let (place, units) = part.split_once('=')?;
        let (level, name) = place.split_once('.')?;
        Some(Shortfall { level: level.parse().ok()?, name: name.parse().ok()?, units: units.parse().ok()? })
    };
    let shortfalls: Option<Box<[Shortfall]>> = parts.map(shortfall).collect();
    held.zip(shortfalls)
        .ok_or_else(|| StoreError::Corrupt { what: format!("invalid holdings `{}`", text.escape_debug()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_number_is_corrupt() {
        assert!(ending(3).is_err());
        assert!(stamp(-1).is_err());
        assert!(on_expiry(2).is_err());
    }

    #[test]
    fn holdings_roundtrip_as_text() {
        let table: [&[Option<u64>]; 4] =
            [&[Some(0)], &[None], &[Some(12), None, Some(500)], &[Some(u64::MAX)]];
        let at = Stamp::from_secs(1);
        for (held, units) in table.into_iter().zip([0, 1, u64::MAX, 7]) {
            let shortfalls = (0..u8::from(units > 0)).map(|level| Shortfall { level, name: 1, units });
            let record = Record::new(held.into(), at, at, OnExpiry::Settle);
            let record = record.with_shortfalls(shortfalls.collect());
            let (units, shortfalls) = holding_from_text(&holding_to_text(&record)).unwrap();
            assert_eq!((&units[..], &*shortfalls), (held, record.shortfalls()));
        }
        for bad in ["", "x", "1,", "-1", "1,,2", "1;", "1;1.2", "1;1=2", "1;300.0=1", "1;0.0=-1"] {
            let error = holding_from_text(bad).unwrap_err();
            assert!(matches!(error, StoreError::Corrupt { .. }), "{bad}");
        }
    }
}
