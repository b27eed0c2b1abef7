//! Between the parts: keys and their hints, retries, circuits, shared entry and limits that change, each a story of what once went
//! wrong there.

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

/// Closed is closed, also for a key that nobody held at that moment and that is then looked up with `get`.
#[test]
fn a_key_that_is_looked_up_after_a_close_is_closed() {
    let keyed: Keyed<u32> = Keyed::builder(slots(1)).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST));
    keyed.close();
    let throttle = keyed.get(&1).unwrap();
    assert_eq!(throttle.try_acquire(REQUEST).map(drop), Err(Refused::Closed));
}

/// And follows the limits of now, not those of before.
#[test]
fn a_key_that_is_looked_up_after_a_change_follows_it() {
    let keyed: Keyed<u32> = Keyed::builder(slots(1)).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST));
    keyed.reconfigure(|_| slots(9));
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(9));
    assert_eq!(keyed.snapshot(1).top[0].throttle.slots, Some(9));
}

/// A Retry-After holds those who wait in line already, on a plan of a rate alone.
#[tokio::test(start_paused = true)]
async fn a_hint_holds_those_in_line_at_a_rate_alone() {
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

/// One dead host among those that share an entry keeps no other of them out.
#[test]
fn one_dead_host_beyond_the_bound_does_not_shut_out_the_others() {
    let limits = Throttle::host().circuit(Circuit::after_failures(5)).limits().unwrap();
    let keyed: Keyed<&str> = Keyed::builder(limits).keys_max(1).build().unwrap();
    let _held = keyed.try_acquire(&"kept", REQUEST).unwrap();
    for _ in 0..5 {
        keyed.record(&"dead", Outcome::failure());
    }
    let answer = keyed.try_acquire(&"alive", REQUEST).map(drop);
    assert_eq!(answer, Ok(()));
}

/// What unlimited traffic ran into says nothing of the limit: on again, it goes on from where it was.
#[test]
fn overloads_met_while_the_limits_are_off_do_not_cut_them() {
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
        // A hundred in a second, of which the far side bears twenty.
        let permit = keyed.try_acquire(&1, REQUEST).unwrap();
        clock.advance(millis(10));
        permit.settle(Outcome::overload());
    }
    keyed.set_enabled(true);
    assert_eq!(keyed.get(&1).unwrap().snapshot().rate.unwrap().to_string(), "8/s");
}

/// The entry that keys share has limits of its own, which can be changed too.
#[test]
fn the_shared_entry_follows_a_change_of_its_own_limits() {
    let keyed: Keyed<u32> = Keyed::builder(slots(3)).keys_max(1).build().unwrap();
    let _held = keyed.try_acquire(&1, REQUEST).unwrap();
    keyed.set_overflow(&slots(1));
    let _two = keyed.try_acquire(&2, REQUEST).unwrap();
    assert!(keyed.try_acquire(&3, REQUEST).is_err(), "a second request beside one slot");
}

/// All futures may be sent.
#[test]
fn futures_may_be_sent() {
    fn sent<T: Send>(_: T) {}
    let keyed: Keyed<String> = Keyed::builder(slots(1)).build().unwrap();
    sent(keyed.acquire("a", REQUEST));
    sent(keyed.acquire_within("a", REQUEST, secs(1)));
    sent(keyed.run("a", REQUEST, |_| async { Ok::<(), ()>(()) }));
    sent(keyed.drain());
    sent(keyed.snapshots(secs(1), 1).next());
    sent(keyed.events().next());
}

/// Attempts of `run` under a key are counted once each, and the retries are those after the first.
#[tokio::test(start_paused = true)]
async fn a_run_with_two_retries_is_three_requests_and_two_retries() {
    let limits =
        Throttle::host().retry(Retry::attempts(3)).circuit(Circuit::after_failures(9)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).build().unwrap();
    let result = keyed.run(&1, REQUEST, |_| async { Err::<(), ()>(()) }).await;
    assert!(result.is_err());
    let snapshot = keyed.snapshot(1);
    assert_eq!((snapshot.total, snapshot.retries, snapshot.top[0].throttle.outcomes.other), (3, 2, 3));
}

