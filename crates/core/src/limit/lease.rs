//! The record of a lease: the units it holds and the number of its last step, so that each step applies once.
//!
//! The holder numbers the calls of a lease. A repeated step returns the first response and changes nothing; a
//! step older than the last one is late and refused. The record of an ended lease makes the same ending
//! idempotent and every other step an error. A lease that is cancelled before its draw arrives leaves a
//! record too, which refuses the draw.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::limit::cascade::{Deltas, Units};
use crate::limit::policy::OnExpiry;
use crate::time::Stamp;

/// How long a store keeps the record of an ended lease.
pub const REMEMBERED: Duration = Duration::from_secs(600);
/// How long a lease may stay open by default.
pub const DEADLINE: Duration = Duration::from_secs(3_600);
/// The longest renewal.
pub const RENEWAL_MAX: Duration = Duration::from_secs(86_400);

/// The bit that marks an id chosen by a caller. No timestamp sets it before the year 6429.
const CHOSEN: u128 = 1 << 127;

/// The id of a lease: 48 bits of creation time and 80 random bits, or a number that a caller has
/// [chosen](Self::chosen) as an idempotency key, so that a retry names the same lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u128);

impl LeaseId {
    /// An id created at `millis` since 1970, with the lower 80 of these random bits.
    pub const fn new(millis: u64, random: u128) -> Self {
        let random = random & ((1 << 80) - 1);
        Self(((millis as u128) << 80) | random)
    }

    /// An id chosen by a caller: the lower 127 bits of `number`, without a time. Best derived as a keyed hash
    /// of the caller's identity and its request id.
    pub const fn chosen(number: u128) -> Self {
        Self(CHOSEN | number)
    }

    /// Whether a caller chose the id and will retry with it. Such a lease is not ended because a response was
    /// lost.
    pub const fn is_chosen(self) -> bool {
        self.0 & CHOSEN != 0
    }

    /// The id with this number.
    pub const fn from_number(number: u128) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u128 {
        self.0
    }

    /// The creation time in milliseconds since 1970 by the creator's clock; 0 for a chosen id.
    pub const fn millis(self) -> u64 {
        if self.is_chosen() { 0 } else { (self.0 >> 80) as u64 }
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The error for text that is not a lease id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not a lease id: expected 32 hexadecimal digits")]
pub struct InvalidLeaseId {
    /// The first 80 characters of the text.
    pub text: String,
}

impl FromStr for LeaseId {
    type Err = InvalidLeaseId;

    fn from_str(text: &str) -> Result<Self, InvalidLeaseId> {
        let is_hex = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(number) if is_hex => Ok(Self(number)),
            _ => Err(InvalidLeaseId { text: text.chars().take(80).collect() }),
        }
    }
}

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Settled at its actual usage.
    Settled,
    /// Cancelled, with all units returned.
    Cancelled,
    /// Ended by its deadline.
    Expired,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Settled => "settled",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        })
    }
}

/// How to handle a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is new: apply it.
    Apply,
    /// It was applied before: return the first response.
    Repeat,
    /// A later step was applied, or the lease has ended: refuse it.
    Late,
}

/// Units that a lease holds and a bucket did not take, because its debt is bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortfall {
    /// The index of the level.
    pub level: u8,
    /// The index of the limit's name.
    pub name: u8,
    /// The units; never zero.
    pub units: u64,
}

/// An open lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    step: u32,
    held: Units,
    /// Nearly always empty: each bucket has taken all units held.
    shortfalls: Box<[Shortfall]>,
    drawn_at: Stamp,
    stepped_at: Stamp,
    deadline: Stamp,
    on_expiry: OnExpiry,
}

impl Record {
    /// A lease that drew `units` at `now`. The draw is step 0.
    pub fn new(units: Units, now: Stamp, deadline: Stamp, on_expiry: OnExpiry) -> Self {
        Self::restored(0, units, now, now, deadline, on_expiry)
    }

    /// A lease read back from a store, after its step `step`.
    pub fn restored(
        step: u32,
        held: Units,
        drawn_at: Stamp,
        stepped_at: Stamp,
        deadline: Stamp,
        on_expiry: OnExpiry,
    ) -> Self {
        Self { step, held, shortfalls: Box::default(), drawn_at, stepped_at, deadline, on_expiry }
    }

    /// The record with the units that buckets did not take.
    #[must_use]
    pub fn with_shortfalls(self, shortfalls: Box<[Shortfall]>) -> Self {
        Self { shortfalls, ..self }
    }

