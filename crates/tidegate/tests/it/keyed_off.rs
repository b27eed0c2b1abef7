//! Limits that are off (`enabled = false`): everybody passes, and what is around the limits goes on as before.

use std::time::Duration;

use tidegate::{
    Circuit, Class, Keyed, Limit, Limiter, Limits, ManualClock, Memory, Outcome, Random, Retry, Slots,
    Throttle,
};
use tokio::time::{Instant, timeout};

use crate::kit::{REQUEST, secs};

fn touchy() -> Limits {
    Throttle::host().circuit(Circuit::after_failures(1).open_for(secs(5))).limits().expect("in bounds")
}

/// With the limits off, a pause holds nobody; but `run` takes it for its wait, and so does not wait at all.
#[tokio::test(start_paused = true)]
async fn with_the_limits_off_a_retry_still_keeps_away_for_its_own_backoff() {
    let keyed: Keyed<u32> =
        Keyed::builder(touchy()).enabled(false).random(Random::fixed(0.9)).build().unwrap();
    let start = Instant::now();
    let mut times = Vec::new();
    let throttle = keyed.throttle(&1);
    let result = throttle
        .runner()
        .retry(Retry::attempts(3))
        .classify(|_: &Result<(), ()>| Class::again(Outcome::overload().retry_after(secs(30))))
        .run(REQUEST, |_| {
            times.push(start.elapsed());
            async { Err(()) }
        })
        .await;
    assert!(result.is_err());
    assert!(times[1] > Duration::ZERO && times[2] > times[1], "attempts at {times:?}");
}

/// A drain is to wait for what is in flight, whether the limits are on or off.
#[tokio::test(start_paused = true)]
async fn with_the_limits_off_a_drain_waits_for_what_is_in_flight() {
    let keyed: Keyed<u32> = Keyed::builder(touchy()).enabled(false).build().unwrap();
    let permit = keyed.acquire(&1, REQUEST).await.unwrap();
    let drained = timeout(secs(1), keyed.drain()).await;
    drop(permit);
    assert!(drained.is_err(), "drained with a request in flight");
}

/// "admits everything and still counts".
#[tokio::test(start_paused = true)]
async fn with_the_limits_off_requests_in_flight_are_still_counted() {
    let limits = Throttle::builder().slots(Slots::fixed(2)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).enabled(false).build().unwrap();
    let _held: Vec<_> = (0..3).map(|_| keyed.try_acquire(&1, REQUEST).unwrap()).collect();
    assert_eq!(keyed.snapshot(1).in_flight, 3);
}

/// What is in flight when the limits come back counts against them.
#[tokio::test(start_paused = true)]
async fn slots_hold_for_those_who_entered_while_the_limits_were_off() {
    let limits = Throttle::builder().slots(Slots::fixed(2)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).enabled(false).build().unwrap();
    let _held: Vec<_> = (0..2).map(|_| keyed.try_acquire(&1, REQUEST).unwrap()).collect();
    keyed.set_enabled(true);
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "a third request in flight beside two slots");
}

/// A joined caller over a throttle whose limits are off is let through its open circuit, as anybody is.
#[tokio::test(start_paused = true)]
async fn with_the_limits_off_an_open_circuit_turns_no_joined_caller_away() {
    let keyed: Keyed<u32> = Keyed::builder(touchy()).enabled(false).build().unwrap();
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_second("rpm", 1)]).build().unwrap();
    let throttle = keyed.throttle(&1);
    let joined = throttle.limited_by(&limiter);
    joined.acquire(("acme", "r"), REQUEST).await.unwrap().settle(Outcome::success()).await.unwrap();
    keyed.record(&1, Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "the limits are off");
    let answer = joined.acquire(("acme", "r"), REQUEST).await;
    assert!(answer.is_ok(), "{:?}", answer.err().map(|error| error.to_string()));
}

/// The same when the circuit's time is over: it may go round and round for a probe's place that it never takes.
#[test]
fn with_the_limits_off_a_half_open_circuit_does_not_spin_a_joined_caller() {
    let (done, ended) = std::sync::mpsc::channel();
    let (show, shown) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let clock = ManualClock::new();
            let keyed: Keyed<u32> =
                Keyed::builder(touchy()).enabled(false).clock(clock.clone()).build().unwrap();
            let limiter =
                Limiter::builder(Memory::new()).defaults([Limit::per_second("rpm", 1)]).build().unwrap();
            let throttle = keyed.throttle(&1);
            let joined = throttle.limited_by(&limiter);
            joined.acquire(("acme", "r"), REQUEST).await.unwrap().settle(Outcome::success()).await.unwrap();
            keyed.record(&1, Outcome::failure());
            clock.advance(secs(6));
            let _ = show.send(keyed.clone());
            let answer = joined.acquire(("acme", "r"), REQUEST).await;
            let _ = done.send(answer.is_ok());
        });
    });
    let keyed = shown.recv().unwrap();
    let answer = ended.recv_timeout(secs(60));
    let asked = keyed.throttle(&1).snapshot().evaluations;
    assert_eq!(answer, Ok(true), "it went round {asked} times");
}
