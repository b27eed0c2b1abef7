//! What outcomes told so far, for those who look: how many of which kind, and how long the good ones took.
//!
//! Nothing decides by it, so it is kept apart, and made with the first outcome that is learned from.

use std::time::Duration;

use crate::cause::Cause;
use crate::latency::Latency;
use crate::outcome::{Kind, Outcome};

/// Outcomes since the beginning. What was ignored is not among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcomes {
    /// It worked.
    pub successes: u64,
    /// The far side said that it is too much: an overload, unless another cause was said.
    pub throttled: u64,
    /// The far side failed.
    pub server: u64,
    /// Nothing came back.
    pub network: u64,
    /// Everything else, such as a failure whose cause was not said.
    pub other: u64,
}

impl Outcomes {
    /// Those that are no success.
    pub const fn errors(&self) -> u64 {
        self.throttled.saturating_add(self.server).saturating_add(self.network).saturating_add(self.other)
    }

    /// All of them.
    pub const fn total(&self) -> u64 {
        self.successes.saturating_add(self.errors())
    }

    #[inline]
    fn count(&mut self, outcome: Outcome) {
        let count = match outcome.blame() {
            None if outcome.kind == Kind::Ignored => return,
            None => &mut self.successes,
            Some(Cause::Throttled) => &mut self.throttled,
            Some(Cause::Server) => &mut self.server,
            Some(Cause::Network) => &mut self.network,
            Some(Cause::Other) => &mut self.other,
        };
        *count = count.saturating_add(1);
    }
}

/// Counts and latency of one throttle.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    pub(crate) outcomes: Outcomes,
    pub(crate) latency: Latency,
}

impl Observed {
    /// Takes in one outcome. Only the latency of a success is a sample: what is rejected is rejected fast.
    #[inline]
    pub(crate) fn note(&mut self, outcome: Outcome, latency: Option<Duration>) {
        self.outcomes.count(outcome);
        if let (Kind::Success, Some(latency)) = (outcome.kind, latency) {
            self.latency.record(latency);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_is_counted_by_its_cause_and_else_by_its_kind() {
        let counts = |outcomes: Outcomes| {
            [outcomes.successes, outcomes.throttled, outcomes.server, outcomes.network, outcomes.other]
        };
        let (success, failure, overload) = (Outcome::success(), Outcome::failure(), Outcome::overload());
        let table = [
            (success, [1, 0, 0, 0, 0]),
            (success.because(Cause::Server), [1, 0, 0, 0, 0]),
            (overload, [0, 1, 0, 0, 0]),
            (failure, [0, 0, 0, 0, 1]),
            (failure.because(Cause::Throttled), [0, 1, 0, 0, 0]),
            (overload.because(Cause::Server), [0, 0, 1, 0, 0]),
            (failure.because(Cause::Server), [0, 0, 1, 0, 0]),
            (failure.because(Cause::Network), [0, 0, 0, 1, 0]),
            (failure.because(Cause::Other), [0, 0, 0, 0, 1]),
            (failure.retried(), [0, 0, 0, 0, 1]),
            (Outcome::ignored().because(Cause::Other), [0; 5]),
        ];
        let mut all = Outcomes::default();
        for (outcome, wanted) in table {
            let mut one = Outcomes::default();
            one.count(outcome);
            assert_eq!(counts(one), wanted, "{outcome:?}");
            all.count(outcome);
        }
        assert_eq!((counts(all), all.errors(), all.total()), ([2, 2, 2, 1, 3], 8, 10));
    }

    #[test]
    fn only_a_success_that_took_time_is_a_sample() {
        let took = Some(Duration::from_micros(5));
        let table = [
            (Outcome::success(), took, took),
            (Outcome::success(), None, None),
            (Outcome::failure(), took, None),
            (Outcome::overload(), took, None),
        ];
        for (outcome, latency, sampled) in table {
            let mut observed = Observed::default();
            observed.note(outcome, latency);
            assert_eq!(observed.latency.mean(), sampled, "{outcome:?}");
        }
    }
}