    /// The held units that buckets did not take.
    pub const fn shortfalls(&self) -> &[Shortfall] {
        &self.shortfalls
    }

    /// Returns the change of a bucket when the units held of its limit change by `delta` and it may take at
    /// most `capacity`. Units that it does not take are recorded as a shortfall and never returned to it.
    #[inline]
    pub fn bucket_delta(&mut self, level: usize, name: usize, delta: i64, capacity: Option<u64>) -> i64 {
        if self.shortfalls.is_empty()
            && capacity.is_none_or(|capacity| i128::from(delta) <= i128::from(capacity))
        {
            return delta;
        }
        self.short_delta(level, name, delta, capacity)
    }

    #[cold]
    fn short_delta(&mut self, level: usize, name: usize, delta: i64, capacity: Option<u64>) -> i64 {
        let (level, name) = (u8::try_from(level).unwrap_or(u8::MAX), u8::try_from(name).unwrap_or(u8::MAX));
        let is_here = |short: &Shortfall| (short.level, short.name) == (level, name);
        let before = self.shortfalls.iter().find(|short| is_here(short)).map_or(0, |short| short.units);
        let (units, moved) = if let Ok(more) = u64::try_from(delta) {
            let taken = capacity.map_or(more, |capacity| capacity.min(more));
            (before.saturating_add(more - taken), 0_i64.saturating_add_unsigned(taken))
        } else {
            let never_taken = before.min(delta.unsigned_abs());
            (before - never_taken, delta.saturating_add_unsigned(never_taken))
        };
        let others = self.shortfalls.iter().filter(|short| !is_here(short)).copied();
        let this = Some(Shortfall { level, name, units }).filter(|short| short.units > 0);
        self.shortfalls = others.chain(this).collect();
        moved
    }

    /// How to handle step `step`.
    pub const fn turn(&self, step: u32) -> Turn {
        if step > self.step {
            Turn::Apply
        } else if step == self.step {
            Turn::Repeat
        } else {
            Turn::Late
        }
    }

    /// Adds `more` to the units held.
    pub fn extend(&mut self, step: u32, more: &[Option<u64>], now: Stamp) {
        (self.step, self.stepped_at) = (step, now);
        for (held, more) in self.held.iter_mut().zip(more) {
            if let Some(more) = more {
                *held = Some(held.unwrap_or(0).saturating_add(*more));
            }
        }
    }

    /// Changes the units held by `deltas`, not below zero, and returns the actual changes.
    pub fn adjust(&mut self, step: u32, deltas: &[Option<i64>], now: Stamp) -> Deltas {
        (self.step, self.stepped_at) = (step, now);
        let change = |(held, delta): (&mut Option<u64>, &Option<i64>)| {
            let (before, delta) = (held.unwrap_or(0), (*delta)?);
            let after = before.saturating_add_signed(delta);
            *held = Some(after);
            Some(difference(after, before))
        };
        self.held.iter_mut().zip(deltas).map(change).collect()
    }

    /// Moves the deadline to `deadline`, forward only.
    pub fn renew(&mut self, step: u32, deadline: Stamp, now: Stamp) {
        (self.step, self.stepped_at) = (step, now);
        self.deadline = self.deadline.max(deadline);
    }

    /// The change when limit `name` is settled at `actual`: zero if the settlement does not name the limit,
    /// `None` if the lease does not hold any of it either.
    #[inline]
    pub fn change(&self, name: usize, actual: Option<u64>) -> Option<i64> {
        let held = self.held[name];
        match actual {
            Some(actual) => Some(difference(actual, held.unwrap_or(0))),
            None => held.map(|_| 0),
        }
    }

    /// The units held, by limit name; `None` for a limit that is not part of the lease.
    pub fn held(&self) -> &[Option<u64>] {
        &self.held
    }

    /// The last step that was applied.
    pub const fn step(&self) -> u32 {
        self.step
    }

    /// When the lease drew, by the wall clock. Usage is counted in the windows of that time.
    pub const fn drawn_at(&self) -> Stamp {
        self.drawn_at
    }

    /// When the last step was applied.
    pub const fn stepped_at(&self) -> Stamp {
        self.stepped_at
    }

    /// When the lease expires.
    pub const fn deadline(&self) -> Stamp {
        self.deadline
    }

    /// Whether the deadline has passed. The lease may still have to be ended.
    pub fn is_due(&self, now: Stamp) -> bool {
        self.deadline <= now
    }

