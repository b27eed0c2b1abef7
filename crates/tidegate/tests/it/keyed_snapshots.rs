//! Snapshots over all keys: sums match the calls, and the list of keys matches the sums.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::{
    Aimd, Cause, Circuit, CircuitState, Clock, Controller, Instant, Keyed, Outcome, Pace, Rate, Retry, Slots,
    Throttle,
};

use crate::kit::keyed::{IDLE, by_hand, keys, poll_once, rate, slots};
use crate::kit::{REQUEST, millis, secs};

#[test]
fn sums_match_the_calls() {
    let (keyed, clock) = keys(Throttle::builder().pace(Pace::every(secs(1))).limits().unwrap());
    let empty = keyed.snapshot(5);
    assert_eq!((empty.keys, empty.total, empty.waited, empty.top.len()), (0, 0, Duration::ZERO, 0));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    assert!(poll_once(keyed.acquire_within(&1, REQUEST, millis(500))).is_ready(), "refused at once");
    let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    let seen = keyed.snapshot(5);
    assert_eq!((seen.total, seen.admitted, seen.refused, seen.waiting), (3, 1, 2, 1));
    clock.advance(secs(1));
    assert!(poll_once(waiter.as_mut()).is_ready());
    let seen = keyed.snapshot(5);
    assert_eq!((seen.total, seen.admitted, seen.refused, seen.waiting), (4, 2, 2, 0));
    assert_eq!((seen.throttled, seen.waited), (1, secs(1)));
    assert_eq!(seen.at, clock.now());
}

#[test]
fn only_waits_above_the_threshold_are_throttled() {
    for (wait, throttled) in [(10, 0), (11, 1)] {
        let (builder, clock) = by_hand(slots(1));
        let keyed = builder.throttled_after(millis(10)).build().unwrap();
        let held = keyed.try_acquire(&1, REQUEST).unwrap();
        let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
        assert!(poll_once(waiter.as_mut()).is_pending());
        clock.advance(millis(wait));
        drop(held);
        assert!(poll_once(waiter.as_mut()).is_ready());
        let seen = keyed.snapshot(0);
        assert_eq!((seen.throttled, seen.waited), (throttled, millis(wait)));
    }
}

