//! Waiting for a shared limit: one FIFO queue per subject, and only its head draws from the store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{Lease, Limit, LimitError, LimitEvent, Limiter, Memory, Scope, Subject};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, EventLog, HookStore, Moment, Network, calls, calm, child, flushed, id, level, memory, policy,
    wait,
};
use crate::kit::{millis, secs, settle_tasks};

/// A limiter on a store that counts its calls.
fn limiter(limits: impl IntoIterator<Item = Limit>) -> (Limiter, Network) {
    let store = calm();
    (crate::kit::limiter::over(&store).defaults(limits).build().expect("within the bounds"), store)
}

/// One unit per second, with a burst of ten.
fn rps() -> Limit {
    Limit::per_second("rpm", 1).burst(10)
}

fn draws(store: &Network) -> u64 {
    calls(store, Verb::Draw)
}

#[tokio::test(start_paused = true)]
async fn waiters_are_served_fifo_and_only_the_head_draws() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for number in 0..8_u64 {
        let (limiter, order) = (limiter.clone(), Arc::clone(&order));
        tasks.push(tokio::spawn(async move {
            // Later callers want less, and still none overtakes.
            let lease = limiter.acquire_within(ACME, [("rpm", 8 - number)], secs(60)).await;
            order.lock().expect("the lock is not poisoned").push((number, start.elapsed().as_secs()));
            lease.expect("a minute is enough").settle_full().await
        }));
        settle_tasks().await;
        assert_eq!(draws(&store), 1, "only the head has drawn, and once");
    }
    assert_eq!(limiter.stats().waiting, 8);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let expected = [(0, 8), (1, 15), (2, 21), (3, 26), (4, 30), (5, 33), (6, 35), (7, 36)];
    assert_eq!(*order.lock().unwrap(), expected);
    // Each was refused once as the head, and granted at its retry time.
    assert_eq!(draws(&store), 16);
    assert_eq!((limiter.stats().waiting, limiter.stats().open_leases), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn unreachable_deadline_is_refused_at_once() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let error = limiter.acquire_within(ACME, [("rpm", 5)], millis(4_999)).await.unwrap_err();
    assert!(matches!(error, LimitError::Limited(_)), "{error}");
    assert_eq!((error.retry_after(), start.elapsed()), (Some(secs(5)), Duration::ZERO));
    assert_eq!(draws(&store), 1);
    let lease = limiter.acquire_within(ACME, [("rpm", 5)], secs(5)).await.unwrap();
    assert_eq!(start.elapsed(), secs(5), "exactly at the deadline is in time");
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn caller_behind_late_head_is_refused_at_once() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let head = wait(&limiter, ACME, 9, secs(60));
    settle_tasks().await;
    let start = Instant::now();
    let error = limiter.acquire_within(ACME, [("rpm", 1)], secs(8)).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { ahead: 1, .. }) && !error.is_final(), "{error}");
    assert_eq!(error.retry_after(), Some(secs(9)), "when the head is served");
    assert_eq!((start.elapsed(), draws(&store)), (Duration::ZERO, 1));
    // An impossible or invalid cost is reported before any wait.
    let error = limiter.acquire_within(ACME, [("rpm", 11)], secs(8)).await.unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)), "{error}");
    let error = limiter.acquire_within(ACME, [("typo", 1)], secs(8)).await.unwrap_err();
    assert!(matches!(error, LimitError::Cost(_)), "{error}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(head.await.unwrap().unwrap());
    assert_eq!(start.elapsed(), secs(9));
}

#[tokio::test(start_paused = true)]
async fn waiters_behind_late_new_head_are_refused() {
    let (limiter, _) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let first = wait(&limiter, ACME, 5, secs(60));
    settle_tasks().await;
    let second = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    // The first is served in time; that the second is not is found when it becomes the head.
    let error = limiter.acquire_within(ACME, [("rpm", 1)], secs(7)).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { .. }), "{error}");
    assert_eq!(start.elapsed(), secs(5));
    first.await.unwrap().unwrap().settle_full().await.unwrap();
    drop(second.await.unwrap().unwrap());
    assert_eq!(start.elapsed(), secs(15));
}

