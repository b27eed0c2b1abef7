//! One throttle per host or endpoint, as seen by waiting callers.

use std::ops::Range;
use std::time::Duration;

use tidegate::{
    Account, Authority, Circuit, CircuitState, Keyed, Limits, ManualClock, Outcome, Random, Rate, Refused,
    Retry, Slots, Throttle, WhenRefused,
};
use tokio::time::{Instant, sleep, timeout};

use crate::kit::upstream::aimd_host;
use crate::kit::{REQUEST, millis, secs};

/// The idle time after which the keys of these tests may be evicted.
const TTL: Duration = secs(180);

fn host(text: &str) -> Authority {
    Authority::new(text).expect("a host")
}

/// Host limits whose circuit opens at the first failure.
fn fragile(open_for: Duration) -> Limits {
    let circuit = Circuit::after_failures(1).open_for(open_for);
    Throttle::host().circuit(circuit).limits().expect("in bounds")
}

/// Calls hosts that are used only once; each call examines a few idle keys for eviction.
fn call_once(hosts: &Keyed<Authority>, numbers: Range<u32>) {
    for number in numbers {
        let permit = hosts.try_acquire(&host(&format!("passer-by-{number}.example")), REQUEST);
        permit.expect("a new key is free").settle(Outcome::success());
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_on_success_delays_the_next_caller() {
    let rate = Throttle::builder().rate(Rate::per_second(1).burst(1)).limits().unwrap();
    let hosts = Keyed::builder(rate).random(Random::seeded(1)).build().unwrap();
    let (site, began) = (host("site.example"), Instant::now());
    let permit = hosts.acquire(&site, REQUEST).await.unwrap();
    permit.settle(Outcome::success().retry_after(secs(2)));
    let _next = hosts.acquire(&site, REQUEST).await.unwrap();
    assert!(began.elapsed() >= secs(2), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn fetcher_that_waits_out_a_refusal_succeeds() {
    let hosts = Keyed::builder(fragile(secs(5))).random(Random::seeded(1)).build().unwrap();
    let (site, began) = (host("https://site.example/"), Instant::now());
    hosts.record(&site, Outcome::failure());
    let mut tries = 0;
    let permit = loop {
        tries += 1;
        match hosts.acquire(&site, REQUEST).await {
            Ok(permit) => break permit,
            Err(refused) => sleep(refused.retry_after().expect("it is transient")).await,
        }
    };
    permit.settle(Outcome::success());
    assert_eq!((tries, began.elapsed()), (2, secs(5)));

    // By default `run` stops at a refusal.
    hosts.record(&site, Outcome::failure());
    let throttle = hosts.throttle(&site);
    let stopped = throttle.run(REQUEST, |_| async { Ok::<_, ()>("page") }).await;
    assert!(stopped.is_err());
    let waits = throttle.runner().retry(Retry::attempts(3).when_refused(WhenRefused::Wait));
    assert_eq!(waits.run(REQUEST, |_| async { Ok::<_, ()>("page") }).await, Ok("page"));
    assert!(began.elapsed() >= secs(10), "{:?}", began.elapsed());
}

#[test]
fn open_circuit_is_kept_however_long_it_is_idle() {
    let clock = ManualClock::new();
    let hosts = Keyed::builder(fragile(2 * TTL + secs(600))).clock(clock.clone()).shards(1).build().unwrap();
    let down = host("down.example");
    let failed = hosts.try_acquire(&down, REQUEST).unwrap();
    failed.settle(Outcome::failure());
    call_once(&hosts, 0..50);
    clock.advance(2 * TTL);
    // The other keys are evicted, and this one is not.
    call_once(&hosts, 50..150);
    assert!(hosts.snapshot(0).evicted_idle >= 50, "{:?}", hosts.snapshot(0));
    let refused = hosts.try_acquire(&down, REQUEST).unwrap_err();
    assert_eq!(refused, Refused::CircuitOpen { retry_after: secs(600) });
    clock.advance(secs(600));
    assert!(hosts.try_acquire(&down, REQUEST).is_ok());
}

#[test]
fn request_longer_than_idle_ttl_keeps_its_state() {
    let clock = ManualClock::new();
    let hosts = Keyed::hosts().clock(clock.clone()).shards(1).build().unwrap();
    let slow = host("slow.example");
    let first = hosts.try_acquire(&slow, REQUEST).unwrap();
    clock.advance(millis(100));
    let second = hosts.try_acquire(&slow, REQUEST).unwrap();
    call_once(&hosts, 0..50);
    clock.advance(2 * TTL);
    call_once(&hosts, 50..150);
    assert!(hosts.snapshot(0).evicted_idle >= 50);
    for (permit, failures) in [(first, 1), (second, 2)] {
        permit.settle(Outcome::failure());
        let seen = hosts.throttle(&slow).snapshot();
        let circuit = seen.circuit.unwrap();
        assert_eq!((seen.admitted, circuit.consecutive_failures), (2, failures));
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_that_times_out_returns_on_time() {
    let hosts = Keyed::hosts().build().unwrap();
    let (busy, began) = (host("busy.example"), Instant::now());
    hosts.record(&busy, Outcome::success().retry_after(secs(60)));
    assert!(timeout(secs(1), hosts.acquire(&busy, REQUEST)).await.is_err());
    assert_eq!(began.elapsed(), secs(1));
    let seen = hosts.throttle(&busy).snapshot();
    assert_eq!((seen.waiting, seen.admitted), (0, 0), "nothing is left behind");
}

#[test]
fn million_hosts_stay_bounded_and_live_keys_stay() {
    const KEYS_MAX: usize = 2_000;
    let clock = ManualClock::new();
    let hosts: Keyed<u64> =
        Keyed::builder(aimd_host()).keys_max(KEYS_MAX).clock(clock.clone()).build().unwrap();
    let (limited, open) = (u64::MAX, u64::MAX - 1);
    hosts.try_acquire(&limited, REQUEST).unwrap().settle(Outcome::overload());
    for _ in 0..5 {
        hosts.record(&open, Outcome::failure());
    }
    for number in 0..1_000_000_u64 {
        // Keys with an entry of their own, and keys that share the overflow entry and are refused there.
        let _ = hosts.try_acquire(&number, REQUEST).map(|permit| permit.settle(Outcome::ignored()));
        if number % 1_000 == 0 {
            assert!(hosts.len() <= KEYS_MAX);
            clock.advance(millis(60));
        }
    }
    let seen = hosts.snapshot(0);
    assert!(
        seen.keys <= KEYS_MAX && seen.overflowed + seen.evicted_size + seen.evicted_idle > 900_000,
        "{seen:?}"
    );
    let view = hosts.get(&limited).expect("not evicted").snapshot();
    assert_eq!(view.rate.unwrap().to_string(), "1/s");
    let view = hosts.get(&open).expect("not evicted").snapshot();
    // Open for 15 s and half-open since then, because no request has probed it.
    assert_eq!(view.circuit.unwrap().state, CircuitState::HalfOpen);
}

/// Layered dispatch by endpoint and account.
fn endpoints(slots: u32) -> Keyed<Account> {
    let limits = Throttle::layered().slots(Slots::fixed(slots)).limits().expect("in bounds");
    Keyed::builder(limits).build().expect("in bounds")
}

fn endpoint(url: &str, account: &str) -> Account {
    Account::new(host(url), account).expect("an account")
}

#[tokio::test(start_paused = true)]
async fn endpoint_in_backoff_does_not_delay_another() {
    let endpoints = endpoints(400);
    let (a, b) = (endpoint("https://a.example/v1", "key"), endpoint("https://b.example/v1", "key"));
    let permit = endpoints.acquire(&a, REQUEST.bytes(10)).await.unwrap();
    permit.settle(Outcome::overload());
    let began = Instant::now();
    endpoints.acquire(&b, REQUEST.bytes(10)).await.unwrap().settle(Outcome::success());
    assert_eq!(began.elapsed(), Duration::ZERO);
    endpoints.acquire(&a, REQUEST.bytes(10)).await.unwrap().settle(Outcome::success());
    assert!(began.elapsed() >= secs(1), "{:?}", began.elapsed());
}

#[test]
fn clients_of_one_endpoint_and_account_share_limits() {
    let endpoints = endpoints(1);
    let _held = endpoints.try_acquire(&endpoint("https://EXAMPLE.com:443", "key"), REQUEST).unwrap();
    assert!(endpoints.try_acquire(&endpoint("https://example.com", "key"), REQUEST).is_err());
    assert_eq!(endpoints.len(), 1);
}

#[test]
fn accounts_of_one_endpoint_have_their_own_slots() {
    let endpoints = endpoints(1);
    let one = endpoints.try_acquire(&endpoint("https://example.com", "one"), REQUEST);
    let two = endpoints.try_acquire(&endpoint("https://example.com", "two"), REQUEST);
    assert!(one.is_ok() && two.is_ok());
    assert_eq!(endpoints.len(), 2);
}
