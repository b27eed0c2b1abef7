//! The plan of a [`Faulty`](super::Faulty) engine: the rates of faults, and a count of them.

use std::time::Duration;

use thiserror::Error;
use tidegate_core::random::Random;

/// The denominator of rates.
const OUT_OF: u32 = 1_000;

/// The rates of faults per thousand calls, and the seed. A new plan has no faults.
///
/// ```
/// use std::time::Duration;
/// use tidegate_store::wrap::FaultPlan;
///
/// let plan = FaultPlan::seeded(7).fails(50).loses(30).repeats(20).delays(100, Duration::from_millis(5));
/// assert!(plan.check().is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultPlan {
    seed: u64,
    fails: u32,
    loses: u32,
    repeats: u32,
    defers: u32,
    delays: u32,
    delay_max: Duration,
}

/// The error for an invalid plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidFaultPlan {
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

/// The number of injected faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Calls that failed before they were made.
    pub failed: u64,
    /// Calls that were made and whose reply was lost.
    pub lost: u64,
    /// Calls that were made twice.
    pub repeated: u64,
    /// Calls whose reply was lost and that were made later.
    pub deferred: u64,
    /// Calls that were delayed.
    pub delayed: u64,
}

/// The fate of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Pass,
    Fail,
    Lose,
    Repeat,
    Defer,
}

impl FaultPlan {
    /// A plan without faults. Faults are deterministic for the same seed and calls.
    pub const fn seeded(seed: u64) -> Self {
        let delay_max = Duration::ZERO;
        Self { seed, fails: 0, loses: 0, repeats: 0, defers: 0, delays: 0, delay_max }
    }

    /// Sets the rate of calls that fail before they are made.
    #[must_use]
    pub const fn fails(mut self, rate: u32) -> Self {
        self.fails = rate;
        self
    }

    /// Sets the rate of calls that are made and whose reply is lost.
    #[must_use]
    pub const fn loses(mut self, rate: u32) -> Self {
        self.loses = rate;
        self
    }

    /// Sets the rate of calls that are made twice and return the second result.
    #[must_use]
    pub const fn repeats(mut self, rate: u32) -> Self {
        self.repeats = rate;
        self
    }

    /// Sets the rate of steps whose reply is lost and that are made later, perhaps after later calls.
    #[must_use]
    pub const fn defers(mut self, rate: u32) -> Self {
        self.defers = rate;
        self
    }

    /// Sets the rate of calls that take up to `delay_max` longer, in addition to other faults.
    #[must_use]
    pub const fn delays(mut self, rate: u32, delay_max: Duration) -> Self {
        self.delays = rate;
        self.delay_max = delay_max;
        self
    }

    /// Checks that there are no more faults than calls.
    ///
    /// # Errors
    /// [`InvalidFaultPlan`] with the number that is too high.
    pub fn check(self) -> Result<Self, InvalidFaultPlan> {
        let faults = [self.fails, self.loses, self.repeats, self.defers].map(u64::from).iter().sum();
        if faults > u64::from(OUT_OF) {
            return Err(InvalidFaultPlan::Faults { faults });
        }
        if self.delays > OUT_OF {
            return Err(InvalidFaultPlan::Delays { delays: self.delays });
        }
        Ok(self)
    }

    pub(super) const fn random(&self) -> Random {
        Random::seeded(self.seed)
    }

    /// The fate of the next call, and its delay.
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
    fn plan_has_no_more_faults_than_calls() {
        let error = FaultPlan::seeded(1).fails(600).loses(401).check().unwrap_err().to_string();
        assert_eq!(error, "1001 faults of one call each in 1000 calls");
        let error = FaultPlan::seeded(1).delays(1_001, Duration::ZERO).check().unwrap_err().to_string();
        assert_eq!(error, "1001 delays in 1000 calls");
        assert!(FaultPlan::seeded(1).fails(250).loses(250).repeats(250).defers(250).check().is_ok());
    }

    #[test]
    fn fault_rates_are_met_and_deterministic_by_seed() {
        let plan = FaultPlan::seeded(11).fails(100).loses(200).repeats(50).defers(50);
        let rolls = |plan: &FaultPlan| {
            let mut random = plan.random();
            (0..10_000).map(|_| plan.roll(&mut random).0).collect::<Vec<_>>()
        };
        let fates = rolls(&plan);
        assert_eq!(fates, rolls(&plan));
        for (fate, rate) in [(Fate::Fail, 100), (Fate::Lose, 200), (Fate::Repeat, 50), (Fate::Defer, 50)] {
            let count = fates.iter().filter(|other| **other == fate).count();
            assert!((rate * 8..=rate * 12).contains(&count), "{fate:?} {count} times in 10,000");
        }
        let none = FaultPlan::seeded(11);
        assert!(rolls(&none).iter().all(|fate| *fate == Fate::Pass));
    }
}
