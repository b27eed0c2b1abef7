//! What happens to the keys is told with the key, in order, and never under a lock (invariant 9).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use tidegate::{
    Circuit, Event, Evict, Instant, Keyed, KeyedEvent, KeyedEvents, Limits, Outcome, Rate, Throttle, Trip,
};

use crate::kit::keyed::{IDLE, by_hand, has, hearing, poll_once, rate, slots, sweep, told};
use crate::kit::{REQUEST, secs};

fn fragile() -> Limits {
    let circuit = Circuit::after_failures(1).open_for(secs(5)).probes(1);
    Throttle::builder().circuit(circuit).limits().expect("within the bounds")
}

fn opened() -> KeyedEvent {
    let why = Trip::Consecutive { failures: 1 };
    KeyedEvent::Throttle(Event::CircuitOpened { span: secs(5), why })
}

fn read(events: &mut KeyedEvents<u64>) -> Vec<(Option<u64>, KeyedEvent)> {
    std::iter::from_fn(|| events.try_next()).map(|notice| (notice.key, notice.event)).collect()
}

#[test]
fn events_carry_their_key_and_come_in_order() {
    let (builder, clock) = by_hand(fragile());
    let (builder, heard) = hearing(builder);
    let keyed = builder.build().unwrap();
    let mut events = keyed.events();
    keyed.record(&1, Outcome::failure());
    clock.advance(secs(2));
    keyed.record(&2, Outcome::failure());
    clock.advance(secs(4));
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::success());
    keyed.throttle(&2).pause(secs(1));
    let until = Instant::ZERO + secs(7);
    let wanted = [
        (Some(1), opened()),
        (Some(2), opened()),
        (Some(1), KeyedEvent::Throttle(Event::CircuitHalfOpened)),
        (Some(1), KeyedEvent::Throttle(Event::CircuitClosed)),
        (Some(2), KeyedEvent::Throttle(Event::Paused { until, span: secs(1) })),
    ];
    let times: Vec<_> =
        heard.lock().unwrap().iter().map(|notice| notice.at.as_nanos() / 1_000_000_000).collect();
    assert_eq!(times, [0, 2, 6, 6, 6]);
    assert_eq!(told(&heard), wanted);
    assert_eq!(read(&mut events), wanted);
    assert_eq!(events.missed(), 0);
}

#[test]
fn the_shared_entrys_events_have_no_key() {
    let (builder, _) = by_hand(fragile());
    let (builder, heard) = hearing(builder);
    let keyed = builder.keys_max(1).overflow(fragile()).build().unwrap();
    let pinned = keyed.throttle(&1);
    keyed.record(&2, Outcome::failure());
    assert_eq!(told(&heard), [(None, KeyedEvent::Overflowed { keys_max: 1 }), (None, opened())]);
    drop(pinned);
}

#[test]
fn a_stream_of_one_key_shows_that_key_alone() {
    let (builder, _) = by_hand(fragile());
    let keyed = builder.build().unwrap();
    let mut events = keyed.throttle(&1).events();
    keyed.record(&2, Outcome::failure());
    keyed.record(&1, Outcome::failure());
    keyed.record(&3, Outcome::failure());
    let all: Vec<_> = std::iter::from_fn(|| events.try_next()).map(|notice| notice.event).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(matches!(all[0], Event::CircuitOpened { .. }));
}

#[test]
fn a_listener_that_panics_is_counted_and_the_next_event_is_told() {
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    let (builder, _) = by_hand(fragile());
    let builder = builder.on_event(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        panic!("the listener does");
    });
    let keyed = builder.build().unwrap();
    for key in 0..5 {
        keyed.record(&key, Outcome::failure());
        assert!(keyed.try_acquire(&key, REQUEST).is_err(), "what happened has happened");
    }
    assert_eq!(count.load(Ordering::SeqCst), 5);
    assert_eq!(keyed.snapshot(0).listener_panics, 5);
}