    /// What to do when the lease expires.
    pub const fn on_expiry(&self) -> OnExpiry {
        self.on_expiry
    }
}

/// The record of a lease that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndRecord {
    /// How it ended.
    pub how: Ending,
    /// The step that ended it.
    pub step: u32,
    /// When it ended.
    pub at: Stamp,
    /// The [`digest`] of the settled amounts, to recognize a retry of the same settle.
    pub digest: u64,
}

impl EndRecord {
    /// How to handle a settle after the end, whose amounts have this [`digest`].
    pub fn turn_settle(&self, step: u32, digest: u64) -> Turn {
        let is_same = self.how == Ending::Settled && self.step == step && self.digest == digest;
        if is_same { Turn::Repeat } else { Turn::Late }
    }

    /// How to handle a cancel after the end.
    pub fn turn_cancel(&self) -> Turn {
        if self.how == Ending::Cancelled { Turn::Repeat } else { Turn::Late }
    }
}

/// A digest of amounts by name, independent of their order. With it a store recognizes a repeated settle
/// after it has dropped the lease's levels.
pub fn digest<'a>(amounts: impl IntoIterator<Item = (&'a str, u64)>) -> u64 {
    digest_by_key(amounts.into_iter().map(|(name, units)| (name_key(name), units)))
}

/// [`digest`] with the [keys](name_key) of the names.
#[inline]
pub(crate) fn digest_by_key(amounts: impl Iterator<Item = (u64, u64)>) -> u64 {
    // Detects honest retries; it need not resist an attacker.
    let mix = |(key, units): (u64, u64)| {
        let mixed = (key ^ units).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(31)
    };
    amounts.map(mix).fold(0, u64::wrapping_add)
}

