//! Which faults, how often, and what came of it.

use std::time::Duration;

use thiserror::Error;
use tidegate_core::random::Random;

/// Rates are out of so many calls.
const OUT_OF: u32 = 1_000;

/// What goes wrong, out of a thousand calls each, and from which seed. A new plan has no faults.
///
/// ```
/// use std::time::Duration;
/// use tidegate_store::wrap::Plan;
///
/// let plan = Plan::seeded(7).fails(50).loses(30).repeats(20).delays(100, Duration::from_millis(5));
/// assert!(plan.check().is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    seed: u64,
    fails: u32,
    loses: u32,
    repeats: u32,
    defers: u32,
    delays: u32,
    delay_max: Duration,
}

/// A plan that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidPlan {
    /// More faults than calls.
    #[error("{faults} faults of one call each in {OUT_OF} calls")]
    Faults {
        /// Failed, lost, repeated and deferred calls together.
        faults: u64,
    },
    /// More delays than calls.
    #[error("{delays} delays in {OUT_OF} calls")]
    Delays {
        /// Delayed calls.
        delays: u32,
    },
}

/// Faults that were made so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Calls that failed before they were made.
    pub failed: u64,
    /// Calls that were made and not answered.
    pub lost: u64,
    /// Calls that were made twice.
    pub repeated: u64,
    /// Calls that were not answered, and made later.
    pub deferred: u64,
    /// Calls that took longer.
    pub delayed: u64,
}

/// What becomes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Pass,
    Fail,
    Lose,
    Repeat,
    Defer,
}

impl Plan {
    /// No faults yet; those to come are the same for the same seed and the same calls.
    pub const fn seeded(seed: u64) -> Self {
        let delay_max = Duration::ZERO;
        Self { seed, fails: 0, loses: 0, repeats: 0, defers: 0, delays: 0, delay_max }
    }

    /// So many fail before they are made: nothing was done.
    #[must_use]
    pub const fn fails(mut self, rate: u32) -> Self {
        self.fails = rate;
        self
    }

    /// So many are made, and their reply is lost.
    #[must_use]
    pub const fn loses(mut self, rate: u32) -> Self {
        self.loses = rate;
        self
    }

    /// So many are made twice, and answered as the second time.
    #[must_use]
    pub const fn repeats(mut self, rate: u32) -> Self {
        self.repeats = rate;
        self
    }

    /// So many steps of leases are given up on at once and made later, perhaps after what the caller did next.
    #[must_use]
    pub const fn defers(mut self, rate: u32) -> Self {
        self.defers = rate;
        self
    }

    /// So many take up to `delay_max` longer, whatever else becomes of them.
    #[must_use]
    pub const fn delays(mut self, rate: u32, delay_max: Duration) -> Self {
        self.delays = rate;
        self.delay_max = delay_max;
        self
    }

    /// Whether there are not more faults than calls.
    ///
    /// # Errors
    /// [`InvalidPlan`] with the number that is too high.
    pub fn check(self) -> Result<Self, InvalidPlan> {
        let faults = [self.fails, self.loses, self.repeats, self.defers].map(u64::from).iter().sum();
        if faults > u64::from(OUT_OF) {
            return Err(InvalidPlan::Faults { faults });
        }
        if self.delays > OUT_OF {
            return Err(InvalidPlan::Delays { delays: self.delays });
        }
        Ok(self)
    }

    pub(super) const fn random(&self) -> Random {
        Random::seeded(self.seed)
    }

    /// What becomes of the next call, and how much longer it takes.
    pub(super) fn roll(&self, random: &mut Random) -> (Fate, Option<Duration>) {
        let mut left = random.below(u64::from(OUT_OF));
        let fates = [
            (self.fails, Fate::Fail),
            (self.loses, Fate::Lose),
            (self.repeats, Fate::Repeat),
            (self.defers, Fate::Defer),
        ];
        let mut fate = Fate::Pass;
        for (rate, fault) in fates {
            if left < u64::from(rate) {
                fate = fault;
                break;
            }
            left -= u64::from(rate);
        }
        let is_delayed = random.below(u64::from(OUT_OF)) < u64::from(self.delays);
        let micros = u64::try_from(self.delay_max.as_micros()).unwrap_or(u64::MAX);
        (fate, is_delayed.then(|| Duration::from_micros(random.below(micros.saturating_add(1)))))
    }
}

impl Faults {
    pub(super) const fn count(&mut self, fate: Fate, is_delayed: bool) {
        match fate {
            Fate::Pass => {}
            Fate::Fail => self.failed += 1,
            Fate::Lose => self.lost += 1,
            Fate::Repeat => self.repeated += 1,
            Fate::Defer => self.deferred += 1,
        }
        self.delayed += is_delayed as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_no_more_faults_than_calls() {
        let error = Plan::seeded(1).fails(600).loses(401).check().unwrap_err().to_string();
        assert_eq!(error, "1001 faults of one call each in 1000 calls");
        let error = Plan::seeded(1).delays(1_001, Duration::ZERO).check().unwrap_err().to_string();
        assert_eq!(error, "1001 delays in 1000 calls");
        assert!(Plan::seeded(1).fails(250).loses(250).repeats(250).defers(250).check().is_ok());
    }

    #[test]
    fn faults_come_as_often_as_planned_and_the_same_for_a_seed() {
        let plan = Plan::seeded(11).fails(100).loses(200).repeats(50).defers(50);
        let rolls = |plan: &Plan| {
            let mut random = plan.random();
            (0..10_000).map(|_| plan.roll(&mut random).0).collect::<Vec<_>>()
        };
        let fates = rolls(&plan);
        assert_eq!(fates, rolls(&plan));
        for (fate, rate) in [(Fate::Fail, 100), (Fate::Lose, 200), (Fate::Repeat, 50), (Fate::Defer, 50)] {
            let seen = fates.iter().filter(|seen| **seen == fate).count();
            assert!((rate * 8..=rate * 12).contains(&seen), "{fate:?} came {seen} times in 10,000");
        }
        let none = Plan::seeded(11);
        assert!(rolls(&none).iter().all(|fate| *fate == Fate::Pass));
    }
}