#[test]
fn a_listener_may_do_whatever_a_caller_may() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let keys = Arc::clone(&cell);
    let (told, tellings) = mpsc::channel();
    let (is_busy, acts) = (AtomicBool::new(false), AtomicU64::new(0));
    let (builder, clock) = by_hand(fragile());
    let builder = builder.shards(1).keys_max(3).on_event(move |notice| {
        let keyed = keys.get().expect("it is set before anything happens");
        assert!(!is_busy.swap(true, Ordering::SeqCst), "one at a time");
        told.send((notice.key, notice.event.clone())).expect("somebody reads");
        let key = notice.key.unwrap_or(0);
        if acts.fetch_add(1, Ordering::SeqCst) >= 100 {
            // What it does makes more happen, and that has to have an end.
            is_busy.store(false, Ordering::SeqCst);
            return;
        }
        drop(keyed.try_acquire(&key, REQUEST));
        drop(keyed.try_acquire(&(key + 1), REQUEST));
        keyed.snapshot(9);
        keyed.throttle(&key).snapshot();
        keyed.set_limits(&key, fragile()).ok();
        keyed.reconfigure(|_| fragile());
        keyed.clear_limits(&key);
        keyed.set_enabled(false);
        keyed.set_enabled(true);
        drop(poll_once(keyed.acquire(&(key + 2), REQUEST)));
        drop(keyed.events());
        is_busy.store(false, Ordering::SeqCst);
    });
    let keyed = builder.build().unwrap();
    cell.set(keyed.clone()).unwrap();
    // In a thread, so that a deadlock is a failure and not a hang.
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        keyed.record(&1, Outcome::failure());
        for key in 10..30 {
            keyed.record(&key, Outcome::failure());
            clock.advance(IDLE);
            drop(keyed.try_acquire(&key, REQUEST));
            keyed.record(&key, Outcome::success());
        }
        keyed.close();
        done.send(keyed.snapshot(9)).expect("somebody waits");
    });
    let seen = is_done.recv_timeout(Duration::from_secs(60)).expect("nobody waits for itself");
    assert_eq!((seen.listener_panics, seen.events_lost, seen.in_flight), (0, 0, 0));
    let told: Vec<_> = tellings.try_iter().collect();
    assert!(told.contains(&(Some(1), opened())));
    assert!(told.iter().any(|(_, event)| matches!(event, KeyedEvent::Evicted { .. })), "{told:?}");
}

#[test]
fn a_slow_listener_loses_what_comes_after_its_room_is_full_and_that_is_counted() {
    let (begun, beginning) = mpsc::channel();
    let (go_on, going_on) = mpsc::channel::<()>();
    let (going_on, is_first) = (std::sync::Mutex::new(going_on), AtomicBool::new(true));
    let (builder, _) = by_hand(Throttle::builder().limits().unwrap());
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    let builder = builder.on_event(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        if is_first.swap(false, Ordering::SeqCst) {
            begun.send(()).expect("somebody reads");
            going_on.lock().expect("no panic").recv().expect("it is told to go on");
        }
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || keyed.throttle(&0).pause(secs(1)))
    };
    beginning.recv().unwrap();
    for key in 1..=1_100 {
        assert!(keyed.throttle(&key).pause(secs(1)), "nobody waits for the listener");
    }
    assert_eq!(keyed.snapshot(0).events_lost, 1_100 - 1_024);
    go_on.send(()).unwrap();
    assert!(slow.join().unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 1 + 1_024);
    assert!(keyed.throttle(&0).resume());
    assert_eq!(count.load(Ordering::SeqCst), 1 + 1_024 + 1, "it hears again");
}

#[test]
fn a_slow_reader_loses_the_oldest_and_knows_how_many() {
    let (builder, _) = by_hand(fragile());
    let keyed = builder.build().unwrap();
    let mut events = keyed.events();
    for key in 0..1_500 {
        keyed.record(&key, Outcome::failure());
    }
    let all = read(&mut events);
    assert_eq!((all.len(), events.missed()), (1_024, 476));
    assert_eq!(all[0].0, Some(476));
}

