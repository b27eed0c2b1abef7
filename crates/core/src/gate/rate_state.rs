//! The state of a throttle with only a rate, in 32 bytes: a registry keeps it inline for most of its keys.

use std::num::NonZero;

use super::gates::Gates;
use super::idleness::Idleness;
use super::rate::RateGate;
use crate::bucket::Bucket;
use crate::cost::{Admission, Holds};
use crate::plan::Plan;
use crate::random::Random;
use crate::time::Instant;

/// The gates of a plan with [only a rate](Plan::is_rate_alone), while nothing but the bucket has changed.
///
/// It admits as [`Gates`] do (checked by a test). Where more is needed, such as a wait, a pause or other limits,
/// [`gates`](Self::gates) continue from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateState {
    bucket: Bucket,
    /// The latest clock reading.
    latest: Instant,
    admitted: u64,
}

impl RateState {
    /// A full bucket.
    pub const fn full() -> Self {
        Self { bucket: Bucket::full(), latest: Instant::ZERO, admitted: 0 }
    }

    /// Takes a unit of the rate for a [plain](crate::cost::Cost::is_plain) cost, if there is one and `plan` has only a
    /// rate.
    ///
    /// On `None` nothing was taken: the [`gates`](Self::gates) decide.
    #[inline]
    pub fn admit(&mut self, plan: &Plan, now: Instant) -> Option<Admission> {
        let shape = plan.rate.as_ref().filter(|_| plan.is_rate_alone())?;
        let now = now.max(self.latest);
        self.bucket.take(shape, 1, now).ok()?;
        self.latest = now;
        self.admitted += 1;
        // No cut and no change of a circuit has begun another generation.
        Some(Admission::new(now, NonZero::<u32>::MIN, Holds::RATE))
    }

    /// Requests admitted.
    pub const fn admitted(&self) -> u64 {
        self.admitted
    }

    /// The latest clock reading.
    pub const fn latest(&self) -> Instant {
        self.latest
    }

    /// What evicting this state at `now` would lose.
    pub fn idleness(&self, now: Instant) -> Idleness {
        if self.bucket.is_full(now.max(self.latest)) { Idleness::Fresh } else { Idleness::Busy }
    }

    /// The gates that have admitted the same requests.
    pub fn gates(&self, plan: &Plan, random: Random) -> Gates {
        Gates {
            rate: RateGate::with_bucket(self.bucket),
            latest: self.latest,
            admitted: self.admitted(),
            ..Gates::new(plan, random)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::plan::{Draft, Pace, Rate, Slots};

    fn plan(draft: Draft) -> Plan {
        draft.check().expect("within the bounds")
    }

    fn rate(rate: Rate) -> Plan {
        plan(Draft { rate: Some(rate), ..Draft::default() })
    }

    #[test]
    fn rate_state_admits_as_gates_do() {
        let plan = rate(Rate::per_second(7).burst(3));
        let mut random = Random::seeded(5);
        let (mut state, mut gates) = (RateState::full(), Gates::new(&plan, Random::seeded(1)));
        let mut now = Instant::from_nanos(1 << 40);
        for step in 0..10_000 {
            // Also standing still and backwards.
            let span = random.below(400_000_000);
            now = if step % 5 == 0 {
                Instant::from_nanos(now.as_nanos() - span / 2)
            } else {
                now.plus_nanos(span)
            };
            assert_eq!(state.admit(&plan, now), gates.admit_plain(&plan, now), "step {step}");
            let same = state.gates(&plan, Random::seeded(1));
            let at = now.plus_nanos(span);
            assert_eq!(same.snapshot(&plan, 0, at), gates.snapshot(&plan, 0, at), "step {step}");
            assert_eq!(state.idleness(at), gates.idleness(&plan, at), "step {step}");
        }
        assert!(gates.admitted() > 1_000, "{} admitted", gates.admitted());
    }

    #[test]
    fn plan_with_anything_but_a_rate_is_declined() {
        let rate = Draft { rate: Some(Rate::per_second(5)), ..Draft::default() };
        let table = [
            (rate.clone(), true),
            (Draft::default(), false),
            (Draft { slots: Some(Slots::fixed(2)), ..rate.clone() }, false),
            (Draft { pace: Some(Pace::every(Duration::from_secs(1))), ..rate.clone() }, false),
            (Draft { total: Some(0), ..rate.clone() }, false),
            (Draft { slots: Some(Slots::unlimited()), ..rate }, false),
        ];
        for (draft, is_alone) in table {
            let plan = plan(draft);
            assert_eq!(plan.is_rate_alone(), is_alone, "{:?}", plan.draft());
            let admitted = RateState::full().admit(&plan, Instant::ZERO);
            assert_eq!(admitted.is_some(), is_alone, "{:?}", plan.draft());
        }
    }
}
