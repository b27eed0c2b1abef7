//! Pooled limits, bounded debts and repairs of buckets, through the limiter.

use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::{
    Across, BucketLimit, Cost, Lease, Limit, LimitError, LimitEvent, LimitKey, LimitName, Limiter, Memory,
    OnUnavailable, Outcome, Scope, Share, Stamp, StoreError, Subject, Throttle, UsageOf, UsageQuery, Window,
    Would,
};

use crate::kit::limiter::{EventLog, calm, child, id, over, policy};

const START: Stamp = Stamp::from_secs(1_800_000_000);

fn limit(text: &str) -> Limit {
    text.parse().expect("a valid limit")
}

fn key(text: &str) -> LimitKey {
    text.parse().expect("a valid key")
}

fn resource(name: &str) -> Scope {
    Scope::Resource(tidegate::ResourceName::new(name).expect("a valid name"))
}

/// A limiter with these policies, whose time stands still.
async fn limiter(policies: &[(Scope, &[&str])]) -> Limiter {
    let limiter = Limiter::new(Memory::with_clock(ManualWall::new(START)));
    for (scope, limits) in policies {
        let policy = policy(limits.iter().map(|text| limit(text)));
        limiter.admin("tests").set_policy(scope.clone(), policy).await.expect("a valid policy");
    }
    limiter
}

/// The buckets of a subject with their available units.
async fn buckets(limiter: &Limiter, subject: (&str, &str)) -> Vec<(String, i64)> {
    let lines = limiter.balances(subject).await.expect("memory is available");
    let shown = |line: tidegate::LimitLine| (line.balance.subject.to_string(), line.balance.available);
    lines.into_iter().map(shown).collect()
}

fn row(bucket: &str, available: i64) -> (String, i64) {
    (bucket.to_owned(), available)
}

/// A daily budget of a customer, over all models.
#[tokio::test]
async fn entity_budget_counts_all_its_resources() {
    let acme = Scope::Entity(id("acme"));
    let limiter = limiter(&[(acme, &["usd:10/day,across=resources"])]).await;
    for model in ["gpt", "o1"] {
        limiter.spend(("acme", model), [("usd", 4)]).await.unwrap();
    }
    let error = limiter.try_acquire(("acme", "mini"), [("usd", 3)]).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "limit \"usd\" exceeded for acme on all resources: 2 of 10 available, 3 requested (by entity acme); \
         retry after 2h24m"
    );
    assert_eq!(buckets(&limiter, ("acme", "mini")).await, [row("acme on all resources", 2)]);
    // The narrowest scope of each kind decides, and other entities have no such budget.
    assert!(matches!(limiter.spend(("other", "gpt"), [("usd", 1)]).await, Err(LimitError::NoLimits { .. })));
}

/// A total over all customers on one model, beside a limit for each.
#[tokio::test]
async fn total_and_own_limit_of_one_name_both_apply() {
    let limits: &[&str] = &["tpm:60/day", "tpm:100/day,across=entities"];
    let limiter = limiter(&[(resource("gpt"), limits), (Scope::System, &["tpm:500/day,across=both"])]).await;
    limiter.spend(("a", "gpt"), [("tpm", 60)]).await.unwrap();
    assert!(limiter.spend(("a", "gpt"), [("tpm", 1)]).await.is_err());
    limiter.spend(("b", "gpt"), [("tpm", 40)]).await.unwrap();
    let explained = limiter.explain(("b", "gpt"), [("tpm", 5)]).await.unwrap();
    let short: Vec<_> = explained.lines.iter().filter(|line| line.balance.is_short()).collect();
    assert_eq!(short.len(), 1);
    assert_eq!(short[0].balance.key(), key("tpm,across=entities"));
    assert!(matches!(explained.would, Would::Wait(_)));
    let expected =
        [row("b on gpt", 20), row("all entities on gpt", 0), row("all entities on all resources", 400)];
    assert_eq!(buckets(&limiter, ("b", "gpt")).await, expected);
    // A policy of the entity replaces its own limit, and cannot leave the total.
    let own = policy([limit("tpm:900/day")]);
    limiter.admin("tests").set_policy(Scope::Entity(id("b")), own).await.unwrap();
    assert!(limiter.spend(("b", "gpt"), [("tpm", 1)]).await.is_err());
}

