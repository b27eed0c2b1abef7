//! One throttle per host: a rate and a number of slots, which `Auto` derives from the host's responses.
//!
//! Nothing waits here. A refused request gets the time after which to retry.

use std::time::Duration;

use tidegate::{
    Authority, Auto, Cost, Gate, InvalidKeyedOptions, InvalidPlan, Keyed, Outcome, Pace, Pause, Permit,
    Refused, Slots, Snapshot, Throttle,
};

use crate::failure::Failure;

/// Maximum pause. A host that asks for a longer one gets no further request in the same run.
const PAUSE_MAX: Duration = Duration::from_hours(24);

/// The throttles of all hosts.
#[derive(Debug)]
pub(crate) struct Gates {
    hosts: Keyed<Authority>,
}

/// Permission to send one request to a host.
#[derive(Debug)]
pub(crate) struct Entry {
    permit: Permit<'static>,
}

/// Why a request to a host has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The rate allows the next request after this time.
    Rate(Duration),
    /// The host asked for a pause, or for a delay between requests.
    Pause(Duration),
    /// The circuit is open.
    Circuit(Duration),
    /// All slots are in use: wait until a request in flight ends.
    Slot,
}

impl Gates {
    /// Starts at `rate` requests per second and host, up to `rate_max`, with at most `at_once` requests in
    /// flight.
    pub(crate) fn new(rate: f64, rate_max: Option<f64>, at_once: u32) -> Result<Self, Failure> {
        let auto = Auto::default().rate_start(rate);
        let auto = rate_max.map_or(auto, |rate_max| auto.rate_min(1e-3_f64.min(rate_max)).rate_max(rate_max));
        let limits = Throttle::host()
            .slots(Slots::adaptive(1..=at_once))
            .auto_within(auto)
            .pause(Pause::default().max(PAUSE_MAX))
            .limits()
            .map_err(|error: InvalidPlan| Failure::usage(error.to_string()))?;
        let unkeyed = |error: InvalidKeyedOptions| Failure::failed(error.to_string());
        Ok(Self { hosts: Keyed::builder(limits).build().map_err(unkeyed)? })
    }

    /// Tries to acquire a permit, without waiting.
    pub(crate) fn try_enter(&self, host: &Authority) -> Result<Entry, Wait> {
        let permit = self.hosts.try_acquire(host, Cost::request()).map_err(wait)?;
        Ok(Entry { permit })
    }

    /// Allows at most one request in `span`, as robots.txt demands. The longest of several spans wins.
    pub(crate) fn space(&self, host: &Authority, span: Duration) -> Throttle {
        let throttle = self.hosts.throttle(host);
        let span = span.max(throttle.snapshot().interval);
        // A span out of bounds is replaced by the longest valid one.
        let spaced = |span| throttle.retune(|draft| draft.pace = Some(Pace::every(span)));
        if spaced(span).is_err() {
            drop(spaced(PAUSE_MAX));
        }
        throttle
    }

    /// The state of a host's throttle.
    pub(crate) fn view(&self, host: &Authority) -> Option<Snapshot> {
        Some(self.hosts.get(host)?.snapshot())
    }
}

impl Entry {
    /// Records the outcome of a response whose body has not arrived yet.
    pub(crate) fn learn(&mut self, outcome: Outcome) {
        self.permit.record(outcome);
    }

    /// Returns the permit and records the outcome.
    pub(crate) fn settle(self, outcome: Outcome) {
        self.permit.settle(outcome);
    }
}

fn wait(refused: Refused) -> Wait {
    match refused {
        Refused::CircuitOpen { retry_after } => Wait::Circuit(retry_after),
        Refused::Limited { by: Gate::Pause | Gate::Pace, retry_after: Some(span) } => Wait::Pause(span),
        Refused::Limited { retry_after: Some(span), .. } => Wait::Rate(span),
        _ => Wait::Slot,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Authority {
        Authority::new("example.com").expect("a host")
    }

    fn entries(gates: &Gates) -> Vec<Entry> {
        std::iter::from_fn(|| gates.try_enter(&host()).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn rate_delays_the_next_request() {
        let gates = Gates::new(2.0, Some(8.0), 8).unwrap();
        assert_eq!(entries(&gates).len(), 1);
        let half_a_second = Duration::from_millis(501);
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Rate(span)) if span <= half_a_second));
        assert_eq!(gates.view(&host()).unwrap().in_flight, 0, "the permit was returned");
    }

    #[tokio::test(start_paused = true)]
    async fn slots_bound_requests_in_flight() {
        let gates = Gates::new(1_000.0, None, 3).unwrap();
        let mut held = entries(&gates);
        while held.len() < 3 {
            tokio::time::advance(Duration::from_millis(1)).await;
            held.extend(gates.try_enter(&host()).ok());
        }
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(gates.try_enter(&host()).unwrap_err(), Wait::Slot);
        held.pop().unwrap().settle(Outcome::success());
        assert!(gates.try_enter(&host()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_of_a_host_differ_from_its_rate() {
        let gates = Gates::new(100.0, Some(100.0), 8).unwrap();
        let pause = Duration::from_secs(30);
        // A hint on a rejection stops all requests once nothing was accepted since the last.
        for _ in 0..3 {
            tokio::time::advance(Duration::from_secs(1)).await;
            if let Ok(entry) = gates.try_enter(&host()) {
                entry.settle(Outcome::overload().retry_after(pause));
            }
        }
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Pause(span)) if span > pause / 2));
        let other = Authority::new("other.example").expect("a host");
        let held = gates.space(&other, Duration::from_secs(5));
        assert!(gates.try_enter(&other).is_ok());
        assert_eq!(gates.try_enter(&other).unwrap_err(), Wait::Pause(Duration::from_secs(5)));
        drop(held);
        let third = Authority::new("third.example").expect("a host");
        for _ in 0..5 {
            tokio::time::advance(Duration::from_secs(10)).await;
            gates.try_enter(&third).unwrap().settle(Outcome::failure());
        }
        assert!(matches!(gates.try_enter(&third), Err(Wait::Circuit(_))));
    }

    #[test]
    fn extreme_rates_are_valid() {
        for rate in [0.01, 0.25, 1.0, 8.0, 1e6] {
            assert!(Gates::new(rate, Some(rate), 1).is_ok(), "{rate}");
            assert!(Gates::new(rate, None, 10_000).is_ok(), "{rate}");
        }
    }
}
