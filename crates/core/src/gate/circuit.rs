//! Circuit breaker: stops requests when the upstream fails, then tests it with a few probes.
//!
//! Half-open is derived from time and never stored: an open circuit whose time is over admits up to `probes`
//! requests at a time. As many successes close it; a failure re-opens it for twice as long (at most five
//! times the first span). A probe's place belongs to its permit and is released however the permit ends.
//! Outcomes of requests admitted before the last change of the circuit are ignored.

use std::time::Duration;

use crate::event::{Event, Trip};
use crate::plan::Circuit;
use crate::refused::Refused;
use crate::snapshot::{CircuitState, CircuitView};
use crate::time::{Instant, nanos};
use crate::window::Tally;

/// A circuit stays open for at most this many times the configured span.
const OPEN_FACTOR_MAX: u64 = 5;
/// The shortest `retry_after` while all probes are in flight, when the actual time is unknown.
const PROBE_WAIT_MIN: Duration = Duration::from_millis(1);

/// The state of a breaker.
#[derive(Debug, Clone)]
pub(crate) struct CircuitGate {
    state: State,
    /// The generation that began with the last change; outcomes of earlier ones are ignored.
    since: u32,
    tally: Option<Box<Tally>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed { failures: u32 },
    Open { probe_at: Instant, span: u64, probes: u32, successes: u32, probed: bool },
}

/// Whether an outcome changed the circuit. A change begins a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    Changed,
}

impl CircuitGate {
    pub(crate) fn new(plan: &Circuit, generation: u32) -> Self {
        let tally = plan.error_rate.map(|rate| Box::new(Tally::new(rate.window, plan.slices)));
        Self { state: State::Closed { failures: 0 }, since: generation, tally }
    }

    /// Why a request is refused at `now`, if it is.
    pub(crate) fn refuses(&self, plan: &Circuit, now: Instant) -> Option<Refused> {
        match self.state {
            State::Open { probe_at, .. } if now < probe_at => {
                Some(Refused::CircuitOpen { retry_after: probe_at.since(now) })
            }
            State::Open { probes, span, .. } if probes >= plan.probes => {
                let retry_after = Duration::from_nanos(span / 10).max(PROBE_WAIT_MIN);
                Some(Refused::CircuitOpen { retry_after })
            }
            State::Open { .. } | State::Closed { .. } => None,
        }
    }

    /// When probes are admitted, if that is after `now`.
    pub(crate) fn open_until(&self, now: Instant) -> Option<Instant> {
        match self.state {
            State::Open { probe_at, .. } if now < probe_at => Some(probe_at),
            State::Open { .. } | State::Closed { .. } => None,
        }
    }

