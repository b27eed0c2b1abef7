//! Pauses asked for by the far side or by hand, and the cautious time after them.
//!
//! While paused nobody enters. For `tail` afterwards the phase is recovering: entries use the recovery slots
//! and pay more for bytes. A pause is only ever raised; ending it early takes a hand. Those who waited are let
//! in spread over up to a tenth of the pause, so that they do not come back as the wave that caused it.

use std::time::Duration;

use crate::random::Random;
use crate::snapshot::Phase;
use crate::time::{Instant, nanos};

/// Those who waited are let in over at most this long.
const SPREAD_MAX: Duration = Duration::from_secs(1);

/// Whether waiters are admitted spread out after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// Something else paces them.
    None,
    /// This many wait now.
    Over(u32),
}

/// The running pause, if there is one.
#[derive(Debug, Clone, Default)]
pub(crate) struct PauseGate {
    /// Boxed: a throttle that is not paused should not pay for it.
    pause: Option<Box<Set>>,
}

#[derive(Debug, Clone, Copy)]
struct Set {
    since: Instant,
    until: Instant,
    /// The next of those who waited enters no earlier than this.
    next: Instant,
    /// From here on entries are spread no longer.
    spread_until: Instant,
    /// The end that was last told of; at first the beginning.
    told: Instant,
}

impl PauseGate {
    pub(crate) fn phase(&self, tail: Duration, now: Instant) -> Phase {
        match &self.pause {
            Some(pause) if now < pause.until => Phase::Paused,
            Some(pause) if now < pause.until + tail => Phase::Recovering,
            _ => Phase::Normal,
        }
    }

    /// When the next request may enter at the earliest.
    pub(crate) fn ready_at(&self) -> Instant {
        self.pause.as_ref().map_or(Instant::ZERO, |pause| pause.next)
    }

    /// The end of the pause that is running at `now`.
    pub(crate) fn until(&self, now: Instant) -> Option<Instant> {
        self.pause.as_ref().map(|pause| pause.until).filter(|until| now < *until)
    }

    /// When the recovering phase ends; `None` without a pause.
    pub(crate) fn tail_end(&self, tail: Duration) -> Option<Instant> {
        self.pause.as_ref().map(|pause| pause.until + tail)
    }

    /// Whether it may still hold someone or be recovering: only then the time matters.
    #[inline]
    pub(crate) const fn is_set(&self) -> bool {
        self.pause.is_some()
    }

    /// Whether it still holds someone, or is recovering.
    pub(crate) fn holds(&self, tail: Duration, now: Instant) -> bool {
        self.pause.as_ref().is_some_and(|pause| now < (pause.until + tail).max(pause.spread_until))
    }

    /// Forgets a pause that no longer holds anyone.
    pub(crate) fn expire(&mut self, tail: Duration, now: Instant) {
        if !self.holds(tail, now) {
            self.pause = None;
        }
    }

    /// Raises the pause to `until`; answers whether that raised anything.
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
        let (since, told) = running.map_or((now, now), |pause| (pause.since, pause.told));
        let (spread, waiting) = match spread {
            Spread::None => (0, 0),
            Spread::Over(waiting) => (nanos(SPREAD_MAX).min(until.nanos_since(since) / 10), waiting),
        };
        let spread_until = until.plus_nanos(spread);
        // Callers that come while it lasts need space too: the first takes half of the spread at most.
        let first = random.below(share(spread, waiting.max(3)));
        self.pause = Some(Box::new(Set { since, until, next: until.plus_nanos(first), spread_until, told }));
        true
    }

    /// Whether the end has moved by more than `least` since it was last told of; if so, it is told of now.
    pub(crate) fn is_news(&mut self, least: Duration) -> bool {
        let Some(pause) = &mut self.pause else { return false };
        let is_news = pause.until.since(pause.told) > least;
        if is_news {
            pause.told = pause.until;
        }
        is_news
    }

    /// Someone enters with `waiting` others behind; the next of them is kept a random gap away.
    pub(crate) fn take(&mut self, waiting: u32, now: Instant, random: &mut Random) {
        if let Some(pause) = &mut self.pause
            && waiting > 0
            && now < pause.spread_until
        {
            let gap = random.below(share(pause.spread_until.nanos_since(now), waiting));
            pause.next = now.plus_nanos(gap);
        }
    }

    /// Ends the pause and its tail by hand; answers whether there was one.
    pub(crate) fn resume(&mut self) -> bool {
        self.pause.take().is_some()
    }
}

/// A gap whose mean shares `span` evenly among those who wait and one more.
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
    fn a_pause_of_no_length_is_none() {
        let mut pause = PauseGate::default();
        assert!(!pause.raise(at(1_000), Spread::Over(0), at(1_000), &mut Random::seeded(1)));
        assert!(!pause.is_set());
    }

    #[test]
    fn those_who_waited_are_spread_over_a_tenth_of_the_pause_and_at_most_a_second() {
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
    fn a_pause_is_forgotten_once_it_holds_nobody() {
        let mut pause = paused(1_000);
        pause.expire(TAIL, at(10_999));
        assert!(pause.is_set());
        pause.expire(TAIL, at(11_000));
        assert!(!pause.is_set());
        assert!(!pause.resume(), "there is nothing left to resume");
    }
}
