//! Traces: emitted events match the guide's table, arrive in order, and a panicking subscriber does no harm.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::{
    Aimd, Brake, Budget, Circuit, Controller, Cost, Keyed, ManualClock, Outcome, Rate, Slots, Throttle,
};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::kit::{Caller, REQUEST, millis, secs};
use crate::subscribers::keep_undecided;

const GUIDE: &str = include_str!("../../src/guide/observability.md");

/// One recorded event.
#[derive(Debug, Clone)]
struct RecordedEvent {
    level: Level,
    target: String,
    /// All field names of the event, also those without a value.
    fields: BTreeSet<String>,
    values: BTreeMap<String, String>,
}

impl RecordedEvent {
    fn message(&self) -> &str {
        &self.values["message"]
    }
}

/// A subscriber that records every event up to a level.
#[derive(Clone)]
struct EventRecorder {
    most: LevelFilter,
    events: Arc<Mutex<Vec<RecordedEvent>>>,
}

impl EventRecorder {
    fn up_to(most: LevelFilter) -> Self {
        Self { most, events: Arc::default() }
    }

    fn events(&self) -> Vec<RecordedEvent> {
        self.events.lock().expect("the lock is not poisoned").clone()
    }

    fn messages(&self) -> Vec<String> {
        self.events().iter().map(|event| event.message().to_owned()).collect()
    }
}

struct Values<'a>(&'a mut BTreeMap<String, String>);

