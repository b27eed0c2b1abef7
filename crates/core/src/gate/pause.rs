//! Pauses, requested by the upstream or by hand, and the recovery after them.
//!
//! While paused, nothing is admitted. For `tail` afterwards the phase is recovering: requests use the
//! recovery slots and pay a higher price for bytes. A pause can only be extended; ending it early needs
//! `resume`. Waiters are admitted spread over up to a tenth of the pause, so that they do not repeat the wave
//! that caused it.

use std::time::Duration;

use crate::random::Random;
use crate::snapshot::Phase;
use crate::time::{Instant, nanos};

/// The longest time over which waiters are spread after a pause.
const SPREAD_MAX: Duration = Duration::from_secs(1);

/// Whether waiters are admitted spread out after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// Not spread: a controller paces them.
    None,
    /// Spread for this many waiters.
    Over(u32),
}

/// The running pause, if any.
#[derive(Debug, Clone, Default)]
pub(crate) struct PauseGate {
    /// Boxed, so that a throttle without a pause stays small.
    pause: Option<Box<RunningPause>>,
}

#[derive(Debug, Clone, Copy)]
struct RunningPause {
    since: Instant,
    until: Instant,
    /// The next waiter enters no earlier than this.
    next: Instant,
    /// The end of the spreading.
    spread_until: Instant,
    /// The last reported end; initially the start.
    reported_until: Instant,
}

impl PauseGate {
    pub(crate) fn phase(&self, tail: Duration, now: Instant) -> Phase {
        match &self.pause {
            Some(pause) if now < pause.until => Phase::Paused,
            Some(pause) if now < pause.until + tail => Phase::Recovering,
            _ => Phase::Normal,
        }
    }

    /// The earliest time at which the next request may enter.
    pub(crate) fn ready_at(&self) -> Instant {
        self.pause.as_ref().map_or(Instant::ZERO, |pause| pause.next)
    }

    /// The end of the pause running at `now`.
    pub(crate) fn until(&self, now: Instant) -> Option<Instant> {
        self.pause.as_ref().map(|pause| pause.until).filter(|until| now < *until)
    }

    /// When the recovering phase ends; `None` without a pause.
    pub(crate) fn tail_end(&self, tail: Duration) -> Option<Instant> {
        self.pause.as_ref().map(|pause| pause.until + tail)
    }

    /// Whether a pause is stored, running or recovering; only then does the time matter.
    #[inline]
    pub(crate) const fn is_set(&self) -> bool {
        self.pause.is_some()
    }

    /// Whether the pause still delays requests, or is recovering.
    pub(crate) fn holds(&self, tail: Duration, now: Instant) -> bool {
        self.pause.as_ref().is_some_and(|pause| now < (pause.until + tail).max(pause.spread_until))
    }

    /// Removes a pause that no longer has an effect.
    pub(crate) fn expire(&mut self, tail: Duration, now: Instant) {
        if !self.holds(tail, now) {
            self.pause = None;
        }
    }

    /// Extends the pause to `until`; returns whether this changed anything.
    pub(crate) fn raise(
        &mut self,
        until: Instant,
        spread: Spread,
        now: Instant,
        random: &mut Random,
    ) -> bool {
        let running = self.pause.as_deref().copied().filter(|pause| now < pause.until);
        if until <= now || running.is_some_and(|pause| until <= pause.until) {
            return false;
        }
        let (since, reported_until) = running.map_or((now, now), |pause| (pause.since, pause.reported_until));
        let (spread, waiting) = match spread {
            Spread::None => (0, 0),
            Spread::Over(waiting) => (nanos(SPREAD_MAX).min(until.nanos_since(since) / 10), waiting),
        };
        let spread_until = until.plus_nanos(spread);
        // Leaves space for callers that arrive during the pause: the first entry uses at most half of the
        // spread.
        let first = random.below(share(spread, waiting.max(3)));
        self.pause = Some(Box::new(RunningPause {
            since,
            until,
            next: until.plus_nanos(first),
            spread_until,
            reported_until,
        }));
        true
    }

