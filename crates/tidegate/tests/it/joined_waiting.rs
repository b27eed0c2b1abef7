//! Joined callers waiting for an exhausted limit: where they wait, in which order, and which callers proceed.

use std::sync::Mutex;
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{
    Controller, JoinedError, Limit, LimitError, LimitEvent, Limiter, Memory, Outcome, Pace, Rate, Refused,
    Scope, Slots, Throttle,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::kit::joined::{BETA, EntryLog, limiter, one, rps, slots, spend, wait};
use crate::kit::limiter::{ACME, Act, EventLog, HookStore, Moment, calls, calm, child, id, over, policy};
use crate::kit::{millis, secs, settle_tasks};

#[tokio::test(start_paused = true)]
async fn store_refusal_returns_whole_local_charge() {
    // Slots, rate, pace and tokens: a request that was never sent is charged nowhere.
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .rate(Rate::per_second(1))
        .pace(Pace::every(secs(1)))
        .controller(Controller::Fixed)
        .build()
        .unwrap();
    let limiter = limiter(Limit::per_hour("rpm", 1));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let stuck = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one()).await.map(drop) }
    });
    settle_tasks().await;
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.admitted, snapshot.rate_level), (0, 0, Some(1)));
    // Another tenant is admitted at the same instant through the same single slot.
    let start = Instant::now();
    joined.acquire(BETA, one()).await.unwrap().settle(Outcome::success()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    stuck.abort();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn blocked_tenant_does_not_affect_others() {
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    child(&limiter, "acme", "org").await;
    child(&limiter, "beta", "org").await;
    let own = policy([Limit::per_hour("rpm", 1)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("acme")), own).await.unwrap();
    spend(&limiter, ACME, 1).await;
    let joined = slots(2).limited_by(&limiter);
    let entries = EntryLog::default();
    let stuck: Vec<_> = (0..20).map(|_| wait(&joined, ACME, "acme", &entries)).collect();
    settle_tasks().await;
    let start = Instant::now();
    for _ in 0..50 {
        joined.acquire(BETA, one()).await.unwrap().settle(Outcome::success()).await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    let org = limiter.balances(("org", "gpt")).await.unwrap();
    assert_eq!(org[0].balance.available, 1_000 - 51, "the blocked tenant drew nothing from its parent");
    for task in stuck {
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_subject_enter_in_fifo_order() {
    for is_remote in [false, true] {
        let store = calm();
        let limiter =
            if is_remote { over(&store).defaults([rps()]).build().unwrap() } else { limiter(rps()) };
        let joined = slots(2).limited_by(&limiter);
        spend(&limiter, ACME, 1).await;
        let entries = EntryLog::default();
        let mut tasks = Vec::new();
        for number in 0..6 {
            tasks.push(wait(&joined, ACME, &number.to_string(), &entries));
            settle_tasks().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(entries.names(), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(entries.times(), [1, 2, 3, 4, 5, 6].map(secs), "one per second, and none is lost");
    }
}

#[tokio::test(start_paused = true)]
async fn queue_draws_only_for_its_head() {
    let store = calm();
    let limiter = over(&store).defaults([rps()]).build().unwrap();
    let joined = slots(100).limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entries = EntryLog::default();
    let tasks: Vec<_> = (0..50).map(|number| wait(&joined, ACME, &number.to_string(), &entries)).collect();
    for task in tasks {
        task.await.unwrap();
    }
    let draws = calls(&store, Verb::Draw);
    assert!((100..=50 * 4).contains(&draws), "fifty at first, then a few per grant: {draws}");
}

#[tokio::test(start_paused = true)]
async fn refilled_limit_drains_queue_in_batches() {
    // With a latency of ten milliseconds, a hundred sequential draws would take a second.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 100)]).await.unwrap();
    let joined = slots(200).limited_by(&limiter);
    let entries = EntryLog::default();
    let tasks: Vec<_> = (0..100).map(|number| wait(&joined, ACME, &number.to_string(), &entries)).collect();
    tokio::time::sleep(millis(100)).await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(start.elapsed() <= millis(100), "{:?}", start.elapsed());
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn retrying_caller_keeps_its_queue_position() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entries = EntryLog::default();
    let acme = wait(&joined, ACME, "acme", &entries);
    settle_tasks().await;
    // The slot is taken and others queue for it before acme's wait of one second is over.
    let slot = throttle.acquire(one()).await.unwrap();
    let others: Vec<_> = ["first", "second"].map(|name| wait(&joined, BETA, name, &entries)).into();
    let plain = tokio::spawn({
        let (throttle, entries) = (throttle.clone(), entries.clone());
        async move {
            let permit = throttle.acquire(one()).await.unwrap();
            entries.record("plain", Instant::now());
            permit.settle(Outcome::success());
        }
    });
    tokio::time::sleep(millis(1_500)).await;
    assert_eq!(throttle.snapshot().waiting, 4);
    slot.settle(Outcome::success());
    acme.await.unwrap();
    plain.await.unwrap();
    for task in others {
        task.await.unwrap();
    }
    let names = entries.names();
    assert_eq!(names[0], "acme", "it arrived first: {names:?}");
    assert_eq!(names[1..3], ["first", "plain"], "later callers keep their order");
}

#[tokio::test(start_paused = true)]
async fn leaving_the_queue_lets_the_next_draw() {
    let limiter = limiter(Limit::per_hour("rpm", 10));
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one().tokens(10)).await.map(drop) }
    });
    settle_tasks().await;
    let entries = EntryLog::default();
    let cheap: Vec<_> = (0..5).map(|number| wait(&joined, ACME, &number.to_string(), &entries)).collect();
    settle_tasks().await;
    assert!(entries.names().is_empty(), "a costly head is not overtaken");
    let start = Instant::now();
    costly.abort();
    for task in cheap {
        task.await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn try_acquire_does_not_overtake_waiters() {
    let limiter = limiter(Limit::per_hour("rpm", 10));
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one().tokens(10)).await.map(drop) }
    });
    settle_tasks().await;
    let error = joined.try_acquire(ACME, one()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Waiting { ahead: 1, .. })), "{error}");
    assert!(error.retry_after() > Some(secs(1_700)) && !error.is_final(), "{error}");
    // The same for callers of the limiter itself.
    let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { .. }), "{error}");
    assert_eq!(joined.throttle().snapshot().admitted, 0);
    drop(joined.try_acquire(BETA, one()).await.unwrap());
    costly.abort();
}