impl Visit for Values<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl Subscriber for EventRecorder {
    /// `sometimes`, because other tests use other subscribers, and a cached interest would apply to all of
    /// them.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.most
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.most)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut values = BTreeMap::new();
        event.record(&mut Values(&mut values));
        let metadata = event.metadata();
        let fields = metadata.fields().iter().map(|field| field.name().to_owned()).collect();
        let (level, target) = (*metadata.level(), metadata.target().to_owned());
        self.events.lock().expect("the lock is not poisoned").push(RecordedEvent {
            level,
            target,
            fields,
            values,
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A circuit that opens, half-opens and closes, slots that are cut and restored, pauses, waits, and a close.
fn exercise_slots(clock: &ManualClock) {
    let throttle = Throttle::builder()
        .named("slots")
        .slots(Slots::adaptive(1..=2))
        .controller(Controller::Brake(Brake::default().at(1, secs(60)).ceiling_periods(1)))
        .circuit(Circuit::after_failures(2).open_for(secs(1)).probes(1))
        .budget(Budget::tokens(100, secs(60)))
        .total(4)
        .waiters_max(1)
        .clock(clock.clone())
        .build()
        .expect("within the bounds");
    throttle.record_failure();
    throttle.record_failure();
    assert!(throttle.try_acquire(REQUEST).is_err(), "the circuit is open");
    clock.advance(secs(1));
    throttle.try_acquire(REQUEST).expect("there is capacity").settle(Outcome::success());
    for _ in 0..4 {
        clock.advance(secs(61));
        throttle.try_acquire(REQUEST).expect("there is capacity").settle(Outcome::success());
    }
    throttle.pause(secs(2));
    throttle.resume();
    throttle.record(Outcome::success().retry_after(secs(86_400)));
    throttle.resume();
    throttle
        .retune(|limits| {
            limits.slots = Some(Slots::fixed(1));
            limits.controller = Controller::Fixed;
        })
        .expect("within the bounds");
    assert!(throttle.try_acquire(Cost::request().tokens(101)).is_err(), "too large");
    let held = throttle.try_acquire(REQUEST).expect("there is capacity");
    let mut waiting = Caller::queued(&throttle, REQUEST);
    let mut overflow = Caller::new(throttle.acquire(REQUEST));
    assert!(overflow.refused().is_some(), "the queue is full");
    clock.advance(millis(250));
    drop(held);
    let held = waiting.permit().expect("it has been granted");
    // A grant that is not polled, until a new waiter detects it.
    let unpolled = Caller::queued(&throttle, REQUEST);
    drop(held);
    for _ in 0..2 {
        drop(Caller::queued(&throttle, REQUEST));
        clock.advance(secs(2));
    }
    drop(unpolled);
    throttle.close();
}

/// A rate that is cut and then recovers.
fn exercise_rate(clock: &ManualClock) {
    let aimd = Aimd::default().within(1.0..=8.0).increase(0.5);
    let throttle = Throttle::builder()
        .named("rate")
        .rate(Rate::per_second(4).burst(4))
        .controller(Controller::Aimd(aimd))
        .clock(clock.clone())
        .build()
        .expect("within the bounds");
    throttle.record(Outcome::overload());
    for _ in 0..2_000 {
        match throttle.try_acquire(REQUEST) {
            Ok(permit) => permit.settle(Outcome::success()),
            Err(_) => clock.advance(millis(100)),
        }
    }
}

/// More entries than a window keeps separately.
fn exercise_budget(clock: &ManualClock) {
    let budget = Budget::tokens(1_000_000, secs(3_600));
    let throttle =
        Throttle::builder().budget(budget).clock(clock.clone()).build().expect("within the bounds");
    for _ in 0..4_200 {
        clock.advance(millis(1));
        throttle.record_tokens(1);
    }
}

/// More keys than `keys_max`: one is evicted, and one shares the overflow entry.
fn exercise_keys(clock: &ManualClock) {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().expect("within the bounds");
    let keys: Keyed<u32> =
        Keyed::builder(limits).keys_max(1).clock(clock.clone()).build().expect("within the bounds");
    drop(keys.throttle(&1));
    let _held = keys.try_acquire(&2, REQUEST).expect("there is capacity");
    drop(keys.throttle(&3));
}

/// Overloads until `Auto` sees an outage.
fn exercise_auto(clock: &ManualClock) {
    let throttle = Throttle::auto().clock(clock.clone()).build().expect("within the bounds");
    for _ in 0..100 {
        match throttle.try_acquire(REQUEST) {
            Ok(permit) => permit.settle(Outcome::overload()),
            Err(_) => clock.advance(millis(100)),
        }
    }
}

/// Records all events up to a level.
fn record_all(most: LevelFilter) -> EventRecorder {
    let recorder = EventRecorder::up_to(most);
    with_default(recorder.clone(), || {
        for exercise in [exercise_slots, exercise_rate, exercise_auto, exercise_budget, exercise_keys] {
            exercise(&ManualClock::new());
        }
    });
    recorder
}

type Row = (String, String, BTreeSet<String>);

/// The guide's table: message, level and fields.
fn documented() -> BTreeSet<Row> {
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows = GUIDE.lines().filter(|line| line.starts_with('|')).map(cells);
    rows.filter(|row| row.len() == 3 && ["WARN", "INFO", "DEBUG"].contains(&row[1].as_str()))
        .map(|row| {
            let fields = row[2].split(',').map(|field| field.trim().trim_matches('`').to_owned());
            (row[0].clone(), row[1].clone(), fields.filter(|field| !field.is_empty()).collect())
        })
        .collect()
}

fn rows(recorder: &EventRecorder) -> BTreeSet<Row> {
    let common = ["message", "throttle", "key"];
    recorder
        .events()
        .into_iter()
        .map(|event| {
            assert_eq!(event.target, "tidegate");
            assert!(common.iter().all(|field| event.fields.contains(*field)), "{event:?}");
            let fields = event.fields.iter().filter(|field| !common.contains(&field.as_str()));
            (event.message().to_owned(), event.level.to_string(), fields.cloned().collect())
        })
        .collect()
}

#[test]
fn events_match_the_guide() {
    keep_undecided();
    assert_eq!(rows(&record_all(LevelFilter::TRACE)), documented());
}

#[test]
fn subscriber_receives_only_enabled_events() {
    keep_undecided();
    for (most, levels) in [
        (LevelFilter::INFO, vec!["WARN", "INFO"]),
        (LevelFilter::WARN, vec!["WARN"]),
        (LevelFilter::OFF, vec![]),
    ] {
        let wanted = documented().into_iter().filter(|row| levels.contains(&row.1.as_str()));
        assert_eq!(rows(&record_all(most)), wanted.collect(), "{most}");
    }
}

#[test]
fn events_arrive_in_order_with_values_and_name() {
    keep_undecided();
    let recorder = EventRecorder::up_to(LevelFilter::INFO);
    with_default(recorder.clone(), || {
        let limits = Throttle::builder()
            .slots(Slots::adaptive(1..=8))
            .controller(Controller::Brake(Brake::default().at(1, secs(60))))
            .circuit(Circuit::after_failures(2).open_for(secs(3)))
            .limits()
            .unwrap();
        let keys: Keyed<u32> = Keyed::builder(limits)
            .named("api")
            .labelled(|key| if *key == 0 { String::new() } else { "example.com".to_owned() })
            .clock(ManualClock::new())
            .build()
            .unwrap();
        let (throttle, keyed) = (keys.throttle(&0), keys.throttle(&1));
        throttle.record_failure();
        keyed.record_failure();
        throttle.record_failure();
        keyed.close();
    });
    let messages: Vec<_> = recorder
        .events()
        .iter()
        .map(|event| (event.message().to_owned(), event.values.get("key").cloned().unwrap_or_default()))
        .collect();
    let wanted = [
        ("slowed", ""),
        ("slowed", "example.com"),
        ("circuit opened", ""),
        ("slowed", ""),
        ("closed", "example.com"),
        ("drained", "example.com"),
    ];
    assert_eq!(messages, wanted.map(|(message, key)| (message.to_owned(), key.to_owned())));
    let events = recorder.events();
    assert!(events.iter().all(|event| event.values["throttle"] == "api"));
    let value = |index: usize, field: &str| events[index].values[field].clone();
    assert_eq!((value(0, "slots_from"), value(0, "slots_to")), ("8".to_owned(), "4".to_owned()));
    assert_eq!(value(2, "span_seconds"), "3.0");
    assert_eq!(value(2, "why"), "Consecutive { failures: 2 }");
}

#[test]
fn wait_event_reports_duration_and_gate() {
    keep_undecided();
    let recorder = EventRecorder::up_to(LevelFilter::DEBUG);
    let clock = ManualClock::new();
    with_default(recorder.clone(), || {
        let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(clock.clone()).build().unwrap();
        let held = throttle.try_acquire(REQUEST).unwrap();
        let mut waiting = Caller::queued(&throttle, REQUEST);
        let mut bounded = Caller::new(throttle.acquire_within(REQUEST, millis(200)));
        assert!(bounded.poll().is_pending());
        clock.advance(millis(250));
        assert!(bounded.refused().is_some());
        drop(held);
        drop(waiting.permit().unwrap());
    });
    let events = recorder.events();
    assert_eq!(recorder.messages(), ["refused", "waited"]);
    let value = |index: usize, field: &str| events[index].values[field].clone();
    assert_eq!((value(0, "gate"), value(0, "waited_seconds")), ("the queue".to_owned(), "0.25".to_owned()));
    assert_eq!(value(0, "reason"), "limited by the queue");
    assert_eq!((value(1, "gate"), value(1, "waited_seconds")), ("the slots".to_owned(), "0.25".to_owned()));
}

#[test]
fn no_event_is_formatted_without_a_subscriber() {
    keep_undecided();
    let format_count = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&format_count);
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().unwrap();
    let label = move |_: &u32| {
        counter.fetch_add(1, Ordering::SeqCst);
        "example.com".to_owned()
    };
    let keys = Keyed::builder(limits).labelled(label).clock(ManualClock::new()).build().unwrap();
    let keyed = keys.throttle(&1);
    keyed.pause(secs(1));
    // The same with a subscriber for warnings only, and one for other targets.
    with_default(EventRecorder::up_to(LevelFilter::WARN), || keyed.pause(secs(2)));
    assert_eq!(format_count.load(Ordering::SeqCst), 0);
    with_default(EventRecorder::up_to(LevelFilter::INFO), || keyed.pause(secs(3)));
    assert_eq!(format_count.load(Ordering::SeqCst), 1);
}

/// A subscriber that panics on every event.
struct PanickingSubscriber;

impl Subscriber for PanickingSubscriber {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        panic!("injected panic");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn subscriber_panic_is_caught_and_counted() {
    keep_undecided();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(ManualClock::new()).build().unwrap();
    with_default(PanickingSubscriber, || {
        throttle.pause(secs(1));
        assert!(throttle.try_acquire(REQUEST).is_err(), "paused, with an event as well");
    });
    assert_eq!(throttle.snapshot().listener_panics, 2);
    throttle.resume();
    assert!(throttle.try_acquire(REQUEST).is_ok());
}

/// A subscriber may call the throttle; events caused by this are delivered after it returns.
#[test]
fn subscriber_may_call_the_throttle() {
    struct ReentrantSubscriber(Throttle, EventRecorder);

    impl Subscriber for ReentrantSubscriber {
        fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
            Interest::sometimes()
        }

        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            self.1.enabled(metadata)
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            self.1.event(event);
            self.0.close();
            let mut events = self.1.events.lock().expect("the lock is not poisoned");
            events.last_mut().expect("it was just recorded").values.insert("left".into(), String::new());
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    keep_undecided();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(ManualClock::new()).build().unwrap();
    let recorder = EventRecorder::up_to(LevelFilter::INFO);
    with_default(ReentrantSubscriber(throttle.clone(), recorder.clone()), || throttle.pause(secs(1)));
    assert_eq!(recorder.messages(), ["paused", "closed", "drained"]);
    assert!(
        recorder.events().iter().all(|event| event.values.contains_key("left")),
        "the subscriber is not re-entered"
    );
}