#[tokio::test]
async fn child_and_parent_count_once_in_a_pool() {
    let limiter =
        limiter(&[(Scope::System, &["rpm:10/day,across=entities", "usd:9/day,across=resources"])]).await;
    child(&limiter, "child", "parent").await;
    limiter.spend(("child", "gpt"), [("rpm", 3), ("usd", 2)]).await.unwrap();
    limiter.spend(("parent", "o1"), [("usd", 4)]).await.unwrap();
    let expected =
        [row("all entities on gpt", 7), row("child on all resources", 7), row("parent on all resources", 3)];
    assert_eq!(buckets(&limiter, ("child", "gpt")).await, expected);
}

#[tokio::test]
async fn usage_and_capacity_name_the_bucket() {
    let limits: &[&str] = &["tpm:50/day", "tpm:80/day,across=entities", "tpm:90/day,across=resources"];
    let limiter = limiter(&[(Scope::System, limits)]).await;
    for (entity, units) in [("a", 5), ("b", 7)] {
        limiter.spend((entity, "gpt"), [("tpm", units)]).await.unwrap();
    }
    let sum = async |of| {
        let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
        let sum = limiter.usage_sum(&query).await.unwrap().limits;
        sum.into_iter().map(|(key, tally)| (key.to_string(), tally.units, tally.own)).collect::<Vec<_>>()
    };
    let line = |key: &str, units, own| (key.to_owned(), units, own);
    let of_a = [line("tpm", 5, 5), line("tpm,across=resources", 5, 0)];
    assert_eq!(sum(UsageOf::Entity(id("a"))).await, of_a);
    let Scope::Resource(gpt) = resource("gpt") else { unreachable!() };
    let of_gpt = [line("tpm", 12, 12), line("tpm,across=entities", 12, 0)];
    assert_eq!(sum(UsageOf::Resource(gpt)).await, of_gpt);
    let capacity = limiter.capacity("gpt").await.unwrap();
    let capacity: Vec<_> =
        capacity.iter().map(|(key, sum)| (key.to_string(), sum.buckets, sum.available)).collect();
    assert_eq!(capacity, [("tpm".to_owned(), 2, 88), ("tpm,across=entities".to_owned(), 1, 68)]);
}

#[tokio::test]
async fn limit_of_a_call_cannot_be_pooled() {
    let limiter = limiter(&[(Scope::System, &["rpm:10/day"])]).await;
    let request = limiter.request(("a", "gpt"), &[("rpm", 1)]).limits([limit("rpm:5/day,across=both")]);
    let error = request.try_acquire().await.unwrap_err().to_string();
    assert_eq!(
        error,
        "the limit `rpm` is given with a call and cannot count across=both: put it in a policy"
    );
    // A limit given with a call replaces the subject's own, not the total.
    let total = policy([limit("rpm:4/day,across=entities")]);
    limiter.admin("tests").set_policy(resource("gpt"), total).await.unwrap();
    let request = limiter.request(("a", "gpt"), &[("rpm", 5)]).limits([limit("rpm:50/day")]);
    assert!(matches!(request.try_acquire().await, Err(LimitError::TooLarge(_))));
}

#[tokio::test]
async fn pool_that_a_scope_does_not_cover_is_refused() {
    let limiter = limiter(&[]).await;
    let pooled = policy([limit("rpm:10/day,across=entities")]);
    let error = limiter.admin("tests").set_policy(Scope::Entity(id("a")), pooled).await.unwrap_err();
    assert!(matches!(&error, LimitError::Store(StoreError::Invalid { .. })), "{error}");
    assert!(
        error.to_string().ends_with(
            "the limit `rpm` counts across=entities, which a policy at `entity a` cannot limit: all entities on a \
             resource share it, so define it for the system or the resource"
        ),
        "{error}"
    );
}

