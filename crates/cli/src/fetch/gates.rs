//! What each host bears: a rate and a number of requests at once, both found out by what it answers.
//!
//! A throttle has one controller, and a host has two things to find out. So each host has two throttles: one whose adaptive rate,
//! circuit and pauses say when, and one whose adaptive slots say how many at once. The slot is asked for first: it goes back whole
//! when the rate says no, and an entry of the rate would not.
//!
//! Nobody waits here. Whoever is refused is told for how long, and comes again.

use std::time::Duration;

use tidegate::{
    Aimd, Authority, Brake, Controller, Cost, Gate, InvalidKeyedOptions, InvalidPlan, Keyed, Outcome, Pace,
    Pause, Permit, Rate, Refused, Slots, Snapshot, Throttle,
};

use crate::failure::Failure;

/// So many may be sent at once after a rest, or a quarter of a second's where that is more.
const BURST: f64 = 4.0;
/// No host goes below this, unless it is to stay below.
const RATE_MIN: f64 = 0.25;
/// From the least to the most it takes so many seconds of steady growth.
const GROWTH_SECONDS: f64 = 32.0;
/// A host that asks for more than this is not asked again in the same run.
const PAUSE_MAX: Duration = Duration::from_hours(24);

/// The throttles of all hosts.
#[derive(Debug)]
pub(crate) struct Gates {
    rates: Keyed<Authority>,
    slots: Keyed<Authority>,
}

/// The right to send one request to a host.
#[derive(Debug)]
pub(crate) struct Entry {
    slot: Permit<'static>,
    turn: Permit<'static>,
}

/// Why a host is not asked now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It goes on by itself after so long, which is as usual.
    Turn(Duration),
    /// It was asked for: a pause, or a delay between requests.
    Asked(Duration),
    /// Too much has failed there, and it is left alone.
    Open(Duration),
    /// Until one of those under way there ends.
    Return,
}

impl Gates {
    /// From `rate` requests a second to a host up to `rate_max`, and at most `at_once` at a time.
    pub(crate) fn new(rate: f64, rate_max: f64, at_once: u32) -> Result<Self, Failure> {
        let refused = |error: InvalidPlan| Failure::usage(error.to_string());
        let unkeyed = |error: InvalidKeyedOptions| Failure::failed(error.to_string());
        let rate = rate.min(rate_max);
        let aimd = Aimd::default().within(RATE_MIN.min(rate)..=rate_max).slow_start();
        let aimd = aimd.increase((rate_max / GROWTH_SECONDS).max(RATE_MIN));
        let rates = Throttle::host()
            .rate(per_second(rate).burst(whole(BURST.max(rate / BURST))))
            .controller(Controller::Aimd(aimd))
            .pause(Pause::default().max(PAUSE_MAX))
            .limits()
            .map_err(refused)?;
        let slots = Throttle::builder()
            .slots(Slots::adaptive(1..=at_once))
            .controller(Controller::Brake(Brake::default()))
            .pause(Pause::default().max(PAUSE_MAX))
            .limits()
            .map_err(refused)?;
        Ok(Self {
            rates: Keyed::builder(rates).build().map_err(unkeyed)?,
            slots: Keyed::builder(slots).build().map_err(unkeyed)?,
        })
    }

    /// Enters now, or says why not.
    pub(crate) fn try_enter(&self, host: &Authority) -> Result<Entry, Wait> {
        let slot = self.slots.try_acquire(host, Cost::request()).map_err(wait)?;
        let turn = self.rates.try_acquire(host, Cost::request()).map_err(wait)?;
        Ok(Entry { slot, turn })
    }

    /// At most one request in `span`, as the host's rules ask. The longer one counts where two are asked for.
    pub(crate) fn space(&self, host: &Authority, span: Duration) -> Throttle {
        let throttle = self.rates.throttle(host);
        let span = span.max(throttle.snapshot().interval);
        // A span beyond all bounds is refused, and the longest that there is takes its place.
        let spaced = |span| throttle.retune(|draft| draft.pace = Some(Pace::every(span)));
        if spaced(span).is_err() {
            drop(spaced(PAUSE_MAX));
        }
        throttle
    }

    /// How the two throttles of a host stand.
    pub(crate) fn view(&self, host: &Authority) -> Option<(Snapshot, Snapshot)> {
        Some((self.rates.get(host)?.snapshot(), self.slots.get(host)?.snapshot()))
    }
}

impl Entry {
    /// Learns from an answer whose end has yet to come.
    pub(crate) fn learn(&mut self, outcome: Outcome) {
        self.turn.record(outcome);
        self.slot.record(outcome);
    }

    /// Gives it back, with how it went.
    pub(crate) fn settle(self, outcome: Outcome) {
        self.turn.settle(outcome);
        self.slot.settle(outcome);
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

/// A rate, to the thousandth.
fn per_second(rate: f64) -> Rate {
    Rate::new(whole(rate * 1_000.0), Duration::from_secs(1_000))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within its bounds by then")]
fn whole(number: f64) -> u64 {
    number.clamp(1.0, 1e15) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Authority {
        Authority::new("example.com").expect("a host")
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_goes_back_when_the_rate_says_no() {
        let gates = Gates::new(2.0, 8.0, 8).unwrap();
        let entries: Vec<Entry> = std::iter::from_fn(|| gates.try_enter(&host()).ok()).collect();
        assert_eq!(entries.len(), 4, "the burst");
        assert!(
            matches!(gates.try_enter(&host()), Err(Wait::Turn(span)) if span <= Duration::from_millis(501))
        );
        let (_, slots) = gates.view(&host()).unwrap();
        assert_eq!(slots.in_flight, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_bears_no_more_at_once_than_its_slots() {
        let gates = Gates::new(1_000.0, 1_000.0, 3).unwrap();
        let mut entries: Vec<Entry> = std::iter::from_fn(|| gates.try_enter(&host()).ok()).collect();
        assert_eq!((entries.len(), gates.try_enter(&host()).unwrap_err()), (3, Wait::Return));
        entries.pop().unwrap().settle(Outcome::success());
        assert!(gates.try_enter(&host()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_host_asks_for_is_told_apart_from_what_is_usual() {
        let gates = Gates::new(100.0, 100.0, 8).unwrap();
        let pause = Duration::from_secs(30);
        gates.try_enter(&host()).unwrap().settle(Outcome::overload().retry_after(pause));
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Asked(span)) if span >= pause));
        let other = Authority::new("other.example").expect("a host");
        let held = gates.space(&other, Duration::from_secs(5));
        assert!(gates.try_enter(&other).is_ok());
        assert_eq!(gates.try_enter(&other).unwrap_err(), Wait::Asked(Duration::from_secs(5)));
        drop(held);
        for _ in 0..5 {
            let third = Authority::new("third.example").expect("a host");
            tokio::time::advance(Duration::from_secs(10)).await;
            if let Ok(entry) = gates.try_enter(&third) {
                entry.settle(Outcome::failure());
            }
        }
        let third = Authority::new("third.example").expect("a host");
        assert!(matches!(gates.try_enter(&third), Err(Wait::Open(_))));
    }

    #[test]
    fn the_least_and_the_most_rates_are_within_the_bounds() {
        for rate in [0.01, 0.25, 1.0, 8.0, 1e6] {
            assert!(Gates::new(2.0, rate, 1).is_ok() && Gates::new(rate, 1e6, 10_000).is_ok(), "{rate}");
        }
    }
}
