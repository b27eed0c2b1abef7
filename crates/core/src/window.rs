//! Sliding windows: timestamped amounts ([`Window`]), and counts of outcomes in slices of time ([`Tally`]).
//!
//! An entry counts until it is older than the span, boundary included. Reading never writes: `total(now)`
//! skips expired entries, and the next record removes them.

use std::collections::VecDeque;
use std::time::Duration;

use crate::time::{Instant, nanos};

/// The most entries a window holds; beyond it, entries are merged.
pub const ENTRIES_MAX: usize = 4_096;

/// Amounts recorded over the last span of time.
///
/// Exact up to [`ENTRIES_MAX`] entries. A fuller window merges entries within the same 1/2048 of its span, at
/// the later time: amounts never expire early, and at most span/2048 late.
#[derive(Debug, Clone, Default)]
pub struct Window {
    entries: VecDeque<Entry>,
    total: u64,
    count: u64,
    /// The time of the latest removed entry: amounts recorded up to here cannot be taken back.
    removed_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    at: Instant,
    sum: u64,
    count: u64,
}

impl Window {
    /// Records `amount` at `now`, or at the latest recorded time if `now` is earlier.
    ///
    /// Returns whether the window was full and merged entries.
    pub fn record(&mut self, span: Duration, now: Instant, amount: u64) -> bool {
        self.prune(span, now);
        // The total must equal the sum of the entries, so an amount that would overflow it is cut.
        let amount = amount.min(u64::MAX - self.total);
        self.total += amount;
        self.count += 1;
        match self.entries.back_mut() {
            Some(last) if last.at >= now => {
                last.sum += amount;
                last.count += 1;
                return false;
            }
            _ => {}
        }
        let full = self.entries.len() == ENTRIES_MAX;
        if full {
            self.coarsen(span);
        }
        self.entries.push_back(Entry { at: now, sum: amount, count: 1 });
        full
    }

    /// Takes back `amount` of the units recorded from `stamp` on, the oldest first; nothing if those at `stamp` have
    /// expired.
    pub fn take_back(&mut self, stamp: Instant, amount: u64) {
        if self.removed_until.is_some_and(|removed| stamp <= removed) {
            return;
        }
        // Merged entries carry a later time, so the amount is in the first entry at or after the stamp;
        // mostly that is the last entry.
        let last = self.entries.len().saturating_sub(1);
        let is_last = last == 0 || self.entries[last - 1].at < stamp;
        let index = if is_last { last } else { self.entries.partition_point(|entry| entry.at < stamp) };
        // Amounts of the same request that were recorded later are in later entries.
        let mut left = amount;
        for entry in self.entries.range_mut(index..).filter(|entry| entry.at >= stamp) {
            let back = left.min(entry.sum);
            entry.sum -= back;
            self.total -= back;
            left -= back;
            if left == 0 {
                break;
            }
        }
    }

    /// The sum of the amounts in the window at `now`.
    pub fn total(&self, span: Duration, now: Instant) -> u64 {
        self.expired(span, now).fold(self.total, |total, entry| total - entry.sum)
    }

    /// The number of records in the window at `now`.
    pub fn count(&self, span: Duration, now: Instant) -> u64 {
        self.expired(span, now).fold(self.count, |count, entry| count - entry.count)
    }

    /// The first time at which `amount` of the window's content at `now` has expired.
    ///
    /// `None` if the window holds less than `amount`.
    pub fn freed_at(&self, span: Duration, now: Instant, amount: u64) -> Option<Instant> {
        let live = self.entries.iter().skip_while(|entry| is_expired(entry.at, span, now));
        let mut freed = 0_u64;
        for entry in live {
            freed = freed.saturating_add(entry.sum);
            if freed >= amount {
                // The boundary is inclusive: an entry counts at `at + span`, but not a nanosecond later.
                return Some((entry.at + span).plus_nanos(1));
            }
        }
        None
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.removed_until = self.entries.back().map(|entry| entry.at).or(self.removed_until);
        self.entries.clear();
        self.total = 0;
        self.count = 0;
    }

    fn expired(&self, span: Duration, now: Instant) -> impl Iterator<Item = &Entry> {
        self.entries.iter().take_while(move |entry| is_expired(entry.at, span, now))
    }