/// Without the store each process enforces its share of a pool, too.
#[tokio::test(start_paused = true)]
async fn local_share_of_a_pool_is_one_bucket() {
    let network = calm();
    let limiter = over(&network).build().unwrap();
    let share = OnUnavailable::LocalShare(Share::new(0.1).expect("a valid share"));
    let policy = policy([limit("rpm:100/day,across=entities")]).on_unavailable(share);
    limiter.admin("tests").set_policy(Scope::System, policy).await.unwrap();
    for entity in ["a", "b", "c"] {
        limiter.balances((entity, "gpt")).await.unwrap();
    }
    network.go_away();
    for entity in ["a", "b"] {
        limiter.spend((entity, "gpt"), [("rpm", 5)]).await.unwrap();
    }
    assert!(limiter.spend(("c", "gpt"), [("rpm", 1)]).await.is_err());
}

/// A waiter is woken by a lease of another subject that returns units to their pool.
#[tokio::test(start_paused = true)]
async fn waiter_is_woken_by_a_return_to_its_pool() {
    let limiter =
        Limiter::builder(Memory::new()).defaults([limit("rpm:10/day,across=both")]).build().unwrap();
    let mut lease = limiter.try_acquire(("a", "gpt"), [("rpm", 10)]).await.unwrap();
    let waiting = {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let within = Duration::from_secs(86_000);
            limiter.acquire_within(("b", "o1"), [("rpm", 6)], within).await.map(Lease::detach)
        })
    };
    while limiter.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let before = tokio::time::Instant::now();
    lease.settle([("rpm", 2)]).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert!(before.elapsed() < Duration::from_secs(60), "it waited for the refill: {:?}", before.elapsed());
}

/// A client that confuses bytes and tokens: the ledger has what it reported, and the tenant is locked out for
/// ten days at most.
#[tokio::test]
async fn debt_stops_at_its_bound_and_is_reported() {
    let limiter = limiter(&[(Scope::System, &["tpm:100/day", "tpm:300/day,across=entities,debt=50"])]).await;
    let events = EventLog::default();
    limiter.on_event(events.listener());
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 1)]).await.unwrap();
    lease.settle([("tpm", 30_000_000)]).await.unwrap();
    assert_eq!(
        buckets(&limiter, ("acme", "gpt")).await,
        [row("acme on gpt", -1_000), row("all entities on gpt", -50)]
    );
    let wait = limiter.time_until_available(("acme", "gpt"), [("tpm", 1)]).await.unwrap();
    assert!(wait <= Duration::from_secs(11 * 86_400), "{wait:?}");
    let is_bound = |bucket: &str, bound: u64| {
        let (bucket, tpm) = (bucket.to_owned(), LimitName::new("tpm").expect("a valid name"));
        move |event: &LimitEvent| {
            matches!(event, LimitEvent::DebtBound { bucket: of, limit, debt_max }
                if of.to_string() == bucket && *limit == tpm && *debt_max == bound)
        }
    };
    assert_eq!(events.count(is_bound("acme on gpt", 1_000)), 1);
    assert_eq!(events.count(is_bound("all entities on gpt", 50)), 1);
    assert_eq!(limiter.stats().debt_bound, 2);
    let query =
        UsageQuery { of: UsageOf::Entity(id("acme")), window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let sum = limiter.usage_sum(&query).await.unwrap().limits;
    assert_eq!(sum[&key("tpm")].units, 30_000_000);
}

/// By a step of a lease that another process holds, and by an adjustment.
#[tokio::test]
async fn every_way_to_settle_reports_the_bound() {
    let limiter = limiter(&[(Scope::System, &["tpm:100/day"])]).await;
    let mut adjusted = limiter.try_acquire(("a", "gpt"), [("tpm", 10)]).await.unwrap();
    adjusted.adjust([("tpm", 5)]).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 0);
    adjusted.adjust([("tpm", 5_000)]).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 1);
    // What the bucket never took is not returned.
    adjusted.cancel().await.unwrap();
    assert_eq!(buckets(&limiter, ("a", "gpt")).await, [row("a on gpt", 100)]);
    let remote = limiter.try_acquire(("b", "gpt"), [("tpm", 10)]).await.unwrap().detach();
    limiter.adjust_lease(remote, 1, [("tpm", 2_000)]).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 2);
    limiter.settle_lease(remote, 2, [("tpm", 9_000)]).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 3);
    let joined = Throttle::new().limited_by(&limiter).costs(|cost| [("tpm", cost.total_tokens())]);
    let permit = joined.acquire(("d", "gpt"), Cost::request().tokens(10)).await.unwrap();
    permit.settle(Outcome::success().spent(Cost::request().tokens(9_000))).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 4);
    // Nor is a settlement within what is held.
    let mut within = limiter.try_acquire(("c", "gpt"), [("tpm", 10)]).await.unwrap();
    within.settle([("tpm", 10)]).await.unwrap();
    assert_eq!(limiter.stats().debt_bound, 4);
}