/// An operator who takes the circuit away lets callers in, at the rate there is.
#[test]
fn a_circuit_that_is_taken_away_while_open_holds_nobody_any_more() {
    let clock = ManualClock::new();
    let limits = Throttle::host().circuit(Circuit::after_failures(1).open_for(secs(3_600))).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(clock.clone()).build().unwrap();
    keyed.record(&1, Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    keyed.reconfigure(move |_| limits.edited(|draft| draft.circuit = None).unwrap());
    clock.advance(secs(10));
    assert_eq!(keyed.try_acquire(&1, REQUEST).map(drop), Ok(()));
}

/// "It is asked when a key is first seen": not at every call of a key for which there is no room.
#[test]
fn the_function_of_limits_is_not_asked_at_every_call_beyond_the_bound() {
    let asked = Arc::new(AtomicU32::new(0));
    let keyed: Keyed<u32> = Keyed::builder(slots(100))
        .keys_max(1)
        .limits_by({
            let asked = Arc::clone(&asked);
            move |_| {
                asked.fetch_add(1, Ordering::SeqCst);
                slots(100)
            }
        })
        .build()
        .unwrap();
    let _held = keyed.try_acquire(&1, REQUEST).unwrap();
    for _ in 0..50 {
        drop(keyed.try_acquire(&2, REQUEST).unwrap());
    }
    assert!(asked.load(Ordering::SeqCst) <= 2, "asked {asked:?} times for two keys");
}

/// A key that has learned nothing starts where it is told to start.
#[test]
fn a_key_that_has_learned_nothing_follows_a_new_start_of_its_rate() {
    let limits = Throttle::host().limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(ManualClock::new()).build().unwrap();
    let throttle = keyed.throttle(&1);
    keyed.reconfigure(move |_| {
        limits.edited(|draft| draft.rate = Some(Rate::per_second(1).burst(4))).unwrap()
    });
    assert_eq!(throttle.snapshot().rate.unwrap().to_string(), "1/s");
}

/// A higher bound is a bound: what a host bears above the old one is to be found out, and not to be sent at once.
#[test]
fn a_higher_bound_of_the_rate_is_climbed_to_and_not_jumped_to() {
    let limits = Throttle::host().rate(Rate::per_second(8).burst(4)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits.clone()).clock(ManualClock::new()).build().unwrap();
    let throttle = keyed.throttle(&1);
    keyed.reconfigure(move |_| {
        let aimd = Aimd::default().within(0.25..=1_000.0);
        limits.edited(|draft| draft.controller = Controller::Aimd(aimd)).unwrap()
    });
    assert_eq!(throttle.snapshot().rate.unwrap().to_string(), "8/s");
}

/// Work that was never tried again, long ago, makes no key worth keeping: with a retry budget as without.
#[tokio::test(start_paused = true)]
async fn a_retry_budget_does_not_keep_keys_that_nothing_is_lost_with() {
    let retry = Retry::attempts(3).budget(RetryBudget::default());
    let limits = Throttle::builder().rate(Rate::per_second(2).burst(4)).retry(retry).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).keys_max(4).build().unwrap();
    for key in 0..8 {
        keyed.run(&key, REQUEST, |_| async { Ok::<(), ()>(()) }).await.unwrap();
        // All buckets are full again, and the window of the budget is over.
        sleep(secs(30)).await;
    }
    assert_eq!(keyed.snapshot(0).overflowed, 0, "calls that had to share");
}

/// "Retry-After never undercut": one who was let in, and has not gone out yet, hears of it too.
#[tokio::test(start_paused = true)]
async fn a_hint_holds_those_who_are_let_in_and_have_not_gone_out_yet() {
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
    // Two responses in one go: the first lets the waiter in, the second says to stay away.
    first.settle(Outcome::success());
    second.settle(Outcome::overload().retry_after(secs(30)));
    let sent = waiter.await.unwrap();
    assert!(sent >= secs(30), "sent at {sent:?}, when the hint was known");
}
