//! The policy cache: how long entries live, and how few reads reach the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate::store::wrap::{FaultPlan, Verb};
use tidegate::store::{Changes, Policies};
use tidegate::{Limit, LimitError, LimitEvent, Limiter, Memory, OnUnavailable, Scope, Subject};

use crate::kit::limiter::{
    ACME, Act, EventLog, HookStore, Moment, Network, calls, calm, child, flushed, id, level, memory, network,
    over, policy,
};
use crate::kit::{millis, secs};

fn rpm(amount: u64) -> tidegate::Policy {
    policy([Limit::per_day("rpm", amount)])
}

/// Counts of version, entity and policy reads.
fn reads(store: &Network) -> (u64, u64, u64) {
    (calls(store, Verb::Version), calls(store, Verb::Chain), calls(store, Verb::Read))
}

async fn burst(limiter: &Limiter) -> u64 {
    limiter.balances(ACME).await.expect("the store is available")[0].balance.burst
}

#[tokio::test(start_paused = true)]
async fn acquire_with_cached_policy_draws_and_settles_once() {
    let store = calm();
    let limits = ["a", "b", "c"].map(|name| Limit::per_day(name, 100));
    let limiter = over(&store).defaults(limits).build().unwrap();
    child(&limiter, "acme", "org").await;
    limiter.spend(ACME, [("a", 1)]).await.unwrap();
    let before = store.inner().calls();
    let mut lease = limiter.try_acquire(ACME, [("a", 1), ("b", 2), ("c", 3)]).await.unwrap();
    assert_eq!(store.inner().calls().total() - before.total(), 1);
    lease.settle([("b", 1)]).await.unwrap();
    drop(lease);
    flushed(&limiter).await;
    assert_eq!(store.inner().calls().total() - before.total(), 2);
    limiter.spend(ACME, [("a", 1)]).await.unwrap();
    assert_eq!(store.inner().calls().total() - before.total(), 3);
    // Balances of both levels take one call and write nothing.
    assert_eq!(limiter.balances(ACME).await.unwrap().len(), 6);
    assert_eq!(store.inner().calls().total() - before.total(), 4);
    assert_eq!(level(memory(&store), ("org", "gpt"), "b").await, Some((99, 1)));
}

