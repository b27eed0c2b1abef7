//! The marks that leases leave in the items of their buckets: `o:` for an open one, `e:` for one that has ended.
//!
//! They are short texts, because there may be many of them in one item, and are compared as a whole: a step of a lease is
//! written only if the mark is the one that it was decided by.

use std::fmt;
use std::str::FromStr;

use tidegate_core::limit::cascade::{Level, Units};
use tidegate_core::limit::lease::{Ended, LeaseId, Record};
use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use crate::error::StoreError;
use crate::tables::{column, ending, ending_number, held_from_text, held_to_text, on_expiry, stamp};

/// An open lease, as the item of one of its levels has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpenMark {
    /// Which of its levels the item is of. That of its own level, the first, is the one that counts.
    pub(super) level: usize,
    pub(super) record: Record,
    /// Which of the item's texts of levels is its.
    pub(super) levels: String,
}

/// A lease that has ended, and what is to be counted of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndMark {
    pub(super) ended: Ended,
    pub(super) drawn_at: Stamp,
    /// Whether the item is of its own level.
    pub(super) is_own: bool,
    /// What was used of each limit, to be counted.
    pub(super) used: Vec<(LimitName, u64)>,
}

/// What the attribute of an open lease is called.
pub(super) fn open_name(lease: LeaseId) -> String {
    format!("o:{lease}")
}

/// What the attribute of a lease that has ended is called.
pub(super) fn end_name(lease: LeaseId) -> String {
    format!("e:{lease}")
}

/// What the attribute of a draw that was taken back is called.
pub(super) fn undone_name(lease: LeaseId) -> String {
    format!("x:{lease}")
}

impl fmt::Display for OpenMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, record, levels } = self;
        let [drawn, stepped, deadline] =
            [record.drawn_at(), record.stepped_at(), record.deadline()].map(Stamp::as_micros);
        let on_expiry = u8::from(record.on_expiry() == OnExpiry::Return);
        let held = held_to_text(record.held());
        write!(f, "{level} {} {drawn} {stepped} {deadline} {on_expiry} {levels} {held}", record.step())
    }
}

impl FromStr for OpenMark {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let parts: Vec<&str> = text.split(' ').collect();
        let [level, step, drawn, stepped, deadline, expiry, levels, held] = parts[..] else {
            return Err(not_ours(text));
        };
        let held: Units = held_from_text(held)?;
        let times = (time(drawn)?, time(stepped)?, time(deadline)?);
        let on_expiry = on_expiry(number(expiry)?)?;
        let record = Record::restored(number(step)?, held, times.0, times.1, times.2, on_expiry);
        Ok(Self { level: number(level)?, record, levels: levels.to_owned() })
    }
}

impl fmt::Display for EndMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ended { how, step, at, digest } = self.ended;
        let (how, at, drawn) = (ending_number(how), at.as_micros(), self.drawn_at.as_micros());
        write!(f, "{how} {step} {at} {digest} {drawn} {} ", u8::from(self.is_own))?;
        for (place, (name, units)) in self.used.iter().enumerate() {
            write!(f, "{}{name}={units}", if place == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for EndMark {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let parts: Vec<&str> = text.split(' ').collect();
        let [how, step, at, digest, drawn, own, used] = parts[..] else { return Err(not_ours(text)) };
        let ended =
            Ended { how: ending(number(how)?)?, step: number(step)?, at: time(at)?, digest: number(digest)? };
        let line = |line: &str| {
            let (name, units) = line.split_once('=').ok_or_else(|| not_ours(text))?;
            Ok((LimitName::new(name).map_err(|_| not_ours(text))?, number(units)?))
        };
        let used =
            used.split(',').filter(|line| !line.is_empty()).map(line).collect::<Result<_, StoreError>>()?;
        Ok(Self { ended, drawn_at: time(drawn)?, is_own: own == "1", used })
    }
}

/// What of `units` is counted at a level: of each limit that it has.
pub(super) fn used_at(level: &Level, units: impl Fn(usize) -> Option<u64>) -> Vec<(LimitName, u64)> {
    let used = level.limits.iter().filter_map(|line| Some((line.rule.name().clone(), units(line.name)?)));
    used.collect()
}

fn number<T: FromStr>(text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| not_ours(text))
}

fn time(text: &str) -> Result<Stamp, StoreError> {
    stamp(column(number(text)?))
}

fn not_ours(text: &str) -> StoreError {
    let shown: String = text.chars().take(80).collect();
    StoreError::Corrupt { what: format!("the mark {shown:?}") }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::lease::Ending;

    use super::*;

    #[test]
    fn a_mark_is_read_back_as_it_was_written() {
        let at = Stamp::from_secs(1_800_000_000);
        let held: Units = [Some(12), None, Some(500)].into_iter().collect();
        let record = Record::restored(7, held, at, at, at, OnExpiry::Return);
        let open = OpenMark { level: 2, record, levels: "abc".to_owned() };
        assert_eq!(open.to_string().parse::<OpenMark>().unwrap(), open);
        let name = |name: &str| LimitName::new(name).unwrap();
        for used in [vec![], vec![(name("rpm"), 1)], vec![(name("rpm"), 0), (name("a.b"), u64::MAX)]] {
            let ended = Ended { how: Ending::Settled, step: 3, at, digest: u64::MAX };
            let end = EndMark { ended, drawn_at: at, is_own: true, used };
            assert_eq!(end.to_string().parse::<EndMark>().unwrap(), end);
        }
        for bad in ["", "1", "0 0 0 0 0 9 x 1", "9 0 0 0 0 1 ", "0 0 0 0 0 1 rpm", "0 0 0 0 0 1 r m=1"] {
            assert!(bad.parse::<OpenMark>().is_err() && bad.parse::<EndMark>().is_err(), "{bad}");
        }
    }
}