    /// Whether the end has moved by more than `least` since the last report; if so, marks it as reported.
    pub(crate) fn should_report(&mut self, least: Duration) -> bool {
        let Some(pause) = &mut self.pause else { return false };
        let should_report = pause.until.since(pause.reported_until) > least;
        if should_report {
            pause.reported_until = pause.until;
        }
        should_report
    }

    /// A request enters with `waiting` others behind it; the next one waits for a random gap.
    pub(crate) fn take(&mut self, waiting: u32, now: Instant, random: &mut Random) {
        if let Some(pause) = &mut self.pause
            && waiting > 0
            && now < pause.spread_until
        {
            let gap = random.below(share(pause.spread_until.nanos_since(now), waiting));
            pause.next = now.plus_nanos(gap);
        }
    }

    /// Ends the pause and its tail by hand; returns whether there was one.
    pub(crate) fn resume(&mut self) -> bool {
        self.pause.take().is_some()
    }
}

/// The bound of a random gap whose mean divides `span` evenly among the waiters and one more.
fn share(span: u64, waiting: u32) -> u64 {
    span.min((span / (u64::from(waiting) + 1)).saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const TAIL: Duration = Duration::from_secs(10);

    fn paused(until: u64) -> PauseGate {
        let mut pause = PauseGate::default();
        assert!(pause.raise(at(until), Spread::Over(0), at(0), &mut Random::fixed(0.0)));
        pause
    }

    #[test]
    fn phases_are_paused_then_recovering_then_normal() {
        let pause = paused(10_000);
        let phases = [9_900, 10_000, 19_900, 20_000].map(|millis| pause.phase(TAIL, at(millis)));
        assert_eq!(phases, [Phase::Paused, Phase::Recovering, Phase::Recovering, Phase::Normal]);
    }

    #[test]
    fn a_later_shorter_pause_shortens_nothing() {
        let mut pause = paused(5_000);
        assert!(!pause.raise(at(2_000), Spread::Over(0), at(1_000), &mut Random::fixed(0.0)));
        assert_eq!(pause.until(at(1_000)), Some(at(5_000)));
        assert!(pause.raise(at(6_000), Spread::Over(0), at(1_000), &mut Random::fixed(0.0)));
        assert_eq!(pause.until(at(1_000)), Some(at(6_000)));
    }

    #[test]
    fn pause_of_zero_length_is_ignored() {
        let mut pause = PauseGate::default();
        assert!(!pause.raise(at(1_000), Spread::Over(0), at(1_000), &mut Random::seeded(1)));
        assert!(!pause.is_set());
    }

    #[test]
    fn waiters_are_spread_over_a_tenth_of_the_pause() {
        for (length, spread) in [(5_000, 500), (30_000, 1_000)] {
            let mut random = Random::seeded(11);
            let mut pause = PauseGate::default();
            pause.raise(at(length), Spread::Over(64), at(0), &mut random);
            let mut entries = Vec::new();
            for waiting in (0..64).rev() {
                let now = pause.ready_at().max(entries.last().copied().unwrap_or(at(length)));
                entries.push(now);
                pause.take(waiting, now, &mut random);
            }
            assert!(entries.iter().all(|now| (at(length)..=at(length + spread)).contains(now)));
            let first_half = entries.iter().filter(|now| **now <= at(length + spread / 2)).count();
            assert!((16..=48).contains(&first_half), "{first_half} of 64 in the first half of {spread} ms");
        }
    }

    #[test]
    fn pause_is_removed_after_its_tail() {
        let mut pause = paused(1_000);
        pause.expire(TAIL, at(10_999));
        assert!(pause.is_set());
        pause.expire(TAIL, at(11_000));
        assert!(!pause.is_set());
        assert!(!pause.resume(), "the pause is over");
    }
}