#[tokio::test(start_paused = true)]
async fn cached_policy_is_revalidated_after_a_minute() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (1, 1, 1));
    // The lifetime is jittered, so that entries do not expire at the same moment.
    tokio::time::advance(secs(45)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (1, 1, 1));
    tokio::time::advance(secs(15)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (2, 1, 1), "nothing has changed: only the version was read");
    tokio::time::advance(secs(45)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (2, 1, 1));
    let cache = limiter.stats().cache;
    assert_eq!((cache.hits, cache.misses, cache.renewed, cache.stale, cache.entries), (2, 1, 1, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn one_version_read_revalidates_all_subjects() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let all_spend = async || {
        for number in 0..50 {
            limiter.spend((&*format!("user-{number}"), "gpt"), [("rpm", 1)]).await.unwrap();
        }
    };
    all_spend().await;
    assert_eq!(reads(&store), (1, 50, 50));
    for minutes in 1..4 {
        tokio::time::advance(secs(60)).await;
        all_spend().await;
        assert_eq!(reads(&store), (1 + minutes, 50, 50));
    }
    // A later subject does not extend the life of an earlier version read.
    tokio::time::advance(secs(30)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (4, 51, 51));
    let other = over(&store).build().unwrap();
    other.admin("ops").set_policy(Scope::System, rpm(7)).await.unwrap();
    tokio::time::advance(secs(30)).await;
    let before = reads(&store);
    assert_eq!(limiter.balances(("user-7", "gpt")).await.unwrap()[0].balance.burst, 7);
    assert_eq!(reads(&store), (before.0 + 1, before.1 + 1, before.2 + 1));
    // Stale entries are reloaded, and subjects cached since then are current already.
    assert_eq!(limiter.balances(("user-8", "gpt")).await.unwrap()[0].balance.burst, 7);
    assert_eq!(reads(&store), (before.0 + 1, before.1 + 2, before.2 + 2));
    other.admin("ops").set_policy(Scope::System, rpm(9)).await.unwrap();
    let before = reads(&store);
    assert_eq!(limiter.balances(("new", "gpt")).await.unwrap()[0].balance.burst, 9);
    assert_eq!(reads(&store), (before.0, before.1 + 2, before.2 + 2), "detected by the reads");
    assert_eq!(limiter.balances(("newer", "gpt")).await.unwrap()[0].balance.burst, 9);
    assert_eq!(reads(&store), (before.0 + 2, before.1 + 3, before.2 + 3), "and the change, once");
}

#[tokio::test(start_paused = true)]
async fn busy_subjects_share_version_reads() {
    let store = network(FaultPlan::seeded(3).delays(1_000, millis(4)));
    let limiter = over(&store).defaults([Limit::per_day("rpm", 1_000_000)]).build().unwrap();
    let spend = |number: u32| {
        let limiter = limiter.clone();
        async move { limiter.spend((&*format!("user-{number}"), "gpt"), [("rpm", 1)]).await.unwrap() }
    };
    for number in 0..50 {
        spend(number).await;
    }
    for _ in 0..180 {
        tokio::time::advance(secs(1)).await;
        (0..50).map(&spend).collect::<tokio::task::JoinSet<_>>().join_all().await;
    }
    let (versions, lineages, reads) = reads(&store);
    assert!((4..=6).contains(&versions), "{versions} in three minutes");
    assert_eq!((lineages, reads), (50, 50));
}

#[tokio::test(start_paused = true)]
async fn missing_policy_is_cached() {
    let store = calm();
    let (limiter, other) = (over(&store).build().unwrap(), over(&store).build().unwrap());
    for _ in 0..3 {
        let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
        assert!(matches!(error, LimitError::NoLimits { .. }), "{error}");
    }
    assert_eq!((reads(&store), calls(&store, Verb::Draw)), ((1, 1, 1), 0));
    assert_eq!(limiter.stats().cache.negative_hits, 2);
    // Another process writes the first policy, which applies here after a minute.
    other.admin("ops").set_policy(Scope::System, rpm(5)).await.unwrap();
    assert!(limiter.try_acquire(ACME, [("rpm", 1)]).await.is_err());
    tokio::time::advance(secs(60)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
}

/// Regression: every write made all cached subjects reload their policies.
#[tokio::test(start_paused = true)]
async fn unrelated_writes_cause_no_reads() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let other = over(&store).build().unwrap();
    other.admin("ops").set_policy(Scope::System, rpm(50)).await.unwrap();
    let all_spend = async || {
        for number in 0..50 {
            limiter.spend((&*format!("user-{number}"), "gpt"), [("rpm", 1)]).await.unwrap();
        }
    };
    all_spend().await;
    let (versions, lineages, policies) = reads(&store);
    for round in 1..4 {
        let stranger = Scope::Entity(id(&format!("stranger-{round}")));
        other.admin("ops").set_policy(stranger, rpm(7)).await.unwrap();
        tokio::time::advance(secs(60)).await;
        all_spend().await;
        // The writer reads the policy that it changes, and one more version read returns the changes since.
        assert_eq!(reads(&store), (versions + 2 * round, lineages, policies + round));
        assert_eq!(calls(&store, Verb::Scan), round);
    }
    // A write for one subject reloads that subject.
    other.admin("ops").set_policy(Scope::Entity(id("user-7")), rpm(9)).await.unwrap();
    tokio::time::advance(secs(60)).await;
    all_spend().await;
    assert_eq!(reads(&store), (versions + 8, lineages + 1, policies + 5));
    assert_eq!(limiter.balances(("user-7", "gpt")).await.unwrap()[0].balance.burst, 9);
    // A write for the system scope reloads all.
    other.admin("ops").set_policy(Scope::System, rpm(60)).await.unwrap();
    tokio::time::advance(secs(60)).await;
    all_spend().await;
    assert_eq!(reads(&store), (versions + 10, lineages + 51, policies + 56));
}

#[tokio::test(start_paused = true)]
async fn announced_changes_apply_at_once() {
    let (memory, (announcer, changes)) = (Memory::new(), Changes::channel());
    let limiter = over(&HookStore::announcing(&memory, changes)).build().unwrap();
    let elsewhere = Limiter::new(memory.clone());
    elsewhere.admin("ops").set_policy(Scope::System, rpm(5)).await.unwrap();
    assert_eq!(burst(&limiter).await, 5);
    elsewhere.admin("ops").set_policy(Scope::System, rpm(7)).await.unwrap();
    limiter.spend(ACME, [("rpm", 4)]).await.unwrap();
    assert_eq!(burst(&limiter).await, 5, "no announcement has arrived");
    announcer.announce(memory.version().await.unwrap());
    assert_eq!(burst(&limiter).await, 7);
    // Waiters are woken as well, here a day early.
    let waiter = {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire_within(ACME, [("rpm", 6)], secs(200_000)).await })
    };
    tokio::time::sleep(secs(10)).await;
    assert!(!waiter.is_finished());
    let start = tokio::time::Instant::now();
    elsewhere
        .admin("ops")
        .set_policy(Scope::System, policy([Limit::per_second("rpm", 1_000)]))
        .await
        .unwrap();
    announcer.announce(memory.version().await.unwrap());
    let mut lease = waiter.await.unwrap().unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    lease.cancel().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn concurrent_misses_read_once() {
    let store = network(FaultPlan::seeded(3).delays(1_000, millis(4)));
    let limiter = over(&store).defaults([Limit::per_day("rpm", 1_000)]).build().unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.spend(ACME, [("rpm", 1)]).await });
    }
    for answer in tasks.join_all().await {
        answer.unwrap();
    }
    assert_eq!((reads(&store), calls(&store, Verb::Spend)), ((1, 1, 1), 100));
    // After a minute they read the version once.
    tokio::time::advance(secs(61)).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.spend(ACME, [("rpm", 1)]).await });
    }
    for answer in tasks.join_all().await {
        answer.unwrap();
    }
    assert_eq!((reads(&store), limiter.stats().cache.renewed), ((2, 1, 1), 1));
}

