//! When the writer does background work, and when it pauses for other processes.
//!
//! A process that waits for the file polls its lock every one to two milliseconds and cannot signal the
//! holder. The writer therefore pauses at intervals for longer than that, however short the gaps between its
//! own callers are.

use std::time::{Duration, Instant};

/// The interval of cleanups.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of cleanups without calls.
const IDLE_CLEANUP_INTERVAL: Duration = Duration::from_secs(30);
/// The delay of background work after a failure.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// The longest time of writing without a [`PAUSE`]: if other processes write too, and if none was seen.
const RUN_MAX: [Duration; 2] = [Duration::from_millis(8), Duration::from_millis(100)];
/// Longer than the polling interval of other processes.
const PAUSE: Duration = Duration::from_micros(2_500);
/// After this time without writes, other processes are taken to be gone.
const OTHERS_TTL: Duration = Duration::from_secs(1);

/// The times of the last events.
pub(super) struct Schedule {
    last_cleanup: Instant,
    /// Whether more may be past its retention: every transaction then deletes some.
    pub(super) is_behind: bool,
    /// Since when it has written without a pause, and when its last transaction ended.
    run_start: Instant,
    ended: Instant,
    /// When another process was last seen to have written.
    other_writer_seen: Option<Instant>,
    /// When a transaction failed, if the last one did.
    failed: Option<Instant>,
}

impl Schedule {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            last_cleanup: now,
            is_behind: false,
            run_start: now,
            ended: now,
            other_writer_seen: None,
            failed: None,
        }
    }

    /// When the writer has background work: at once if it has undo jobs.
    pub(super) fn wakes_at(&self, has_undo_jobs: bool) -> Instant {
        let mut due =
            self.last_cleanup + if self.is_behind { CLEANUP_INTERVAL } else { IDLE_CLEANUP_INTERVAL };
        if has_undo_jobs {
            due = due.min(self.ended);
        }
        // A failure is retried after a delay.
        self.failed.map_or(due, |failed| due.max(failed + RETRY_DELAY))
    }

    /// How long to pause before the next transaction, so that other processes get the lock.
    pub(super) fn pause_for_others(&mut self, now: Instant) -> Option<Duration> {
        let paused = now.saturating_duration_since(self.ended);
        if paused >= PAUSE {
            self.run_start = now;
            return None;
        }
        let is_seen = |seen| now.saturating_duration_since(seen) < OTHERS_TTL;
        let run_max = RUN_MAX[usize::from(!self.other_writer_seen.is_some_and(is_seen))];
        if now.saturating_duration_since(self.run_start) < run_max {
            return None;
        }
        let rest = PAUSE.saturating_sub(paused);
        self.run_start = now + rest;
        Some(rest)
    }

    pub(super) const fn saw_other_writer(&mut self, now: Instant) {
        self.other_writer_seen = Some(now);
    }

    pub(super) const fn has_ended(&mut self, now: Instant) {
        self.ended = now;
        self.failed = None;
    }

    pub(super) const fn has_failed(&mut self, now: Instant) {
        self.ended = now;
        self.failed = Some(now);
    }

    /// Whether a cleanup is due, which is then taken as done.
    pub(super) fn starts_cleanup(&mut self, now: Instant) -> bool {
        let is_due = self.is_behind || now.saturating_duration_since(self.last_cleanup) >= CLEANUP_INTERVAL;
        if is_due {
            self.last_cleanup = now;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Regression: with a missing file, background work stayed due and the thread spun.
    #[test]
    fn failed_transaction_is_retried_after_a_delay() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start);
        assert_eq!(schedule.wakes_at(false), start + IDLE_CLEANUP_INTERVAL);
        let later = start + millis(5_000);
        schedule.has_failed(later);
        assert_eq!(schedule.wakes_at(true), later + RETRY_DELAY);
        schedule.has_ended(later);
        assert_eq!(schedule.wakes_at(true), later);
        assert!(schedule.starts_cleanup(later) && !schedule.starts_cleanup(later + millis(999)));
        assert_eq!(schedule.wakes_at(false), later + IDLE_CLEANUP_INTERVAL);
    }

    /// Regression: the short gap while callers come back counted as a pause, and no other process got the
    /// lock.
    #[test]
    fn short_idle_gap_does_not_count_as_pause() {
        let start = Instant::now();
        for (has_others, run_max) in [(true, RUN_MAX[0]), (false, RUN_MAX[1])] {
            let mut schedule = Schedule::new(start);
            let mut now = start + millis(10);
            assert_eq!(schedule.pause_for_others(now), None);
            let begun = now;
            let rest = loop {
                if has_others {
                    schedule.saw_other_writer(now);
                }
                now += Duration::from_micros(900);
                schedule.has_ended(now);
                // The gather phase: a tenth of a millisecond.
                now += Duration::from_micros(100);
                if let Some(rest) = schedule.pause_for_others(now) {
                    break rest;
                }
                assert!(now < begun + run_max, "no pause after {run_max:?}");
            };
            assert_eq!(rest + Duration::from_micros(100), PAUSE);
            now += rest;
            assert_eq!(schedule.pause_for_others(now), None, "it has paused");
        }
    }
}
