//! Tests of the metrics: they match `docs/metrics.md`, sums are right as throttles come and go, and a
//! panicking recorder does no harm.
#![allow(clippy::float_cmp, reason = "whole numbers, and values that are passed through unchanged")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use metrics::{
    CounterFn, GaugeFn, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, with_local_recorder,
};
use tidegate_core::feedback::headers::{Dimension, Reset};
use tidegate_core::outcome::QuotaLevel;
use tidegate_core::plan::{Brake, Budget, Circuit, Controller, Rate, Slots};
use tidegate_core::retry::Retry;

use super::*;
use crate::manual_clock::ManualClock;
use crate::throttle::Throttle;
use crate::{Backoff, Cost};

const PAGE: &str = include_str!("../../../../docs/metrics.md");
const REQUEST: Cost = Cost::request();

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The values recorded for one series.
#[derive(Debug, Default)]
struct Series {
    values: Mutex<Vec<f64>>,
}

impl Series {
    fn change(&self, change: impl FnOnce(f64) -> f64) {
        let mut values = self.values.lock().unwrap();
        let next = change(values.last().copied().unwrap_or(0.0));
        values.push(next);
    }
}

impl CounterFn for Series {
    fn increment(&self, value: u64) {
        assert!(value > 0, "zero is never recorded");
        self.change(|sum| sum + f64::from(u32::try_from(value).unwrap()));
    }

    fn absolute(&self, _: u64) {
        unreachable!("counters are sums over throttles");
    }
}

impl GaugeFn for Series {
    fn increment(&self, value: f64) {
        self.change(|sum| sum + value);
    }

    fn decrement(&self, value: f64) {
        self.change(|sum| sum - value);
    }

    fn set(&self, _: f64) {
        unreachable!("gauges are sums over throttles");
    }
}

impl HistogramFn for Series {
    fn record(&self, value: f64) {
        self.change(|_| value);
    }
}

