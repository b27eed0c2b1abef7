//! Events of keys carry their key, arrive in order, and are never delivered under a lock (invariant 9).

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures_core::Stream;
use tidegate::{
    Circuit, Event, Events, EvictCause, Instant, Keyed, KeyedEvent, KeyedEvents, Limits, Outcome, Rate,
    Throttle, Trip,
};

use crate::kit::keyed::{IDLE, by_hand, has, poll_once, rate, record_notices, slots, sweep, take_notices};
use crate::kit::{REQUEST, Wakes, secs};

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
fn events_carry_their_key_in_order() {
    let (builder, clock) = by_hand(fragile());
    let (builder, notices) = record_notices(builder);
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
        notices.lock().unwrap().iter().map(|notice| notice.at.as_nanos() / 1_000_000_000).collect();
    assert_eq!(times, [0, 2, 6, 6, 6]);
    assert_eq!(take_notices(&notices), wanted);
    assert_eq!(read(&mut events), wanted);
    assert_eq!(events.missed(), 0);
}

/// The stream, `next` and `try_next` continue where the other ended, also after a wait.
#[tokio::test(start_paused = true)]
async fn events_are_a_stream() {
    async fn item<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
        poll_fn(|context| Pin::new(&mut *stream).poll_next(context)).await
    }
    let throttle = Throttle::new();
    let mut events = throttle.events();
    assert!(poll_once(item(&mut events)).is_pending());
    assert_eq!(events.try_next(), None);
    throttle.pause(secs(1));
    assert!(matches!(events.try_next(), Some(notice) if matches!(notice.event, Event::Paused { .. })));
    assert!(poll_once(item(&mut events)).is_pending());
    throttle.resume();
    assert_eq!(item(&mut events).await.map(|notice| notice.event), Some(Event::Resumed));
    throttle.close();
    assert_eq!(events.next().await.map(|notice| notice.event), Some(Event::Closed { in_flight: 0 }));
    assert_eq!(item(&mut events).await.map(|notice| notice.event), Some(Event::Drained));
    drop(throttle);
    assert_eq!(item(&mut events).await, None);
    let (builder, _) = by_hand(fragile());
    let keyed = builder.build().unwrap();
    let mut events = keyed.events();
    keyed.record(&7, Outcome::failure());
    assert_eq!(item(&mut events).await.map(|notice| (notice.key, notice.event)), Some((Some(7), opened())));
}

/// Regression: `try_next` took the place of the waiting task's waker, so no event woke that task.
#[test]
fn try_next_leaves_a_waiting_task_its_wake_up() {
    let throttle = Throttle::new();
    let mut events = throttle.events();
    let wakes = Arc::new(Wakes::default());
    let task = Waker::from(Arc::clone(&wakes));
    let poll = |events: &mut Events| Pin::new(events).poll_next(&mut Context::from_waker(&task));
    for round in 1..=2 {
        assert!(poll(&mut events).is_pending());
        assert_eq!((events.try_next(), events.try_next()), (None, None));
        throttle.pause(secs(1));
        assert_eq!(wakes.count(), round);
        throttle.resume();
        assert_eq!(wakes.count(), round, "woken once, until it polls again");
        assert!(events.try_next().is_some());
        assert!(matches!(poll(&mut events), Poll::Ready(Some(_))));
        assert_eq!(events.try_next(), None);
    }
}

#[test]
fn overflow_entry_events_have_no_key() {
    let (builder, _) = by_hand(fragile());
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(1).overflow(fragile()).build().unwrap();
    let pinned = keyed.throttle(&1);
    keyed.record(&2, Outcome::failure());
    assert_eq!(take_notices(&notices), [(None, KeyedEvent::Overflowed { keys_max: 1 }), (None, opened())]);
    drop(pinned);
}

#[test]
fn stream_of_one_key_shows_that_key_alone() {
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
fn listener_panic_is_counted_and_delivery_goes_on() {
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    let (builder, _) = by_hand(fragile());
    let builder = builder.on_event(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        panic!("injected panic");
    });
    let keyed = builder.build().unwrap();
    for key in 0..5 {
        keyed.record(&key, Outcome::failure());
        assert!(keyed.try_acquire(&key, REQUEST).is_err(), "the event's cause stays in effect");
    }
    assert_eq!(count.load(Ordering::SeqCst), 5);
    assert_eq!(keyed.snapshot(0).listener_panics, 5);
}

#[test]
fn listener_may_call_the_registry() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let keys = Arc::clone(&cell);
    let (sender, receiver) = mpsc::channel();
    let (is_busy, acts) = (AtomicBool::new(false), AtomicU64::new(0));
    let (builder, clock) = by_hand(fragile());
    let builder = builder.shards(1).keys_max(3).on_event(move |notice| {
        let keyed = keys.get().expect("set before the first event");
        assert!(!is_busy.swap(true, Ordering::SeqCst), "the listener is not re-entered");
        sender.send((notice.key, notice.event.clone())).expect("the receiver is alive");
        let key = notice.key.unwrap_or(0);
        if acts.fetch_add(1, Ordering::SeqCst) >= 100 {
            // Its calls cause further events, so it has to stop at some point.
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
        done.send(keyed.snapshot(9)).expect("the receiver is alive");
    });
    let seen = is_done.recv_timeout(Duration::from_secs(60)).expect("no deadlock");
    assert_eq!((seen.listener_panics, seen.events_lost, seen.in_flight), (0, 0, 0));
    let events: Vec<_> = receiver.try_iter().collect();
    assert!(events.contains(&(Some(1), opened())));
    assert!(events.iter().any(|(_, event)| matches!(event, KeyedEvent::Evicted { .. })), "{events:?}");
}

