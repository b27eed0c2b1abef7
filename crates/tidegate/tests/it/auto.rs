//! The `Auto` controller inside a throttle, in virtual time: it finds hidden limits, waits for hints and
//! survives outages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{
    Authority, Auto, Class, Cost, Dimension, Event, Keyed, Outcome, QuotaLevel, Reason, Reset, Retry,
    RunError, Slots, Throttle,
};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::kit::upstream::in_virtual_time;
use crate::kit::{REQUEST, millis, secs};

/// An upstream with a hidden token bucket.
struct Hidden {
    rate: f64,
    burst: f64,
    latency: Duration,
    level: Mutex<(f64, Instant)>,
    accepted: AtomicU64,
    rejected: AtomicU64,
}

impl Hidden {
    fn new(rate: f64, burst: f64, latency: Duration) -> Arc<Self> {
        let level = Mutex::new((burst, Instant::now()));
        let (accepted, rejected) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { rate, burst, latency, level, accepted, rejected })
    }

    async fn call(&self) -> Outcome {
        let mut level = self.level.lock().await;
        let (units, since) = *level;
        let units = (units + self.rate * since.elapsed().as_secs_f64()).min(self.burst);
        let is_accepted = units >= 1.0;
        *level = (if is_accepted { units - 1.0 } else { units }, Instant::now());
        drop(level);
        if is_accepted {
            sleep(self.latency).await;
            self.accepted.fetch_add(1, Ordering::Relaxed);
            Outcome::success()
        } else {
            sleep(millis(20)).await;
            self.rejected.fetch_add(1, Ordering::Relaxed);
            Outcome::overload()
        }
    }
}

/// Spawns workers that send requests back to back.
fn work(throttle: &Throttle, upstream: &Arc<Hidden>, workers: usize) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        let (throttle, upstream) = (throttle.clone(), Arc::clone(upstream));
        tasks.spawn(async move {
            loop {
                let permit = throttle.acquire(REQUEST).await.expect("nothing refuses");
                let outcome = upstream.call().await;
                permit.settle(outcome);
            }
        });
    }
    tasks
}

/// Requests accepted and rejected per second in the minute after the first.
async fn minute(upstream: &Hidden) -> (f64, f64) {
    let count = || {
        [&upstream.accepted, &upstream.rejected]
            .map(|count| u32::try_from(count.load(Ordering::Relaxed)).expect("a short test"))
    };
    sleep(secs(60)).await;
    let before = count();
    sleep(secs(60)).await;
    let after = count();
    (f64::from(after[0] - before[0]) / 60.0, f64::from(after[1] - before[1]) / 60.0)
}

#[test]
fn every_default_uses_a_hidden_rate() {
    for (rate, latency) in [(5.0, millis(300)), (50.0, secs(2)), (400.0, millis(100))] {
        for preset in ["new", "host", "hosts"] {
            in_virtual_time(async {
                let upstream = Hidden::new(rate, rate, latency);
                let throttle = match preset {
                    "new" => Throttle::new(),
                    "host" => Throttle::host().build().unwrap(),
                    _ => Keyed::hosts().build().unwrap().throttle(&Authority::new("a.example").unwrap()),
                };
                let _tasks = work(&throttle, &upstream, 200);
                let (accepted, rejected) = minute(&upstream).await;
                assert!(accepted > 0.95 * rate, "{preset}: {accepted} of {rate} per second");
                assert!(rejected < 0.03 * rate, "{preset}: {rejected} rejected of {rate} per second");
                let control = throttle.snapshot().control.expect("it is Auto");
                let quota = control.requests.quota.expect("it met the limit").as_f64();
                assert!((quota / rate - 1.0).abs() < 0.2, "{preset}: {quota} estimated, {rate} granted");
            });
        }
    }
}

#[test]
fn ceiling_is_kept_and_reported() {
    in_virtual_time(async {
        let upstream = Hidden::new(500.0, 500.0, millis(50));
        let throttle = Throttle::auto().auto_within(Auto::default().rate_max(40.0)).build().unwrap();
        let _tasks = work(&throttle, &upstream, 64);
        let (accepted, _) = minute(&upstream).await;
        assert!((39.0..=40.5).contains(&accepted), "{accepted}");
        assert_eq!(throttle.snapshot().control.unwrap().reason, Reason::Ceiling);
        // Slots are reported as well.
        let throttle = Throttle::auto().slots(Slots::adaptive(1..=3)).build().unwrap();
        let _tasks = work(&throttle, &upstream, 64);
        sleep(secs(60)).await;
        let snapshot = throttle.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.control.unwrap().reason), (3, Reason::Ceiling));
    });
}

