//! The marks of leases in the item of their home bucket, the first of their levels: `o:` for an open lease,
//! `e:` for an ended one.
//!
//! Marks are short texts, because an item may have many of them, and are compared as a whole: a step is
//! written only if the mark is the one that it was decided by.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use tidegate_core::excerpt::excerpt;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId, Record};
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use crate::codec::levels_to_text;
use crate::error::StoreError;
use crate::record::hex;
use crate::tables::{column, ending, ending_number, holding_from_text, holding_to_text, on_expiry, stamp};

/// Separates the levels of an ended lease; no name contains it.
const LEVEL: char = '#';
/// The bytes of an attribute's name.
const NAME_BYTES: usize = 34;
/// The most bytes of units, with their separators.
const UNITS_BYTES: usize = 20;

/// Units per limit.
pub(super) type Used = Vec<(LimitName, u64)>;

/// An open lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpenMark {
    /// The number of the level whose item this is. Older versions also marked the items above the home: those
    /// are above 0.
    pub(super) level: usize,
    pub(super) record: Record,
    /// The attribute `l:` of the item that has its levels.
    pub(super) levels: String,
}

/// An ended lease, and the units to be counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndMark {
    pub(super) ended: EndRecord,
    pub(super) drawn_at: Stamp,
    /// Whether the item is the home. Older versions also left marks in the items above it.
    pub(super) is_own: bool,
    /// Units used of the item's limits.
    pub(super) used: Used,
    /// Units used at the other levels.
    pub(super) others: Vec<(Subject, Used)>,
}

/// The name of levels in items, and their text.
pub(super) fn levels_text(levels: &Levels) -> (String, String) {
    let text = levels_to_text(levels);
    let mut name = hex(&Sha256::digest(text.as_bytes()));
    name.truncate(20);
    (name, text)
}

/// The name of the attribute of an open lease.
pub(super) fn open_name(lease: LeaseId) -> String {
    format!("o:{lease}")
}

/// The name of the attribute of an ended lease.
pub(super) fn end_name(lease: LeaseId) -> String {
    format!("e:{lease}")
}

impl OpenMark {
    /// An upper bound of the size of the attribute, in bytes.
    pub(super) fn bytes(&self) -> usize {
        NAME_BYTES
            + 80
            + self.levels.len()
            + UNITS_BYTES * (self.record.held().len() + self.record.shortfalls().len())
    }
}

impl EndMark {
    /// An upper bound of the size of the attribute, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let used =
            |used: &Used| used.iter().map(|(name, _)| name.as_str().len() + UNITS_BYTES).sum::<usize>();
        let other = |(subject, units): &(Subject, Used)| {
            subject.entity.as_str().len() + subject.resource.as_str().len() + 3 + used(units)
        };
        NAME_BYTES + 80 + used(&self.used) + self.others.iter().map(other).sum::<usize>()
    }
}

impl fmt::Display for OpenMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, record, levels } = self;
        let [drawn, stepped, deadline] =
            [record.drawn_at(), record.stepped_at(), record.deadline()].map(Stamp::as_micros);
        let on_expiry = u8::from(record.on_expiry() == OnExpiry::Return);
        let held = holding_to_text(record);
        write!(f, "{level} {} {drawn} {stepped} {deadline} {on_expiry} {levels} {held}", record.step())
    }
}

impl FromStr for OpenMark {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let parts: Vec<&str> = text.split(' ').collect();
        let [level, step, drawn, stepped, deadline, expiry, levels, held] = parts[..] else {
            return Err(invalid_mark(text));
        };
        let (held, shortfalls) = holding_from_text(held)?;
        let times = (time(drawn)?, time(stepped)?, time(deadline)?);
        let on_expiry = on_expiry(number(expiry)?)?;
        let record = Record::restored(number(step)?, held, times.0, times.1, times.2, on_expiry);
        let record = record.with_shortfalls(shortfalls);
        Ok(Self { level: number(level)?, record, levels: levels.to_owned() })
    }
}

impl fmt::Display for EndMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EndRecord { how, step, at, digest } = self.ended;
        let (how, at, drawn) = (ending_number(how), at.as_micros(), self.drawn_at.as_micros());
        write!(f, "{how} {step} {at} {digest} {drawn} {} ", u8::from(self.is_own))?;
        write_used(f, &self.used)?;
        for (Subject { entity, resource }, used) in &self.others {
            write!(f, "{LEVEL}{entity}{LEVEL}{resource}{LEVEL}")?;
            write_used(f, used)?;
        }
        Ok(())
    }
}

fn write_used(f: &mut fmt::Formatter<'_>, used: &Used) -> fmt::Result {
    for (place, (name, units)) in used.iter().enumerate() {
        write!(f, "{}{name}={units}", if place == 0 { "" } else { "," })?;
    }
    Ok(())
}

