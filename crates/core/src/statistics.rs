//! Statistics about a throttle's outcomes: counts by cause, and the latency of successes.
//!
//! No decision depends on them, so they are boxed and allocated with the first outcome that is recorded.

use std::time::Duration;

use crate::cause::Cause;
use crate::latency::Latency;
use crate::outcome::{Kind, Outcome};

/// Outcomes since the start, without ignored ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcomes {
    /// Successes.
    pub successes: u64,
    /// Rejections by a rate limit: overloads, unless they name another cause.
    pub throttled: u64,
    /// Failures of the upstream.
    pub server: u64,
    /// Requests without a response.
    pub network: u64,
    /// Everything else, such as failures without a cause.
    pub other: u64,
}

impl Outcomes {
    /// The number of unsuccessful outcomes.
    pub const fn errors(&self) -> u64 {
        self.throttled.saturating_add(self.server).saturating_add(self.network).saturating_add(self.other)
    }

    /// The number of outcomes.
    pub const fn total(&self) -> u64 {
        self.successes.saturating_add(self.errors())
    }

    #[inline]
    fn count(&mut self, outcome: &Outcome) {
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
pub(crate) struct Statistics {
    pub(crate) outcomes: Outcomes,
    pub(crate) latency: Latency,
}

impl Statistics {
    /// Records one outcome. Only a success contributes a latency sample, because rejections are fast.
    #[inline]
    pub(crate) fn record(&mut self, outcome: &Outcome, latency: Option<Duration>) {
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
    fn outcomes_are_counted_by_cause_or_kind() {
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
            one.count(&outcome);
            assert_eq!(counts(one), wanted, "{outcome:?}");
            all.count(&outcome);
        }
        assert_eq!((counts(all), all.errors(), all.total()), ([2, 2, 2, 1, 3], 8, 10));
    }

    #[test]
    fn only_successes_with_a_latency_are_sampled() {
        let took = Some(Duration::from_micros(5));
        let table = [
            (Outcome::success(), took, took),
            (Outcome::success(), None, None),
            (Outcome::failure(), took, None),
            (Outcome::overload(), took, None),
        ];
        for (outcome, latency, sampled) in table {
            let mut statistics = Statistics::default();
            statistics.record(&outcome, latency);
            assert_eq!(statistics.latency.mean(), sampled, "{outcome:?}");
        }
    }
}
