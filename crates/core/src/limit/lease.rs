//! A lease as a store remembers it: what it drew, and which step came last, so that each counts once.
//!
//! A lease's calls are numbered by its holder. A step that comes again is answered as the first time and
//! changes nothing; one that comes after a later one is too late. What is remembered after the end makes the
//! same ending, said again, the same answer, and everything else an error. A lease that is cancelled before its
//! draw arrived is remembered too: the draw is then refused.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::limit::cascade::{Deltas, Units};
use crate::limit::policy::OnExpiry;
use crate::time::Stamp;

/// How long an ended lease is remembered.
pub const REMEMBERED: Duration = Duration::from_secs(600);
/// How long a lease may stay open unless said otherwise.
pub const DEADLINE: Duration = Duration::from_secs(3_600);
/// A lease is renewed for at most so long at a time.
pub const RENEWAL_MAX: Duration = Duration::from_secs(86_400);

/// Set in an id that a caller has chosen. No time reaches it before the year 6429.
const CHOSEN: u128 = 1 << 127;

/// The id of a lease: 48 bits of the time it was made at, and 80 that nobody can guess. Or a number that a caller has
/// [chosen](Self::chosen) beforehand, so that to ask again with it is to ask for the same lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u128);

impl LeaseId {
    /// The id made at `millis` since 1970 with these random bits, of which the lower 80 count.
    pub const fn new(millis: u64, random: u128) -> Self {
        let random = random & ((1 << 80) - 1);
        Self(((millis as u128) << 80) | random)
    }

    /// The id that stands for what a caller has chosen: 127 bits of `number` count, and it has no time. They are best a
    /// keyed hash of who asks and what it is called there.
    pub const fn chosen(number: u128) -> Self {
        Self(CHOSEN | number)
    }

    /// Whether a caller has chosen it, and will ask again with it: nobody ends its lease because an answer was lost.
    pub const fn is_chosen(self) -> bool {
        self.0 & CHOSEN != 0
    }

    /// The id of this number.
    pub const fn from_number(number: u128) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u128 {
        self.0
    }

    /// When it was made, in milliseconds since 1970 by its maker's clock; 0 for one that was chosen.
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

/// Text that is no lease id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is no lease id: it has 32 hexadecimal digits")]
pub struct InvalidLeaseId {
    /// The text, at most 80 characters of it.
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
    /// At what was used.
    Settled,
    /// With everything returned.
    Cancelled,
    /// By its deadline.
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

/// What to do with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is new: do it.
    Apply,
    /// It was done: answer as the first time.
    Repeat,
    /// A later one was done, or the lease has ended: refuse it.
    Late,
}

/// What a bucket did not take of what a lease holds, because its debt is bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortfall {
    /// The number of the level.
    pub level: u8,
    /// The number of the limit's name.
    pub name: u8,
    /// How many units; never zero.
    pub units: u64,
}

