//! The decoded item of a bucket.
//!
//! It may be outdated: every write states as a condition what must still hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::bucket::Shape;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::keys::{Item, TTL};
use super::lease_marks::{EndMark, OpenMark};
use crate::codec;
use crate::error::StoreError;
use crate::shared_engine::LeaseState;
use crate::tables::MeterRow;

/// The number of writes of an item.
pub(super) const REVISION: &str = "n";
/// The name of the rules of an item, which changes with them.
pub(super) const RULES: &str = "R";
/// The horizon: the item has the end of a lease that was made later; the end of an earlier one may have been
/// counted.
pub(super) const HORIZON: &str = "h";
/// Older versions stored here how long the item is kept.
const KEPT_UNTIL: &str = "a";
/// The number of marks of open leases.
pub(super) const OPENS: &str = "O";
/// The number of marks of ended leases.
pub(super) const ENDS: &str = "E";
/// When the item is due: the deadline of its first lease.
pub(super) const DUE: &str = "GSI1SK";

/// The item of a bucket.
#[derive(Debug, Clone, Default)]
pub(super) struct BucketView {
    /// `None` if the item does not exist.
    pub(super) rules: Option<String>,
    pub(super) revision: u64,
    /// By row.
    pub(super) meters: BTreeMap<String, Meter>,
    pub(super) open: BTreeMap<LeaseId, OpenMark>,
    pub(super) ended: BTreeMap<LeaseId, EndMark>,
    /// Attributes of older versions.
    pub(super) obsolete: Vec<String>,
    /// The numbers of marks of open and of ended leases, by the item's own counters.
    pub(super) opens: i64,
    pub(super) ends: i64,
    /// The texts of levels that open leases refer to.
    pub(super) levels: BTreeMap<String, String>,
    pub(super) horizon: Option<u64>,
    pub(super) due: Option<Stamp>,
    pub(super) ttl: Option<u64>,
}

impl BucketView {
    /// Decodes an item.
    pub(super) fn read(item: Option<&Item>) -> Result<Self, StoreError> {
        let mut view = Self::default();
        let Some(item) = item else { return Ok(view) };
        view.rules = Some(String::new());
        for (name, value) in item {
            view.read_one(item, name, value)?;
        }
        Ok(view)
    }

    fn read_one(&mut self, item: &Item, name: &str, value: &AttributeValue) -> Result<(), StoreError> {
        if let Some((kind, rest)) = name.split_once(':') {
            match kind {
                "r" => {
                    let meter = meter(item, rest, text(name, value)?)?;
                    self.meters.insert(rest.to_owned(), meter);
                }
                "o" => drop(self.open.insert(lease(rest)?, text(name, value)?.parse()?)),
                "e" => drop(self.ended.insert(lease(rest)?, text(name, value)?.parse()?)),
                "x" => self.obsolete.push(name.to_owned()),
                "l" => drop(self.levels.insert(rest.to_owned(), text(name, value)?.to_owned())),
                _ => {}
            }
            return Ok(());
        }
        match name {
            REVISION => self.revision = number(name, value)?,
            RULES => self.rules = Some(text(name, value)?.to_owned()),
            HORIZON => self.horizon = Some(number(name, value)?),
            KEPT_UNTIL => self.obsolete.push(name.to_owned()),
            OPENS => self.opens = number(name, value)?,
            ENDS => self.ends = number(name, value)?,
            DUE => {
                let due = text(name, value)?.parse().map_err(|_| corrupt(name))?;
                self.due = Some(Stamp::from_micros(due));
            }
            TTL => self.ttl = Some(number(name, value)?),
            _ => {}
        }
        Ok(())
    }

    /// Applies the attributes that a write has set.
    pub(super) fn absorb(&mut self, set: &Item) -> Result<(), StoreError> {
        self.rules.get_or_insert_default();
        for (name, value) in set {
            match name.split_once(':') {
                Some(("f", row))
                    if self.meters.contains_key(row) && !set.contains_key(&format!("r:{row}")) =>
                {
                    let meter = &self.meters[row];
                    let consumed = set.get(&format!("c:{row}"));
                    let consumed = consumed.map_or(Ok(meter.consumed()), |value| number(name, value))?;
                    let bucket =
                        super::bucket_update::bucket(full_at(name, value)?, meter.rule().shape().amount());
                    let meter = Meter::restored(bucket, Arc::clone(meter.rule()), meter.version(), consumed);
                    self.meters.insert(row.to_owned(), meter);
                }
                _ => self.read_one(set, name, value)?,
            }
        }
        Ok(())
    }

    pub(super) const fn exists(&self) -> bool {
        self.rules.is_some()
    }

    /// The levels of an open lease of the item.
    pub(super) fn levels_of(&self, mark: &OpenMark) -> Result<Arc<Levels>, StoreError> {
        let text = self.levels.get(&mark.levels);
        let text = text.ok_or_else(|| StoreError::Corrupt {
            what: format!("a lease refers to the missing levels {}", mark.levels),
        })?;
        codec::levels_from_text(text).map(Arc::new)
    }