impl FromStr for EndMark {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let levels: Vec<&str> = text.split(LEVEL).collect();
        let parts: Vec<&str> = levels[0].split(' ').collect();
        let [how, step, at, digest, drawn, own, used] = parts[..] else { return Err(invalid_mark(text)) };
        let ended = EndRecord {
            how: ending(number(how)?)?,
            step: number(step)?,
            at: time(at)?,
            digest: number(digest)?,
        };
        let other = |other: &[&str]| {
            let [entity, resource, used] = other[..] else { return Err(invalid_mark(text)) };
            let subject = Subject::stored(entity, resource).map_err(|_| invalid_mark(text))?;
            Ok((subject, read_used(used)?))
        };
        let others = levels[1..].chunks(3).map(other).collect::<Result<_, StoreError>>()?;
        Ok(Self { ended, drawn_at: time(drawn)?, is_own: own == "1", used: read_used(used)?, others })
    }
}

fn read_used(text: &str) -> Result<Used, StoreError> {
    let line = |line: &str| {
        let (name, units) = line.split_once('=').ok_or_else(|| invalid_mark(text))?;
        Ok((LimitName::new(name).map_err(|_| invalid_mark(text))?, number(units)?))
    };
    text.split(',').filter(|line| !line.is_empty()).map(line).collect()
}

fn number<T: FromStr>(text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| invalid_mark(text))
}

fn time(text: &str) -> Result<Stamp, StoreError> {
    stamp(column(number(text)?))
}

fn invalid_mark(text: &str) -> StoreError {
    StoreError::Corrupt { what: format!("the mark `{}`", excerpt(text)) }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::cascade::Units;
    use tidegate_core::limit::lease::{Ending, Shortfall};

    use super::*;

    const AT: Stamp = Stamp::from_secs(1_800_000_000);

    fn name(name: &str) -> LimitName {
        LimitName::new(name).unwrap()
    }

    #[test]
    fn mark_round_trips_through_text() {
        let held: Units = [Some(12), None, Some(500)].into_iter().collect();
        let short = Shortfall { level: 1, name: 0, units: 7 };
        let record = Record::restored(7, held, AT, AT, AT, OnExpiry::Return).with_shortfalls([short].into());
        let open = OpenMark { level: 2, record, levels: "abc".to_owned() };
        assert_eq!(open.to_string().parse::<OpenMark>().unwrap(), open);
        let others = vec![
            (Subject::new("a b, c=1", "größe/7:x").unwrap(), vec![(name("rpm"), 1), (name("tpm"), 2)]),
            (Subject::pool(None, None), vec![(name("rpm"), 3)]),
        ];
        for used in [vec![], vec![(name("rpm"), 1)], vec![(name("rpm"), 0), (name("a.b"), u64::MAX)]] {
            for others in [vec![], others.clone()] {
                let ended = EndRecord { how: Ending::Settled, step: 3, at: AT, digest: u64::MAX };
                let end = EndMark { ended, drawn_at: AT, is_own: true, used: used.clone(), others };
                assert_eq!(end.to_string().parse::<EndMark>().unwrap(), end);
            }
        }
    }

    #[test]
    fn size_estimate_is_an_upper_bound() {
        let held: Units = [Some(1 << 40), None, Some(0)].into_iter().collect();
        let short = Shortfall { level: 19, name: 143, units: 1 << 40 };
        let record =
            Record::restored(u32::MAX, held, AT, AT, AT, OnExpiry::Return).with_shortfalls([short].into());
        let open = OpenMark { level: 0, record, levels: "0123456789abcdef0123".to_owned() };
        assert!(open.bytes() >= NAME_BYTES + open.to_string().len(), "{open}");
        let used = vec![(name("requests"), 1 << 40)];
        let others = vec![(Subject::new("acme", "gpt").unwrap(), used.clone())];
        let ended = EndRecord { how: Ending::Settled, step: u32::MAX, at: AT, digest: u64::MAX };
        let end = EndMark { ended, drawn_at: AT, is_own: true, used, others };
        assert!(end.bytes() >= NAME_BYTES + end.to_string().len(), "{end}");
    }

    #[test]
    fn mark_of_an_older_version_is_read() {
        let end: EndMark = "0 9 1800000000000000 7 1800000000000000 0 rpm=3,tpm=4".parse().unwrap();
        assert_eq!((end.is_own, end.others.len()), (false, 0));
        assert_eq!(end.used, [(name("rpm"), 3), (name("tpm"), 4)]);
    }

    #[test]
    fn invalid_mark_is_corrupt() {
        for bad in ["", "1", "0 0 0 0 0 9 x 1", "9 0 0 0 0 1 ", "0 0 0 0 0 1 rpm", "0 0 0 0 0 1 r m=1"] {
            assert!(bad.parse::<OpenMark>().is_err() && bad.parse::<EndMark>().is_err(), "{bad}");
        }
        for bad in ["0 0 0 0 0 1 rpm=1#a", "0 0 0 0 0 1 #a#b", "0 0 0 0 0 1 #a#b#rpm", "0 0 0 0 0 1 ##b#"] {
            assert!(bad.parse::<EndMark>().is_err(), "{bad}");
        }
    }
}
