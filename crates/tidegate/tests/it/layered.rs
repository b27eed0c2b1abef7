//! The layered preset under a storm of 429s, and the recovery of the brake, in virtual time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{
    Brake, Class, Controller, Cost, EstimateBytes, Event, Outcome, Part, Phase, Random, Retry, RetryBudget,
    RunError, Slots, State, Throttle,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks};

#[test]
fn layered_preset_has_documented_limits() {
    let throttle = Throttle::layered().build().unwrap();
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.slots, snapshot.slots_max, snapshot.phase), (Some(400), Some(400), Phase::Normal));
    let large = throttle.try_acquire(Cost::request().bytes(5 << 20)).unwrap();
    let over = throttle.try_acquire(Cost::request().bytes(1)).unwrap();
    assert!(throttle.try_acquire(Cost::request().bytes(1)).is_err(), "5 MiB and one byte are in flight");
    drop((large, over));
}

#[tokio::test(start_paused = true)]
async fn request_size_sets_pause_after_overload() {
    let sizes = [
        (Part::Text { tokens: 1 }, 1_000),
        (Part::Image { bytes: 128 << 10 }, 1_000),
        (Part::Text { tokens: 15_000 }, 5_000),
    ];
    for (part, wanted) in sizes {
        let throttle = Throttle::layered().build().unwrap();
        let mut events = throttle.events();
        throttle.try_acquire(part.to_cost()).unwrap().settle(Outcome::overload());
        let paused = events.next().await.unwrap().event;
        assert!(
            matches!(paused, Event::Paused { span, .. } if span == millis(wanted)),
            "{part:?}: {paused:?}"
        );
    }
}

/// What the upstream received.
#[derive(Default)]
struct Log {
    sent: Vec<Duration>,
    in_flight: usize,
    most_while_recovering: usize,
    most_after: usize,
}

/// 600 requests at once, the first of which gets a 429. Nothing is sent during the pause, waiters resume
/// spread out with at most ten in flight while recovering, and after the tail all slots are used.
#[tokio::test(start_paused = true)]
async fn throttle_recovers_from_storm_of_429s() {
    const PAUSE: Duration = Duration::from_secs(5);
    let throttle =
        Throttle::layered().retry(Retry::attempts(20).budget(RetryBudget::unlimited())).build().unwrap();
    let (log, start) = (Arc::new(Mutex::new(Log::default())), Instant::now());
    let mut tasks = JoinSet::new();
    for number in 0..600_u32 {
        let (throttle, log) = (throttle.clone(), Arc::clone(&log));
        tasks.spawn(async move {
            let work = |_| {
                let (log, throttle) = (Arc::clone(&log), throttle.clone());
                async move {
                    let sent = start.elapsed();
                    {
                        let mut log = log.lock().unwrap();
                        log.sent.push(sent);
                        log.in_flight += 1;
                        let now = log.in_flight;
                        match throttle.snapshot().phase {
                            Phase::Recovering => {
                                log.most_while_recovering = log.most_while_recovering.max(now);
                            }
                            _ if sent > PAUSE => log.most_after = log.most_after.max(now),
                            _ => {}
                        }
                    }
                    sleep(millis(if sent < PAUSE { 100 } else { 200 })).await;
                    log.lock().unwrap().in_flight -= 1;
                    if sent < PAUSE { Err(number) } else { Ok(()) }
                }
            };
            let result: Result<(), RunError<u32>> = throttle
                .runner()
                .classify(|result: &Result<(), u32>| match result {
                    Ok(()) => Class::end(Outcome::success()),
                    Err(_) => Class::again(Outcome::overload().retry_after(PAUSE)),
                })
                .run(Cost::request().bytes(64), work)
                .await;
            result
        });
    }
    while let Some(result) = tasks.join_next().await {
        assert_eq!(result.unwrap(), Ok(()));
    }
    let log = log.lock().unwrap();
    let until = millis(100) + PAUSE;
    let early = log.sent.iter().filter(|sent| **sent < millis(100)).count();
    assert_eq!(early, 400, "all slots, before the first response");
    assert!(log.sent.iter().all(|sent| *sent < millis(100) || *sent >= until), "nothing during the pause");
    assert!(log.most_while_recovering <= 10, "{} while recovering", log.most_while_recovering);
    let resumed: Vec<_> = log.sent.iter().filter(|sent| **sent >= until).take(10).collect();
    let spread = resumed[9].saturating_sub(*resumed[0]);
    assert!(spread > millis(1), "the first ten resumed within {spread:?}");
    let recovering = log.sent.iter().filter(|sent| (until..until + secs(10)).contains(*sent)).count();
    assert!((300..=510).contains(&recovering), "ten at a time, 200 ms each, for ten seconds: {recovering}");
    let left = log.sent.iter().filter(|sent| **sent >= until + secs(10)).count();
    assert!(left > 50, "{left} remain after the tail");
    // All remaining requests at once, beside the last ones of the recovery.
    assert!((left..=left + 10).contains(&log.most_after), "{} of {left} at once", log.most_after);
    assert_eq!(throttle.snapshot().phase, Phase::Normal);
}