    /// The state of a lease whose home this is.
    pub(super) fn lease(&self, lease: LeaseId, now: Stamp) -> Result<LeaseState, StoreError> {
        if let Some(mark) = self.open.get(&lease).filter(|mark| mark.level == 0) {
            return Ok(LeaseState::Open(mark.record.clone(), self.levels_of(mark)?));
        }
        let ended = self.end_of(lease, now).filter(|mark| mark.is_own);
        Ok(ended.map_or(LeaseState::Unknown, |mark| LeaseState::Ended(mark.ended)))
    }

    /// The mark of an ended lease, while it is remembered.
    pub(super) fn end_of(&self, lease: LeaseId, now: Stamp) -> Option<&EndMark> {
        self.ended.get(&lease).filter(|mark| is_remembered(mark.ended.at, now))
    }

    /// The number of open leases, as far as known.
    pub(super) fn open_count(&self) -> usize {
        self.open.len().max(usize::try_from(self.opens).unwrap_or(0))
    }

    /// The number of marks of ended leases.
    pub(super) fn end_count(&self) -> usize {
        self.ended.len().max(usize::try_from(self.ends).unwrap_or(0))
    }

    /// The approximate size of the marks, in bytes.
    pub(super) fn mark_bytes(&self) -> usize {
        let open = self.open.values().map(OpenMark::bytes).sum::<usize>();
        open + self.ended.values().map(EndMark::bytes).sum::<usize>()
    }

    /// Whether the end of the lease may have been counted: then only its tombstone shows it.
    pub(super) fn is_late(&self, lease: LeaseId) -> bool {
        self.horizon.is_some_and(|horizon| horizon >= lease.millis())
    }

    /// Whether the lease has a mark here, open or ended.
    pub(super) fn is_marked(&self, lease: LeaseId) -> bool {
        self.open.contains_key(&lease) || self.ended.contains_key(&lease)
    }
}

/// Whether a lease that ended at `at` is still remembered.
pub(super) fn is_remembered(at: Stamp, now: Stamp) -> bool {
    now < at + REMEMBERED
}

fn meter(item: &Item, row: &str, rule: &str) -> Result<Meter, StoreError> {
    let numbers: Result<Vec<i64>, _> = rule.split(' ').map(str::parse).collect();
    let bad = || StoreError::Corrupt { what: format!("the limit `{row}`: its rule is {rule:?}") };
    let [version, amount, period, burst] = numbers.map_err(|_| bad())?[..] else { return Err(bad()) };
    let attribute = |kind: &str| {
        let name = format!("{kind}:{row}");
        item.get(&name).ok_or_else(|| corrupt(&name)).map(|value| (name, value))
    };
    let (name, value) = attribute("f")?;
    let full_at = full_at(&name, value)?;
    let parts = u128::try_from(amount).ok().filter(|amount| *amount > 0).ok_or_else(bad)?;
    let whole = u64::try_from(full_at / parts).unwrap_or(u64::MAX);
    let part = i64::try_from(full_at % parts).unwrap_or(0);
    let (name, consumed) = attribute("c")?;
    let consumed = number(&name, consumed)?;
    let shape = [amount, period, burst];
    MeterRow { row, shape, full_at: whole.cast_signed(), part, version, consumed }.meter()
}

/// The time at which a limit is full, times its amount. It may be negative, because units may be returned
/// after the rule became slower; the bucket is then full.
fn full_at(name: &str, value: &AttributeValue) -> Result<u128, StoreError> {
    number(name, value).map(|parts: i128| parts.max(0).unsigned_abs())
}

/// The stored form of a rule.
pub(super) fn rule_text(meter: &Meter) -> String {
    let shape: &Shape<Stamp> = meter.rule().shape();
    let period = shape.period().as_micros();
    format!("{} {} {period} {}", meter.version(), shape.amount(), shape.burst())
}

pub(super) fn text<'a>(name: &str, value: &'a AttributeValue) -> Result<&'a str, StoreError> {
    value.as_s().map(String::as_str).map_err(|_| corrupt(name))
}

pub(super) fn number<T: std::str::FromStr>(name: &str, value: &AttributeValue) -> Result<T, StoreError> {
    let number = value.as_n().ok().and_then(|number| number.parse().ok());
    number.ok_or_else(|| corrupt(name))
}

/// The text of an attribute that must exist.
pub(super) fn text_of<'a>(item: &'a Item, name: &str) -> Result<&'a str, StoreError> {
    text(name, item.get(name).ok_or_else(|| corrupt(name))?)
}

/// The number of an attribute that must exist.
pub(super) fn number_of<T: std::str::FromStr>(item: &Item, name: &str) -> Result<T, StoreError> {
    number(name, item.get(name).ok_or_else(|| corrupt(name))?)
}

fn lease(text: &str) -> Result<LeaseId, StoreError> {
    text.parse().map_err(|_| corrupt(text))
}

fn corrupt(name: &str) -> StoreError {
    StoreError::Corrupt { what: format!("the attribute `{}`", name.escape_debug()) }
}
