//! Listeners and streams: events arrive in order and outside the lock, and a faulty listener does no harm.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;

use tidegate::{
    Brake, Builder, Circuit, Controller, Event, ManualClock, Outcome, Pace, Slots, Throttle, Trip, Why,
};

use crate::kit::{Caller, REQUEST, millis, secs};

/// A throttle that brakes and opens its circuit at the first failure: three events each.
fn fragile() -> Builder {
    Throttle::builder()
        .slots(Slots::adaptive(1..=8))
        .controller(Controller::Brake(Brake::default().at(1, secs(60))))
        .circuit(Circuit::after_failures(2).open_for(secs(0)))
        .clock(ManualClock::new())
}

/// A throttle whose listener blocks in the first event until the sender is dropped, and the thread that
/// delivers it.
fn with_blocked_listener() -> (Throttle, mpsc::Sender<()>, thread::JoinHandle<()>) {
    let (started, receiver) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let throttle = fragile()
        .on_state_change(move |_| {
            let _ = started.send(());
            let _ = released.lock().map(|released| released.recv());
        })
        .build()
        .expect("within the bounds");
    let teller = throttle.clone();
    let telling = thread::spawn(move || teller.record_failure());
    receiver.recv().expect("the listener was called");
    (throttle, release, telling)
}

#[test]
fn events_arrive_in_order_with_their_values() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&events);
    let throttle = fragile()
        .pace(Pace::every(millis(100)).slowest(secs(1)))
        .on_state_change(move |notice| recorder.lock().unwrap().push(notice.event.clone()))
        .build()
        .unwrap();
    throttle.record_failure();
    throttle.record_failure();
    let events = events.lock().unwrap();
    assert_eq!(events.len(), 3);
    assert!(matches!(
        &events[0],
        Event::Slowed { slots, interval, rate: None, why: Why::Failures { count: 1, .. } }
            if (slots.from, slots.to) == (8, 4) && (interval.from, interval.to) == (millis(100), millis(200))
    ));
    assert_eq!(events[1], Event::CircuitOpened { span: secs(0), why: Trip::Consecutive { failures: 2 } });
    assert!(matches!(&events[2], Event::Slowed { slots, .. } if (slots.from, slots.to) == (4, 2)));
}

#[test]
fn listener_panic_is_caught_and_counted() {
    let throttle = fragile().on_state_change(|_| panic!("injected panic")).build().unwrap();
    let permit = throttle.try_acquire(REQUEST).unwrap();
    permit.settle(Outcome::failure());
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.listener_panics, snapshot.in_flight), (1, 0));
    throttle.record_failure();
    assert_eq!(throttle.snapshot().listener_panics, 3, "delivery goes on after a panic");
}

#[test]
fn listener_may_call_the_throttle() {
    let home: Arc<OnceLock<Throttle>> = Arc::default();
    let (reached, depth) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (throttle, counter, level) = (Arc::clone(&home), Arc::clone(&reached), Arc::clone(&depth));
    let built = fragile()
        .on_state_change(move |_| {
            assert_eq!(level.fetch_add(1, Ordering::SeqCst), 0, "a listener is not re-entered");
            if let Some(throttle) = throttle.get()
                && counter.fetch_add(1, Ordering::SeqCst) < 5
            {
                drop(throttle.try_acquire(REQUEST));
                throttle.retune(|limits| limits.slots = Some(Slots::adaptive(1..=3))).unwrap();
                assert!(throttle.snapshot().slots <= Some(8));
            }
            level.fetch_sub(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    home.set(built.clone()).unwrap();
    built.record_failure();
    assert!(reached.load(Ordering::SeqCst) > 5, "events it caused are delivered after it returns");
    assert_eq!(built.snapshot().listener_panics, 0);
}

#[test]
fn slow_listener_blocks_only_the_delivering_thread() {
    let (throttle, release, telling) = with_blocked_listener();
    // While the listener blocks, other callers acquire, settle, wait and are granted as usual, events
    // included.
    let held: Vec<_> = std::iter::from_fn(|| throttle.try_acquire(REQUEST).ok()).collect();
    assert_eq!(held.len(), 4);
    let mut waiter = Caller::queued(&throttle, REQUEST);
    for permit in held {
        permit.settle(Outcome::success());
    }
    assert!(waiter.permit().is_some());
    throttle.record_failure();
    drop(release);
    telling.join().unwrap();
    assert_eq!(throttle.snapshot().events_lost, 0);
}

#[tokio::test]
async fn slow_stream_drops_oldest_events_and_counts_them() {
    let throttle = fragile().build().unwrap();
    let mut events = throttle.events();
    for _ in 0..2_000 {
        throttle.retune(|limits| limits.total = None).unwrap();
    }
    let mut read = 0;
    while events.try_next().is_some() {
        read += 1;
    }
    assert_eq!((read, events.missed()), (1_024, 976));
    drop(throttle);
    assert_eq!(events.next().await, None, "the stream ends with the throttle");
}

#[test]
fn panicking_waker_does_not_end_a_stream() {
    struct PanickingWaker;
    impl std::task::Wake for PanickingWaker {
        fn wake(self: Arc<Self>) {
            panic!("injected panic");
        }
    }
    let throttle = fragile().build().unwrap();
    let (mut bad, mut good) = (throttle.events(), throttle.events());
    let bomb = std::task::Waker::from(Arc::new(PanickingWaker));
    let mut next = Box::pin(bad.next());
    assert!(next.as_mut().poll(&mut std::task::Context::from_waker(&bomb)).is_pending());
    throttle.pause(secs(1));
    drop(next);
    drop(bad);
    throttle.resume();
    let received: Vec<_> = std::iter::from_fn(|| good.try_next()).map(|notice| notice.event).collect();
    assert!(matches!(received[..], [Event::Paused { .. }, Event::Resumed]), "{received:?}");
}

#[test]
fn events_for_blocked_listener_are_bounded() {
    let (throttle, release, telling) = with_blocked_listener();
    for _ in 0..1_100 {
        throttle.retune(|limits| limits.total = None).unwrap();
    }
    assert_eq!(throttle.snapshot().events_lost, 76, "1,024 are buffered, the rest is lost");
    drop(release);
    telling.join().unwrap();
}
