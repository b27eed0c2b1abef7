//! Metrics through the `metrics` facade.
//!
//! Metrics are registered once, when a throttle is built, and labelled by the throttle's name: a key of a
//! keyed throttle is never a label. Throttles may share a name, so gauges are sums: each throttle adds its
//! changes, and subtracts its total when it is dropped.
//!
//! A recorder is user code, so only [`GaugeHandle::read`], which does not call it, runs under the throttle's lock.
//! Readings may overtake each other before they are published; only the newest counts.

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
use tidegate_core::verdict::GateName;

use crate::builder::Builder;
use crate::keyed::KeyedBuilder;
use crate::state::State;

const GAUGES: usize = 7;
/// In the order of [`GaugeValues`].
const GAUGE_NAMES: [(&str, Option<&str>); GAUGES] = [
    ("tidegate_in_flight", None),
    ("tidegate_waiting", None),
    ("tidegate_slots", None),
    ("tidegate_rate", None),
    ("tidegate_quota", None),
    ("tidegate_circuit_state", Some("open")),
    ("tidegate_circuit_state", Some("half_open")),
];
/// Named limits with a series of their own; further ones are not shown.
const LIMITS_MAX: usize = 64;
const OUTCOMES: [&str; 6] = ["success", "throttled", "server", "network", "other", "ignored"];
const REASONS: [&str; 5] = ["closed", "circuit_open", "too_large", "busy", "limited"];

/// A throttle's values on the gauges.
type GaugeValues = [f64; GAUGES];

/// The units that each named limit of a throttle has available.
type LimitValues = Vec<(GateName, f64)>;

impl Builder {
    /// Records metrics of the throttle with the recorder of the `metrics` crate that is installed at this
    /// time.
    ///
    /// Throttles without this have no overhead. See [the guide](crate::guide::observability#metrics).
    /// [the guide](crate::guide::observability#metrics).
    pub fn measured(mut self) -> Self {
        self.is_measured = true;
        self
    }
}

impl<K> KeyedBuilder<K> {
    /// Records metrics of all keys together, and of the registry, with the recorder of the `metrics` crate
    /// that is installed at this time. See [the guide](crate::guide::observability#metrics).
    pub fn measured(mut self) -> Self {
        self.is_measured = true;
        self
    }
}

/// The metrics of all throttles with one name; `None` if they are not measured.
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
    throttle: String,
    /// Registered when a limit is first seen: a retune may add one.
    limits: Mutex<Vec<(GateName, Gauge)>>,
    /// Lost events already published.
    lost: AtomicU64,
}

/// One throttle's contribution to the gauges; `None` if it is not measured.
#[derive(Debug)]
pub(crate) struct GaugeHandle(Option<Box<ThrottleGauges>>);

#[derive(Debug)]
struct ThrottleGauges {
    handles: Arc<Handles>,
    /// Readings taken, counted under the throttle's lock: a higher number is newer.
    readings: AtomicU64,
    last: Mutex<(u64, GaugeValues, LimitValues)>,
    /// Admissions already published. An admission that is undone lowers the throttle's count; the counter
    /// cannot decrease, so it stays until the count has caught up.
    admitted: AtomicU64,
}

/// A reading taken under the lock.
#[derive(Debug, Clone)]
pub(crate) struct Reading(Option<GaugeReading>);

#[derive(Debug, Clone)]
struct GaugeReading {
    number: u64,
    values: GaugeValues,
    limits: LimitValues,
    admitted: u64,
    slowed: u64,
    reasons: u64,
    opened: u64,
}

impl Meter {
    /// Registers the metrics, if it is to be measured. If the recorder panics, nothing is measured.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        let register = || {
            describe();
            Arc::new(Handles::register(name))
        };
        Self(is_measured.then(|| catch_unwind(AssertUnwindSafe(register)).ok()).flatten())
    }

    pub(crate) fn gauge_handle(&self) -> GaugeHandle {
        GaugeHandle(self.0.as_ref().map(|handles| {
            Box::new(ThrottleGauges {
                handles: Arc::clone(handles),
                readings: AtomicU64::new(0),
                last: Mutex::new((0, [0.0; GAUGES], Vec::new())),
                admitted: AtomicU64::new(0),
            })
        }))
    }

    /// Records the result of an acquire and its waiting time.
    pub(crate) fn record_acquire(&self, waited: Duration, answer: Result<(), &Refused>) {
        let Some(handles) = &self.0 else { return };
        match answer {
            Ok(()) => handles.wait.record(waited),
            Err(refused) => handles.refused[reason(refused)].increment(1),
        }
    }

    /// Records the outcome of a request.
    pub(crate) fn record_outcome(&self, outcome: Outcome, latency: Option<Duration>) {
        let Some(handles) = &self.0 else { return };
        handles.outcomes[ending(outcome)].increment(1);
        if outcome.is_retried() {
            handles.retries.increment(1);
        }
        if let (Kind::Success, Some(latency)) = (outcome.kind(), latency) {
            handles.latency.record(latency);
        }
    }

    /// Publishes a reading; `lost` is the number of events lost so far.
    pub(crate) fn publish(&self, gauge_handle: &GaugeHandle, reading: Reading, lost: u64) {
        let (Some(handles), Some(gauges), Some(read)) = (&self.0, &gauge_handle.0, reading.0) else { return };
        gauges.show(read.number, read.values, read.limits);
        let admitted =
            read.admitted.saturating_sub(gauges.admitted.fetch_max(read.admitted, Ordering::Relaxed));
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
        let published = handles.lost.fetch_max(lost, Ordering::Relaxed);
        if lost > published {
            handles.events_lost.increment(lost - published);
        }
    }
}

