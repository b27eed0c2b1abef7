//! Logs, metrics and snapshots of keyed and joined throttles agree with each other.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    with_local_recorder,
};
use tidegate::{
    Circuit, Cost, Keyed, KeyedEvent, Limit, Limiter, Limits, ManualClock, Memory, Outcome, Slots, Throttle,
};
use tokio::time::{sleep, timeout};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Subscriber};

use crate::kit::{REQUEST, millis, secs};
use crate::subscribers::keep_undecided;

#[derive(Clone, Default)]
struct MetricStore(Arc<Mutex<BTreeMap<String, f64>>>);

struct Series(MetricStore, String);

impl Series {
    fn add(&self, value: f64) {
        *self.0.0.lock().expect("the lock is not poisoned").entry(self.1.clone()).or_default() += value;
    }
}

impl CounterFn for Series {
    fn increment(&self, value: u64) {
        self.add(f64::from(u32::try_from(value).expect("few")));
    }
    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Series {
    fn increment(&self, value: f64) {
        self.add(value);
    }
    fn decrement(&self, value: f64) {
        self.add(-value);
    }
    fn set(&self, _: f64) {}
}

impl MetricStore {
    fn name(key: &Key) -> String {
        let labels =
            key.labels().filter(|label| label.key() != "throttle").map(|label| format!("/{}", label.value()));
        key.name().to_owned() + &labels.collect::<String>()
    }

    fn of(&self, name: &str) -> f64 {
        self.0.lock().expect("the lock is not poisoned").get(name).copied().unwrap_or(0.0)
    }
}

impl Recorder for MetricStore {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Series(self.clone(), Self::name(key))))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Series(self.clone(), Self::name(key))))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// A subscriber that records messages and runs a callback for each.
#[derive(Clone)]
struct RecordingSubscriber(Arc<Mutex<Vec<String>>>, Arc<dyn Fn() + Send + Sync>);

impl RecordingSubscriber {
    fn new(act: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::default(), Arc::new(act))
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for RecordingSubscriber {
    /// `sometimes`, because a cached interest would also apply to threads without a subscriber.
    fn register_callsite(&self, _: &'static tracing::Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().expect("the lock is not poisoned").push(message.0);
        (self.1)();
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn one_slot() -> Limits {
    Throttle::builder().slots(Slots::fixed(1)).limits().expect("in bounds")
}

/// Operators look for a full registry in the logs.
#[test]
fn overflow_and_eviction_are_logged() {
    keep_undecided();
    let subscriber = RecordingSubscriber::new(|| {});
    with_default(subscriber.clone(), || {
        let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).build().unwrap();
        let mut events = keyed.events();
        drop(keyed.throttle(&1));
        let held = keyed.try_acquire(&2, REQUEST).unwrap();
        drop(keyed.throttle(&3));
        drop(held);
        assert!(matches!(events.try_next().unwrap().event, KeyedEvent::Evicted { .. }));
        assert!(matches!(events.try_next().unwrap().event, KeyedEvent::Overflowed { .. }));
    });
    let messages = subscriber.0.lock().unwrap().clone();
    assert_eq!(messages, ["evicted", "overflowed"]);
}

/// A subscriber may take snapshots, acquire keys and reconfigure the registry.
#[test]
fn subscriber_may_call_the_registry() {
    keep_undecided();
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let limits = Throttle::host().circuit(Circuit::after_failures(1)).limits().unwrap();
        let keyed: Keyed<u32> =
            Keyed::builder(limits.clone()).shards(1).labelled(u32::to_string).build().unwrap();
        let subscriber = RecordingSubscriber::new({
            let keyed = keyed.clone();
            move || {
                let _ = keyed.snapshot(4);
                drop(keyed.try_acquire(&7, REQUEST));
                let limits = limits.clone();
                keyed.reconfigure(move |_| limits.clone());
            }
        });
        with_default(subscriber.clone(), || {
            keyed.record(&1, Outcome::failure());
            keyed.set_enabled(false);
            keyed.throttle(&1).pause(secs(1));
            keyed.close();
        });
        let messages = subscriber.0.lock().unwrap().len();
        let _ = done.send(messages);
    });
    assert!(ended.recv_timeout(secs(60)).expect("no deadlock") >= 3);
}

/// All gauges return to zero once the keys are evicted or dropped, also after reconfiguration and waits.
#[tokio::test(start_paused = true)]
async fn gauges_return_to_zero_when_keys_are_gone() {
    keep_undecided();
    let metrics = MetricStore::default();
    let limits =
        Throttle::host().slots(Slots::fixed(3)).circuit(Circuit::after_failures(1)).limits().unwrap();
    let keyed: Keyed<u32> = with_local_recorder(&metrics, || {
        Keyed::builder(limits.clone()).keys_max(2).measured().build().unwrap()
    });
    for key in 0..4 {
        drop(keyed.throttle(&key));
    }
    let held = keyed.try_acquire(&9, REQUEST).unwrap();
    let over = keyed.try_acquire(&10, REQUEST).unwrap();
    keyed.record(&9, Outcome::failure());
    keyed.reconfigure(move |_| limits.edited(|draft| draft.slots = Some(Slots::fixed(5))).unwrap());
    assert!(timeout(millis(1), keyed.acquire(&9, REQUEST)).await.unwrap().is_err());
    keyed.set_enabled(false);
    drop(keyed.try_acquire(&9, REQUEST));
    drop(keyed);
    drop((held, over));
    for name in
        ["in_flight", "waiting", "slots", "rate", "circuit_state/open", "circuit_state/half_open", "keys"]
    {
        let left = metrics.of(&format!("tidegate_{name}"));
        assert!(left.abs() < 1e-9, "{name}: {left}");
    }
}

