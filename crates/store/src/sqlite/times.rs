//! When the writer does what nobody asks for, and when it lets other processes in.
//!
//! A process that waits for the file asks for it every one to two milliseconds; it cannot tell the one that has it that
//! it is waiting. Whoever writes therefore leaves the file alone now and then for longer than that, however short the
//! pauses between its own callers are.

use std::time::{Duration, Instant};

/// How often what is too old is looked for.
const TIDIED_EVERY: Duration = Duration::from_secs(1);
/// How often it is where nobody asks for anything.
const TIDIED_IDLE: Duration = Duration::from_secs(30);
/// How long after a failure it is tried again where nobody asks for anything.
const TRIED_AGAIN: Duration = Duration::from_millis(200);
/// After writing for this long without a break, others are let in for [`BREAK`]: the first where others write too, the
/// second where none was seen to.
const RUNS: [Duration; 2] = [Duration::from_millis(8), Duration::from_millis(100)];
/// Longer than another process waits before it asks again.
const BREAK: Duration = Duration::from_micros(2_500);
/// Others that have not written for this long are taken to be gone.
const OTHERS_FORGOTTEN: Duration = Duration::from_secs(1);

/// When what was last done.
pub(super) struct Times {
    tidied: Instant,
    /// There may be more that is too old: every transaction looks for it.
    pub(super) is_behind: bool,
    /// Since when it has been writing without a break, and when its last transaction ended.
    run: Instant,
    ended: Instant,
    /// When somebody else was last seen to have written.
    others: Option<Instant>,
    /// When a transaction failed, if the last one did.
    failed: Option<Instant>,
}

impl Times {
    pub(super) const fn new(now: Instant) -> Self {
        Self { tidied: now, is_behind: false, run: now, ended: now, others: None, failed: None }
    }

    /// When there is something to do though nobody asks for it. Whoever `owes` something has it to do now.
    pub(super) fn wakes_at(&self, owes: bool) -> Instant {
        let mut due = self.tidied + if self.is_behind { TIDIED_EVERY } else { TIDIED_IDLE };
        if owes {
            due = due.min(self.ended);
        }
        // Trouble is not over sooner for being looked at without a pause.
        self.failed.map_or(due, |failed| due.max(failed + TRIED_AGAIN))
    }

    /// How long others are to be let in before it writes again.
    pub(super) fn take_a_break(&mut self, now: Instant) -> Option<Duration> {
        let paused = now.saturating_duration_since(self.ended);
        if paused >= BREAK {
            self.run = now;
            return None;
        }
        let is_seen = |seen| now.saturating_duration_since(seen) < OTHERS_FORGOTTEN;
        let run = RUNS[usize::from(!self.others.is_some_and(is_seen))];
        if now.saturating_duration_since(self.run) < run {
            return None;
        }
        let rest = BREAK.saturating_sub(paused);
        self.run = now + rest;
        Some(rest)
    }

    pub(super) const fn saw_others(&mut self, now: Instant) {
        self.others = Some(now);
    }

    pub(super) const fn has_ended(&mut self, now: Instant) {
        self.ended = now;
        self.failed = None;
    }

    pub(super) const fn has_failed(&mut self, now: Instant) {
        self.ended = now;
        self.failed = Some(now);
    }

    /// Whether what is too old is to be looked for, which is then done.
    pub(super) fn tidies(&mut self, now: Instant) -> bool {
        let is_due = self.is_behind || now.saturating_duration_since(self.tidied) >= TIDIED_EVERY;
        if is_due {
            self.tidied = now;
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

    /// A file that had vanished kept the thread awake without a pause: what was due stayed due.
    #[test]
    fn trouble_is_looked_at_again_after_a_pause() {
        let start = Instant::now();
        let mut times = Times::new(start);
        assert_eq!(times.wakes_at(false), start + TIDIED_IDLE);
        let later = start + millis(5_000);
        times.has_failed(later);
        assert_eq!(times.wakes_at(true), later + TRIED_AGAIN);
        times.has_ended(later);
        assert_eq!(times.wakes_at(true), later);
        assert!(times.tidies(later) && !times.tidies(later + millis(999)));
        assert_eq!(times.wakes_at(false), later + TIDIED_IDLE);
    }

    /// Callers who come back at once left the queue empty for a moment after every transaction, and that counted as a
    /// break: nobody else got in.
    #[test]
    fn a_moment_without_callers_is_no_break() {
        let start = Instant::now();
        for (has_others, run) in [(true, RUNS[0]), (false, RUNS[1])] {
            let mut times = Times::new(start);
            let mut now = start + millis(10);
            assert_eq!(times.take_a_break(now), None);
            let begun = now;
            let rest = loop {
                if has_others {
                    times.saw_others(now);
                }
                now += Duration::from_micros(900);
                times.has_ended(now);
                // It waits for its callers for a tenth of a millisecond.
                now += Duration::from_micros(100);
                if let Some(rest) = times.take_a_break(now) {
                    break rest;
                }
                assert!(now < begun + run, "no break after {run:?}");
            };
            assert_eq!(rest + Duration::from_micros(100), BREAK);
            now += rest;
            assert_eq!(times.take_a_break(now), None, "it has had its break");
        }
    }
}