#[test]
fn slow_listener_loses_events_beyond_its_buffer() {
    let (started, has_started) = mpsc::channel();
    let (resume, resumed) = mpsc::channel::<()>();
    let (resumed, is_first) = (std::sync::Mutex::new(resumed), AtomicBool::new(true));
    let (builder, _) = by_hand(Throttle::builder().limits().unwrap());
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    let builder = builder.on_event(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        if is_first.swap(false, Ordering::SeqCst) {
            started.send(()).expect("the receiver is alive");
            resumed.lock().expect("no panic").recv().expect("the sender sends");
        }
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || keyed.throttle(&0).pause(secs(1)))
    };
    has_started.recv().unwrap();
    for key in 1..=1_100 {
        assert!(keyed.throttle(&key).pause(secs(1)), "callers do not wait for the listener");
    }
    assert_eq!(keyed.snapshot(0).events_lost, 1_100 - 1_024);
    resume.send(()).unwrap();
    assert!(slow.join().unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 1 + 1_024);
    assert!(keyed.throttle(&0).resume());
    assert_eq!(count.load(Ordering::SeqCst), 1 + 1_024 + 1, "it receives events again");
}

#[test]
fn slow_stream_drops_oldest_and_counts_them() {
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
fn key_is_not_evicted_before_its_events_are_sent() {
    let (started, has_started) = mpsc::channel();
    let (resume, resumed) = mpsc::channel::<()>();
    let resumed = std::sync::Mutex::new(resumed);
    let (builder, clock) = by_hand(Throttle::builder().limits().unwrap());
    let (sender, receiver) = mpsc::channel();
    let builder = builder.shards(1).on_event(move |notice| {
        sender.send((notice.key, notice.event.clone())).expect("the receiver is alive");
        if notice.key == Some(0) {
            started.send(()).expect("the receiver is alive");
            resumed.lock().expect("no panic").recv().expect("the sender sends");
        }
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || keyed.throttle(&0).pause(secs(1)))
    };
    has_started.recv().unwrap();
    assert!(keyed.throttle(&1).pause(secs(1)), "this event is delivered after the listener returns");
    clock.advance(IDLE);
    sweep(&keyed, 2);
    assert!(has(&keyed, 1));
    resume.send(()).unwrap();
    slow.join().unwrap();
    let keys: Vec<_> = receiver.try_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [Some(0), Some(1)]);
    drop(resume);
    clock.advance(IDLE);
    sweep(&keyed, 2);
    assert!(!has(&keyed, 1));
}

#[tokio::test(start_paused = true)]
async fn stream_ends_when_registry_is_dropped() {
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
fn evictions_carry_their_cause() {
    let (builder, clock) = by_hand(rate(Rate::per_second(1).burst(1)));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(1).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(secs(1));
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    clock.advance(IDLE);
    drop(keyed.try_acquire(&3, REQUEST).unwrap());
    drop(keyed.try_acquire(&4, REQUEST).unwrap());
    let wanted = [
        (Some(1), KeyedEvent::Evicted { cause: EvictCause::Size }),
        (Some(2), KeyedEvent::Evicted { cause: EvictCause::Idle }),
        (None, KeyedEvent::Overflowed { keys_max: 1 }),
    ];
    assert_eq!(take_notices(&notices), wanted);
    let seen = keyed.snapshot(0);
    assert_eq!((seen.evicted_size, seen.evicted_idle, seen.overflowed), (1, 1, 1));
}

#[test]
fn lookup_of_absent_key_emits_no_event() {
    let (builder, _) = by_hand(slots(1));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.build().unwrap();
    assert!(keyed.get(&1).is_none());
    keyed.snapshot(1);
    assert_eq!(take_notices(&notices), []);
}

/// Regression: evictions of several keys were emitted one by one after the shard lock was released. A caller
/// that recreated one of them in between saw its creation before its eviction.
#[test]
fn eviction_is_emitted_before_key_is_recreated() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, is_first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (sender, receiver) = mpsc::channel();
    let (builder, clock) = by_hand(fragile());
    let builder = builder.shards(1).on_event(move |notice| {
        sender.send((notice.key, notice.event.clone())).expect("the receiver is alive");
        if is_first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("set before the first event");
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
    let events: Vec<_> = receiver.try_iter().collect();
    for key in 1..=4 {
        let of_key: Vec<_> =
            events.iter().filter(|(of, _)| *of == Some(key)).map(|(_, event)| event).collect();
        let wanted = [KeyedEvent::Evicted { cause: EvictCause::Idle }, opened()];
        assert_eq!(of_key, wanted.iter().collect::<Vec<_>>(), "of key {key}");
        assert!(has(&keyed, key));
    }
}