    /// Removes the entries that have expired at `now`, so that reads need not skip them.
    pub fn prune(&mut self, span: Duration, now: Instant) {
        while let Some(entry) = self.entries.front().filter(|entry| is_expired(entry.at, span, now)) {
            self.total -= entry.sum;
            self.count -= entry.count;
            self.removed_until = Some(entry.at);
            self.entries.pop_front();
        }
    }

    /// Merges entries of the same slice of a fixed grid, so that merging is idempotent.
    fn coarsen(&mut self, span: Duration) {
        let slice = (nanos(span) / (ENTRIES_MAX as u64 / 2)).max(1);
        let mut merged: VecDeque<Entry> = VecDeque::with_capacity(ENTRIES_MAX);
        for entry in self.entries.drain(..) {
            match merged.back_mut() {
                Some(last) if last.at.as_nanos() / slice == entry.at.as_nanos() / slice => {
                    last.at = entry.at;
                    last.sum += entry.sum;
                    last.count += entry.count;
                }
                _ => merged.push_back(entry),
            }
        }
        self.entries = merged;
    }
}

fn is_expired(at: Instant, span: Duration, now: Instant) -> bool {
    at + span < now
}

/// Good and bad outcomes within a sliding span, counted in slices (a ring buffer).
#[derive(Debug, Clone)]
pub struct Tally {
    slices: Box<[Slice]>,
    width: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    /// The slice's number on the timeline; a different number means stale counts from an earlier lap.
    number: u64,
    good: u64,
    bad: u64,
}

/// The counts of a [`Tally`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Outcomes in the window.
    pub total: u64,
    /// Bad ones among them.
    pub bad: u64,
}

impl Tally {
    /// A tally over `span` in `slices` slices.
    pub fn new(span: Duration, slices: u32) -> Self {
        let slices = slices.max(1);
        let width = (nanos(span) / u64::from(slices)).max(1);
        Self { slices: vec![Slice::default(); slices as usize].into_boxed_slice(), width }
    }

    /// Counts one outcome.
    pub fn record(&mut self, now: Instant, is_bad: bool) {
        let number = self.number(now);
        let index = self.index(number);
        let slice = &mut self.slices[index];
        if slice.number != number {
            *slice = Slice { number, good: 0, bad: 0 };
        }
        if is_bad {
            slice.bad += 1;
        } else {
            slice.good += 1;
        }
    }

    /// The counts in the window at `now`.
    pub fn counts(&self, now: Instant) -> Counts {
        let newest = self.number(now);
        let length = self.slices.len() as u64;
        self.slices.iter().filter(|slice| slice.number <= newest && newest - slice.number < length).fold(
            Counts::default(),
            |counts, slice| Counts {
                total: counts.total + slice.good + slice.bad,
                bad: counts.bad + slice.bad,
            },
        )
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.slices.fill(Slice::default());
    }

    fn number(&self, now: Instant) -> u64 {
        now.as_nanos() / self.width
    }