/// Type, name, labels.
type Id = (&'static str, String, BTreeMap<String, String>);

/// A recorder that stores everything.
#[derive(Debug, Default)]
struct StoringRecorder {
    series: Mutex<BTreeMap<Id, Arc<Series>>>,
    /// Type, name, unit.
    described: Mutex<BTreeSet<(&'static str, String, String)>>,
}

impl StoringRecorder {
    fn register(&self, kind: &'static str, key: &Key) -> Arc<Series> {
        let labels = key.labels().map(|label| (label.key().to_owned(), label.value().to_owned())).collect();
        Arc::clone(self.series.lock().unwrap().entry((kind, key.name().to_owned(), labels)).or_default())
    }

    fn describe(&self, kind: &'static str, name: &KeyName, unit: Option<Unit>) {
        let unit = unit.map_or("", |unit| unit.as_str()).to_owned();
        self.described.lock().unwrap().insert((kind, name.as_str().to_owned(), unit));
    }

    /// The values of the series `name` whose only label besides `throttle` has this value.
    fn values(&self, name: &str, label: Option<&str>) -> Vec<f64> {
        let series = self.series.lock().unwrap();
        let found = series.iter().find(|((_, known, labels), _)| {
            let mut others =
                labels.iter().filter(|(key, _)| *key != "throttle").map(|(_, value)| value.as_str());
            known == name && others.next() == label
        });
        let (_, series) = found.unwrap_or_else(|| panic!("{name} {label:?} was not recorded"));
        series.values.lock().unwrap().clone()
    }

    fn last(&self, name: &str) -> f64 {
        self.values(name, None).last().copied().unwrap_or(0.0)
    }
}

impl Recorder for StoringRecorder {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("counter", &name, unit);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("gauge", &name, unit);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe("histogram", &name, unit);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.register("counter", key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.register("gauge", key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.register("histogram", key))
    }
}

/// Exercises every metric of one throttle.
fn exercise(clock: &ManualClock) {
    let home: Arc<OnceLock<Throttle>> = Arc::default();
    let throttle = Arc::clone(&home);
    let built = Throttle::builder()
        .named("api")
        .measured()
        .slots(Slots::adaptive(1..=2))
        .controller(Controller::Brake(Brake::default().at(2, secs(60))))
        .rate(Rate::per_second(50))
        .budget(Budget::tokens(100, secs(60)))
        .rate_named("rpd", Rate::per_day(1_000))
        .circuit(Circuit::after_failures(3).open_for(secs(1)))
        .retry(Retry::attempts(2).backoff(Backoff::fixed(Duration::ZERO)))
        .waiters_max(1)
        .clock(clock.clone())
        .on_state_change(move |notice| {
            // More events than the buffer holds, while the listener runs.
            if let (Event::Drained, Some(throttle)) = (&notice.event, throttle.get()) {
                (0..1_100).for_each(|_| throttle.retune(|_| {}).unwrap());
            }
        })
        .build()
        .unwrap();
    let throttle = home.get_or_init(|| built);
    for outcome in [
        Outcome::success().took(Duration::from_millis(30)),
        Outcome::ignored(),
        Outcome::overload().retry_after(Duration::ZERO),
        Outcome::failure().because(Cause::Network),
    ] {
        throttle.try_acquire(REQUEST).unwrap().settle(outcome);
    }
    assert!(throttle.try_acquire(Cost::request().tokens(101)).is_err(), "too large");
    assert!(throttle.run_blocking(REQUEST, |_| Err::<(), _>("down")).is_err(), "the circuit opens");
    assert!(throttle.try_acquire(REQUEST).is_err(), "the circuit is open");
    clock.advance(secs(1));
    let probe = throttle.try_acquire(REQUEST).unwrap();
    probe.settle(Outcome::success());
    throttle.record(Outcome::failure().because(Cause::Server));
    clock.advance(secs(60));
    let held: Vec<_> = std::iter::from_fn(|| throttle.try_acquire(REQUEST).ok()).collect();
    let mut waiting = Box::pin(throttle.acquire(REQUEST));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    assert!(throttle.acquire_blocking(REQUEST).is_err(), "the queue is full");
    clock.advance(Duration::from_millis(250));
    drop(held);
    assert!(waiting.as_mut().poll(&mut context).is_ready());
    throttle.close();
    assert!(throttle.try_acquire(REQUEST).is_err(), "closed");
}

/// Exercises every metric of one throttle, and a second throttle that reaches a limit under `Auto`.
fn exercise_both(clock: &ManualClock) {
    exercise(clock);
    let auto = Throttle::auto().named("api").measured().clock(clock.clone()).build().unwrap();
    for _ in 0..10 {
        clock.advance(secs(10));
        auto.try_acquire(REQUEST).unwrap().settle(Outcome::overload());
    }
    let level = QuotaLevel { limit: 100, remaining: 50, reset: Reset::More(secs(20)), window: None };
    for _ in 0..2 {
        clock.advance(secs(10));
        auto.try_acquire(REQUEST).unwrap().settle(Outcome::success().quota(Dimension::Requests, level));
    }
}

/// Labels with their valid values; any value, if none are listed.
type Labels = BTreeMap<String, BTreeSet<String>>;
/// Name, type, unit, labels.
type Row = (String, String, String, Labels);

/// The rows of the documentation page.
fn documented_rows() -> BTreeSet<Row> {
    let bare = |word: &str| word.trim().trim_matches('`').to_owned();
    let labels = |cell: &str| -> Labels {
        let label = |part: &str| {
            let (name, values) = part.split_once('=').unwrap_or((part, ""));
            (bare(name), values.split(',').map(bare).filter(|value| !value.is_empty()).collect())
        };
        cell.split(';').map(label).collect()
    };
    // The server's metrics have their own test.
    let page = PAGE.split("\n## `tidegate serve`\n").next().unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `tidegate_"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        (bare(cells[0]), bare(cells[1]), bare(cells[2]), labels(cells[3]))
    })
    .collect()
}

/// The same rows, as recorded.
fn recorded_rows(recorder: &StoringRecorder) -> BTreeSet<Row> {
    let mut labels: BTreeMap<(&str, String), Labels> = BTreeMap::new();
    for (kind, name, of_one) in recorder.series.lock().unwrap().keys() {
        let of_all = labels.entry((kind, name.clone())).or_default();
        for (label, value) in of_one {
            let values = of_all.entry(label.clone()).or_default();
            // Names are free: the page lists no values.
            if label != "throttle" && label != "limit" {
                values.insert(value.clone());
            }
        }
    }
    let described = recorder.described.lock().unwrap();
    assert_eq!(described.len(), labels.len(), "every described metric is registered");
    let row = |(kind, name, unit): &(&'static str, String, String)| {
        let labels =
            labels.remove(&(*kind, name.clone())).unwrap_or_else(|| panic!("{name} is only described"));
        (name.clone(), (*kind).to_owned(), unit.clone(), labels)
    };
    described.iter().map(row).collect()
}

#[test]
fn recorded_metrics_match_the_documentation() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || {
        exercise_both(&ManualClock::new());
        let keys = KeyedMeter::new("api", true);
        (0..5).for_each(|_| keys.added());
        keys.evicted(1, 2);
        keys.overflowed();
        keys.registry_dropped(2);
    });
    assert_eq!(recorded_rows(&recorder), documented_rows());
    for ((_, name, labels), series) in &*recorder.series.lock().unwrap() {
        assert!(
            series.values.lock().unwrap().iter().any(|value| *value > 0.0),
            "{name} {labels:?} was not changed"
        );
        assert_eq!(labels["throttle"], "api");
    }
}

#[test]
fn counters_match_the_number_of_calls() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || exercise(&ManualClock::new()));
    let count = |name: &str, label| recorder.values(name, label).last().copied().unwrap_or(0.0);
    let refused = REASONS.map(|reason| count("tidegate_refused_total", Some(reason)));
    assert_eq!(refused, [1.0, 2.0, 1.0, 1.0, 1.0], "the second attempt finds the circuit open as well");
    let outcomes = OUTCOMES.map(|outcome| count("tidegate_outcomes_total", Some(outcome)));
    assert_eq!(outcomes, [2.0, 1.0, 1.0, 1.0, 1.0, 3.0], "two permits are dropped");
    let admitted = count("tidegate_admitted_total", None);
    assert_eq!(admitted, outcomes.iter().sum::<f64>() - 1.0, "one was recorded without a permit");
    let waits = recorder.values("tidegate_wait_seconds", None);
    assert_eq!((waits.len(), waits.iter().filter(|wait| **wait > 0.0).count()), (8, 1));
    assert!(waits.contains(&0.25));
    assert_eq!(recorder.values("tidegate_latency_seconds", None), [0.03, 0.0]);
    assert_eq!(
        (count("tidegate_retries_total", None), count("tidegate_circuit_opened_total", None)),
        (1.0, 1.0)
    );
}

#[test]
fn gauges_sum_over_throttles_of_one_name() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || {
        let build =
            || Throttle::builder().named("api").measured().slots(Slots::fixed(3)).clock(ManualClock::new());
        let (one, other) = (build().build().unwrap(), build().rate(Rate::per_second(7)).build().unwrap());
        let twin = other.twin();
        assert_eq!((recorder.last("tidegate_slots"), recorder.last("tidegate_rate")), (9.0, 14.0));
        let held = [one.try_acquire(REQUEST).unwrap(), twin.try_acquire(REQUEST).unwrap()];
        assert_eq!(recorder.last("tidegate_in_flight"), 2.0);
        drop(held);
        assert_eq!(recorder.last("tidegate_in_flight"), 0.0);
        one.retune(|limits| limits.slots = Some(Slots::fixed(5))).unwrap();
        assert_eq!(recorder.last("tidegate_slots"), 11.0);
        drop(one);
        assert_eq!(recorder.last("tidegate_slots"), 6.0);
        drop((other, twin));
        assert_eq!((recorder.last("tidegate_slots"), recorder.last("tidegate_rate")), (0.0, 0.0));
    });
}

#[test]
fn named_limits_have_a_gauge_each() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || {
        let throttle = Throttle::builder()
            .named("api")
            .measured()
            .rate_named("rpd", Rate::per_day(10))
            .budget_named("otpm", Budget::output_tokens(100, secs(60)))
            .clock(ManualClock::new())
            .build()
            .unwrap();
        let last = |limit| recorder.values("tidegate_limit_available", Some(limit)).last().copied();
        let permit = throttle.try_acquire(REQUEST.output_tokens(30)).unwrap();
        assert_eq!((last("rpd"), last("otpm")), (Some(9.0), Some(70.0)));
        permit.settle(Outcome::success().spent(REQUEST.output_tokens(110)));
        assert_eq!((last("rpd"), last("otpm")), (Some(9.0), Some(-10.0)));
        throttle.retune(|limits| limits.budgets.clear()).unwrap();
        assert_eq!((last("rpd"), last("otpm")), (Some(9.0), Some(0.0)));
        drop(throttle);
        assert_eq!(last("rpd"), Some(0.0));
    });
}

/// An unmeasured throttle with only slots reads no clock.
#[test]
fn only_measured_throttle_reads_the_clock() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || {
        let clock = ManualClock::new();
        let build = || Throttle::builder().slots(Slots::fixed(3)).clock(clock.clone());
        let plain = build().named("plain").build().unwrap();
        plain.try_acquire(REQUEST).unwrap().settle(Outcome::success());
        assert_eq!((clock.readings(), recorder.series.lock().unwrap().len()), (0, 0));
        let measured = build().measured().build().unwrap();
        let permit = measured.try_acquire(REQUEST).unwrap();
        clock.advance(secs(2));
        permit.settle(Outcome::success());
        assert_eq!(recorder.values("tidegate_latency_seconds", None), [2.0]);
        measured.retune(|limits| limits.slots = Some(Slots::fixed(1))).unwrap();
        drop(measured.try_acquire(REQUEST));
        assert_eq!(recorder.last("tidegate_admitted_total"), 2.0, "it stays measured after a retune");
    });
}

/// Regardless of the order of publication, the newest reading wins.
#[test]
fn old_reading_does_not_replace_a_newer_one() {
    let recorder = StoringRecorder::default();
    with_local_recorder(&recorder, || {
        let meter = Meter::new("api", true);
        let gauge_handle = meter.gauge_handle();
        let read = |number, in_flight, admitted| {
            let values = [in_flight, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            Reading(Some(GaugeReading {
                number,
                values,
                limits: Vec::new(),
                admitted,
                slowed: 1,
                reasons: 0,
                opened: 0,
            }))
        };
        for (number, in_flight, admitted) in [(1, 1.0, 1), (3, 3.0, 9), (2, 2.0, 5)] {
            meter.publish(&gauge_handle, read(number, in_flight, admitted), 4);
        }
    });
    assert_eq!(recorder.values("tidegate_in_flight", None), [1.0, 3.0, 0.0]);
    assert_eq!(recorder.last("tidegate_slowed_total"), 3.0, "events count whenever they are published");
    assert_eq!(recorder.last("tidegate_admitted_total"), 9.0, "admissions count once");
    assert_eq!(recorder.last("tidegate_events_lost_total"), 4.0, "once");
}

/// Panics on every value.
struct PanickingMetric;

impl CounterFn for PanickingMetric {
    fn increment(&self, _: u64) {
        panic!("a bug in the recorder");
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for PanickingMetric {
    fn increment(&self, _: f64) {
        panic!("a bug in the recorder");
    }

    fn decrement(&self, _: f64) {
        panic!("a bug in the recorder");
    }

    fn set(&self, _: f64) {}
}

/// Returns panicking metrics, or panics itself.
struct PanickingRecorder {
    is_late: bool,
}

impl Recorder for PanickingRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        assert!(self.is_late, "a bug in the recorder");
        Counter::from_arc(Arc::new(PanickingMetric))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(PanickingMetric))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn panicking_recorder_is_caught_and_counted() {
    for is_late in [false, true] {
        let builder = Throttle::builder().measured().slots(Slots::fixed(1)).clock(ManualClock::new());
        let throttle = with_local_recorder(&PanickingRecorder { is_late }, || builder.build().unwrap());
        let permit = throttle.try_acquire(REQUEST).unwrap();
        assert!(throttle.try_acquire(REQUEST).is_err());
        permit.settle(Outcome::success());
        let seen = throttle.snapshot();
        assert_eq!((seen.in_flight, seen.listener_panics > 0), (0, is_late));
        // The gauges are updated once more on drop, which panics too.
        drop(throttle);
    }
}
