//! Disabled limits (`enabled = false`): every caller is admitted, while retries, drains and counters keep
//! working.

use std::time::Duration;

use tidegate::{
    Circuit, Class, Keyed, Limit, Limiter, Limits, ManualClock, Memory, Outcome, Random, Retry, Slots,
    Throttle,
};
use tokio::time::{Instant, timeout};

use crate::kit::{REQUEST, secs};

fn fragile() -> Limits {
    Throttle::host().circuit(Circuit::after_failures(1).open_for(secs(5))).limits().expect("in bounds")
}

/// Regression: with limits disabled a pause holds no caller, but `run` relied on it for its wait and so
/// retried at once.
#[tokio::test(start_paused = true)]
async fn disabled_limits_keep_retry_backoff() {
    let keyed: Keyed<u32> =
        Keyed::builder(fragile()).enabled(false).random(Random::fixed(0.9)).build().unwrap();
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

/// A drain waits for requests in flight, whether limits are enabled or not.
#[tokio::test(start_paused = true)]
async fn drain_waits_while_limits_are_disabled() {
    let keyed: Keyed<u32> = Keyed::builder(fragile()).enabled(false).build().unwrap();
    let permit = keyed.acquire(&1, REQUEST).await.unwrap();
    let drained = timeout(secs(1), keyed.drain()).await;
    drop(permit);
    assert!(drained.is_err(), "drained with a request in flight");
}

/// "admits everything and still counts".
#[tokio::test(start_paused = true)]
async fn requests_are_counted_while_limits_are_disabled() {
    let limits = Throttle::builder().slots(Slots::fixed(2)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).enabled(false).build().unwrap();
    let _held: Vec<_> = (0..3).map(|_| keyed.try_acquire(&1, REQUEST).unwrap()).collect();
    assert_eq!(keyed.snapshot(1).in_flight, 3);
}

/// Requests in flight count against the limits when these are enabled again.
#[tokio::test(start_paused = true)]
async fn slots_count_requests_admitted_while_disabled() {
    let limits = Throttle::builder().slots(Slots::fixed(2)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).enabled(false).build().unwrap();
    let _held: Vec<_> = (0..2).map(|_| keyed.try_acquire(&1, REQUEST).unwrap()).collect();
    keyed.set_enabled(true);
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "a third request in flight beside two slots");
}

/// A joined caller passes an open circuit while limits are disabled.
#[tokio::test(start_paused = true)]
async fn disabled_open_circuit_admits_joined_callers() {
    let keyed: Keyed<u32> = Keyed::builder(fragile()).enabled(false).build().unwrap();
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_second("rpm", 1)]).build().unwrap();
    let throttle = keyed.throttle(&1);
    let joined = throttle.limited_by(&limiter);
    joined.acquire(("acme", "r"), REQUEST).await.unwrap().settle(Outcome::success()).await.unwrap();
    keyed.record(&1, Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "the limits are off");
    let answer = joined.acquire(("acme", "r"), REQUEST).await;
    assert!(answer.is_ok(), "{:?}", answer.err().map(|error| error.to_string()));
}

/// Regression: with a half-open circuit the caller looped for a probe slot that it never took.
#[test]
fn disabled_half_open_circuit_does_not_spin() {
    let (done, ended) = std::sync::mpsc::channel();
    let (show, shown) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let clock = ManualClock::new();
            let keyed: Keyed<u32> =
                Keyed::builder(fragile()).enabled(false).clock(clock.clone()).build().unwrap();
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
    let polls = keyed.throttle(&1).snapshot().evaluations;
    assert_eq!(answer, Ok(true), "it looped {polls} times");
}