    /// Whether a request admitted in `generation` belongs to the current state of the circuit.
    pub(crate) const fn is_current(&self, generation: u32, is_probe: bool) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { .. } => is_probe && generation >= self.since,
        }
    }

    /// Takes a probe's place, if the circuit is half-open.
    pub(crate) fn take(&mut self, events: &mut Vec<Event>) -> bool {
        match &mut self.state {
            State::Closed { .. } => false,
            State::Open { probes, probed, .. } => {
                *probes += 1;
                if !*probed {
                    *probed = true;
                    events.push(Event::CircuitHalfOpened);
                }
                true
            }
        }
    }

    /// Releases the place of a probe.
    pub(crate) fn give_back(&mut self, generation: u32) {
        if let State::Open { probes, .. } = &mut self.state
            && generation >= self.since
        {
            *probes = probes.saturating_sub(1);
        }
    }

    pub(crate) fn success(
        &mut self,
        plan: &Circuit,
        generation: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Change {
        if generation < self.since {
            return Change::None;
        }
        match &mut self.state {
            State::Closed { failures } => {
                *failures = 0;
                self.tally(now, false);
                Change::None
            }
            State::Open { probe_at, successes, .. } if now >= *probe_at => {
                *successes += 1;
                if *successes < plan.probes {
                    return Change::None;
                }
                self.state = State::Closed { failures: 0 };
                if let Some(tally) = &mut self.tally {
                    tally.clear();
                }
                events.push(Event::CircuitClosed);
                Change::Changed
            }
            State::Open { .. } => Change::None,
        }
    }

    pub(crate) fn failure(
        &mut self,
        plan: &Circuit,
        generation: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Change {
        if generation < self.since {
            return Change::None;
        }
        match &mut self.state {
            State::Closed { failures } => {
                *failures = failures.saturating_add(1);
                let failures = *failures;
                self.tally(now, true);
                match self.trips(plan, failures, now) {
                    Some(why) => self.open(nanos(plan.open_for), why, now, events),
                    None => Change::None,
                }
            }
            State::Open { probe_at, span, .. } if now >= *probe_at => {
                let span = span.saturating_mul(2).min(nanos(plan.open_for).saturating_mul(OPEN_FACTOR_MAX));
                self.open(span, Trip::Probe, now, events)
            }
            // An open circuit is not extended.
            State::Open { .. } => Change::None,
        }
    }

    pub(crate) const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Whether the circuit refuses requests, or a probe is in flight.
    pub(crate) fn holds(&self, now: Instant) -> bool {
        matches!(self.state, State::Open { probe_at, probes, .. } if now < probe_at || probes > 0)
    }

    /// Whether the state depends on any outcome.
    pub(crate) fn has_outcomes(&self, now: Instant) -> bool {
        let is_new = matches!(self.state, State::Closed { failures: 0 });
        !is_new || self.tally.as_ref().is_some_and(|tally| tally.counts(now).total > 0)
    }

    pub(crate) fn view(&self, now: Instant) -> CircuitView {
        let closed = CircuitView {
            state: CircuitState::Closed,
            consecutive_failures: 0,
            probe_successes: 0,
            probes_in_flight: 0,
            retry_after: Duration::ZERO,
        };
        match self.state {
            State::Closed { failures } => CircuitView { consecutive_failures: failures, ..closed },
            State::Open { probe_at, probes, successes, .. } => CircuitView {
                state: if now < probe_at { CircuitState::Open } else { CircuitState::HalfOpen },
                probe_successes: successes,
                probes_in_flight: probes,
                retry_after: probe_at.since(now),
                ..closed
            },
        }
    }

    /// The share of failures in the window; `None` without a window, or if it is empty.
    #[expect(clippy::cast_precision_loss, reason = "a share for display")]
    pub(crate) fn error_rate(&self, now: Instant) -> Option<f64> {
        let counts = self.tally.as_ref()?.counts(now);
        (counts.total > 0).then(|| counts.bad as f64 / counts.total as f64)
    }

    /// Begins a new generation after a change: outcomes of requests already in flight no longer count.
    pub(crate) const fn begin(&mut self, generation: u32) {
        self.since = generation;
    }

    /// Applies a plan with another error rate; keeps the state.
    pub(crate) fn tune(&mut self, old: Option<&Circuit>, new: &Circuit) {
        if old.is_none_or(|old| (old.error_rate, old.slices) != (new.error_rate, new.slices)) {
            self.tally = new.error_rate.map(|rate| Box::new(Tally::new(rate.window, new.slices)));
        }
    }

    fn open(&mut self, span: u64, why: Trip, now: Instant, events: &mut Vec<Event>) -> Change {
        let probe_at = now.plus_nanos(span);
        self.state = State::Open { probe_at, span, probes: 0, successes: 0, probed: false };
        events.push(Event::CircuitOpened { span: Duration::from_nanos(span), why });
        Change::Changed
    }

    fn trips(&self, plan: &Circuit, failures: u32, now: Instant) -> Option<Trip> {
        if plan.consecutive.is_some_and(|limit| failures >= limit) {
            return Some(Trip::Consecutive { failures });
        }
        let rate = plan.error_rate?;
        let counts = self.tally.as_ref()?.counts(now);
        #[expect(clippy::cast_precision_loss, reason = "a share of outcomes, compared with a share")]
        let trips = counts.total >= u64::from(rate.samples_min)
            && counts.bad as f64 / counts.total as f64 >= rate.threshold;
        trips.then_some(Trip::ErrorRate { failures: counts.bad, total: counts.total })
    }

    fn tally(&mut self, now: Instant, is_bad: bool) {
        if let Some(tally) = &mut self.tally {
            tally.record(now, is_bad);
        }
    }
}

#[cfg(test)]
#[path = "circuit_tests.rs"]
mod tests;