    fn index(&self, number: u64) -> usize {
        usize::try_from(number % self.slices.len() as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const TEN: Duration = Duration::from_secs(10);

    #[test]
    fn the_boundary_is_inclusive() {
        let mut window = Window::default();
        window.record(TEN, at(0), 1);
        assert_eq!(window.count(TEN, at(10_000)), 1);
        assert_eq!(window.count(TEN, at(10_010)), 0);
    }

    #[test]
    fn only_entries_in_the_window_count() {
        let mut window = Window::default();
        window.record(TEN, at(0), 1);
        window.record(TEN, at(3_000), 2);
        window.record(TEN, at(6_000), 3);
        assert_eq!((window.count(TEN, at(11_000)), window.total(TEN, at(11_000))), (2, 5));
        window.clear();
        assert_eq!((window.count(TEN, at(11_000)), window.total(TEN, at(11_000))), (0, 0));
    }

    #[test]
    fn take_back_reduces_the_entry_it_was_recorded_in() {
        let mut window = Window::default();
        window.record(TEN, at(0), 50);
        window.record(TEN, at(1_000), 40);
        window.take_back(at(0), 30);
        assert_eq!(window.total(TEN, at(1_000)), 60);
        window.take_back(at(1_000), 100);
        assert_eq!(window.total(TEN, at(1_000)), 20, "at most the recorded amount is taken back");
        window.record(TEN, at(20_000), 1);
        window.take_back(at(25_000), 9);
        assert_eq!(window.total(TEN, at(20_000)), 1, "no entry at or after the stamp");
    }

    #[test]
    fn take_back_ignores_expired_entries() {
        let mut window = Window::default();
        window.record(TEN, at(0), 50);
        window.record(TEN, at(11_000), 40);
        window.take_back(at(0), 50);
        assert_eq!(window.total(TEN, at(11_000)), 40, "the entry of time 0 has expired");
        window.clear();
        window.record(TEN, at(12_000), 7);
        window.take_back(at(11_000), 40);
        assert_eq!(window.total(TEN, at(12_000)), 7, "cleared entries cannot be taken back");
    }

    #[test]
    fn a_clock_that_steps_back_records_at_the_latest_time() {
        let mut window = Window::default();
        window.record(TEN, at(5_000), 1);
        window.record(TEN, at(2_000), 1);
        assert_eq!(window.count(TEN, at(12_001)), 2);
        assert_eq!(window.count(TEN, at(15_001)), 0);
    }

    #[test]
    fn freed_at_is_just_after_the_entry_expires() {
        let mut window = Window::default();
        window.record(TEN, at(0), 60);
        window.record(TEN, at(3_000), 30);
        assert_eq!(window.freed_at(TEN, at(3_000), 40), Some(at(10_000).plus_nanos(1)));
        assert_eq!(window.freed_at(TEN, at(3_000), 61), Some(at(13_000).plus_nanos(1)));
        assert_eq!(window.freed_at(TEN, at(3_000), 91), None);
    }

    #[test]
    fn full_window_merges_without_freeing_early() {
        let mut window = Window::default();
        let mut coarsened = 0;
        // 20,000 records in one second of a ten-second window: far more than `ENTRIES_MAX`.
        for index in 0..20_000_u64 {
            coarsened += u32::from(window.record(TEN, Instant::from_nanos(index * 50_000), 1));
            assert!(window.entries.len() <= ENTRIES_MAX);
        }
        assert!(coarsened > 0);
        assert_eq!(window.total(TEN, at(1_000)), 20_000);
        // Accurate to one slice (10 s / 2,048 = 4.9 ms, so 98 records), and never early.
        for millis in (0..1_000).step_by(50) {
            let left = window.total(TEN, at(10_000 + millis));
            let exact = 20_000 - millis * 20;
            assert!((exact..exact + 120).contains(&left), "{left} left at {millis} ms, {exact} exactly");
        }
    }

    #[test]
    fn a_steadily_full_window_keeps_its_throughput() {
        // Merging the two oldest entries instead would snowball into one entry that never expires.
        let (span, capacity) = (Duration::from_secs(1), 10_000_u64);
        let mut window = Window::default();
        let mut admitted = 0_u64;
        for tick in 0..200_000_u64 {
            let now = Instant::from_nanos(tick * 50_000);
            if window.total(span, now) < capacity {
                window.record(span, now, 1);
                admitted += 1;
            }
        }
        assert!((98_000..=100_000).contains(&admitted), "{admitted} of 100,000 in ten windows");
    }

    #[test]
    fn a_tally_counts_its_slices() {
        let mut tally = Tally::new(TEN, 10);
        tally.record(at(0), false);
        tally.record(at(500), true);
        tally.record(at(1_500), false);
        assert_eq!(tally.counts(at(2_000)), Counts { total: 3, bad: 1 });
        tally.clear();
        assert_eq!(tally.counts(at(2_000)), Counts::default());
    }

    #[test]
    fn tally_counts_at_the_end_of_time() {
        let mut tally = Tally::new(Duration::from_nanos(1), 3);
        tally.record(Instant::MAX, true);
        assert_eq!(tally.counts(Instant::MAX), Counts { total: 1, bad: 1 });
    }

    #[test]
    fn tally_drops_whole_slices() {
        let mut tally = Tally::new(Duration::from_secs(5), 5);
        tally.record(at(0), true);
        tally.record(at(2_000), false);
        tally.record(at(4_000), false);
        assert_eq!(tally.counts(at(4_000)), Counts { total: 3, bad: 1 });
        assert_eq!(tally.counts(at(6_000)), Counts { total: 2, bad: 0 });
        tally.record(at(10_000), true);
        assert_eq!(tally.counts(at(10_000)), Counts { total: 1, bad: 1 }, "a slot of the ring is reused");
    }
}