#[tokio::test(start_paused = true)]
async fn try_acquire_does_not_overtake_costly_head() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 5)]).await.unwrap();
    let head = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    // Five units are available, and are reserved for the head.
    for attempt in
        [limiter.try_acquire(ACME, [("rpm", 1)]).await.map(drop), limiter.spend(ACME, [("rpm", 1)]).await]
    {
        let error = attempt.unwrap_err();
        let LimitError::Waiting { ahead, retry_after, .. } = &error else { panic!("{error}") };
        assert_eq!((*ahead, *retry_after), (1, Some(secs(5))));
        assert!(!error.is_final());
    }
    assert_eq!(draws(&store), 1);
    drop(head.await.unwrap().unwrap());
    flushed(&limiter).await;
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn drawing_caller_does_not_block_others() {
    // Regression: a caller that might wait counted as a waiter from the start, so during its draw all others
    // were refused although the store had a hundred units.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |_, _| Act::Sleep(millis(5)));
    let limiter = crate::kit::limiter::over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let asking = wait(&limiter, ACME, 1, secs(60));
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 1);
    drop(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap());
    drop(asking.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn subjects_do_not_wait_for_each_other() {
    let (limiter, _) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let stuck = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    let start = Instant::now();
    for other in [("acme", "claude"), ("beta", "gpt")] {
        limiter.try_acquire(other, [("rpm", 5)]).await.unwrap().settle_full().await.unwrap();
        limiter.acquire_within(other, [("rpm", 5)], secs(1)).await.unwrap().settle_full().await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(stuck.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn subject_blocked_on_own_limit_spares_its_parents() {
    let (limiter, store) = limiter([Limit::per_day("rpm", 1_000)]);
    child(&limiter, "left", "org").await;
    child(&limiter, "right", "org").await;
    let own = policy([Limit::per_second("rpm", 1)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("left")), own).await.unwrap();
    limiter.spend(("left", "gpt"), [("rpm", 1)]).await.unwrap();
    let stuck = wait(&limiter, ("left", "gpt"), 1, secs(60));
    settle_tasks().await;
    assert_eq!(level(memory(&store), ("org", "gpt"), "rpm").await, Some((999, 1)));
    for _ in 0..9 {
        limiter.spend(("right", "gpt"), [("rpm", 100)]).await.unwrap();
    }
    assert_eq!(level(memory(&store), ("org", "gpt"), "rpm").await, Some((99, 901)));
    stuck.await.unwrap().unwrap().settle_full().await.unwrap();
    assert_eq!(level(memory(&store), ("org", "gpt"), "rpm").await, Some((98, 902)));
}

#[tokio::test(start_paused = true)]
async fn leaving_the_queue_promotes_the_next_at_once() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 8)]).await.unwrap();
    let costly = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    let start = Instant::now();
    let cheap: Vec<_> = (0..2).map(|_| wait(&limiter, ACME, 1, secs(60))).collect();
    settle_tasks().await;
    costly.abort();
    for cheap in cheap {
        cheap.await.unwrap().unwrap().settle_full().await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((0, 10)));
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn waiter_leaving_from_the_middle_is_skipped() {
    let (limiter, _) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let tasks: Vec<_> = (0..3).map(|_| wait(&limiter, ACME, 5, secs(60))).collect();
    settle_tasks().await;
    tasks[1].abort();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 2);
    let mut granted = Vec::new();
    for task in tasks {
        if let Ok(lease) = task.await {
            lease.unwrap().settle_full().await.unwrap();
            granted.push(start.elapsed());
        }
    }
    assert_eq!(granted, [secs(5), secs(10)]);
}

