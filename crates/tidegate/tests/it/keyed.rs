//! Every key has its own throttle: keys are isolated, and every acquire method works per key.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use tidegate::{
    Account, Attempt, Authority, Backoff, Circuit, Clock, Gate, Keyed, Limits, Outcome, Pace, Rate, Refused,
    Retry, RunError, Slots, State, Throttle,
};
use tokio::time::Instant as TokioInstant;

use crate::kit::keyed::{keys, poll_once, rate, slots};
use crate::kit::{REQUEST, millis, secs};

fn accounts() -> Keyed<Account> {
    Keyed::builder(slots(1)).build().expect("within the bounds")
}

fn named(limits: Limits) -> Keyed<String> {
    Keyed::builder(limits).build().expect("within the bounds")
}

#[test]
fn paused_key_does_not_delay_other_keys() {
    let (keyed, _) = keys(slots(1));
    keyed.throttle(&1).pause(secs(60));
    let refused = keyed.try_acquire(&1, REQUEST).unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Pause, retry_after: Some(secs(60)) });
    assert!(keyed.try_acquire(&2, REQUEST).is_ok());
}

#[test]
fn spellings_of_one_authority_are_one_key() {
    let keyed = accounts();
    let key = |url: &str, name: &str| Account::new(Authority::new(url).unwrap(), name).unwrap();
    let held = keyed.try_acquire(&key("https://EXAMPLE.com:443", "a"), REQUEST).unwrap();
    assert!(keyed.try_acquire(&key("https://example.com", "a"), REQUEST).is_err(), "the same limiter");
    assert!(keyed.try_acquire(&key("https://example.com", "b"), REQUEST).is_ok(), "another account");
    assert_eq!(keyed.len(), 2);
    held.settle(Outcome::success());
    assert!(keyed.try_acquire(&key("https://example.com", "a"), REQUEST).is_ok());
}

#[test]
fn keys_have_slots_of_their_own() {
    let (keyed, _) = keys(slots(1));
    let one = keyed.try_acquire(&1, REQUEST).unwrap();
    let other = keyed.try_acquire(&2, REQUEST).unwrap();
    for key in [1, 2] {
        let refused = keyed.try_acquire(&key, REQUEST).unwrap_err();
        assert_eq!(refused, Refused::Limited { by: Gate::Slots, retry_after: None });
    }
    drop((one, other));
    assert_eq!(keyed.snapshot(2).in_flight, 0);
}

#[test]
fn open_circuit_affects_its_key_alone() {
    let limits = Throttle::builder().circuit(Circuit::after_failures(1).open_for(secs(5))).limits().unwrap();
    let (keyed, _) = keys(limits);
    keyed.record(&1, Outcome::failure());
    assert!(matches!(keyed.try_acquire(&1, REQUEST), Err(Refused::CircuitOpen { .. })));
    assert!(keyed.try_acquire(&2, REQUEST).is_ok());
}