/// The FNV-1a hash of a limit's name.
pub(crate) fn name_key(name: &str) -> u64 {
    let byte = |key: u64, byte: u8| (key ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    name.bytes().fold(0xCBF2_9CE4_8422_2325, byte)
}

fn difference(after: u64, before: u64) -> i64 {
    i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(held: &[Option<u64>]) -> Record {
        let start = Stamp::from_secs(1_800_000_000);
        Record::new(held.into(), start, start + DEADLINE, OnExpiry::Settle)
    }

    #[test]
    fn each_step_applies_once_and_in_order() {
        let mut lease = record(&[Some(500)]);
        assert_eq!((lease.turn(0), lease.turn(1)), (Turn::Repeat, Turn::Apply));
        let later = lease.drawn_at() + Duration::from_secs(5);
        lease.extend(2, &[Some(100)], later);
        assert_eq!(lease.stepped_at(), later);
        let turns = [0, 1, 2, 3].map(|step| lease.turn(step));
        assert_eq!(turns, [Turn::Late, Turn::Late, Turn::Repeat, Turn::Apply]);
        assert_eq!((lease.held(), lease.step()), (&[Some(600)][..], 2));
    }

    #[test]
    fn restored_lease_equals_the_original() {
        let mut was = record(&[Some(500), None]);
        was.extend(3, &[None, Some(7)], was.drawn_at() + Duration::from_secs(5));
        let (drawn_at, stepped_at) = (was.drawn_at(), was.stepped_at());
        let held = was.held().into();
        let back = Record::restored(was.step(), held, drawn_at, stepped_at, was.deadline(), was.on_expiry());
        assert_eq!(back, was);
    }

    #[test]
    fn adjustment_returns_no_more_than_is_held() {
        let mut lease = record(&[Some(500), None, None]);
        assert_eq!(
            lease.adjust(1, &[Some(-200), None, Some(7)], Stamp::MAX)[..],
            [Some(-200), None, Some(7)]
        );
        assert_eq!(lease.held(), [Some(300), None, Some(7)]);
        assert_eq!(lease.adjust(2, &[Some(-900), None, None], Stamp::MAX)[..], [Some(-300), None, None]);
        assert_eq!(lease.held(), [Some(0), None, Some(7)]);
    }

    #[test]
    fn bucket_returns_no_more_than_it_took() {
        let mut lease = record(&[Some(10)]);
        // Change of the units held, capacity, change of the bucket, remaining shortfall.
        let table: [(i64, Option<u64>, i64, u64); 8] = [
            (5, None, 5, 0),
            (5, Some(5), 5, 0),
            (7, Some(3), 3, 4),
            (2, Some(0), 0, 6),
            (-1, Some(0), 0, 5),
            (-8, Some(100), -3, 0),
            (-2, None, -2, 0),
            (i64::MAX, Some(1), 1, i64::MAX.unsigned_abs() - 1),
        ];
        for (delta, capacity, moved, missing) in table {
            assert_eq!(
                lease.bucket_delta(1, 0, delta, capacity),
                moved,
                "{delta} with capacity {capacity:?}"
            );
            let short = lease.shortfalls().iter().map(|short| (short.level, short.name, short.units));
            assert_eq!(short.collect::<Vec<_>>(), if missing > 0 { vec![(1, 0, missing)] } else { vec![] });
        }
        assert_eq!(lease.bucket_delta(0, 0, 7, Some(6)), 6, "each bucket by itself");
        assert_eq!(lease.shortfalls().len(), 2);
    }

    #[test]
    fn settle_keeps_units_that_it_does_not_name() {
        let lease = record(&[Some(40), Some(1), None, None]);
        let changes = [Some(55), None, Some(3), None].into_iter().enumerate();
        let changes: Vec<_> = changes.map(|(name, actual)| lease.change(name, actual)).collect();
        assert_eq!(changes, [Some(15), Some(0), Some(3), None]);
    }

    #[test]
    fn same_ending_is_a_repeat_and_others_are_late() {
        let at = Stamp::from_secs(1);
        let (five, six) = (digest([("tpm", 5)]), digest([("tpm", 6)]));
        let settled = EndRecord { how: Ending::Settled, step: 3, at, digest: five };
        assert_eq!(settled.turn_settle(3, five), Turn::Repeat);
        assert_eq!(settled.turn_settle(3, six), Turn::Late);
        assert_eq!(settled.turn_settle(4, five), Turn::Late);
        assert_eq!(settled.turn_cancel(), Turn::Late);
        let cancelled = EndRecord { how: Ending::Cancelled, ..settled };
        assert_eq!(cancelled.turn_cancel(), Turn::Repeat);
        assert_eq!(cancelled.turn_settle(3, five), Turn::Late);
    }

    #[test]
    fn digest_ignores_order_but_not_names_and_units() {
        assert_eq!(digest([("rpm", 1), ("tpm", 500)]), digest([("tpm", 500), ("rpm", 1)]));
        let others = [
            digest([]),
            digest([("rpm", 0)]),
            digest([("rpm", 1)]),
            digest([("tpm", 1)]),
            digest([("rpm", 1), ("tpm", 500)]),
            digest([("rpm", 500), ("tpm", 1)]),
        ];
        let different: std::collections::BTreeSet<u64> = others.into_iter().collect();
        assert_eq!(different.len(), others.len());
    }

    #[test]
    fn renewal_moves_deadline_forward_and_keeps_units() {
        let mut lease = record(&[Some(500)]);
        let (first, later) = (lease.deadline(), lease.drawn_at() + Duration::from_secs(1_800));
        lease.renew(1, later + DEADLINE, later);
        assert_eq!((lease.deadline(), lease.step()), (first + Duration::from_secs(1_800), 1));
        assert!(!lease.is_due(first));
        lease.renew(2, later + Duration::from_secs(1), later);
        assert_eq!((lease.deadline(), lease.stepped_at()), (later + DEADLINE, later));
        assert!(lease.is_due(later + DEADLINE));
        assert_eq!(lease.held(), [Some(500)]);
    }

    #[test]
    fn chosen_id_has_no_time_and_roundtrips() {
        let id = LeaseId::chosen(7);
        assert!(id.is_chosen() && !LeaseId::new(u64::from(u32::MAX), u128::MAX).is_chosen());
        assert_eq!((id.millis(), id.to_string().parse()), (0, Ok(id)));
        assert_ne!(id, LeaseId::chosen(8));
    }

    #[test]
    fn id_is_32_digits_and_has_its_creation_time() {
        let id = LeaseId::new(1_700_000_000_123, u128::MAX);
        assert_eq!(id.millis(), 1_700_000_000_123);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(LeaseId::from_number(id.number()), id);
        for bad in ["", "12", "+2345678901234567890123456789012", "g2345678901234567890123456789012"] {
            assert!(bad.parse::<LeaseId>().is_err(), "{bad}");
        }
        let endings = [Ending::Settled, Ending::Cancelled, Ending::Expired].map(|how| how.to_string());
        assert_eq!(endings, ["settled", "cancelled", "expired"]);
    }
}
