//! Numbers for dashboards and alerts, through the `metrics` facade.
//!
//! What is counted is registered once, when a throttle is built, and labelled by the throttle's name: a key of a
//! keyed throttle is never a label. Many throttles may share a name, so gauges are sums: each throttle adds what
//! changed since it last did, and takes all of it away when it goes.
//!
//! A recorder is somebody's code, so nothing here runs under the throttle's lock but [`Gauged::read`], which calls
//! none of it. Readings overtake each other on the way out; only the newest counts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, Label, Unit, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};
use tidegate_core::cause::Cause;
use tidegate_core::event::Event;
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::per_second::PerSecond;
use tidegate_core::refused::Refused;
use tidegate_core::snapshot::CircuitState;

use crate::builder::Builder;
use crate::keyed::KeyedBuilder;
use crate::state::State;

const GAUGES: usize = 7;
/// In the order of [`Shown`].
const GAUGE_NAMES: [(&str, Option<&str>); GAUGES] = [
    ("tidegate_in_flight", None),
    ("tidegate_waiting", None),
    ("tidegate_slots", None),
    ("tidegate_rate", None),
    ("tidegate_quota", None),
    ("tidegate_circuit_state", Some("open")),
    ("tidegate_circuit_state", Some("half_open")),
];
const OUTCOMES: [&str; 6] = ["success", "throttled", "server", "network", "other", "ignored"];
const REASONS: [&str; 5] = ["closed", "circuit_open", "too_large", "busy", "limited"];

/// What a throttle shows on the gauges.
type Shown = [f64; GAUGES];

impl Builder {
    /// Counts what goes through the throttle, for the recorder of the `metrics` crate that is installed by now.
    ///
    /// A throttle that is not measured pays nothing for those that are. See
    /// [the guide](crate::guide::observability#metrics).
    pub fn measured(mut self) -> Self {
        self.is_measured = true;
        self
    }
}

impl<K> KeyedBuilder<K> {
    /// Counts what goes through all keys together, and the keys, for the recorder of the `metrics` crate that is
    /// installed by now. See [the guide](crate::guide::observability#metrics).
    pub fn measured(mut self) -> Self {
        self.is_measured = true;
        self
    }
}

/// Where the throttles of a name are counted; `None` if they are not.
#[derive(Debug)]
pub(crate) struct Meter(Option<Arc<Handles>>);

#[derive(Debug)]
struct Handles {
    admitted: Counter,
    refused: [Counter; REASONS.len()],
    outcomes: [Counter; OUTCOMES.len()],
    retries: Counter,
    slowed: Counter,
    reason_changed: Counter,
    circuit_opened: Counter,
    events_lost: Counter,
    wait: Histogram,
    latency: Histogram,
    gauges: [Gauge; GAUGES],
    /// Events lost that were told of.
    lost: AtomicU64,
}

/// One throttle's part in the gauges; `None` if it is not measured.
#[derive(Debug)]
pub(crate) struct Gauged(Option<Box<Own>>);

#[derive(Debug)]
struct Own {
    handles: Arc<Handles>,
    /// Readings taken, counted under the throttle's lock: a higher number is a newer one.
    readings: AtomicU64,
    last: Mutex<(u64, Shown)>,
    /// Requests admitted that were told of. What is admitted and does not go out is taken back by the throttle; a counter
    /// cannot go back, so it waits until as many are admitted again.
    admitted: AtomicU64,
}

/// What was read under the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading(Option<Read>);

#[derive(Debug, Clone, Copy)]
struct Read {
    number: u64,
    shown: Shown,
    admitted: u64,
    slowed: u64,
    reasons: u64,
    opened: u64,
}

impl Meter {
    /// Registers everything, if it is to be measured. A recorder that panics is none.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        let register = || {
            describe();
            Arc::new(Handles::register(name))
        };
        Self(is_measured.then(|| catch_unwind(AssertUnwindSafe(register)).ok()).flatten())
    }

    pub(crate) fn gauged(&self) -> Gauged {
        Gauged(self.0.as_ref().map(|handles| {
            Box::new(Own {
                handles: Arc::clone(handles),
                readings: AtomicU64::new(0),
                last: Mutex::new((0, [0.0; GAUGES])),
                admitted: AtomicU64::new(0),
            })
        }))
    }

    /// A caller has its answer, after so long.
    pub(crate) fn answered(&self, waited: Duration, answer: Result<(), &Refused>) {
        let Some(handles) = &self.0 else { return };
        match answer {
            Ok(()) => handles.wait.record(waited),
            Err(refused) => handles.refused[reason(refused)].increment(1),
        }
    }

    /// A request ended.
    pub(crate) fn ended(&self, outcome: Outcome, latency: Option<Duration>) {
        let Some(handles) = &self.0 else { return };
        handles.outcomes[ending(outcome)].increment(1);
        if outcome.is_retried() {
            handles.retries.increment(1);
        }
        if let (Kind::Success, Some(latency)) = (outcome.kind(), latency) {
            handles.latency.record(latency);
        }
    }

    /// Shows what was read; `lost` are the events lost so far.
    pub(crate) fn publish(&self, gauged: &Gauged, reading: Reading, lost: u64) {
        let (Some(handles), Some(own), Some(read)) = (&self.0, &gauged.0, reading.0) else { return };
        own.show(read.number, read.shown);
        let admitted = read.admitted.saturating_sub(own.admitted.fetch_max(read.admitted, Ordering::Relaxed));
        for (counter, more) in [
            (&handles.admitted, admitted),
            (&handles.slowed, read.slowed),
            (&handles.reason_changed, read.reasons),
            (&handles.circuit_opened, read.opened),
        ] {
            if more > 0 {
                counter.increment(more);
            }
        }
        let told = handles.lost.fetch_max(lost, Ordering::Relaxed);
        if lost > told {
            handles.events_lost.increment(lost - told);
        }
    }
}