#[test]
fn borrowed_lookup_does_not_allocate_a_key() {
    let keyed = named(slots(1));
    let held = keyed.try_acquire("ann", REQUEST).unwrap();
    assert!(keyed.try_acquire(&"ann".to_owned(), REQUEST).is_err(), "borrowed and owned forms are one key");
    assert!(keyed.get("ann").is_some() && keyed.get("bob").is_none());
    assert_eq!(keyed.len(), 1, "a lookup creates no key");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn waiters_enter_in_fifo_order_per_key() {
    let keyed = named(Throttle::builder().pace(Pace::every(secs(1))).limits().unwrap());
    let start = TokioInstant::now();
    let (entered, entries) = mpsc::channel();
    let callers: Vec<_> = (0..3)
        .flat_map(|turn| ["ann", "bob"].map(|key| (key, turn)))
        .map(|(key, turn)| {
            let (keyed, entered) = (keyed.clone(), entered.clone());
            tokio::spawn(async move {
                drop(keyed.acquire(key, REQUEST).await.unwrap());
                entered.send((key, turn, start.elapsed())).unwrap();
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    drop(entered);
    let all: Vec<_> = entries.iter().collect();
    for key in ["ann", "bob"] {
        let turns: Vec<_> =
            all.iter().filter(|(of, ..)| *of == key).map(|(_, turn, at)| (*turn, *at)).collect();
        assert_eq!(turns, [(0, secs(0)), (1, secs(1)), (2, secs(2))], "{key}");
    }
    let seen = keyed.snapshot(2);
    assert_eq!((seen.in_flight, seen.waiting, seen.admitted), (0, 0, 6));
}

#[tokio::test(start_paused = true)]
async fn cancelled_waiter_leaves_at_once_and_takes_nothing() {
    let keyed = named(rate(Rate::per_minute(1).burst(1)));
    drop(keyed.acquire("ann", REQUEST).await.unwrap());
    let start = TokioInstant::now();
    let cancelled = tokio::time::timeout(secs(1), keyed.acquire("ann", REQUEST)).await;
    assert!(cancelled.is_err());
    assert_eq!(start.elapsed(), secs(1));
    let seen = keyed.snapshot(1);
    assert_eq!((seen.waiting, seen.admitted), (0, 1));
    drop(keyed.acquire("ann", REQUEST).await.unwrap());
    assert_eq!(start.elapsed(), secs(60), "the cancelled waiter consumed no unit");
}

#[tokio::test(start_paused = true)]
async fn acquire_within_refuses_unreachable_deadline_early() {
    let keyed = named(rate(Rate::per_minute(1).burst(1)));
    drop(keyed.acquire_within("ann", REQUEST, secs(0)).await.unwrap());
    let start = TokioInstant::now();
    let refused = keyed.acquire_within("ann", REQUEST, secs(59)).await.unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Rate, retry_after: Some(secs(60)) });
    assert_eq!(start.elapsed(), secs(0));
    drop(keyed.acquire_within("ann", REQUEST, secs(60)).await.unwrap());
    assert_eq!(start.elapsed(), secs(60));
    assert!(keyed.acquire_within("bob", REQUEST, std::time::Duration::MAX).await.is_ok());
}

#[test]
fn blocking_waiter_is_woken_by_released_permit() {
    let keyed = named(slots(1));
    let held = keyed.acquire_blocking("ann", REQUEST).unwrap();
    let waiter = {
        let keyed = keyed.clone();
        thread::spawn(move || drop(keyed.acquire_blocking("ann", REQUEST).unwrap()))
    };
    while keyed.snapshot(0).waiting == 0 {
        thread::yield_now();
    }
    drop(held);
    waiter.join().unwrap();
    assert_eq!(keyed.snapshot(1).in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn run_retries_by_the_keys_own_policy() {
    let often = Throttle::builder().retry(Retry::attempts(3)).limits().unwrap();
    let once = Throttle::builder().retry(Retry::off()).limits().unwrap();
    let keyed: Keyed<String> = Keyed::builder(once.clone())
        .limits_by(move |key: &String| if key == "ann" { often.clone() } else { once.clone() })
        .build()
        .unwrap();
    let reply =
        keyed.run("ann", REQUEST, |attempt| async move { if attempt.number < 2 { Err(503) } else { Ok(7) } });
    assert_eq!(reply.await, Ok(7));
    let reply: Result<(), _> = keyed.run("bob", REQUEST, |_| async { Err(503) }).await;
    assert!(matches!(reply, Err(RunError::Failed { .. })), "{reply:?}");
    let seen = keyed.snapshot(2);
    assert_eq!((seen.retries, seen.admitted, seen.in_flight), (2, 4, 0));
}

#[test]
fn blocking_run_retries_by_the_keys_policy() {
    let retry = Retry::attempts(3).backoff(Backoff::fixed(secs(0)));
    let keyed = named(Throttle::builder().retry(retry).limits().unwrap());
    let work = |attempt: Attempt| if attempt.number < 2 { Err(503) } else { Ok(7) };
    assert_eq!(keyed.run_blocking("ann", (), work), Ok(7));
    assert_eq!(keyed.snapshot(1).retries, 2);
}

#[tokio::test(start_paused = true)]
async fn record_without_permit_updates_its_key() {
    let keyed = named(rate(Rate::per_second(100)));
    keyed.record("ann", Outcome::overload().retry_after(secs(5)));
    let start = TokioInstant::now();
    drop(keyed.acquire("bob", REQUEST).await.unwrap());
    assert_eq!(start.elapsed(), secs(0));
    drop(keyed.acquire("ann", REQUEST).await.unwrap());
    assert!(start.elapsed() >= secs(5));
}

#[test]
fn dropped_or_panicked_permit_returns_its_slot() {
    let (keyed, _) = keys(slots(1));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _permit = keyed.try_acquire(&1, REQUEST).unwrap();
        panic!("injected panic");
    }));
    assert!(panicked.is_err());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok());
    assert_eq!(keyed.snapshot(1).in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn cancelled_run_releases_permit_and_key() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).retry(Retry::attempts(9)).limits().unwrap();
    let keyed = named(limits);
    let start = Arc::new(AtomicU32::new(0));
    let attempts = Arc::clone(&start);
    let work = keyed.run("ann", REQUEST, |_| {
        attempts.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<Result<(), ()>>()
    });
    assert!(tokio::time::timeout(secs(600), work).await.is_err());
    assert_eq!((start.load(Ordering::SeqCst), keyed.snapshot(1).in_flight), (1, 0));
    // Calls for another key find this key idle since it began, and evict it.
    for _ in 0..10_000 {
        drop(keyed.try_acquire("bob", REQUEST).unwrap());
    }
    assert!(keyed.get("ann").is_none());
}

#[test]
fn permit_and_handle_outlive_the_registry() {
    let (keyed, _) = keys(slots(1));
    let permit = keyed.try_acquire(&1, REQUEST).unwrap();
    let throttle = keyed.throttle(&1);
    drop(keyed);
    assert_eq!(throttle.snapshot().in_flight, 1);
    permit.settle(Outcome::success());
    assert_eq!(throttle.snapshot().in_flight, 0);
    assert!(throttle.try_acquire(REQUEST).is_ok());
}

#[test]
fn unpolled_grant_returns_all_when_dropped() {
    let (keyed, _) = keys(slots(1));
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    drop(held);
    assert_eq!(keyed.snapshot(1).in_flight, 1, "it was granted");
    drop(waiter);
    let seen = keyed.snapshot(1);
    assert_eq!((seen.in_flight, seen.waiting, seen.admitted), (0, 0, 1));
}

#[test]
fn waiter_at_one_key_does_not_block_another() {
    let (keyed, clock) = keys(Throttle::builder().pace(Pace::every(secs(1))).limits().unwrap());
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    assert!(keyed.try_acquire(&2, REQUEST).is_ok(), "no caller waits at that key");
    clock.advance(millis(1_000));
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "it does not overtake the waiter");
    assert!(poll_once(waiter.as_mut()).is_ready());
}

#[test]
fn threads_on_few_keys_never_exceed_limits() {
    let (keyed, clock) = keys(slots(2));
    let running: Arc<[AtomicU32; 4]> = Arc::default();
    let threads: Vec<_> = (0..4_u64)
        .map(|seed| {
            let (keyed, running) = (keyed.clone(), Arc::clone(&running));
            thread::spawn(move || {
                for turn in 0..2_000 {
                    let key = (seed * 7 + turn) % 4;
                    let permit = keyed.acquire_blocking(&key, REQUEST).unwrap();
                    let now = running[usize::try_from(key).unwrap()].fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 2, "{now} at a key of two slots");
                    running[usize::try_from(key).unwrap()].fetch_sub(1, Ordering::SeqCst);
                    permit.settle(Outcome::success());
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let seen = keyed.snapshot(4);
    assert_eq!((seen.in_flight, seen.waiting, seen.admitted, seen.keys), (0, 0, 8_000, 4));
    assert!(seen.top.iter().all(|view| view.throttle.state == State::Running));
    assert_eq!(clock.now(), seen.at);
}