#[test]
fn cancelled_waiter_is_neither_admitted_nor_refused() {
    let (keyed, clock) = keys(slots(1));
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    clock.advance(secs(1));
    drop(waiter);
    let seen = keyed.snapshot(0);
    assert_eq!((seen.total, seen.refused, seen.waiting, seen.in_flight), (1, 0, 0, 1));
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn attempts_after_the_first_are_retries() {
    let limits = Throttle::builder().retry(Retry::attempts(3)).limits().unwrap();
    let keyed: Keyed<u64> = Keyed::builder(limits).build().unwrap();
    for key in 0..4 {
        let reply: Result<(), _> = keyed.run(&key, REQUEST, |_| async { Err(503) }).await;
        assert!(reply.is_err());
    }
    let seen = keyed.snapshot(0);
    assert_eq!((seen.retries, seen.admitted), (8, 12));
}

#[test]
fn list_matches_the_sums() {
    let circuit = Circuit::after_failures(1).open_for(secs(5)).probes(2);
    let builder = Throttle::builder().slots(Slots::fixed(2)).circuit(circuit);
    let (keyed, clock) = keys(builder.limits().unwrap());
    let mut held = Vec::new();
    for key in 0..10 {
        for _ in 0..=key % 2 {
            held.push(keyed.try_acquire(&key, REQUEST).unwrap());
        }
    }
    let mut waiter = Box::pin(keyed.acquire(&1, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    keyed.record(&3, Outcome::failure());
    clock.advance(secs(4));
    keyed.record(&4, Outcome::failure());
    keyed.throttle(&5).pause(secs(9));
    clock.advance(secs(1));
    let seen = keyed.snapshot(100);
    let views = || seen.top.iter().map(|view| &view.throttle);
    let sum = |of: fn(&tidegate::Snapshot) -> u64| views().map(of).sum::<u64>();
    assert_eq!((seen.keys, seen.top.len()), (10, 10), "more keys were requested than exist");
    assert_eq!(seen.admitted, sum(|view| view.admitted));
    assert_eq!((seen.in_flight, 15), (sum(|view| u64::from(view.in_flight)), held.len()));
    assert_eq!((seen.in_flight, seen.waiting), (15, sum(|view| u64::from(view.waiting))));
    let states =
        |state| views().filter(|view| view.circuit.is_some_and(|circuit| circuit.state == state)).count();
    assert_eq!((seen.open, states(CircuitState::Open)), (1, 1));
    assert_eq!((seen.half_open, states(CircuitState::HalfOpen)), (1, 1));
    assert_eq!(seen.paused, 1);
    let distinct: HashSet<u64> = seen.top.iter().map(|view| view.key).collect();
    assert_eq!(distinct.len(), 10);
    drop((held, waiter));
    assert_eq!(keyed.snapshot(0).in_flight, 0);
}

#[test]
fn busiest_keys_come_first_up_to_requested_count() {
    let (keyed, _) = keys(slots(1));
    for key in 1..=200_u64 {
        for _ in 0..key {
            drop(keyed.try_acquire(&key, REQUEST).unwrap());
        }
    }
    let busiest = |top| keyed.snapshot(top).top.iter().map(|view| view.key).collect::<Vec<_>>();
    assert!(busiest(0).is_empty());
    assert_eq!(busiest(1), [200]);
    assert_eq!(busiest(5), [200, 199, 198, 197, 196]);
    assert_eq!(busiest(usize::MAX), (1..=200).rev().collect::<Vec<_>>());
    let seen = keyed.snapshot(0);
    assert_eq!((seen.keys, seen.admitted), (200, 200 * 201 / 2), "the sums cover all keys");
}

#[test]
fn key_view_shows_levels_latency_and_next_entry() {
    let circuit = Circuit::at_error_rate(0.9, 10, secs(30));
    let builder = Throttle::builder().rate(Aimd::RATE).controller(Controller::Aimd(Aimd::default()));
    let (keyed, clock) = keys(builder.circuit(circuit).limits().unwrap());
    let causes = [Cause::Throttled, Cause::Server, Cause::Network];
    for cause in causes {
        let outcome = Outcome::failure().because(cause).took(millis(30));
        keyed.try_acquire(&1, REQUEST).unwrap().settle(outcome);
    }
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::success().took(millis(100)));
    let seen = keyed.snapshot(1);
    let view = &seen.top[0];
    assert_eq!(view.key, 1);
    assert_eq!(view.throttle.error_rate, Some(0.75));
    let of = view.throttle.outcomes;
    assert_eq!((of.successes, of.throttled, of.server, of.network, of.other), (1, 1, 1, 1, 0));
    assert_eq!(view.throttle.latency_mean, Some(millis(100)), "over successes alone");
    assert_eq!(view.throttle.rate_level, Some(0));
    let next = view.next_entry().expect("it is admitted at a known time");
    assert!(next > Duration::ZERO);
    clock.advance(next);
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "admitted at that time");
}

#[test]
fn stable_keys_appear_once_while_others_churn() {
    let (builder, clock) = by_hand(rate(Rate::per_second(1_000).burst(1)));
    let keyed = builder.shards(2).keys_max(6_000).build().unwrap();
    let pinned: Vec<_> = (0..500).map(|key| keyed.throttle(&key)).collect();
    let is_over = Arc::new(AtomicBool::new(false));
    let flood = {
        let (keyed, is_over) = (keyed.clone(), Arc::clone(&is_over));
        thread::spawn(move || {
            // The registry grows to its bound, is idle, and shrinks again.
            for key in (1_000..).take_while(|_| !is_over.load(Ordering::SeqCst)) {
                drop(keyed.try_acquire(&key, REQUEST));
                if key % 7_000 == 0 {
                    clock.advance(IDLE);
                    (0..3_000).for_each(|_| drop(keyed.throttle(&0)));
                }
            }
        })
    };
    for _ in 0..150 {
        let seen = keyed.snapshot(usize::MAX);
        assert_eq!(seen.keys, seen.top.len(), "the sums and the list cover the same keys");
        let mut of_pinned: Vec<u64> = seen.top.iter().map(|view| view.key).filter(|key| *key < 500).collect();
        of_pinned.sort_unstable();
        assert_eq!(of_pinned, (0..500).collect::<Vec<_>>());
    }
    is_over.store(true, Ordering::SeqCst);
    flood.join().unwrap();
    drop(pinned);
    assert_eq!(keyed.snapshot(0).keys, keyed.len());
}

#[tokio::test(start_paused = true)]
async fn snapshot_stream_is_steady_and_catches_up() {
    let keyed: Keyed<u64> = Keyed::builder(slots(1)).build().unwrap();
    let mut snapshots = keyed.snapshots(secs(10), 3);
    let start = keyed.snapshot(0).at;
    let second = |at: Instant| at.since(start).as_secs();
    assert_eq!(second(snapshots.next().await.at), 10);
    assert_eq!(second(snapshots.next().await.at), 20);
    tokio::time::advance(secs(25)).await;
    assert_eq!(second(snapshots.next().await.at), 45, "at once, for the missed ticks");
    assert_eq!(second(snapshots.next().await.at), 50, "back on the original schedule");
    assert!(tokio::time::timeout(secs(4), snapshots.next()).await.is_err());
    assert_eq!(second(snapshots.next().await.at), 60, "a cancelled read loses nothing");
    tokio::time::advance(secs(10)).await;
    assert_eq!(second(snapshots.next().await.at), 70, "exactly on time is not late");
    assert_eq!(second(snapshots.next().await.at), 80);
}

#[tokio::test(start_paused = true)]
async fn snapshot_span_is_clamped() {
    let keyed: Keyed<u64> = Keyed::builder(slots(1)).build().unwrap();
    let mut often = keyed.snapshots(Duration::ZERO, 0);
    let first = often.next().await.at;
    assert_eq!(often.next().await.at.since(first), millis(1));
    let mut never = keyed.snapshots(Duration::MAX, 0);
    assert!(tokio::time::timeout(secs(1_000_000), never.next()).await.is_err());
}

#[test]
fn snapshots_survive_a_clock_that_steps_back() {
    let (keyed, clock) = keys(slots(1));
    clock.advance(secs(100));
    let mut snapshots = keyed.snapshots(secs(10), 0);
    clock.set(Instant::ZERO);
    let mut next = Box::pin(snapshots.next());
    assert!(poll_once(next.as_mut()).is_pending());
    clock.advance(secs(110));
    assert!(poll_once(next.as_mut()).is_ready());
    clock.set(Instant::ZERO + Duration::MAX);
    drop(next);
    assert!(poll_once(snapshots.next()).is_ready());
    assert_eq!(keyed.snapshot(0).at, clock.now());
}

/// Regression: a key that was read and then evicted before the sums were made was counted twice, and the next
/// snapshot showed less than the one before.
#[test]
fn admissions_are_counted_once_during_eviction() {
    let (builder, clock) = by_hand(rate(Rate::per_second(1_000).burst(1)));
    let keyed = builder.shards(1).keys_max(5_000).build().unwrap();
    let counts: Arc<[AtomicU64; 2]> = Arc::default();
    let is_over = Arc::new(AtomicBool::new(false));
    let flood = {
        let (keyed, is_over, counts) = (keyed.clone(), Arc::clone(&is_over), Arc::clone(&counts));
        thread::spawn(move || {
            for key in (0..).take_while(|_| !is_over.load(Ordering::SeqCst)) {
                clock.advance(millis(1));
                counts[0].fetch_add(1, Ordering::SeqCst);
                drop(keyed.try_acquire(&key, REQUEST).unwrap());
                counts[1].fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    while keyed.len() < 5_000 {
        thread::yield_now();
    }
    for _ in 0..300 {
        let ended = counts[1].load(Ordering::SeqCst);
        let seen = keyed.snapshot(0).total;
        let begun = counts[0].load(Ordering::SeqCst);
        assert!((ended..=begun).contains(&seen), "{seen} of {ended} to {begun}");
    }
    is_over.store(true, Ordering::SeqCst);
    flood.join().unwrap();
    assert_eq!(keyed.snapshot(0).total, counts[0].load(Ordering::SeqCst));
}