/// A request whose tenant waits counts as one admission, however often the gates were evaluated.
#[tokio::test(start_paused = true)]
async fn joined_request_is_counted_as_admitted_once() {
    keep_undecided();
    let metrics = MetricStore::default();
    let throttle = with_local_recorder(&metrics, || {
        Throttle::builder().slots(Slots::fixed(4)).measured().build().unwrap()
    });
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_second("rpm", 1)]).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    for _ in 0..3 {
        joined
            .acquire(("acme", "r"), Cost::request())
            .await
            .unwrap()
            .settle(Outcome::success())
            .await
            .unwrap();
    }
    assert_eq!(throttle.snapshot().admitted, 3);
    assert!(
        (metrics.of("tidegate_admitted_total") - 3.0).abs() < 0.5,
        "{}",
        metrics.of("tidegate_admitted_total")
    );
}

/// Events lost to a listener of keys appear in the snapshot and in the metric of that name.
#[test]
fn events_lost_to_a_keyed_listener_are_in_the_metric() {
    keep_undecided();
    let metrics = MetricStore::default();
    let clock = ManualClock::new();
    let slot: Arc<Mutex<Option<Keyed<u32>>>> = Arc::default();
    let keyed: Keyed<u32> = with_local_recorder(&metrics, || {
        let slot = Arc::clone(&slot);
        let builder = Keyed::builder(one_slot()).clock(clock.clone()).measured();
        builder
            .on_event(move |_| {
                // Slow, so that many events accumulate.
                if let Some(keyed) = slot.lock().unwrap().take() {
                    for key in 100..2_000 {
                        keyed.throttle(&key).pause(secs(1));
                    }
                }
            })
            .build()
            .unwrap()
    });
    *slot.lock().unwrap() = Some(keyed.clone());
    keyed.throttle(&1).pause(secs(1));
    keyed.throttle(&2).pause(secs(1));
    let lost = keyed.snapshot(0).events_lost;
    assert!(lost > 0);
    assert_eq!(keyed.throttle(&1).snapshot().events_lost, lost, "each counted once");
    let reported = metrics.of("tidegate_events_lost_total");
    assert!(
        (reported - f64::from(u32::try_from(lost).unwrap())).abs() < 0.5,
        "{lost} lost, and {reported} in the metric"
    );
}

/// Metrics and snapshot sum up the same requests.
#[tokio::test(start_paused = true)]
async fn metrics_agree_with_snapshot() {
    keep_undecided();
    let metrics = MetricStore::default();
    let keyed: Keyed<u32> =
        with_local_recorder(&metrics, || Keyed::builder(one_slot()).keys_max(1).measured().build().unwrap());
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let shared = keyed.try_acquire(&2, REQUEST).unwrap();
    assert!(keyed.try_acquire(&1, REQUEST).is_err() && keyed.try_acquire(&3, REQUEST).is_err());
    let waiting = tokio::spawn({
        let keyed = keyed.clone();
        async move { drop(keyed.acquire(&4, REQUEST).await) }
    });
    sleep(millis(1)).await;
    let seen = keyed.snapshot(0);
    let metric = |name: &str| metrics.of(&format!("tidegate_{name}"));
    let counted =
        (metric("admitted_total"), metric("refused_total/limited"), metric("waiting"), metric("in_flight"));
    let f = |number: u64| f64::from(u32::try_from(number).unwrap());
    waiting.abort();
    drop((held, shared));
    assert_eq!(counted, (f(seen.admitted), f(seen.refused), f(seen.waiting), f(seen.in_flight)));
}

/// Cancelled waits count as waits.
#[tokio::test(start_paused = true)]
async fn cancelled_waits_are_counted() {
    keep_undecided();
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).build().unwrap();
    let _held = keyed.try_acquire(&1, REQUEST).unwrap();
    for _ in 0..3 {
        assert!(timeout(secs(5), keyed.acquire(&1, REQUEST)).await.is_err());
    }
    let snapshot = keyed.snapshot(0);
    assert_eq!((snapshot.waited, snapshot.throttled), (secs(15), 3), "total {}", snapshot.total);
}

/// The total waiting time saturates and does not overflow.
#[tokio::test]
async fn total_waiting_time_does_not_overflow() {
    const YEARS: Duration = secs(400 * 365 * 86_400);
    keep_undecided();
    let clock = ManualClock::new();
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).clock(clock.clone()).build().unwrap();
    let held: Vec<_> = (0..2).map(|key| keyed.try_acquire(&key, REQUEST).unwrap()).collect();
    let waiters: Vec<_> = (0..2)
        .map(|key| {
            let keyed = keyed.clone();
            tokio::spawn(async move { keyed.acquire(&key, REQUEST).await.map(drop) })
        })
        .collect();
    tokio::task::yield_now().await;
    clock.advance(YEARS);
    drop(held);
    for waiter in waiters {
        waiter.await.unwrap().unwrap();
    }
    assert!(
        keyed.snapshot(0).waited >= YEARS,
        "two have waited {YEARS:?} each: {:?}",
        keyed.snapshot(0).waited
    );
}