#[tokio::test(start_paused = true)]
async fn retry_time_of_a_head_leaves_with_it() {
    // Regression: a head that needed an hour left. While the next one drew from a slow store, new callers
    // were still refused by that hour.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limits = [Limit::per_hour("rpm", 60).burst(60)];
    let limiter = crate::kit::limiter::over(&store).defaults(limits).build().unwrap();
    limiter.spend(ACME, [("rpm", 50)]).await.unwrap();
    let costly = wait(&limiter, ACME, 60, secs(7_200));
    tokio::time::sleep(millis(20)).await;
    let second = wait(&limiter, ACME, 1, secs(7_200));
    settle_tasks().await;
    costly.abort();
    settle_tasks().await;
    let third = limiter.acquire_within(ACME, [("rpm", 1)], secs(1)).await;
    drop(third.expect("the costly head has left, and nine units are available"));
    drop(second.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn returned_lease_wakes_the_head_early() {
    let hourly = [Limit::per_hour("rpm", 10)];
    let (behind_a_network, store) = limiter(hourly.clone());
    let here = Memory::new();
    let in_memory = Limiter::builder(here.clone()).defaults(hourly).build().unwrap();
    for (limiter, memory) in [(behind_a_network, memory(&store)), (in_memory, &here)] {
        let start = Instant::now();
        let mut lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
        let tasks: Vec<_> = (0..4).map(|_| wait(&limiter, ACME, 2, secs(7_200))).collect();
        settle_tasks().await;
        // By an adjustment, a settle below the held units, a cancel, and a drop.
        let mut granted: Vec<Lease> = Vec::new();
        lease.adjust([("rpm", -2)]).await.unwrap();
        let mut tasks = tasks.into_iter();
        granted.push(tasks.next().unwrap().await.unwrap().unwrap());
        lease.settle([("rpm", 6)]).await.unwrap();
        granted.push(tasks.next().unwrap().await.unwrap().unwrap());
        granted[0].cancel().await.unwrap();
        granted.push(tasks.next().unwrap().await.unwrap().unwrap());
        drop(granted.pop());
        granted.push(tasks.next().unwrap().await.unwrap().unwrap());
        assert_eq!(start.elapsed(), Duration::ZERO);
        drop(granted);
        flushed(&limiter).await;
        assert_eq!(level(memory, ACME, "rpm").await, Some((4, 6)));
    }
}

#[tokio::test(start_paused = true)]
async fn return_to_parent_wakes_blocked_child() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 1_000)]);
    child(&limiter, "left", "org").await;
    child(&limiter, "right", "org").await;
    limiter
        .admin("ops")
        .set_policy(Scope::Entity(id("org")), policy([Limit::per_day("rpm", 5)]))
        .await
        .unwrap();
    let lease = limiter.try_acquire(("left", "gpt"), [("rpm", 5)]).await.unwrap();
    let start = Instant::now();
    let stuck = wait(&limiter, ("right", "gpt"), 1, secs(100_000));
    settle_tasks().await;
    drop(lease);
    drop(stuck.await.unwrap().unwrap());
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_next_caller() {
    let events = EventLog::default();
    let limiter = Limiter::builder(Memory::new())
        .defaults([rps()])
        .waiters_max(2)
        .on_event(events.listener())
        .build()
        .unwrap();
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let tasks: Vec<_> = (0..2).map(|_| wait(&limiter, ACME, 1, secs(60))).collect();
    settle_tasks().await;
    let error = limiter.acquire_within(ACME, [("rpm", 1)], secs(60)).await.unwrap_err();
    assert!(
        matches!(error, LimitError::Busy { waiters_max: 2, retry_after: Some(wait) } if wait == secs(1)),
        "{error}: the head of its queue is ready in a second"
    );
    assert!(!error.is_final());
    let error = limiter.acquire_within(("globex", "gpt-4"), [("rpm", 1)], secs(60)).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(secs(1)), "no caller waits for its subject");
    assert_eq!(events.count(|event| matches!(event, LimitEvent::QueueFull { waiters_max: 2 })), 2);
    // A waiter that leaves frees its position.
    tasks[0].abort();
    settle_tasks().await;
    drop(limiter.acquire_within(ACME, [("rpm", 1)], secs(60)).await.unwrap());
    drop(tasks);
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn close_refuses_waiters_and_new_callers() {
    let (limiter, store) = limiter([rps()]);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let tasks: Vec<_> = (0..3).map(|_| wait(&limiter, ACME, 10, secs(60))).collect();
    settle_tasks().await;
    limiter.close();
    for task in tasks {
        assert!(matches!(task.await.unwrap(), Err(LimitError::Closed)));
    }
    assert!(matches!(limiter.acquire_within(ACME, [("rpm", 1)], secs(60)).await, Err(LimitError::Closed)));
    assert!(matches!(limiter.try_acquire(ACME, [("rpm", 1)]).await, Err(LimitError::Closed)));
    assert_eq!((start.elapsed(), draws(&store)), (Duration::ZERO, 1));
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn close_refuses_head_with_draw_in_progress() {
    // Regression: a head that was drawing when the limiter closed waited out its retry time of an hour.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = crate::kit::limiter::over(&store).defaults([Limit::per_hour("rpm", 1)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let start = Instant::now();
    let head = wait(&limiter, ACME, 1, secs(7_200));
    tokio::time::sleep(millis(5)).await;
    limiter.close();
    assert!(matches!(head.await.unwrap(), Err(LimitError::Closed)));
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn drained_limit_reports_retry_after_and_then_grants() {
    for waits in [false, true] {
        let (limiter, _) = limiter([Limit::per_second("rpm", 100)]);
        limiter.spend(ACME, [("rpm", 100)]).await.unwrap();
        let error = limiter.try_acquire(ACME, [("rpm", 50)]).await.unwrap_err();
        assert_eq!(error.retry_after(), Some(millis(500)));
        let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
        assert_eq!(error.retry_after(), Some(millis(10)), "and not zero");
        let start = Instant::now();
        if waits {
            drop(limiter.acquire_within(ACME, [("rpm", 50)], millis(1_100)).await.unwrap());
            assert_eq!(start.elapsed(), millis(500));
        } else {
            tokio::time::advance(millis(1_100)).await;
            drop(limiter.try_acquire(ACME, [("rpm", 50)]).await.unwrap());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn policy_changed_during_wait_applies_to_head() {
    let (limiter, store) = limiter([]);
    let admin = limiter.admin("ops");
    let own = Scope::Subject(Subject::new("acme", "gpt").unwrap());
    admin.set_policy(own.clone(), policy([rps()])).await.unwrap();
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let slowed = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    tokio::time::advance(secs(5)).await;
    admin.set_policy(own.clone(), policy([Limit::per_second("rpm", 2).burst(10)])).await.unwrap();
    // The head draws again at once: five units are available, and the rest refills twice as fast.
    let mut lease = slowed.await.unwrap().unwrap();
    assert_eq!(start.elapsed(), millis(7_500));
    lease.settle_full().await.unwrap();
    // If the change makes the cost impossible, the head is refused.
    let never = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    admin.set_policy(own, policy([Limit::per_second("rpm", 2).burst(4)])).await.unwrap();
    let error = never.await.unwrap().unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)), "{error}");
    assert_eq!(level(memory(&store), ACME, "rpm").await.unwrap().1, 20);
}

#[tokio::test(start_paused = true)]
async fn zero_wait_draws_once() {
    let (limiter, store) = limiter([rps()]);
    limiter.acquire_within(ACME, [("rpm", 10)], Duration::ZERO).await.unwrap().settle_full().await.unwrap();
    let error = limiter.acquire_within(ACME, [("rpm", 1)], Duration::ZERO).await.unwrap_err();
    assert!(matches!(error, LimitError::Limited(_)), "{error}");
    assert_eq!((error.retry_after(), draws(&store)), (Some(secs(1)), 2));
    let head = wait(&limiter, ACME, 1, secs(60));
    settle_tasks().await;
    let error = limiter.acquire_within(ACME, [("rpm", 1)], Duration::ZERO).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { .. }), "{error}");
    drop(head.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn unbounded_wait_is_served() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 1)]);
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let start = Instant::now();
    drop(limiter.acquire_within(ACME, [("rpm", 1)], Duration::MAX).await.unwrap());
    assert_eq!(start.elapsed(), secs(86_400));
}

