//! Listeners and streams: told in order, outside the lock, and harmless whatever they do.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;

use tidegate::{
    Brake, Builder, Circuit, Controller, Event, ManualClock, Outcome, Pace, Slots, Throttle, Trip, Why,
};

use crate::kit::{Caller, REQUEST, millis, secs};

/// A throttle that brakes and trips at the first failure: three events for each.
fn touchy() -> Builder {
    Throttle::builder()
        .slots(Slots::adaptive(1..=8))
        .controller(Controller::Brake(Brake::default().at(1, secs(60))))
        .circuit(Circuit::after_failures(2).open_for(secs(0)))
        .clock(ManualClock::new())
}

/// A throttle whose listener is stuck in the first event until the sender is dropped, and the thread that tells it.
fn with_a_stuck_listener() -> (Throttle, mpsc::Sender<()>, thread::JoinHandle<()>) {
    let (started, begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let throttle = touchy()
        .on_state_change(move |_| {
            let _ = started.send(());
            let _ = released.lock().map(|released| released.recv());
        })
        .build()
        .expect("within the bounds");
    let teller = throttle.clone();
    let telling = thread::spawn(move || teller.record_failure());
    begun.recv().expect("the listener was called");
    (throttle, release, telling)
}

#[test]
fn events_are_told_in_order_with_their_numbers() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    let throttle = touchy()
        .pace(Pace::every(millis(100)).slowest(secs(1)))
        .on_state_change(move |notice| heard.lock().unwrap().push(notice.event.clone()))
        .build()
        .unwrap();
    throttle.record_failure();
    throttle.record_failure();
    let told = told.lock().unwrap();
    assert_eq!(told.len(), 3);
    assert!(matches!(
        &told[0],
        Event::Slowed { slots, interval, rate: None, why: Why::Failures { count: 1, .. } }
            if (slots.from, slots.to) == (8, 4) && (interval.from, interval.to) == (millis(100), millis(200))
    ));
    assert_eq!(told[1], Event::CircuitOpened { span: secs(0), why: Trip::Consecutive { failures: 2 } });
    assert!(matches!(&told[2], Event::Slowed { slots, .. } if (slots.from, slots.to) == (4, 2)));
}

#[test]
fn a_listener_that_panics_is_caught_and_counted() {
    let throttle = touchy().on_state_change(|_| panic!("a bug in the listener")).build().unwrap();
    let permit = throttle.try_acquire(REQUEST).unwrap();
    permit.settle(Outcome::failure());
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.listener_panics, snapshot.in_flight), (1, 0));
    throttle.record_failure();
    assert_eq!(throttle.snapshot().listener_panics, 3, "it hears on after a panic");
}

#[test]
fn a_listener_may_call_the_throttle_again() {
    let home: Arc<OnceLock<Throttle>> = Arc::default();
    let (reached, depth) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (throttle, counter, level) = (Arc::clone(&home), Arc::clone(&reached), Arc::clone(&depth));
    let built = touchy()
        .on_state_change(move |_| {
            assert_eq!(level.fetch_add(1, Ordering::SeqCst), 0, "a listener is not re-entered");
            if let Some(throttle) = throttle.get()
                && counter.fetch_add(1, Ordering::SeqCst) < 5
            {
                drop(throttle.try_acquire(REQUEST));
                throttle.retune(|limits| limits.slots = Some(Slots::fixed(3))).unwrap();
                assert!(throttle.snapshot().slots <= Some(8));
            }
            level.fetch_sub(1, Ordering::SeqCst);
        })
        .build()
        .unwrap();
    home.set(built.clone()).unwrap();
    built.record_failure();
    assert!(reached.load(Ordering::SeqCst) > 5, "what it caused was told when it had returned");
    assert_eq!(built.snapshot().listener_panics, 0);
}

#[test]
fn a_slow_listener_holds_up_nobody_but_the_thread_that_tells() {
    let (throttle, release, telling) = with_a_stuck_listener();
    // The listener is stuck; everybody else enters, settles, waits and is granted as ever, events included.
    let held: Vec<_> = std::iter::from_fn(|| throttle.try_acquire(REQUEST).ok()).collect();
    assert_eq!(held.len(), 4);
    let mut waiter = Caller::asks(&throttle, REQUEST);
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
async fn a_slow_reader_loses_the_oldest_events_and_knows_how_many() {
    let throttle = touchy().build().unwrap();
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
fn a_readers_waker_that_panics_ends_no_stream() {
    struct Bomb;
    impl std::task::Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("a bug in somebody's runtime");
        }
    }
    let throttle = touchy().build().unwrap();
    let (mut bad, mut good) = (throttle.events(), throttle.events());
    let bomb = std::task::Waker::from(Arc::new(Bomb));
    let mut next = Box::pin(bad.next());
    assert!(next.as_mut().poll(&mut std::task::Context::from_waker(&bomb)).is_pending());
    throttle.pause(secs(1));
    drop(next);
    drop(bad);
    throttle.resume();
    let told: Vec<_> = std::iter::from_fn(|| good.try_next()).map(|notice| notice.event).collect();
    assert!(matches!(told[..], [Event::Paused { .. }, Event::Resumed]), "{told:?}");
}

#[test]
fn events_for_a_stuck_listener_are_bounded_and_counted() {
    let (throttle, release, telling) = with_a_stuck_listener();
    for _ in 0..1_100 {
        throttle.retune(|limits| limits.total = None).unwrap();
    }
    assert_eq!(throttle.snapshot().events_lost, 76, "1,024 wait for it, the rest is lost to it");
    drop(release);
    telling.join().unwrap();
}