/// An open lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    step: u32,
    held: Units,
    /// Nearly always empty: then each bucket has taken what is held.
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

    /// A lease as a store has kept it, after its step `step`.
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

    /// The same where buckets did not take all of it.
    #[must_use]
    pub fn with_shortfalls(self, shortfalls: Box<[Shortfall]>) -> Self {
        Self { shortfalls, ..self }
    }

    /// What buckets did not take of what is held.
    pub const fn shortfalls(&self) -> &[Shortfall] {
        &self.shortfalls
    }

    /// What a bucket is moved by if what is held of a limit changes by `delta` and the bucket may take no more than `room`.
    /// What it does not take is remembered, and is not given back.
    #[inline]
    pub fn bucket_delta(&mut self, level: usize, name: usize, delta: i64, room: Option<u64>) -> i64 {
        if self.shortfalls.is_empty() && room.is_none_or(|room| i128::from(delta) <= i128::from(room)) {
            return delta;
        }
        self.short_delta(level, name, delta, room)
    }

    #[cold]
    fn short_delta(&mut self, level: usize, name: usize, delta: i64, room: Option<u64>) -> i64 {
        let (level, name) = (u8::try_from(level).unwrap_or(u8::MAX), u8::try_from(name).unwrap_or(u8::MAX));
        let is_here = |short: &Shortfall| (short.level, short.name) == (level, name);
        let before = self.shortfalls.iter().find(|short| is_here(short)).map_or(0, |short| short.units);
        let (units, moved) = if let Ok(more) = u64::try_from(delta) {
            let taken = room.map_or(more, |room| room.min(more));
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

    /// What to do with step `step`.
    pub const fn turn(&self, step: u32) -> Turn {
        if step > self.step {
            Turn::Apply
        } else if step == self.step {
            Turn::Repeat
        } else {
            Turn::Late
        }
    }

    /// Holds `more`.
    pub fn extend(&mut self, step: u32, more: &[Option<u64>], now: Stamp) {
        (self.step, self.stepped_at) = (step, now);
        for (held, more) in self.held.iter_mut().zip(more) {
            if let Some(more) = more {
                *held = Some(held.unwrap_or(0).saturating_add(*more));
            }
        }
    }

    /// Holds more or less by `deltas`, and never less than nothing. Answers by how much it changed.
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

    /// Expires at `deadline`, unless it expires later anyway: a deadline only moves forward.
    pub fn renew(&mut self, step: u32, deadline: Stamp, now: Stamp) {
        (self.step, self.stepped_at) = (step, now);
        self.deadline = self.deadline.max(deadline);
    }

    /// By how much being settled at `actual` changes what is held of the limit numbered `name`: zero where it keeps
    /// what is held, `None` where it takes no part.
    #[inline]
    pub fn change(&self, name: usize, actual: Option<u64>) -> Option<i64> {
        let held = self.held[name];
        match actual {
            Some(actual) => Some(difference(actual, held.unwrap_or(0))),
            None => held.map(|_| 0),
        }
    }

    /// What it holds, per limit name; `None` where a limit takes no part.
    pub fn held(&self) -> &[Option<u64>] {
        &self.held
    }

    /// The last step that was done.
    pub const fn step(&self) -> u32 {
        self.step
    }

    /// When it drew, by the wall clock: usage is counted in the windows of that time.
    pub const fn drawn_at(&self) -> Stamp {
        self.drawn_at
    }

    /// When the last step was done.
    pub const fn stepped_at(&self) -> Stamp {
        self.stepped_at
    }

    /// When it expires.
    pub const fn deadline(&self) -> Stamp {
        self.deadline
    }

    /// Whether it is past its deadline, though perhaps nobody has ended it yet.
    pub fn is_due(&self, now: Stamp) -> bool {
        self.deadline <= now
    }

    /// What becomes of it then.
    pub const fn on_expiry(&self) -> OnExpiry {
        self.on_expiry
    }
}

/// What is remembered of a lease that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// How.
    pub how: Ending,
    /// By which step.
    pub step: u32,
    /// When.
    pub at: Stamp,
    /// Tells a settle with these [amounts](digest) from one with others.
    pub digest: u64,
}

impl Ended {
    /// What to do with a settle that comes after the end, whose amounts have this [`digest`].
    pub fn turn_settle(&self, step: u32, digest: u64) -> Turn {
        let is_same = self.how == Ending::Settled && self.step == step && self.digest == digest;
        if is_same { Turn::Repeat } else { Turn::Late }
    }

    /// What to do with a cancel that comes after the end.
    pub fn turn_cancel(&self) -> Turn {
        if self.how == Ending::Cancelled { Turn::Repeat } else { Turn::Late }
    }
}

/// A number for amounts by name: the same for the same in whatever order, and different for different ones but by great
/// chance. So a settle is known again by those who do not know the lease's levels any more.
pub fn digest<'a>(amounts: impl IntoIterator<Item = (&'a str, u64)>) -> u64 {
    digest_by_key(amounts.into_iter().map(|(name, units)| (name_key(name), units)))
}

