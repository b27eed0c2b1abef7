//! An adaptive (AIMD) rate in virtual time: it converges on the upstream's limit, and waiters follow each
//! change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::{Aimd, Controller, Event, ManualClock, Outcome, Rate, Refused, Throttle};
use tidegate_core::bucket::{Bucket, Shape};
use tidegate_core::time::Instant;

use crate::kit::{Caller, REQUEST, millis, secs};

/// An upstream with a token bucket that returns an overload for each request above it.
struct Upstream {
    shape: Shape,
    bucket: Mutex<Bucket>,
    born: tokio::time::Instant,
    fine: AtomicU64,
    too_many: AtomicU64,
}

impl Upstream {
    fn new(per_second: u64) -> Self {
        Self {
            shape: Shape::new(per_second, secs(1), per_second).expect("in bounds"),
            bucket: Mutex::new(Bucket::full()),
            born: tokio::time::Instant::now(),
            fine: AtomicU64::new(0),
            too_many: AtomicU64::new(0),
        }
    }

    async fn call(&self) -> Outcome {
        tokio::time::sleep(millis(50)).await;
        let now = Instant::ZERO + self.born.elapsed();
        if self.bucket.lock().expect("the lock is not poisoned").take(&self.shape, 1, now).is_ok() {
            self.fine.fetch_add(1, Ordering::Relaxed);
            Outcome::success()
        } else {
            self.too_many.fetch_add(1, Ordering::Relaxed);
            Outcome::overload()
        }
    }

    fn counts(&self) -> (u64, u64) {
        (self.fine.load(Ordering::Relaxed), self.too_many.load(Ordering::Relaxed))
    }
}

#[tokio::test(start_paused = true)]
async fn aimd_rate_converges_and_nearly_all_calls_succeed() {
    let aimd = Aimd::default().within(0.25..=50.0);
    let throttle =
        Throttle::builder().rate(Aimd::RATE).controller(Controller::Aimd(aimd)).build().expect("in bounds");
    let far_side = Arc::new(Upstream::new(10));
    for _ in 0..8 {
        let (throttle, far_side) = (throttle.clone(), far_side.clone());
        tokio::spawn(async move {
            while let Ok(permit) = throttle.acquire(REQUEST).await {
                permit.settle(far_side.call().await);
            }
        });
    }
    // The climb from 2 to 10 per second by a quarter each second, and the first cuts.
    tokio::time::sleep(secs(60)).await;
    let (fine_before, too_many_before) = far_side.counts();
    tokio::time::sleep(secs(300)).await;
    let (fine, too_many) = far_side.counts();
    let (fine, too_many) = (fine - fine_before, too_many - too_many_before);
    assert!(fine * 10 > (fine + too_many) * 9, "{fine} fine, {too_many} too many");
    assert!(fine >= 300 * 10 * 3 / 4, "{fine} of the 3,000 requests that the upstream allows");
    throttle.close();
}

#[test]
fn waiters_enter_at_current_rate_after_cut() {
    let clock = ManualClock::new();
    let throttle = adaptive(&clock, Rate::per_second(1).burst(1));
    let first = throttle.try_acquire(REQUEST).unwrap();
    let mut second = Caller::queued(&throttle, REQUEST);
    // Half a unit is available; at half the rate the missing half takes twice as long.
    clock.advance(millis(500));
    first.settle(Outcome::overload());
    clock.advance(millis(999));
    assert!(second.permit().is_none(), "one second at half the rate for the other half");
    clock.advance(millis(1));
    second.permit().expect("a unit is available").settle(Outcome::success());
}

#[test]
fn waiter_is_refused_when_cut_exceeds_its_deadline() {
    let clock = ManualClock::new();
    let throttle = adaptive(&clock, Rate::per_second(1).burst(1));
    let first = throttle.try_acquire(REQUEST).unwrap();
    let mut bounded = Caller::new(throttle.acquire_within(REQUEST, millis(1_500)));
    assert!(bounded.poll().is_pending());
    first.settle(Outcome::overload());
    assert!(matches!(bounded.refused(), Some(Refused::Limited { .. })));
}

#[test]
fn listener_receives_rate_before_and_after_change() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorder = events.clone();
    let throttle = Throttle::builder()
        .rate(Aimd::RATE)
        .controller(Controller::Aimd(Aimd::default()))
        .on_state_change(move |notice| recorder.lock().unwrap().push(notice.event.clone()))
        .build()
        .unwrap();
    throttle.record(Outcome::overload());
    let events = events.lock().unwrap();
    let [Event::Slowed { rate: Some(rate), .. }] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((rate.from.to_string(), rate.to.to_string()), ("2/s".to_owned(), "1/s".to_owned()));
}

fn adaptive(clock: &ManualClock, rate: Rate) -> Throttle {
    let controller = Controller::Aimd(Aimd::default());
    Throttle::builder().rate(rate).controller(controller).clock(clock.clone()).build().expect("in bounds")
}
