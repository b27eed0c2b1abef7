//! A bucket's item as it was seen.
//!
//! What was seen may have changed since. It is good for a guess: every write says what of it must still hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::bucket::Shape;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::keys::{Item, TTL};
use super::marks::{EndMark, OpenMark};
use crate::codec;
use crate::error::StoreError;
use crate::tables::MeterRow;

/// Counts the writes of an item.
pub(super) const REVISION: &str = "n";
/// Names the rules of an item: another one with each of their changes.
pub(super) const RULES: &str = "R";
/// A lease that was made after this time and has ended is in the item; the end of an older one may be counted.
pub(super) const HORIZON: &str = "h";
/// Older versions wrote here until when the item is kept.
const KEPT_UNTIL: &str = "a";
/// How many open leases have a mark in the item.
pub(super) const OPENS: &str = "O";
/// How many leases that have ended have one.
pub(super) const ENDS: &str = "E";
/// When the item is to be looked at: its first lease is due then.
pub(super) const DUE: &str = "GSI1SK";

/// A bucket's item.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// `None` where there is no item.
    pub(super) rules: Option<String>,
    pub(super) revision: u64,
    /// By row.
    pub(super) meters: BTreeMap<String, Meter>,
    pub(super) open: BTreeMap<LeaseId, OpenMark>,
    pub(super) ended: BTreeMap<LeaseId, EndMark>,
    /// Names of attributes that only older versions wrote.
    pub(super) obsolete: Vec<String>,
    /// How many marks of open and of ended leases there are, by the item's own count.
    pub(super) opens: i64,
    pub(super) ends: i64,
    /// The texts of levels that open leases name.
    pub(super) levels: BTreeMap<String, String>,
    pub(super) horizon: Option<u64>,
    pub(super) due: Option<Stamp>,
    pub(super) ttl: Option<u64>,
}

impl View {
    /// The item as it was read.
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

    /// Takes in what a write has set, as it is after it.
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
                    let bucket = super::forms::bucket(full_at(name, value)?, meter.rule().shape().amount());
                    let meter = Meter::restored(bucket, Arc::clone(meter.rule()), meter.version(), consumed);
                    self.meters.insert(row.to_owned(), meter);
                }
                _ => self.read_one(set, name, value)?,
            }
        }
        Ok(())
    }

    pub(super) const fn is_there(&self) -> bool {
        self.rules.is_some()
    }

    /// The levels that an open lease of the item drew from.
    pub(super) fn levels_of(&self, mark: &OpenMark) -> Result<Arc<Levels>, StoreError> {
        let text = self.levels.get(&mark.levels);
        let text = text.ok_or_else(|| StoreError::Corrupt {
            what: format!("a lease names the levels {}, which are not there", mark.levels),
        })?;
        codec::levels_from_text(text).map(Arc::new)
    }

    /// What is remembered of a lease that has ended, if it is.
    pub(super) fn end_of(&self, lease: LeaseId, now: Stamp) -> Option<&EndMark> {
        self.ended.get(&lease).filter(|mark| is_remembered(mark.ended.at, now))
    }

    /// How many open leases have a mark in it, as far as is known.
    pub(super) fn open_count(&self) -> usize {
        self.open.len().max(usize::try_from(self.opens).unwrap_or(0))
    }

    /// How many leases that have ended have one.
    pub(super) fn end_count(&self) -> usize {
        self.ended.len().max(usize::try_from(self.ends).unwrap_or(0))
    }

    /// About how many bytes the marks have.
    pub(super) fn mark_bytes(&self) -> usize {
        let open = self.open.values().map(OpenMark::bytes).sum::<usize>();
        open + self.ended.values().map(EndMark::bytes).sum::<usize>()
    }

    /// Whether the end of the lease may be counted already: then only its tombstone shows it.
    pub(super) fn is_late(&self, lease: LeaseId) -> bool {
        self.horizon.is_some_and(|horizon| horizon >= lease.millis())
    }

    /// Whether the lease has a mark here, open or ended.
    pub(super) fn is_marked(&self, lease: LeaseId) -> bool {
        self.open.contains_key(&lease) || self.ended.contains_key(&lease)
    }
}

/// Whether what ended at `at` is still remembered.
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

/// The time at which a limit is full, times its amount. What is given back after its rule became slower may be more than all
/// time there was: then it is full since ever.
fn full_at(name: &str, value: &AttributeValue) -> Result<u128, StoreError> {
    number(name, value).map(|parts: i128| parts.max(0).unsigned_abs())
}

/// A rule as the item has it.
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

/// A text of an item that has it.
pub(super) fn text_of<'a>(item: &'a Item, name: &str) -> Result<&'a str, StoreError> {
    text(name, item.get(name).ok_or_else(|| corrupt(name))?)
}

/// A number of an item that has it.
pub(super) fn number_of<T: std::str::FromStr>(item: &Item, name: &str) -> Result<T, StoreError> {
    number(name, item.get(name).ok_or_else(|| corrupt(name))?)
}

fn lease(text: &str) -> Result<LeaseId, StoreError> {
    text.parse().map_err(|_| corrupt(text))
}

fn corrupt(name: &str) -> StoreError {
    StoreError::Corrupt { what: format!("the attribute `{}`", name.escape_debug()) }
}