/// Only the pause holds the 64 waiters: all slots are free when it ends.
#[tokio::test(start_paused = true)]
async fn waiters_resume_spread_over_a_second_after_pause() {
    for seed in 0..20 {
        let builder = Throttle::builder().slots(Slots::fixed(64)).random(Random::seeded(seed));
        let throttle = builder.build().unwrap();
        throttle.pause(secs(30));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..64 {
            let throttle = throttle.clone();
            tasks.spawn(async move {
                let permit = throttle.acquire(REQUEST).await.unwrap().into_owned();
                (start.elapsed(), permit)
            });
        }
        let mut entered: Vec<_> = tasks.join_all().await.into_iter().map(|(at, _)| at).collect();
        entered.sort();
        let (first, last) = (entered[0], entered[63]);
        assert!(first >= secs(30) && last <= millis(31_010), "seed {seed}: {first:?} to {last:?}");
        for window in entered.windows(24) {
            let span = window[23].saturating_sub(window[0]);
            assert!(span > millis(60), "seed {seed}: 24 of 64 within {span:?}");
        }
    }
}

/// Successes do not shorten the recovery phase.
#[tokio::test(start_paused = true)]
async fn recovering_phase_lasts_its_full_tail() {
    let throttle = Throttle::layered().build().unwrap();
    throttle.try_acquire(REQUEST).unwrap().settle(Outcome::overload());
    let mut last = Duration::ZERO;
    let start = Instant::now();
    for _ in 0..300 {
        throttle.acquire(REQUEST).await.unwrap().settle(Outcome::success());
        if throttle.snapshot().phase == Phase::Recovering {
            last = start.elapsed();
        }
        sleep(millis(50)).await;
    }
    assert!(last > millis(10_900), "recovering until {last:?}, of 1 s + 10 s");
    assert_eq!(throttle.snapshot().state, State::Running);
}

/// One wave of failures at 64 slots cuts once to 32, and 32 cooling periods under demand restore 64, as
/// documented.
#[tokio::test(start_paused = true)]
async fn brake_recovers_64_slots_in_32_cooling_periods() {
    let cooling = secs(60);
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=64))
        .controller(Controller::Brake(Brake::default().cooling(cooling)))
        .build()
        .unwrap();
    let wave: Vec<_> = (0..64).map(|_| throttle.try_acquire(REQUEST).unwrap()).collect();
    for permit in wave {
        permit.settle(Outcome::failure());
    }
    let start = Instant::now();
    assert_eq!(throttle.snapshot().slots, Some(32), "one wave is one cut");
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let throttle = throttle.clone();
        tasks.spawn(async move {
            loop {
                let permit = throttle.acquire(REQUEST).await.unwrap();
                sleep(secs(1)).await;
                permit.settle(Outcome::success());
            }
        });
    }
    while throttle.snapshot().slots < Some(64) {
        sleep(secs(1)).await;
        assert!(start.elapsed() < 40 * cooling, "stuck at {:?}", throttle.snapshot().slots);
    }
    let periods = start.elapsed().as_secs() / cooling.as_secs();
    assert_eq!(periods, 32, "{:?}", start.elapsed());
    settle_tasks().await;
    assert_eq!(throttle.snapshot().state, State::Running);
    tasks.abort_all();
}

#[test]
fn progress_is_reported_at_milestones() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watcher = Arc::clone(&seen);
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .total(4)
        .milestones(25)
        .on_progress(move |snapshot| watcher.lock().unwrap().push((snapshot.percentage, snapshot.completed)))
        .build()
        .unwrap();
    for _ in 0..4 {
        throttle.try_acquire(REQUEST).unwrap().settle(Outcome::success());
    }
    let wanted = [(Some(25.0), 1), (Some(50.0), 2), (Some(75.0), 3), (Some(100.0), 4)];
    assert_eq!(*seen.lock().unwrap(), wanted);
}

#[test]
fn watcher_panic_is_caught_and_counted() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .total(2)
        .on_progress(|_| panic!("injected panic"))
        .build()
        .unwrap();
    throttle.try_acquire(REQUEST).unwrap().settle(Outcome::success());
    assert_eq!((throttle.snapshot().listener_panics, throttle.snapshot().completed), (1, 1));
    assert!(Caller::new(throttle.acquire(REQUEST)).permit().is_some());
}