#[test]
fn a_key_is_not_forgotten_before_what_happened_to_it_is_told() {
    let (begun, beginning) = mpsc::channel();
    let (go_on, going_on) = mpsc::channel::<()>();
    let going_on = std::sync::Mutex::new(going_on);
    let (builder, clock) = by_hand(Throttle::builder().limits().unwrap());
    let (told, tellings) = mpsc::channel();
    let builder = builder.shards(1).on_event(move |notice| {
        told.send((notice.key, notice.event.clone())).expect("somebody reads");
        if notice.key == Some(0) {
            begun.send(()).expect("somebody reads");
            going_on.lock().expect("no panic").recv().expect("it is told to go on");
        }
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || keyed.throttle(&0).pause(secs(1)))
    };
    beginning.recv().unwrap();
    assert!(keyed.throttle(&1).pause(secs(1)), "this is told when the listener is back");
    clock.advance(IDLE);
    sweep(&keyed, 2);
    assert!(has(&keyed, 1));
    go_on.send(()).unwrap();
    slow.join().unwrap();
    let keys: Vec<_> = tellings.try_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [Some(0), Some(1)]);
    drop(go_on);
    clock.advance(IDLE);
    sweep(&keyed, 2);
    assert!(!has(&keyed, 1));
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_the_keys_are_gone() {
    let keyed: Keyed<u64> = Keyed::builder(fragile()).build().unwrap();
    let mut events = keyed.events();
    let waited = tokio::time::timeout(secs(1), events.next()).await;
    assert!(waited.is_err(), "nothing has happened yet");
    keyed.record(&1, Outcome::failure());
    drop(keyed);
    assert_eq!(
        events.next().await.map(|notice| notice.key),
        Some(Some(1)),
        "no event is lost to a cancelled read"
    );
    assert_eq!(events.next().await, None);
}

#[test]
fn evictions_are_told_with_their_cause() {
    let (builder, clock) = by_hand(rate(Rate::per_second(1).burst(1)));
    let (builder, heard) = hearing(builder);
    let keyed = builder.keys_max(1).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(secs(1));
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    clock.advance(IDLE);
    drop(keyed.try_acquire(&3, REQUEST).unwrap());
    drop(keyed.try_acquire(&4, REQUEST).unwrap());
    let wanted = [
        (Some(1), KeyedEvent::Evicted { cause: Evict::Size }),
        (Some(2), KeyedEvent::Evicted { cause: Evict::Idle }),
        (None, KeyedEvent::Overflowed { keys_max: 1 }),
    ];
    assert_eq!(told(&heard), wanted);
    let seen = keyed.snapshot(0);
    assert_eq!((seen.evicted_size, seen.evicted_idle, seen.overflowed), (1, 1, 1));
}

#[test]
fn nobody_is_told_of_a_key_that_was_looked_at_and_is_not_there() {
    let (builder, _) = by_hand(slots(1));
    let (builder, heard) = hearing(builder);
    let keyed = builder.build().unwrap();
    assert!(keyed.get(&1).is_none());
    keyed.snapshot(1);
    assert_eq!(told(&heard), []);
}

/// The story: keys that left together were told of one by one, after the shard's lock was gone. A listener, or another
/// thread, that asked for one of them in between was told of its new life first and of its end afterwards.
#[test]
fn what_is_told_of_a_keys_next_life_comes_after_its_end() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, is_first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (told, tellings) = mpsc::channel();
    let (builder, clock) = by_hand(fragile());
    let builder = builder.shards(1).on_event(move |notice| {
        told.send((notice.key, notice.event.clone())).expect("somebody reads");
        if is_first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("it is set before anything happens");
            (1..=4).filter(|key| !has(keyed, *key)).for_each(|key| keyed.record(&key, Outcome::failure()));
        }
    });
    let keyed = builder.build().unwrap();
    cell.set(keyed.clone()).unwrap();
    for key in 1..=4 {
        drop(keyed.try_acquire(&key, REQUEST).unwrap());
    }
    clock.advance(IDLE);
    sweep(&keyed, 9);
    let told: Vec<_> = tellings.try_iter().collect();
    for key in 1..=4 {
        let of_key: Vec<_> = told.iter().filter(|(of, _)| *of == Some(key)).map(|(_, event)| event).collect();
        let wanted = [KeyedEvent::Evicted { cause: Evict::Idle }, opened()];
        assert_eq!(of_key, wanted.iter().collect::<Vec<_>>(), "of key {key}");
        assert!(has(&keyed, key));
    }
}