#[tokio::test(start_paused = true)]
async fn cancelled_reader_hands_over_to_the_next() {
    let (memory, hangs, read_count) =
        (Memory::new(), Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let (hanging, asking) = (Arc::clone(&hangs), Arc::clone(&read_count));
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Read, Moment::Before) => {
            asking.fetch_add(1, Ordering::SeqCst);
            if hanging.swap(false, Ordering::SeqCst) { Act::Hang } else { Act::Pass }
        }
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 1_000)]).build().unwrap();
    let task = |limiter: &Limiter| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.spend(ACME, [("rpm", 1)]).await })
    };
    let leader = task(&limiter);
    crate::kit::settle_tasks().await;
    let others: Vec<_> = (0..10).map(|_| task(&limiter)).collect();
    crate::kit::settle_tasks().await;
    assert_eq!(read_count.load(Ordering::SeqCst), 1, "the others wait for the first reader");
    leader.abort();
    for other in others {
        other.await.unwrap().unwrap();
    }
    assert_eq!(read_count.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn change_applies_here_at_once_elsewhere_in_a_minute() {
    let store = calm();
    let (local, remote) = (over(&store).build().unwrap(), over(&store).build().unwrap());
    let admin = local.admin("ops");
    admin.set_policy(Scope::System, rpm(10)).await.unwrap();
    assert_eq!((burst(&local).await, burst(&remote).await), (10, 10));
    admin.set_policy(Scope::Entity(id("acme")), rpm(20)).await.unwrap();
    assert_eq!((burst(&local).await, burst(&remote).await), (20, 10));
    tokio::time::advance(secs(45)).await;
    assert_eq!(burst(&remote).await, 10);
    tokio::time::advance(secs(15)).await;
    assert_eq!(burst(&remote).await, 20);
    // An entity that gets a parent draws from it at once as well.
    child(&local, "acme", "org").await;
    assert_eq!(
        (local.balances(ACME).await.unwrap().len(), remote.balances(ACME).await.unwrap().len()),
        (2, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn draw_under_newer_policy_invalidates_cache() {
    let (store, events) = (calm(), EventLog::default());
    let local = over(&store).build().unwrap();
    let remote = over(&store).on_event(events.listener()).build().unwrap();
    let admin = local.admin("ops");
    admin.set_policy(Scope::System, rpm(10)).await.unwrap();
    for subject in [ACME, ("beta", "gpt")] {
        remote.spend(subject, [("rpm", 1)]).await.unwrap();
    }
    admin.set_policy(Scope::System, rpm(20)).await.unwrap();
    local.spend(ACME, [("rpm", 1)]).await.unwrap();
    let before = reads(&store);
    // The bucket's newer policy decides, the draw reports it, and the bucket does not flip back.
    remote.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), before);
    let is_it = |event: &LimitEvent| matches!(event, LimitEvent::RulesStale { subject } if *subject == Subject::new("acme", "gpt").expect("valid"));
    assert_eq!(events.count(is_it), 1);
    // From now on this process uses the new policy for every cached subject.
    assert_eq!((burst(&remote).await, remote.stats().cache.misses), (20, 3));
    let lines = remote.balances(("beta", "gpt")).await.unwrap();
    assert_eq!((lines[0].balance.burst, lines[0].balance.available), (20, 9));
    assert_eq!(events.count(|_| true), 1);
}

#[tokio::test(start_paused = true)]
async fn policies_changed_during_a_read_are_not_cached() {
    // Regression: a write between the version read and the policy read cached the new policy under the old
    // version. A process with the old policy under that version then turned the bucket back.
    let (memory, is_armed) = (Memory::new(), Arc::new(AtomicBool::new(false)));
    let writer = Limiter::new(memory.clone());
    writer.admin("ops").set_policy(Scope::System, rpm(100)).await.unwrap();
    let plain = HookStore::new(&memory, |_, _| Act::Pass);
    let old = over(&plain).build().unwrap();
    old.spend(ACME, [("rpm", 1)]).await.unwrap();
    let (behind, armed) = (memory.clone(), Arc::clone(&is_armed));
    let racing = HookStore::new(&memory, move |verb, moment| {
        if (verb, moment) == (Verb::Chain, Moment::Before) && armed.swap(false, Ordering::SeqCst) {
            let change = tidegate::store::PolicyChange {
                scope: Scope::System,
                expect: tidegate::Expect::Any,
                policy: Some(rpm(10)),
            };
            let changes = [change];
            let mut reply = behind.apply(&changes, "admin");
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(Future::poll(std::pin::Pin::new(&mut reply), &mut context).is_ready());
        }
        Act::Pass
    });
    let new = over(&racing).build().unwrap();
    is_armed.store(true, Ordering::SeqCst);
    new.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(level(&memory, ACME, "rpm").await, Some((9, 2)), "capped to the new burst");
    // A process with the old policy does not turn it back, and learns of the new one.
    old.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(level(&memory, ACME, "rpm").await, Some((8, 3)));
    assert_eq!((burst(&new).await, burst(&old).await), (10, 10));
}

#[tokio::test(start_paused = true)]
async fn invalidated_entries_are_reloaded() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    limiter.invalidate();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(reads(&store), (2, 2, 2), "everything, whatever the version");
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!((reads(&store), limiter.stats().cache.misses), ((2, 2, 2), 2));
}

#[tokio::test(start_paused = true)]
async fn read_started_before_a_change_is_not_shared() {
    let (memory, is_slow) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let slow = Arc::clone(&is_slow);
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Read, Moment::After) if slow.swap(false, Ordering::SeqCst) => Act::Sleep(millis(30)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let early = tokio::spawn({
        let limiter = limiter.clone();
        async move { burst(&limiter).await }
    });
    crate::kit::settle_tasks().await;
    limiter.admin("ops").set_policy(Scope::System, rpm(7)).await.unwrap();
    assert_eq!(burst(&limiter).await, 7);
    assert_eq!(early.await.unwrap(), 100);
    assert_eq!(burst(&limiter).await, 7, "the outdated read is not cached");
}

#[tokio::test(start_paused = true)]
async fn cache_size_is_bounded() {
    for (cache_max, bound) in [(64, 64), (100, 100), (1, 32)] {
        let store = calm();
        let limits = [Limit::per_day("rpm", 100)];
        let limiter = over(&store).defaults(limits).cache_max(cache_max).build().unwrap();
        for number in 0..1_000 {
            let entity = format!("e{number}");
            limiter.spend((entity.as_str(), "gpt"), [("rpm", 1)]).await.unwrap();
            assert!(limiter.stats().cache.entries <= bound);
            // A frequently used subject stays cached.
            limiter.spend(ACME, [("rpm", 0)]).await.unwrap_err();
        }
        let cache = limiter.stats().cache;
        assert_eq!((cache.misses, cache.hits), (1_001, 999));
        assert!(cache.entries >= 16, "{cache:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn zero_ttl_reads_version_every_time() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).cache_ttl(secs(0)).build().unwrap();
    for _ in 0..3 {
        limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    }
    assert_eq!(reads(&store), (3, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn failed_read_does_not_replace_newer_entry() {
    let (memory, hangs) = (Memory::new(), Arc::new(AtomicBool::new(false)));
    let hanging = Arc::clone(&hangs);
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Version, Moment::Before) if hanging.swap(false, Ordering::SeqCst) => Act::Hang,
        _ => Act::Pass,
    });
    let limiter = over(&store).on_unavailable(OnUnavailable::Allow).build().unwrap();
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, rpm(10)).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    tokio::time::advance(secs(60)).await;
    hangs.store(true, Ordering::SeqCst);
    let unlucky = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.spend(ACME, [("rpm", 1)]).await }
    });
    crate::kit::settle_tasks().await;
    let both = [Limit::per_day("rpm", 10), Limit::per_day("tpm", 10)];
    admin.set_policy(Scope::System, policy(both)).await.unwrap();
    limiter.spend(ACME, [("tpm", 1)]).await.unwrap();
    unlucky.await.unwrap().unwrap();
    assert_eq!(limiter.stats().cache.stale, 1, "it used its stale entry");
    let misses = limiter.stats().cache.misses;
    limiter.spend(ACME, [("tpm", 1)]).await.unwrap();
    assert_eq!(limiter.stats().cache.misses, misses, "the newer entry is still cached");
}