impl Gauged {
    #[inline]
    pub(crate) fn is_measured(&self) -> bool {
        self.0.is_some()
    }

    /// Reads what is shown, under the throttle's lock, and counts what has just happened.
    #[inline]
    pub(crate) fn read(&self, state: &State, events: &[Event]) -> Reading {
        Reading(self.0.as_ref().map(|own| own.read(state, events)))
    }
}

impl Own {
    fn read(&self, state: &State, events: &[Event]) -> Read {
        let levels = state.gates.levels(&state.plan);
        let count = |is_one: fn(&Event) -> bool| events.iter().filter(|event| is_one(event)).count() as u64;
        let is = |wanted| f64::from(u8::from(levels.circuit == Some(wanted)));
        Read {
            number: self.readings.fetch_add(1, Ordering::Relaxed) + 1,
            shown: [
                f64::from(levels.in_flight),
                f64::from(state.waiting()),
                f64::from(levels.slots.unwrap_or(0)),
                levels.rate.map_or(0.0, PerSecond::as_f64),
                levels.quota.map_or(0.0, PerSecond::as_f64),
                is(CircuitState::Open),
                is(CircuitState::HalfOpen),
            ],
            admitted: state.gates.admitted(),
            slowed: count(|event| matches!(event, Event::Slowed { .. })),
            reasons: count(|event| matches!(event, Event::Controlled { .. })),
            opened: count(|event| matches!(event, Event::CircuitOpened { .. })),
        }
    }

    /// Adds what changed. Sums come out the same in whichever order they are made.
    fn show(&self, number: u64, shown: Shown) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if number <= last.0 {
            return;
        }
        let (_, before) = std::mem::replace(&mut *last, (number, shown));
        drop(last);
        for ((gauge, before), now) in self.handles.gauges.iter().zip(before).zip(shown) {
            let more = now - before;
            if more > 0.0 {
                gauge.increment(more);
            } else if more < 0.0 {
                gauge.decrement(-more);
            }
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Nobody is left who could be told of a panic.
        let _ = catch_unwind(AssertUnwindSafe(|| self.show(u64::MAX, [0.0; GAUGES])));
    }
}

/// Where the keys of a keyed throttle are counted, beside its throttles; `None` if they are not.
#[derive(Debug, Clone)]
pub(crate) struct KeyedMeter(Option<Arc<KeyedHandles>>);

#[derive(Debug)]
struct KeyedHandles {
    keys: Gauge,
    evicted_idle: Counter,
    evicted_size: Counter,
    overflow: Counter,
}

/// Each calls the recorder: not under a lock, and guarded as listeners are.
impl KeyedMeter {
    /// Registers everything, if it is to be measured. A recorder that panics is none.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        let register = || {
            describe_keyed();
            Arc::new(KeyedHandles::register(name))
        };
        Self(is_measured.then(|| catch_unwind(AssertUnwindSafe(register)).ok()).flatten())
    }

    /// A key came to be.
    pub(crate) fn added(&self) {
        if let Some(handles) = &self.0 {
            handles.keys.increment(1);
        }
    }

    /// So many keys left for they were idle, and so many to make room.
    pub(crate) fn evicted(&self, idle: usize, size: usize) {
        let Some(handles) = &self.0 else { return };
        for (counter, keys) in [(&handles.evicted_idle, idle), (&handles.evicted_size, size)] {
            if keys > 0 {
                counter.increment(keys as u64);
                handles.keys.decrement(small(keys));
            }
        }
    }

    /// The registry is gone, and so many keys with it.
    pub(crate) fn forgotten(&self, keys: u32) {
        if let Some(handles) = &self.0 {
            handles.keys.decrement(keys);
        }
    }

    /// A call was served by what keys beyond the bound share.
    pub(crate) fn overflowed(&self) {
        if let Some(handles) = &self.0 {
            handles.overflow.increment(1);
        }
    }
}