#[tokio::test(start_paused = true)]
async fn return_enough_for_two_wakes_two() {
    // Regression: one of them was woken, and the other slept until its timer although nine units were
    // available.
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 1_000)]).build().unwrap();
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    limiter
        .admin("ops")
        .set_policy(Scope::Entity(id("org")), policy([Limit::per_day("rpm", 10)]))
        .await
        .unwrap();
    let mut lease = limiter.try_acquire(("one", "gpt"), [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let heads =
        [wait(&limiter, ("two", "gpt"), 1, secs(86_400)), wait(&limiter, ("three", "gpt"), 1, secs(86_400))];
    settle_tasks().await;
    lease.cancel().await.unwrap();
    for head in heads {
        head.await.unwrap().unwrap().settle_full().await.unwrap();
    }
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

/// An organisation whose ten units a day are drawn: nine by a lease that stays, and one by another.
async fn exhausted_org(limiter: &Limiter) -> (Lease, Lease) {
    for name in ["one", "two", "three"] {
        child(limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.expect("the policy is written");
    let rest = limiter.try_acquire(("one", "gpt"), [("rpm", 9)]).await.expect("ten are available");
    (rest, limiter.try_acquire(("one", "gpt"), [("rpm", 1)]).await.expect("one is available"))
}

#[tokio::test(start_paused = true)]
async fn return_too_small_for_one_wakes_another() {
    // Regression: the return woke a waiter that needed ten units. The other, which needed one, slept until
    // policies were read again although a unit was available.
    let (limiter, store) = limiter([Limit::per_day("rpm", 1_000)]);
    let (rest, mut lease) = exhausted_org(&limiter).await;
    let large = wait(&limiter, ("two", "gpt"), 10, Duration::from_secs(345_600));
    settle_tasks().await;
    let small = wait(&limiter, ("three", "gpt"), 1, Duration::from_secs(345_600));
    settle_tasks().await;
    let (start, before) = (Instant::now(), draws(&store));
    lease.cancel().await.unwrap();
    small.await.unwrap().unwrap().settle_full().await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    assert_eq!(draws(&store) - before, 2, "each of the two drew once");
    large.abort();
    drop(rest);
}

#[tokio::test(start_paused = true)]
async fn two_refused_waiters_do_not_wake_each_other() {
    let (limiter, store) = limiter([Limit::per_day("rpm", 1_000)]);
    let (rest, mut lease) = exhausted_org(&limiter).await;
    let tasks = ["two", "three"].map(|name| wait(&limiter, (name, "gpt"), 10, Duration::from_secs(345_600)));
    settle_tasks().await;
    let before = draws(&store);
    lease.cancel().await.unwrap();
    tokio::time::sleep(secs(30)).await;
    assert_eq!(draws(&store) - before, 2, "each of the two drew once");
    // A waiter that leaves has no wake-up to pass on, because the other already knows of every return.
    tasks[0].abort();
    tokio::time::sleep(secs(10)).await;
    assert_eq!(draws(&store) - before, 2);
    tasks[1].abort();
    drop(rest);
}