#[tokio::test]
async fn wrong_settle_is_repaired() {
    let limiter = limiter(&[(Scope::System, &["tpm:100/day", "tpm:100/day,across=resources"])]).await;
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 1)]).await.unwrap();
    lease.settle([("tpm", 1_000_000)]).await.unwrap();
    let admin = limiter.admin("ops");
    let balance = admin.set_bucket(("acme", "gpt"), &key("tpm"), Some(70)).await.unwrap().value;
    assert_eq!((balance.available, balance.subject), (70, Subject::new("acme", "gpt").unwrap()));
    let balance = admin.set_bucket(("acme", "o1"), &key("tpm,across=resources"), None).await.unwrap().value;
    assert_eq!((balance.available, balance.subject.across()), (100, Some(Across::Resources)));
    limiter.spend(("acme", "gpt"), [("tpm", 70)]).await.unwrap();

    let error = admin.set_bucket(("acme", "gpt"), &key("tpm"), Some(101)).await.unwrap_err().to_string();
    assert!(error.ends_with("101 units available in `tpm`, more than its burst of 100"), "{error}");
    let error = admin.set_bucket(("acme", "gpt"), &key("typo"), None).await.unwrap_err().to_string();
    assert_eq!(error, "`acme on gpt` has no limit `typo`; it has `tpm`");
    let error = admin.set_bucket(("acme", "gpt"), &key("tpm,across=both"), None).await.unwrap_err();
    assert!(error.to_string().starts_with("`all entities on all resources` has no limit `tpm`"), "{error}");
}

/// Its bucket is in no policy, so that no name led to it.
#[tokio::test]
async fn bucket_of_a_call_limit_is_repaired() {
    let limiter = limiter(&[]).await;
    let limit: Limit = "tokens:1k/min".parse().unwrap();
    let request = |units: &'static [(&'static str, u64)]| {
        limiter.request(("acme", "gpt"), units).limits([limit.clone()])
    };
    request(&[("tokens", 9_000)]).debit().await.unwrap();
    assert!(request(&[("tokens", 1)]).spend().await.is_err(), "it is in debt");
    let admin = limiter.admin("ops");
    let bucket = |text: &str| text.parse::<BucketLimit>().unwrap();
    let balance = admin.set_bucket(("acme", "gpt"), bucket("tokens:1000/1m"), Some(70)).await.unwrap().value;
    assert_eq!((balance.available, balance.limit.as_str()), (70, "tokens"));
    request(&[("tokens", 70)]).spend().await.unwrap();
    // Another shape is another bucket.
    admin.set_bucket(("acme", "gpt"), bucket("tokens:1k/min:2k"), None).await.unwrap();
    assert!(request(&[("tokens", 1)]).spend().await.is_err());

    let error =
        admin.set_bucket(("acme", "gpt"), bucket("tokens:1k/min,across=both"), None).await.unwrap_err();
    assert!(matches!(error, LimitError::Policy(_)), "{error}");
    assert_eq!(bucket("tokens:1000/1m").to_string(), "tokens:1k/min");
    assert_eq!(bucket("tokens,across=both").to_string(), "tokens,across=both");
    for invalid in ["", "a b", "tokens:", "tokens:1/fortnight", "tokens,across=all"] {
        assert!(invalid.parse::<BucketLimit>().is_err(), "{invalid}");
    }
}