#[tokio::test(start_paused = true)]
async fn acquire_within_refuses_unreachable_deadline_early() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let start = Instant::now();
    let error = joined.acquire_within(ACME, one(), millis(999)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Limited(_))), "{error}");
    assert_eq!((error.retry_after(), start.elapsed()), (Some(secs(1)), Duration::ZERO));
    // Behind others: the head cannot be served in time, so neither can anyone behind it.
    let entries = EntryLog::default();
    let head = wait(&joined, ACME, "head", &entries);
    settle_tasks().await;
    let error = joined.acquire_within(ACME, one(), millis(500)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Waiting { ahead: 1, .. })), "{error}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    // In time for the head, and too late for itself.
    let error = joined.acquire_within(ACME, one(), millis(1_500)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Limited(_))), "{error}");
    assert_eq!(start.elapsed(), secs(1));
    head.await.unwrap();
    // Enough time.
    joined.acquire_within(ACME, one(), secs(1)).await.unwrap().settle(Outcome::success()).await.unwrap();
    assert_eq!(start.elapsed(), secs(2));
    // Delayed by the throttle, not by the limit.
    let slot = throttle.acquire(one()).await.unwrap();
    let error = joined.acquire_within(BETA, one(), millis(100)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::Limited { .. })), "{error}");
    assert_eq!(start.elapsed(), millis(2_100));
    drop(slot);
    assert_eq!((limiter.stats().waiting, throttle.snapshot().waiting), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_next_caller() {
    let events = EventLog::default();
    let limiter = Limiter::builder(Memory::new())
        .defaults([Limit::per_hour("rpm", 1)])
        .waiters_max(2)
        .on_event(events.listener())
        .build()
        .unwrap();
    let joined = slots(4).limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entries = EntryLog::default();
    let tasks: Vec<_> = (0..2).map(|_| wait(&joined, ACME, "one", &entries)).collect();
    settle_tasks().await;
    let error = joined.acquire(ACME, one()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Busy { waiters_max: 2, .. })), "{error}");
    assert!(!error.is_final() && error.retry_after().is_some(), "{error}");
    assert_eq!(events.count(|event| matches!(event, LimitEvent::QueueFull { waiters_max: 2 })), 1);
    tasks.iter().for_each(JoinHandle::abort);
    settle_tasks().await;
    assert_eq!((limiter.stats().waiting, joined.throttle().snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn throttle_waiter_stays_ahead_of_later_callers() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    let slot = joined.acquire(ACME, one()).await.unwrap();
    let entries = EntryLog::default();
    // It queues at the throttle while its limit has a unit. Then others use that unit up.
    let early = wait(&joined, ACME, "early", &entries);
    settle_tasks().await;
    let other = slots(1).limited_by(&limiter);
    let elsewhere = wait(&other, ACME, "elsewhere", &entries);
    settle_tasks().await;
    let late = wait(&joined, ACME, "late", &entries);
    settle_tasks().await;
    slot.settle(Outcome::success()).await.unwrap();
    for task in [early, late, elsewhere] {
        task.await.unwrap();
    }
    let names = entries.names();
    let place = |name: &str| names.iter().position(|entry| entry == name);
    assert!(place("early") < place("late"), "{names:?}");
}

#[tokio::test(start_paused = true)]
async fn newcomers_at_exhausted_limit_take_nothing_local() {
    let (throttle, limiter) = (slots(1), limiter(Limit::per_hour("rpm", 1)));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entries = EntryLog::default();
    let first = wait(&joined, ACME, "first", &entries);
    settle_tasks().await;
    let slot = throttle.acquire(one()).await.unwrap();
    let evaluations = throttle.snapshot().evaluations;
    let second = wait(&joined, ACME, "second", &entries);
    settle_tasks().await;
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.waiting, snapshot.evaluations), (0, evaluations));
    assert_eq!(limiter.stats().waiting, 2);
    drop(slot);
    first.abort();
    second.abort();
}

