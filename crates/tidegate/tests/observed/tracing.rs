//! Traces: what the guide's table says is what a subscriber hears, in order, and nobody is hurt by one that panics.

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

/// One event as it was heard.
#[derive(Debug, Clone)]
struct Heard {
    level: Level,
    target: String,
    /// Those that the event has, be they filled or not.
    fields: BTreeSet<String>,
    values: BTreeMap<String, String>,
}

impl Heard {
    fn message(&self) -> &str {
        &self.values["message"]
    }
}

/// Hears everything up to a level, and keeps it.
#[derive(Clone)]
struct Ear {
    most: LevelFilter,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Ear {
    fn up_to(most: LevelFilter) -> Self {
        Self { most, heard: Arc::default() }
    }

    fn heard(&self) -> Vec<Heard> {
        self.heard.lock().expect("nobody panics here").clone()
    }

    fn messages(&self) -> Vec<String> {
        self.heard().iter().map(|heard| heard.message().to_owned()).collect()
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

impl Subscriber for Ear {
    /// Asked each time: other tests have other ears, and what one always hears another may never.
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
        self.heard.lock().expect("nobody panics here").push(Heard { level, target, fields, values });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A circuit that opens, half-opens and closes; slots that are cut and given back; pauses, waits and the end.
fn a_life_with_slots(clock: &ManualClock) {
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
    throttle.try_acquire(REQUEST).expect("there is room").settle(Outcome::success());
    for _ in 0..4 {
        clock.advance(secs(61));
        throttle.try_acquire(REQUEST).expect("there is room").settle(Outcome::success());
    }
    throttle.pause(secs(2));
    throttle.resume();
    throttle.record(Outcome::success().retry_after(secs(86_400)));
    throttle.resume();
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(1))).expect("within the bounds");
    assert!(throttle.try_acquire(Cost::request().tokens(101)).is_err(), "too large");
    let held = throttle.try_acquire(REQUEST).expect("there is room");
    let mut waiting = Caller::asks(&throttle, REQUEST);
    let mut turned_away = Caller::new(throttle.acquire(REQUEST));
    assert!(turned_away.refused().is_some(), "the queue is full");
    clock.advance(millis(250));
    drop(held);
    let held = waiting.permit().expect("its turn has come");
    // Granted and not fetched, until a newcomer that has to wait finds it.
    let unseen = Caller::asks(&throttle, REQUEST);
    drop(held);
    for _ in 0..2 {
        drop(Caller::asks(&throttle, REQUEST));
        clock.advance(secs(2));
    }
    drop(unseen);
    throttle.close();
}

/// A rate that is cut and recovers.
fn a_life_with_a_rate(clock: &ManualClock) {
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

/// More tokens than a window keeps apart.
fn a_life_with_a_budget(clock: &ManualClock) {
    let budget = Budget::tokens(1_000_000, secs(3_600));
    let throttle =
        Throttle::builder().budget(budget).clock(clock.clone()).build().expect("within the bounds");
    for _ in 0..4_200 {
        clock.advance(millis(1));
        throttle.record_tokens(1);
    }
}

/// More keys than there is room for: one that is forgotten, and one that has to share.
fn a_life_with_keys(clock: &ManualClock) {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().expect("within the bounds");
    let keys: Keyed<u32> =
        Keyed::builder(limits).keys_max(1).clock(clock.clone()).build().expect("within the bounds");
    drop(keys.throttle(&1));
    let _held = keys.try_acquire(&2, REQUEST).expect("there is room");
    drop(keys.throttle(&3));
}

/// Everything there is to hear, up to a level.
fn everything(most: LevelFilter) -> Ear {
    let ear = Ear::up_to(most);
    with_default(ear.clone(), || {
        for life in [a_life_with_slots, a_life_with_a_rate, a_life_with_a_budget, a_life_with_keys] {
            life(&ManualClock::new());
        }
    });
    ear
}

type Row = (String, String, BTreeSet<String>);

/// The guide's table: message, level, fields.
fn promised() -> BTreeSet<Row> {
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

fn rows(ear: &Ear) -> BTreeSet<Row> {
    let common = ["message", "throttle", "key"];
    ear.heard()
        .into_iter()
        .map(|heard| {
            assert_eq!(heard.target, "tidegate");
            assert!(common.iter().all(|field| heard.fields.contains(*field)), "{heard:?}");
            let fields = heard.fields.iter().filter(|field| !common.contains(&field.as_str()));
            (heard.message().to_owned(), heard.level.to_string(), fields.cloned().collect())
        })
        .collect()
}

#[test]
fn what_is_heard_is_what_the_guide_says() {
    keep_undecided();
    assert_eq!(rows(&everything(LevelFilter::TRACE)), promised());
}

#[test]
fn a_subscriber_hears_no_more_than_it_wants() {
    keep_undecided();
    for (most, levels) in [
        (LevelFilter::INFO, vec!["WARN", "INFO"]),
        (LevelFilter::WARN, vec!["WARN"]),
        (LevelFilter::OFF, vec![]),
    ] {
        let wanted = promised().into_iter().filter(|row| levels.contains(&row.1.as_str()));
        assert_eq!(rows(&everything(most)), wanted.collect(), "{most}");
    }
}

#[test]
fn events_are_heard_in_order_with_their_numbers_and_whose_they_are() {
    keep_undecided();
    let ear = Ear::up_to(LevelFilter::INFO);
    with_default(ear.clone(), || {
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
    let told: Vec<_> = ear
        .heard()
        .iter()
        .map(|heard| (heard.message().to_owned(), heard.values.get("key").cloned().unwrap_or_default()))
        .collect();
    let wanted = [
        ("slowed", ""),
        ("slowed", "example.com"),
        ("circuit opened", ""),
        ("slowed", ""),
        ("closed", "example.com"),
        ("drained", "example.com"),
    ];
    assert_eq!(told, wanted.map(|(message, key)| (message.to_owned(), key.to_owned())));
    let heard = ear.heard();
    assert!(heard.iter().all(|heard| heard.values["throttle"] == "api"));
    let value = |index: usize, field: &str| heard[index].values[field].clone();
    assert_eq!((value(0, "slots_from"), value(0, "slots_to")), ("8".to_owned(), "4".to_owned()));
    assert_eq!(value(2, "span_seconds"), "3.0");
    assert_eq!(value(2, "why"), "Consecutive { failures: 2 }");
}

#[test]
fn a_wait_says_how_long_it_was_and_which_gate_it_was() {
    keep_undecided();
    let ear = Ear::up_to(LevelFilter::DEBUG);
    let clock = ManualClock::new();
    with_default(ear.clone(), || {
        let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(clock.clone()).build().unwrap();
        let held = throttle.try_acquire(REQUEST).unwrap();
        let mut waiting = Caller::asks(&throttle, REQUEST);
        let mut hurried = Caller::new(throttle.acquire_within(REQUEST, millis(200)));
        assert!(hurried.poll().is_pending());
        clock.advance(millis(250));
        assert!(hurried.refused().is_some());
        drop(held);
        drop(waiting.permit().unwrap());
    });
    let heard = ear.heard();
    assert_eq!(ear.messages(), ["refused", "waited"]);
    let value = |index: usize, field: &str| heard[index].values[field].clone();
    assert_eq!((value(0, "gate"), value(0, "waited_seconds")), ("the queue".to_owned(), "0.25".to_owned()));
    assert_eq!(value(0, "reason"), "held back by the queue");
    assert_eq!((value(1, "gate"), value(1, "waited_seconds")), ("the slots".to_owned(), "0.25".to_owned()));
}

#[test]
fn where_nobody_hears_nothing_is_put_into_words() {
    keep_undecided();
    let asked = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&asked);
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().unwrap();
    let label = move |_: &u32| {
        counter.fetch_add(1, Ordering::SeqCst);
        "example.com".to_owned()
    };
    let keys = Keyed::builder(limits).labelled(label).clock(ManualClock::new()).build().unwrap();
    let keyed = keys.throttle(&1);
    keyed.pause(secs(1));
    // Others may be heard: a subscriber that wants warnings only, and one that wants nothing of ours.
    with_default(Ear::up_to(LevelFilter::WARN), || keyed.pause(secs(2)));
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    with_default(Ear::up_to(LevelFilter::INFO), || keyed.pause(secs(3)));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// Hears by panicking.
struct Angry;

impl Subscriber for Angry {
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
        panic!("a bug in the subscriber");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_subscriber_that_panics_is_caught_and_counted() {
    keep_undecided();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(ManualClock::new()).build().unwrap();
    with_default(Angry, || {
        throttle.pause(secs(1));
        assert!(throttle.try_acquire(REQUEST).is_err(), "paused, and that is told too");
    });
    assert_eq!(throttle.snapshot().listener_panics, 2);
    throttle.resume();
    assert!(throttle.try_acquire(REQUEST).is_ok());
}

/// A subscriber may use the throttle it hears of; what that causes is heard when it returns.
#[test]
fn a_subscriber_may_call_the_throttle_again() {
    struct Busybody(Throttle, Ear);

    impl Subscriber for Busybody {
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
            let mut heard = self.1.heard.lock().expect("nobody panics here");
            heard.last_mut().expect("it was just heard").values.insert("left".into(), String::new());
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    keep_undecided();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(ManualClock::new()).build().unwrap();
    let ear = Ear::up_to(LevelFilter::INFO);
    with_default(Busybody(throttle.clone(), ear.clone()), || throttle.pause(secs(1)));
    assert_eq!(ear.messages(), ["paused", "closed", "drained"]);
    assert!(ear.heard().iter().all(|heard| heard.values.contains_key("left")), "one after the other");
}