impl GaugeHandle {
    #[inline]
    pub(crate) fn is_measured(&self) -> bool {
        self.0.is_some()
    }

    /// Reads the gauges under the throttle's lock, and counts the given events.
    #[inline]
    pub(crate) fn read(&self, state: &State, events: &[Event]) -> Reading {
        Reading(self.0.as_ref().map(|gauges| gauges.read(state, events)))
    }
}

impl ThrottleGauges {
    fn read(&self, state: &State, events: &[Event]) -> GaugeReading {
        let levels = state.gates.levels(&state.plan);
        let count = |is_one: fn(&Event) -> bool| events.iter().filter(|event| is_one(event)).count() as u64;
        let is = |wanted| f64::from(u8::from(levels.circuit == Some(wanted)));
        GaugeReading {
            number: self.readings.fetch_add(1, Ordering::Relaxed) + 1,
            values: [
                f64::from(levels.in_flight),
                f64::from(state.waiting()),
                f64::from(levels.slots.unwrap_or(0)),
                levels.rate.map_or(0.0, PerSecond::as_f64),
                levels.quota.map_or(0.0, PerSecond::as_f64),
                is(CircuitState::Open),
                is(CircuitState::HalfOpen),
            ],
            limits: state
                .gates
                .limits(&state.plan)
                .iter()
                .map(|limit| (limit.name, units(limit.available)))
                .collect(),
            admitted: state.gates.admitted(),
            slowed: count(|event| matches!(event, Event::Slowed { .. })),
            reasons: count(|event| matches!(event, Event::Controlled { .. })),
            opened: count(|event| matches!(event, Event::CircuitOpened { .. })),
        }
    }

    /// Applies the changes as differences: their sum does not depend on the order.
    fn show(&self, number: u64, values: GaugeValues, limits: LimitValues) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if number <= last.0 {
            return;
        }
        let (_, before, limits_before) = std::mem::replace(&mut *last, (number, values, limits.clone()));
        drop(last);
        for ((gauge, before), now) in self.handles.gauges.iter().zip(before).zip(values) {
            change(gauge, now - before);
        }
        let value =
            |all: &LimitValues, name| all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        for (name, now) in &limits {
            if let Some(gauge) = self.handles.limit(*name) {
                change(&gauge, now - value(&limits_before, *name).unwrap_or(0.0));
            }
        }
        for (name, before) in limits_before {
            if let (None, Some(gauge)) = (value(&limits, name), self.handles.limit(name)) {
                change(&gauge, -before);
            }
        }
    }
}

impl Drop for ThrottleGauges {
    fn drop(&mut self) {
        // There is no throttle left on which to count a panic.
        let _ = catch_unwind(AssertUnwindSafe(|| self.show(u64::MAX, [0.0; GAUGES], Vec::new())));
    }
}

/// The metrics of a registry's keys; `None` if they are not measured.
#[derive(Debug, Clone)]
pub(crate) struct KeyedMeter(Option<Arc<KeyedHandles>>);

#[derive(Debug)]
struct KeyedHandles {
    keys: Gauge,
    evicted_idle: Counter,
    evicted_size: Counter,
    overflow: Counter,
}