/// Regression: slots beside an adaptive rate never moved.
#[test]
fn adaptive_slots_of_a_host_move() {
    in_virtual_time(async {
        let upstream = Hidden::new(500.0, 500.0, millis(50));
        let throttle = Throttle::host().slots(Slots::adaptive(1..=8).start(1)).build().unwrap();
        let _tasks = work(&throttle, &upstream, 16);
        sleep(secs(60)).await;
        assert_eq!(throttle.snapshot().slots, Some(8));
    });
}

#[tokio::test(start_paused = true)]
async fn rejected_request_waits_for_its_hint() {
    let throttle = Throttle::new();
    let start = Instant::now();
    // Another request is accepted: the hint is for the rejected one alone.
    let runner =
        throttle.runner().retry(Retry::attempts(2)).classify(|reply: &Result<(), u64>| match reply {
            Ok(()) => Class::end(Outcome::success()),
            Err(hint) => Class::again(Outcome::overload().retry_after(secs(*hint))),
        });
    let rejected =
        runner.run(REQUEST, |attempt| async move { if attempt.number == 0 { Err(30) } else { Ok(()) } });
    let other = async {
        sleep(secs(1)).await;
        throttle.acquire(REQUEST).await.unwrap().settle(Outcome::success());
        start.elapsed()
    };
    let (result, other) = tokio::join!(rejected, other);
    assert_eq!(result, Ok::<(), RunError<u64>>(()));
    assert!(start.elapsed() >= secs(30), "{:?}", start.elapsed());
    assert!(other < secs(2), "{other:?}");
}

#[tokio::test(start_paused = true)]
async fn hint_stops_all_if_nothing_was_accepted() {
    let throttle = Throttle::new();
    let start = Instant::now();
    throttle.acquire(REQUEST).await.unwrap().settle(Outcome::success());
    for _ in 0..2 {
        sleep(millis(500)).await;
        throttle.acquire(REQUEST).await.unwrap().settle(Outcome::overload().retry_after(secs(30)));
    }
    throttle.acquire(REQUEST).await.unwrap().settle(Outcome::success());
    assert!(start.elapsed() >= secs(31), "{:?}", start.elapsed());
}

#[test]
fn outage_is_probed_and_ends_quickly() {
    in_virtual_time(async {
        let upstream = Hidden::new(50.0, 50.0, millis(100));
        let throttle = Throttle::new();
        let down = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..40 {
            let (throttle, upstream, down) = (throttle.clone(), Arc::clone(&upstream), Arc::clone(&down));
            tasks.spawn(async move {
                loop {
                    let permit = throttle.acquire(REQUEST).await.expect("nothing refuses");
                    let outcome = if down.load(Ordering::Relaxed) > 0 {
                        down.fetch_add(1, Ordering::Relaxed);
                        sleep(millis(20)).await;
                        Outcome::overload()
                    } else {
                        upstream.call().await
                    };
                    permit.settle(outcome);
                }
            });
        }
        sleep(secs(60)).await;
        down.store(1, Ordering::Relaxed);
        sleep(secs(60)).await;
        let probes = down.load(Ordering::Relaxed);
        assert!((5..60).contains(&probes), "{probes} requests in a minute of 503");
        assert_eq!(throttle.snapshot().control.unwrap().reason, Reason::Outage);
        down.store(0, Ordering::Relaxed);
        sleep(secs(10)).await;
        let before = upstream.accepted.load(Ordering::Relaxed);
        sleep(secs(10)).await;
        let accepted = upstream.accepted.load(Ordering::Relaxed) - before;
        assert!(accepted > 400, "{accepted} of 500 in the second ten seconds after it");
    });
}

#[test]
fn headers_set_the_pace_without_a_rejection() {
    in_virtual_time(async {
        // 600 per minute; each response reports the remaining quota.
        let start = Instant::now();
        let sent = Arc::new(AtomicU64::new(0));
        let throttle = Throttle::new();
        let mut tasks = JoinSet::new();
        for _ in 0..40 {
            let (throttle, sent) = (throttle.clone(), Arc::clone(&sent));
            tasks.spawn(async move {
                loop {
                    let permit = throttle.acquire(Cost::request()).await.expect("nothing refuses");
                    let used = sent.fetch_add(1, Ordering::Relaxed) + 1;
                    let elapsed = u64::try_from(start.elapsed().as_millis()).unwrap();
                    let remaining = (600 + elapsed / 100).saturating_sub(used).min(600);
                    let reset = Reset::Full(Duration::from_millis(100 * (600 - remaining)));
                    sleep(millis(50)).await;
                    let level = QuotaLevel { limit: 600, remaining, reset, window: None };
                    permit.settle(Outcome::success().quota(Dimension::Requests, level));
                }
            });
        }
        sleep(secs(120)).await;
        let before = sent.load(Ordering::Relaxed);
        sleep(secs(60)).await;
        let sent = sent.load(Ordering::Relaxed) - before;
        assert!((580..=620).contains(&sent), "{sent} sent, 600 granted");
        assert_eq!(throttle.snapshot().control.unwrap().reason, Reason::Headers);
    });
}

