//! Regressions in interactions of keyed features: hints, retries, circuits, the shared overflow entry, and
//! changing limits.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::{
    Aimd, Circuit, Controller, Keyed, Limits, ManualClock, Outcome, Random, Rate, Refused, Retry,
    RetryBudget, Slots, Throttle,
};
use tokio::time::{Instant, sleep};

use crate::kit::{REQUEST, millis, secs};

fn slots(slots: u32) -> Limits {
    Throttle::builder().slots(Slots::fixed(slots)).limits().expect("in bounds")
}

/// A close also applies to a key without handles that is looked up with `get` afterwards.
#[test]
fn key_looked_up_after_close_is_closed() {
    let keyed: Keyed<u32> = Keyed::builder(slots(1)).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST));
    keyed.close();
    let throttle = keyed.get(&1).unwrap();
    assert_eq!(throttle.try_acquire(REQUEST).map(drop), Err(Refused::Closed));
}

/// Such a key also follows the current limits.
#[test]
fn key_looked_up_after_change_follows_it() {
    let keyed: Keyed<u32> = Keyed::builder(slots(1)).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST));
    keyed.reconfigure(|_| slots(9));
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(9));
    assert_eq!(keyed.snapshot(1).top[0].throttle.slots, Some(9));
}

/// A `Retry-After` also holds queued waiters where a rate is the only limit.
#[tokio::test(start_paused = true)]
async fn hint_holds_waiters_of_rate_only_throttle() {
    let limits = Throttle::builder().rate(Rate::per_second(1).burst(1)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).random(Random::seeded(3)).build().unwrap();
    let start = Instant::now();
    let first = keyed.acquire(&1, REQUEST).await.unwrap();
    let entered = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let (keyed, entered) = (keyed.clone(), Arc::clone(&entered));
            tokio::spawn(async move {
                keyed.acquire(&1, REQUEST).await.unwrap().settle(Outcome::success());
                entered.lock().unwrap().push(start.elapsed());
            })
        })
        .collect();
    sleep(millis(500)).await;
    first.settle(Outcome::overload().retry_after(secs(30)));
    for waiter in waiters {
        waiter.await.unwrap();
    }
    let entered = entered.lock().unwrap().clone();
    assert!(entered.iter().all(|at| *at >= millis(30_500)), "{entered:?}");
}

/// One dead host among those that share the overflow entry does not block the others.
#[test]
fn dead_overflow_host_does_not_block_others() {
    let limits = Throttle::host().circuit(Circuit::after_failures(5)).limits().unwrap();
    let keyed: Keyed<&str> = Keyed::builder(limits).keys_max(1).build().unwrap();
    let _held = keyed.try_acquire(&"kept", REQUEST).unwrap();
    for _ in 0..5 {
        keyed.record(&"dead", Outcome::failure());
    }
    let answer = keyed.try_acquire(&"alive", REQUEST).map(drop);
    assert_eq!(answer, Ok(()));
}

/// Overloads of unlimited traffic say nothing about the limit, which resumes from its previous value.
#[test]
fn overloads_while_disabled_do_not_cut_limits() {
    let clock = ManualClock::new();
    let limits = Throttle::builder()
        .rate(Rate::per_second(8).burst(8))
        .controller(Controller::Aimd(Aimd::default()))
        .limits()
        .unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).clock(clock.clone()).build().unwrap();
    drop(keyed.throttle(&1));
    keyed.set_enabled(false);
    for _ in 0..100 {
        // A hundred requests in a second, of which the upstream allows twenty.
        let permit = keyed.try_acquire(&1, REQUEST).unwrap();
        clock.advance(millis(10));
        permit.settle(Outcome::overload());
    }
    keyed.set_enabled(true);
    assert_eq!(keyed.get(&1).unwrap().snapshot().rate.unwrap().to_string(), "8/s");
}

/// The limits of the shared overflow entry can be changed as well.
#[test]
fn overflow_entry_follows_change_of_its_limits() {
    let keyed: Keyed<u32> = Keyed::builder(slots(3)).keys_max(1).build().unwrap();
    let _held = keyed.try_acquire(&1, REQUEST).unwrap();
    keyed.set_overflow(&slots(1));
    let _two = keyed.try_acquire(&2, REQUEST).unwrap();
    assert!(keyed.try_acquire(&3, REQUEST).is_err(), "a second request beside one slot");
}

/// All futures are `Send`.
#[test]
fn futures_are_send() {
    fn assert_send<T: Send>(_: T) {}
    let keyed: Keyed<String> = Keyed::builder(slots(1)).build().unwrap();
    assert_send(keyed.acquire("a", REQUEST));
    assert_send(keyed.acquire_within("a", REQUEST, secs(1)));
    assert_send(keyed.run("a", REQUEST, |_| async { Ok::<(), ()>(()) }));
    assert_send(keyed.drain());
    assert_send(keyed.snapshots(secs(1), 1).next());
    assert_send(keyed.events().next());
}