/// Each method calls the recorder, which is user code: never under a lock, and guarded like listeners.
impl KeyedMeter {
    /// Registers the metrics, if they are to be measured. If the recorder panics, nothing is measured.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        let register = || {
            describe_keyed();
            Arc::new(KeyedHandles::register(name))
        };
        Self(is_measured.then(|| catch_unwind(AssertUnwindSafe(register)).ok()).flatten())
    }

    /// A key was created.
    pub(crate) fn added(&self) {
        if let Some(handles) = &self.0 {
            handles.keys.increment(1);
        }
    }

    /// Keys were evicted, by cause.
    pub(crate) fn evicted(&self, idle: usize, size: usize) {
        let Some(handles) = &self.0 else { return };
        for (counter, keys) in [(&handles.evicted_idle, idle), (&handles.evicted_size, size)] {
            if keys > 0 {
                counter.increment(keys as u64);
                handles.keys.decrement(small(keys));
            }
        }
    }

    /// The registry was dropped with this many keys.
    pub(crate) fn registry_dropped(&self, keys: u32) {
        if let Some(handles) = &self.0 {
            handles.keys.decrement(keys);
        }
    }

    /// A call was served by the overflow throttle.
    pub(crate) fn overflowed(&self) {
        if let Some(handles) = &self.0 {
            handles.overflow.increment(1);
        }
    }
}

/// A small number of keys as a gauge value.
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
            throttle: name(),
            limits: Mutex::default(),
            lost: AtomicU64::new(0),
        }
    }

    /// The gauge of a named limit. The recorder is not called under the lock: two threads that register the same
    /// gauge get the same one.
    fn limit(&self, limit: GateName) -> Option<Gauge> {
        let limits = || self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let known = limits();
        if let Some((_, gauge)) = known.iter().find(|(known, _)| *known == limit) {
            return Some(gauge.clone());
        }
        if known.len() >= LIMITS_MAX {
            return None;
        }
        drop(known);
        describe_gauge!("tidegate_limit_available", Unit::Count, "Units that named limits have available");
        let labels =
            vec![Label::new("throttle", self.throttle.clone()), Label::new("limit", limit.to_string())];
        let gauge = gauge!("tidegate_limit_available", labels);
        limits().push((limit, gauge.clone()));
        Some(gauge)
    }
}

/// Adds a difference to a gauge.
fn change(gauge: &Gauge, more: f64) {
    if more > 0.0 {
        gauge.increment(more);
    } else if more < 0.0 {
        gauge.decrement(-more);
    }
}

#[expect(clippy::cast_precision_loss, reason = "limits are exact up to 2^53")]
const fn units(available: i64) -> f64 {
    available as f64
}

fn describe() {
    describe_counter!("tidegate_admitted_total", Unit::Count, "Requests admitted");
    describe_counter!("tidegate_refused_total", Unit::Count, "Requests refused, by reason");
    describe_counter!("tidegate_outcomes_total", Unit::Count, "Requests completed, by outcome");
    describe_counter!("tidegate_retries_total", Unit::Count, "Requests that will be retried");
    describe_counter!("tidegate_slowed_total", Unit::Count, "Times the controller slowed down");
    describe_counter!(
        "tidegate_reason_changed_total",
        Unit::Count,
        "Times the reason for Auto's limits changed"
    );
    describe_counter!("tidegate_circuit_opened_total", Unit::Count, "Times the circuit opened");
    describe_counter!("tidegate_events_lost_total", Unit::Count, "Events lost to slow listeners");
    describe_histogram!("tidegate_wait_seconds", Unit::Seconds, "Time from acquire to admission");
    describe_histogram!("tidegate_latency_seconds", Unit::Seconds, "Time from admission to success");
    describe_gauge!("tidegate_in_flight", Unit::Count, "Requests in flight");
    describe_gauge!("tidegate_waiting", Unit::Count, "Callers waiting");
    describe_gauge!("tidegate_slots", Unit::Count, "Slots");
    describe_gauge!("tidegate_rate", Unit::CountPerSecond, "Admissions per second");
    describe_gauge!(
        "tidegate_quota",
        Unit::CountPerSecond,
        "Requests per second that upstreams are estimated to grant"
    );
    describe_gauge!("tidegate_circuit_state", Unit::Count, "Circuits that are not closed, by state");
}

fn describe_keyed() {
    describe_gauge!("tidegate_keys", Unit::Count, "Keys with their own throttle");
    describe_counter!("tidegate_keys_evicted_total", Unit::Count, "Keys evicted, by cause");
    describe_counter!("tidegate_overflow_total", Unit::Count, "Calls served by the overflow throttle");
}

/// The index of a refusal in [`REASONS`].
const fn reason(refused: &Refused) -> usize {
    match refused {
        Refused::Closed => 0,
        Refused::CircuitOpen { .. } => 1,
        Refused::TooLarge { .. } | Refused::AboveCapacity { .. } => 2,
        Refused::Busy { .. } => 3,
        // Including future variants: something limited it.
        _ => 4,
    }
}

/// The index of an outcome in [`OUTCOMES`].
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