/// The same with names that their [keys](name_key) stand for.
#[inline]
pub(crate) fn digest_by_key(amounts: impl Iterator<Item = (u64, u64)>) -> u64 {
    // It tells honest repeats apart, and need not withstand anybody.
    let mix = |(key, units): (u64, u64)| {
        let mixed = (key ^ units).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(31)
    };
    amounts.map(mix).fold(0, u64::wrapping_add)
}

/// A number for a limit's name: FNV-1a.
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
    fn each_step_counts_once_and_in_order() {
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
    fn a_lease_is_restored_as_it_was() {
        let mut was = record(&[Some(500), None]);
        was.extend(3, &[None, Some(7)], was.drawn_at() + Duration::from_secs(5));
        let (drawn_at, stepped_at) = (was.drawn_at(), was.stepped_at());
        let held = was.held().into();
        let back = Record::restored(was.step(), held, drawn_at, stepped_at, was.deadline(), was.on_expiry());
        assert_eq!(back, was);
    }

    #[test]
    fn an_adjustment_returns_no_more_than_is_held() {
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
    fn bucket_gives_back_no_more_than_it_took() {
        let mut lease = record(&[Some(10)]);
        // What is held changes by this, the room there is, and what the bucket is moved by and still lacks.
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
        for (delta, room, moved, lacks) in table {
            assert_eq!(lease.bucket_delta(1, 0, delta, room), moved, "{delta} with room for {room:?}");
            let short = lease.shortfalls().iter().map(|short| (short.level, short.name, short.units));
            assert_eq!(short.collect::<Vec<_>>(), if lacks > 0 { vec![(1, 0, lacks)] } else { vec![] });
        }
        assert_eq!(lease.bucket_delta(0, 0, 7, Some(6)), 6, "each bucket by itself");
        assert_eq!(lease.shortfalls().len(), 2);
    }

    #[test]
    fn a_settle_says_what_stays_and_leaves_what_it_does_not_name() {
        let lease = record(&[Some(40), Some(1), None, None]);
        let changes = [Some(55), None, Some(3), None].into_iter().enumerate();
        let changes: Vec<_> = changes.map(|(name, actual)| lease.change(name, actual)).collect();
        assert_eq!(changes, [Some(15), Some(0), Some(3), None]);
    }

    #[test]
    fn the_same_ending_is_a_repeat_and_others_are_late() {
        let at = Stamp::from_secs(1);
        let (five, six) = (digest([("tpm", 5)]), digest([("tpm", 6)]));
        let settled = Ended { how: Ending::Settled, step: 3, at, digest: five };
        assert_eq!(settled.turn_settle(3, five), Turn::Repeat);
        assert_eq!(settled.turn_settle(3, six), Turn::Late);
        assert_eq!(settled.turn_settle(4, five), Turn::Late);
        assert_eq!(settled.turn_cancel(), Turn::Late);
        let cancelled = Ended { how: Ending::Cancelled, ..settled };
        assert_eq!(cancelled.turn_cancel(), Turn::Repeat);
        assert_eq!(cancelled.turn_settle(3, five), Turn::Late);
    }

    #[test]
    fn amounts_have_one_digest_in_whatever_order_and_another_for_every_other_name_and_number() {
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
    fn a_renewal_moves_the_deadline_forward_only_and_holds_what_was_held() {
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
    fn a_chosen_id_has_no_time_and_is_read_back_as_chosen() {
        let id = LeaseId::chosen(7);
        assert!(id.is_chosen() && !LeaseId::new(u64::from(u32::MAX), u128::MAX).is_chosen());
        assert_eq!((id.millis(), id.to_string().parse()), (0, Ok(id)));
        assert_ne!(id, LeaseId::chosen(8));
    }

    #[test]
    fn an_id_is_32_digits_and_knows_when_it_was_made() {
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
