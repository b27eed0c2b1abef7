//! How fast each host may be asked: its rate and slots, found by `Auto` from how it answers.
//!
//! Nothing waits here. A request that is refused gets the time after which it may be tried again.

use std::time::Duration;

use tidegate::{
    Authority, Auto, Cost, Gate, InvalidKeyedOptions, InvalidPlan, Keyed, Outcome, Pace, Pause, Permit,
    Refused, Slots, Snapshot, Throttle,
};

use crate::failure::Failure;

/// A host that asks for more than this is not asked again in the same run.
const PAUSE_MAX: Duration = Duration::from_hours(24);

/// The throttles of all hosts.
#[derive(Debug)]
pub(crate) struct Gates {
    hosts: Keyed<Authority>,
}

/// The right to send one request to a host.
#[derive(Debug)]
pub(crate) struct Entry {
    permit: Permit<'static>,
}

/// Why a host is not asked now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Its rate allows the next request after this.
    Turn(Duration),
    /// It asked for a pause, or for a delay between requests.
    Asked(Duration),
    /// Its circuit is open.
    Open(Duration),
    /// Until one of its requests in flight ends.
    Return,
}

impl Gates {
    /// From `rate` requests a second to a host up to `rate_max`, if there is a ceiling, and at most `at_once` at a time.
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

    /// Enters now, or reports why not.
    pub(crate) fn try_enter(&self, host: &Authority) -> Result<Entry, Wait> {
        let permit = self.hosts.try_acquire(host, Cost::request()).map_err(wait)?;
        Ok(Entry { permit })
    }

    /// At most one request in `span`, as the host's rules ask. The longest of several counts.
    pub(crate) fn space(&self, host: &Authority, span: Duration) -> Throttle {
        let throttle = self.hosts.throttle(host);
        let span = span.max(throttle.snapshot().interval);
        // A span beyond all bounds is refused, and the longest possible one takes its place.
        let spaced = |span| throttle.retune(|draft| draft.pace = Some(Pace::every(span)));
        if spaced(span).is_err() {
            drop(spaced(PAUSE_MAX));
        }
        throttle
    }

    /// How the throttle of a host stands.
    pub(crate) fn view(&self, host: &Authority) -> Option<Snapshot> {
        Some(self.hosts.get(host)?.snapshot())
    }
}

impl Entry {
    /// Learns from an answer whose body is still to come.
    pub(crate) fn learn(&mut self, outcome: Outcome) {
        self.permit.record(outcome);
    }

    /// Gives it back, with how it went.
    pub(crate) fn settle(self, outcome: Outcome) {
        self.permit.settle(outcome);
    }
}

fn wait(refused: Refused) -> Wait {
    match refused {
        Refused::CircuitOpen { retry_after } => Wait::Open(retry_after),
        Refused::Limited { by: Gate::Pause | Gate::Pace, retry_after: Some(span) } => Wait::Asked(span),
        Refused::Limited { retry_after: Some(span), .. } => Wait::Turn(span),
        _ => Wait::Return,
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
    async fn rate_holds_the_next_request_back() {
        let gates = Gates::new(2.0, Some(8.0), 8).unwrap();
        assert_eq!(entries(&gates).len(), 1);
        let half_a_second = Duration::from_millis(501);
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Turn(span)) if span <= half_a_second));
        assert_eq!(gates.view(&host()).unwrap().in_flight, 0, "it was given back");
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
        assert_eq!(gates.try_enter(&host()).unwrap_err(), Wait::Return);
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
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Asked(span)) if span > pause / 2));
        let other = Authority::new("other.example").expect("a host");
        let held = gates.space(&other, Duration::from_secs(5));
        assert!(gates.try_enter(&other).is_ok());
        assert_eq!(gates.try_enter(&other).unwrap_err(), Wait::Asked(Duration::from_secs(5)));
        drop(held);
        let third = Authority::new("third.example").expect("a host");
        for _ in 0..5 {
            tokio::time::advance(Duration::from_secs(10)).await;
            gates.try_enter(&third).unwrap().settle(Outcome::failure());
        }
        assert!(matches!(gates.try_enter(&third), Err(Wait::Open(_))));
    }

    #[test]
    fn least_and_most_rates_are_within_the_bounds() {
        for rate in [0.01, 0.25, 1.0, 8.0, 1e6] {
            assert!(Gates::new(rate, Some(rate), 1).is_ok(), "{rate}");
            assert!(Gates::new(rate, None, 10_000).is_ok(), "{rate}");
        }
    }
}