/// Each attempt of `run` under a key is counted once, and every attempt after the first is a retry.
#[tokio::test(start_paused = true)]
async fn two_retries_count_as_three_requests() {
    let limits =
        Throttle::host().retry(Retry::attempts(3)).circuit(Circuit::after_failures(9)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).build().unwrap();
    let result = keyed.run(&1, REQUEST, |_| async { Err::<(), ()>(()) }).await;
    assert!(result.is_err());
    let snapshot = keyed.snapshot(1);
    assert_eq!((snapshot.total, snapshot.retries, snapshot.top[0].throttle.outcomes.other), (3, 2, 3));
}

/// Removing an open circuit admits callers at the current rate.
#[test]
fn removed_open_circuit_admits_callers() {
    let clock = ManualClock::new();
    let limits = Throttle::host().circuit(Circuit::after_failures(1).open_for(secs(3_600))).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(clock.clone()).build().unwrap();
    keyed.record(&1, Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    keyed.reconfigure(move |_| limits.edited(|draft| draft.circuit = None).unwrap());
    clock.advance(secs(10));
    assert_eq!(keyed.try_acquire(&1, REQUEST).map(drop), Ok(()));
}

/// "It is called when a key is first seen": not on every call of a key beyond the capacity.
#[test]
fn limits_function_runs_once_for_overflow_keys() {
    let calls = Arc::new(AtomicU32::new(0));
    let keyed: Keyed<u32> = Keyed::builder(slots(100))
        .keys_max(1)
        .limits_by({
            let calls = Arc::clone(&calls);
            move |_| {
                calls.fetch_add(1, Ordering::SeqCst);
                slots(100)
            }
        })
        .build()
        .unwrap();
    let _held = keyed.try_acquire(&1, REQUEST).unwrap();
    for _ in 0..50 {
        drop(keyed.try_acquire(&2, REQUEST).unwrap());
    }
    assert!(calls.load(Ordering::SeqCst) <= 2, "called {calls:?} times for two keys");
}

/// A key without outcomes follows a changed initial rate.
#[test]
fn fresh_key_follows_new_initial_rate() {
    let limits = Throttle::host().limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(ManualClock::new()).build().unwrap();
    let throttle = keyed.throttle(&1);
    keyed.reconfigure(move |_| {
        limits.edited(|draft| draft.rate = Some(Rate::per_second(1).burst(4))).unwrap()
    });
    assert_eq!(throttle.snapshot().rate.unwrap().to_string(), "1/s");
}

/// A raised upper bound is explored gradually and not used at once.
#[test]
fn raised_rate_bound_is_approached_gradually() {
    let limits = Throttle::host().rate(Rate::per_second(8).burst(4)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(ManualClock::new()).build().unwrap();
    let throttle = keyed.throttle(&1);
    keyed.reconfigure(move |_| {
        let aimd = Controller::Aimd(Aimd::default().within(0.25..=1_000.0));
        limits.edited(|draft| *draft = draft.clone().controlled_by(aimd)).unwrap()
    });
    assert_eq!(throttle.snapshot().rate.unwrap().to_string(), "8/s");
}

/// A retry budget without recent retries does not keep an idle key from eviction.
#[tokio::test(start_paused = true)]
async fn idle_retry_budget_does_not_keep_keys() {
    let retry = Retry::attempts(3).budget(RetryBudget::default());
    let limits = Throttle::builder().rate(Rate::per_second(2).burst(4)).retry(retry).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).keys_max(4).build().unwrap();
    for key in 0..8 {
        keyed.run(&key, REQUEST, |_| async { Ok::<(), ()>(()) }).await.unwrap();
        // All buckets are full again, and the budget's window has passed.
        sleep(secs(30)).await;
    }
    assert_eq!(keyed.snapshot(0).overflowed, 0, "calls that used the overflow entry");
}

/// "Retry-After is never undercut": the hint also holds a caller that was granted but has not been polled.
#[tokio::test(start_paused = true)]
async fn hint_holds_granted_but_unpolled_callers() {
    let keyed: Keyed<u32> = Keyed::builder(slots(2)).random(Random::seeded(3)).build().unwrap();
    let start = Instant::now();
    let (first, second) = (keyed.try_acquire(&1, REQUEST).unwrap(), keyed.try_acquire(&1, REQUEST).unwrap());
    let waiter = tokio::spawn({
        let keyed = keyed.clone();
        async move {
            let _permit = keyed.acquire(&1, REQUEST).await.unwrap();
            start.elapsed()
        }
    });
    sleep(millis(1)).await;
    // Two responses at once: the first grants the waiter, the second carries a `Retry-After`.
    first.settle(Outcome::success());
    second.settle(Outcome::overload().retry_after(secs(30)));
    let sent_at = waiter.await.unwrap();
    assert!(sent_at >= secs(30), "sent at {sent_at:?}, before the hint was over");
}