#[test]
fn change_of_reason_is_an_event() {
    in_virtual_time(async {
        let throttle = Throttle::new();
        let mut events = throttle.events();
        for _ in 0..20 {
            throttle.acquire(REQUEST).await.unwrap().settle(Outcome::overload());
        }
        let mut reasons = Vec::new();
        while let Some(notice) = events.try_next() {
            if let Event::Controlled { reason } = notice.event {
                reasons.push(reason.to);
            }
        }
        assert!(reasons.contains(&Reason::Outage), "{reasons:?}");
    });
}

/// `WaitLayer` and joined throttles start the work some time after the grant; that time once counted as
/// upstream latency.
#[tokio::test(start_paused = true)]
async fn time_between_grant_and_poll_is_not_latency() {
    let throttle = Throttle::auto().slots(Slots::adaptive(1..=1)).build().unwrap();
    let first = throttle.acquire(REQUEST).await.unwrap();
    let mut waiter = Box::pin(throttle.acquire(REQUEST));
    assert!(futures_now(&mut waiter).is_none());
    sleep(secs(1)).await;
    first.settle(Outcome::success());
    // Granted now, and polled a minute later.
    sleep(secs(60)).await;
    let permit = waiter.await.unwrap();
    sleep(millis(200)).await;
    permit.settle(Outcome::success());
    let slowest = throttle.snapshot().latency_p95.unwrap();
    assert!(slowest < secs(2), "{slowest:?}");
}

fn futures_now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::Pin::new(future).poll(&mut context) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_reports_the_wait_at_the_pace_of_the_moment() {
    let throttle = Throttle::auto().auto_within(Auto::default().rate_start(0.5)).build().unwrap();
    throttle.try_acquire(REQUEST).unwrap().settle(Outcome::success());
    let wait = throttle.try_acquire(REQUEST).unwrap_err().retry_after().expect("it is a matter of time");
    assert!((millis(1_900)..=millis(2_100)).contains(&wait), "{wait:?}");
    // Too long for a caller that waits at most a second.
    assert!(throttle.acquire_within(REQUEST, secs(1)).await.is_err());
    assert!(throttle.acquire_within(REQUEST, secs(3)).await.is_ok());
}

/// Many tasks wait at ten per second when the pace doubles: none is refused because of the initial pace.
#[test]
fn waiters_are_not_refused_for_a_pace_that_rises() {
    in_virtual_time(async {
        let upstream = Hidden::new(1_000.0, 1_000.0, millis(50));
        let throttle = Throttle::new();
        let mut tasks = JoinSet::new();
        for _ in 0..300 {
            let (throttle, upstream) = (throttle.clone(), Arc::clone(&upstream));
            tasks.spawn(async move {
                let permit = throttle.acquire_within(REQUEST, secs(10)).await?;
                permit.settle(upstream.call().await);
                Ok::<_, tidegate::Refused>(())
            });
        }
        let refused = tasks.join_all().await.into_iter().filter(Result::is_err).count();
        assert_eq!(refused, 0);
    });
}

/// Regression: a response without quota left, recorded while its body held the only slot, delayed the next request
/// by 950 s.
#[tokio::test(start_paused = true)]
async fn empty_window_delays_the_queue_until_its_reset() {
    let throttle = Throttle::auto().slots(Slots::adaptive(1..=1)).build().unwrap();
    let start = Instant::now();
    let mut first = throttle.acquire(REQUEST).await.unwrap();
    let mut waiter = Box::pin(throttle.acquire_within(REQUEST, secs(30)));
    assert!(futures_now(&mut waiter).is_none());
    let level = QuotaLevel { limit: 100, remaining: 0, reset: Reset::More(secs(20)), window: None };
    first.record(Outcome::success().quota(Dimension::Requests, level));
    sleep(secs(1)).await;
    first.settle(Outcome::success());
    let second = waiter.await.expect("the window resets in time");
    let took = start.elapsed();
    assert!((secs(19)..secs(22)).contains(&took), "{took:?}");
    second.settle(Outcome::success());
}

#[tokio::test(start_paused = true)]
async fn refusal_reports_the_reset_of_an_empty_window() {
    let throttle = Throttle::auto().build().unwrap();
    let level = QuotaLevel { limit: 100, remaining: 0, reset: Reset::More(secs(20)), window: None };
    let first = throttle.try_acquire(REQUEST).unwrap();
    first.settle(Outcome::success().quota(Dimension::Requests, level));
    let wait = throttle.try_acquire(REQUEST).unwrap_err().retry_after().expect("it is a matter of time");
    assert!((secs(19)..secs(22)).contains(&wait), "{wait:?}");
    assert!(throttle.acquire_within(REQUEST, secs(10)).await.is_err());
    assert!(throttle.acquire_within(REQUEST, secs(30)).await.is_ok());
}