#[tokio::test(start_paused = true)]
async fn admitted_caller_does_not_overtake_refused_one() {
    // Regression: the cheap caller queued for the only slot while the costly one was drawing. When the costly
    // one was refused, the cheap one got the slot and drew the units that the costly one waits for.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_second("rpm", 10)]).build().unwrap();
    spend(&limiter, ACME, 5).await;
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let entries = EntryLog::default();
    let start = Instant::now();
    let costly = tokio::spawn({
        let (joined, entries) = (joined.clone(), entries.clone());
        async move {
            let permit = joined.acquire(ACME, one().tokens(10)).await.unwrap();
            entries.record("costly", start);
            permit.settle(Outcome::success()).await.unwrap();
        }
    });
    tokio::time::sleep(millis(10)).await;
    let cheap = wait(&joined, ACME, "cheap", &entries);
    settle_tasks().await;
    assert_eq!(throttle.snapshot().waiting, 1);
    costly.await.unwrap();
    cheap.await.unwrap();
    assert_eq!(entries.names(), ["costly", "cheap"]);
    assert!(entries.times()[0] < millis(600), "{:?}", entries.times());
}

#[tokio::test(start_paused = true)]
async fn new_head_is_not_overtaken_by_limiter_callers() {
    // Regression: two callers were refused in flight and the first of them left. Its retry time was dropped
    // with it, and the second never set its own.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = |units: u64| {
        let joined = joined.clone();
        tokio::spawn(async move { joined.acquire(ACME, one().tokens(units)).await.map(drop) })
    };
    let (first, second) = (costly(10), costly(9));
    tokio::time::sleep(millis(100)).await;
    first.abort();
    tokio::time::sleep(millis(100)).await;
    let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { ahead: 1, retry_after: Some(_), .. }), "{error}");
    second.abort();
}

/// The refusal of the later caller arrives first.
#[tokio::test(start_paused = true)]
async fn earliest_caller_draws_first_after_refusals() {
    let memory = Memory::new();
    let draws = Mutex::new(0);
    let store = HookStore::new(&memory, move |verb, moment| {
        let mut draws = draws.lock().expect("no panic");
        *draws += i32::from((verb, moment) == (Verb::Draw, Moment::Before));
        match (verb, moment, *draws) {
            (Verb::Draw, Moment::Before, 1) => Act::Sleep(millis(30)),
            _ => Act::Pass,
        }
    });
    let limiter = over(&store).defaults([rps()]).build().unwrap();
    spend(&limiter, ACME, 1).await;
    let joined = slots(4).limited_by(&limiter);
    let entries = EntryLog::default();
    let first = wait(&joined, ACME, "first", &entries);
    settle_tasks().await;
    let second = wait(&joined, ACME, "second", &entries);
    for task in [first, second] {
        task.await.unwrap();
    }
    assert_eq!(entries.names(), ["first", "second"]);
}