/// A few keys as a gauge counts.
fn small(keys: usize) -> f64 {
    f64::from(u32::try_from(keys).unwrap_or(u32::MAX))
}

impl KeyedHandles {
    fn register(throttle: &str) -> Self {
        let name = || throttle.to_owned();
        let evicted = |cause| counter!("tidegate_keys_evicted_total", "throttle" => name(), "cause" => cause);
        Self {
            keys: gauge!("tidegate_keys", "throttle" => name()),
            evicted_idle: evicted("idle"),
            evicted_size: evicted("size"),
            overflow: counter!("tidegate_overflow_total", "throttle" => name()),
        }
    }
}

impl Handles {
    fn register(throttle: &str) -> Self {
        let name = || throttle.to_owned();
        Self {
            admitted: counter!("tidegate_admitted_total", "throttle" => name()),
            refused: REASONS
                .map(|reason| counter!("tidegate_refused_total", "throttle" => name(), "reason" => reason)),
            outcomes: OUTCOMES.map(
                |outcome| counter!("tidegate_outcomes_total", "throttle" => name(), "outcome" => outcome),
            ),
            retries: counter!("tidegate_retries_total", "throttle" => name()),
            slowed: counter!("tidegate_slowed_total", "throttle" => name()),
            reason_changed: counter!("tidegate_reason_changed_total", "throttle" => name()),
            circuit_opened: counter!("tidegate_circuit_opened_total", "throttle" => name()),
            events_lost: counter!("tidegate_events_lost_total", "throttle" => name()),
            wait: histogram!("tidegate_wait_seconds", "throttle" => name()),
            latency: histogram!("tidegate_latency_seconds", "throttle" => name()),
            gauges: GAUGE_NAMES.map(|(gauge, state)| {
                let mut labels = vec![Label::new("throttle", name())];
                labels.extend(state.map(|state| Label::new("state", state)));
                gauge!(gauge, labels)
            }),
            lost: AtomicU64::new(0),
        }
    }
}

fn describe() {
    describe_counter!("tidegate_admitted_total", Unit::Count, "Requests admitted");
    describe_counter!("tidegate_refused_total", Unit::Count, "Requests refused, by reason");
    describe_counter!("tidegate_outcomes_total", Unit::Count, "Requests ended, by how they went");
    describe_counter!("tidegate_retries_total", Unit::Count, "Requests that will be tried again");
    describe_counter!("tidegate_slowed_total", Unit::Count, "Times the controller cut");
    describe_counter!(
        "tidegate_reason_changed_total",
        Unit::Count,
        "Times the reason for Auto's limits changed"
    );
    describe_counter!("tidegate_circuit_opened_total", Unit::Count, "Times the circuit opened");
    describe_counter!(
        "tidegate_events_lost_total",
        Unit::Count,
        "Events lost to those who were told too slowly"
    );
    describe_histogram!("tidegate_wait_seconds", Unit::Seconds, "From asking to being admitted");
    describe_histogram!("tidegate_latency_seconds", Unit::Seconds, "From being admitted to success");
    describe_gauge!("tidegate_in_flight", Unit::Count, "Requests in flight");
    describe_gauge!("tidegate_waiting", Unit::Count, "Callers waiting");
    describe_gauge!("tidegate_slots", Unit::Count, "Slots");
    describe_gauge!("tidegate_rate", Unit::CountPerSecond, "Entries per second");
    describe_gauge!(
        "tidegate_quota",
        Unit::CountPerSecond,
        "Requests per second that upstreams are estimated to grant"
    );
    describe_gauge!("tidegate_circuit_state", Unit::Count, "Circuits that are not closed, by state");
}

fn describe_keyed() {
    describe_gauge!("tidegate_keys", Unit::Count, "Keys with a throttle of their own");
    describe_counter!("tidegate_keys_evicted_total", Unit::Count, "Keys that were forgotten, by cause");
    describe_counter!(
        "tidegate_overflow_total",
        Unit::Count,
        "Calls served by what keys beyond the bound share"
    );
}

/// The place of a refusal in [`REASONS`].
const fn reason(refused: &Refused) -> usize {
    match refused {
        Refused::Closed => 0,
        Refused::CircuitOpen { .. } => 1,
        Refused::TooLarge { .. } => 2,
        Refused::Busy { .. } => 3,
        // And whatever comes to be later: it was held back by something.
        _ => 4,
    }
}

/// The place of an outcome in [`OUTCOMES`].
const fn ending(outcome: Outcome) -> usize {
    match outcome.blame() {
        None if matches!(outcome.kind(), Kind::Ignored) => 5,
        None => 0,
        Some(Cause::Throttled) => 1,
        Some(Cause::Server) => 2,
        Some(Cause::Network) => 3,
        Some(_) => 4,
    }
}

#[cfg(test)]
#[path = "meter_tests.rs"]
mod tests;
