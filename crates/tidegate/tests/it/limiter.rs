//! The limiter on the memory store: policies, entities, leases, refusals and reports.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::store::wrap::{CallEnd, Measured, Verb, Watcher};
use tidegate::store::{ManualWall, PolicyChange};
use tidegate::{
    AdjustStatus, Entity, EntityId, Expect, InvalidLimiter, Lease, Limit, LimitError, Limiter,
    LimiterBuilder, Memory, OnExpiry, Paging, Policy, ResourceName, Scope, SettleStatus, Stamp, StoreError,
    Subject, UsageOf, UsageQuery, Window, Would,
};

const START: Stamp = Stamp::from_secs(1_800_000_000);
const DAYS: u64 = 86_400;

fn id(name: &str) -> EntityId {
    EntityId::new(name).expect("a valid name")
}

fn policy(limits: impl IntoIterator<Item = Limit>) -> Policy {
    Policy::new(limits).expect("valid limits")
}

/// A limiter whose time stands still until it is moved.
fn limiter(limits: impl IntoIterator<Item = Limit>) -> (Limiter, ManualWall) {
    let clock = ManualWall::new(START);
    let builder = Limiter::builder(Memory::with_clock(clock.clone()));
    (builder.defaults(limits).build().expect("within the bounds"), clock)
}

async fn available(limiter: &Limiter, entity: &str, limit: &str) -> i64 {
    let lines = limiter.balances((entity, "gpt")).await.expect("the store is available");
    let own = lines
        .iter()
        .find(|line| line.balance.limit.as_str() == limit && line.balance.subject.entity.as_str() == entity);
    own.expect("the limit exists").balance.available
}

fn is_ended(error: &LimitError) -> bool {
    matches!(error, LimitError::Store(StoreError::Ended { .. }))
}

/// Reports of its usage are still recorded, and its leases settled.
#[tokio::test]
async fn disabled_entity_is_refused_on_every_path() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let admin = limiter.admin("test");
    let org = Entity::new(id("org"));
    admin.put_entity(&org, Expect::Absent).await.unwrap();
    let bot = Entity::new(id("bot")).parent(id("org"));
    admin.put_entity(&bot.clone().cascade(), Expect::Absent).await.unwrap();
    let mut lease = limiter.try_acquire(("bot", "gpt"), [("rpm", 2)]).await.unwrap();
    admin.put_entity(&org.clone().disabled(true), Expect::Any).await.unwrap();
    let cost = [("rpm", 1)];
    let request = || limiter.request(("bot", "gpt"), &cost);
    let errors = [
        limiter.spend(("bot", "gpt"), cost).await.unwrap_err(),
        limiter.try_acquire(("bot", "gpt"), cost).await.unwrap_err(),
        request().id(7).try_acquire().await.unwrap_err(),
        request().spend_with_balances().await.unwrap_err(),
        request().acquire_within(Duration::from_secs(9)).await.unwrap_err(),
        request().limits([Limit::per_day("own", 5)]).spend().await.unwrap_err(),
        request().explain().await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_final() && error.retry_after().is_none(), "{error}");
        assert_eq!(error.to_string(), "the entity `org` is disabled: requests of bot on gpt are refused");
    }
    lease.settle_full().await.unwrap();
    request().debit().await.unwrap();
    assert_eq!(available(&limiter, "bot", "rpm").await, 97);
    // Without cascade it does not draw from its parent.
    admin.put_entity(&bot, Expect::Any).await.unwrap();
    limiter.spend(("bot", "gpt"), cost).await.unwrap();
    admin.put_entity(&bot.disabled(true), Expect::Any).await.unwrap();
    assert!(matches!(limiter.spend(("bot", "gpt"), cost).await, Err(LimitError::Disabled { .. })));
}

#[tokio::test]
async fn recorded_units_are_usage_and_no_limit() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let cost = [("rpm", 1), ("input_tokens", 800)];
    let mut lease = limiter.request(("acme", "gpt"), &cost).recorded().try_acquire().await.unwrap();
    lease.settle_full().await.unwrap();
    let limits = limiter.balances_of_entity("acme").await.unwrap();
    assert_eq!(limits.iter().map(|balance| balance.limit.as_str()).collect::<Vec<_>>(), ["rpm"]);
    let (all, paging) = (Stamp::ZERO..Stamp::MAX, Paging::default());
    let usage = limiter.usage_of_entity("acme", Window::Minute, all, &paging).await.unwrap().items;
    let usage: Vec<_> = usage.iter().map(|line| (line.limit.as_str(), line.tally.units)).collect();
    assert_eq!(usage, [("input_tokens", 800), ("rpm", 1)]);
}

#[tokio::test]
async fn overdraw_leaves_a_debt_and_is_never_refused() {
    let (limiter, clock) = limiter([Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)]);
    let used = |units| [("tpm", units)];
    assert_eq!(limiter.request(("acme", "gpt"), &used(130)).debit().await.unwrap(), SettleStatus::Now);
    let (mut lease, recorded) = limiter.request(("acme", "gpt"), &used(40)).overdraw().await.unwrap();
    assert_eq!(recorded, AdjustStatus::Now);
    assert_eq!((available(&limiter, "acme", "tpm").await, lease.held("tpm")), (-70, Some(40)));
    assert_eq!((available(&limiter, "acme", "rpm").await, lease.held("rpm")), (100, None));
    assert!(limiter.spend(("acme", "gpt"), [("tpm", 1)]).await.unwrap_err().limited().is_some());
    lease.settle([("tpm", 30)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "tpm").await, -60);
    // Dropped, it returns what it drew.
    drop(limiter.request(("acme", "gpt"), &used(5)).overdraw().await.unwrap());
    assert_eq!(available(&limiter, "acme", "tpm").await, -60);
    for cost in [[("none", 1)], [("tpm", 0)]] {
        let error = limiter.request(("acme", "gpt"), &cost).debit().await.unwrap_err();
        assert!(matches!(error, LimitError::Cost(_)), "{error}");
    }
    // A detached one expires as the request says, whatever the policy says.
    let returning = policy([Limit::per_day("tpm", 100)]).on_expiry(OnExpiry::Return);
    limiter.admin("test").set_policy(Scope::Entity(id("acme")), returning).await.unwrap();
    let cost = used(10);
    let request = || limiter.request(("acme", "gpt"), &cost).deadline(Duration::from_secs(60));
    request().on_expiry(OnExpiry::Settle).overdraw().await.unwrap().0.detach();
    request().overdraw().await.unwrap().0.detach();
    assert_eq!(available(&limiter, "acme", "tpm").await, -80);
    clock.advance(Duration::from_secs(61));
    let swept = limiter.store().sweep(10).await.unwrap();
    assert_eq!((swept.settled, swept.returned), (1, 1));
    assert_eq!(available(&limiter, "acme", "tpm").await, -70);
}

#[tokio::test]
async fn refusal_takes_nothing_and_lists_every_balance() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)]);
    limiter.spend(("acme", "gpt"), [("tpm", 50)]).await.unwrap();
    let error = limiter.try_acquire(("acme", "gpt"), [("rpm", 1), ("tpm", 80)]).await.unwrap_err();
    let refusal = error.limited().unwrap();
    let seen: Vec<_> =
        refusal.lines.iter().map(|line| (line.balance.limit.as_str(), line.balance.is_short())).collect();
    assert_eq!(seen, [("rpm", false), ("tpm", true)]);
    // The error reports the requested and available units and when to retry.
    let primary = refusal.primary().unwrap();
    assert_eq!((primary.balance.asked, primary.balance.available), (80, 50));
    assert_eq!(error.retry_after(), Some(Duration::from_secs(DAYS * 30 / 100)));
    assert_eq!(
        error.to_string(),
        "limit \"tpm\" exceeded for acme on gpt: 50 of 100 available, 80 requested (by defaults); retry after 7h12m"
    );
    assert_eq!(available(&limiter, "acme", "rpm").await, 100);
}

#[tokio::test]
async fn cost_above_burst_is_refused_as_too_large() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let error = limiter.try_acquire(("acme", "gpt"), [("rpm", 200)]).await.unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)) && error.is_final(), "{error}");
    assert_eq!(error.retry_after(), None);
    let error = limiter.time_until_available(("acme", "gpt"), [("rpm", 200)]).await.unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)), "{error}");
    assert_eq!(available(&limiter, "acme", "rpm").await, 100);
}

#[tokio::test]
async fn lease_is_visible_and_returns_when_dropped() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 90);
    assert_eq!(lease.balances()[0].available, 90);
    drop(lease);
    assert_eq!(available(&limiter, "acme", "rpm").await, 100);
    assert_eq!(limiter.stats().open_leases, 0);
}

#[tokio::test]
async fn refused_extension_leaves_lease_unchanged() {
    let (limiter, _) = limiter([Limit::per_day("tpm", 1_000)]);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 500)]).await.unwrap();
    let error = lease.extend([("tpm", 600)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Limited(_)), "{error}");
    lease.extend([("tpm", 500)]).await.unwrap();
    assert_eq!((lease.held("tpm"), lease.balances()[0].available), (Some(1_000), 0));
    lease.settle_full().await.unwrap();
    assert_eq!(available(&limiter, "acme", "tpm").await, 0);
}

#[tokio::test]
async fn adjustment_is_never_refused_and_stops_at_zero() {
    let (limiter, _) = limiter([Limit::per_day("tpm", 1_000)]);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 500)]).await.unwrap();
    lease.adjust([("tpm", 1_000)]).await.unwrap();
    assert_eq!((lease.held("tpm"), available(&limiter, "acme", "tpm").await), (Some(1_500), -500));
    lease.adjust([("tpm", -1_200)]).await.unwrap();
    assert_eq!((lease.held("tpm"), available(&limiter, "acme", "tpm").await), (Some(300), 700));
    lease.adjust([("tpm", -9_999)]).await.unwrap();
    assert_eq!((lease.held("tpm"), available(&limiter, "acme", "tpm").await), (Some(0), 1_000));
}

#[tokio::test]
async fn cancel_returns_all_and_settle_keeps_what_is_used() {
    let (limiter, _) = limiter([Limit::per_day("tpm", 100)]);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 40)]).await.unwrap();
    lease.adjust([("tpm", 10)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "tpm").await, 50);
    lease.cancel().await.unwrap();
    assert_eq!(available(&limiter, "acme", "tpm").await, 100);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 40)]).await.unwrap();
    lease.adjust([("tpm", 30)]).await.unwrap();
    lease.settle([("tpm", 55)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "tpm").await, 45);
}

#[tokio::test]
async fn repeated_settle_succeeds_and_another_is_refused() {
    let (limiter, _) = limiter([Limit::per_day("tpm", 100)]);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("tpm", 40)]).await.unwrap();
    assert_eq!(lease.settle([("tpm", 30)]).await.unwrap(), SettleStatus::Now);
    assert_eq!(lease.settle([("tpm", 30)]).await.unwrap(), SettleStatus::Now);
    for error in [
        lease.settle([("tpm", 31)]).await.unwrap_err(),
        lease.cancel().await.unwrap_err(),
        lease.extend([("tpm", 1)]).await.unwrap_err(),
        lease.adjust([("tpm", 1)]).await.unwrap_err(),
    ] {
        assert!(is_ended(&error), "{error}");
    }
    drop(lease);
    assert_eq!(available(&limiter, "acme", "tpm").await, 70);
}

/// Subject, cost, and the start of the expected error.
type InvalidRequest = ((&'static str, &'static str), &'static [(&'static str, u64)], &'static str);

#[tokio::test]
async fn bad_input_is_refused_and_changes_nothing() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)]);
    let table: [InvalidRequest; 6] = [
        (("acme", "gpt"), &[("typo", 1_000)], "`acme on gpt` has no limit `typo`; it has `rpm`, `tpm`"),
        (("acme", "gpt"), &[("rpm", 0), ("tpm", 0)], "nothing is requested of `acme on gpt`"),
        (("acme", "gpt"), &[("rpm", 1), ("rpm", 1)], "the limit `rpm` is requested twice"),
        (("a#b", "gpt"), &[("rpm", 1)], "the entity `a#b` has '#'"),
        (("acme", "$SYSTEM"), &[("rpm", 1)], "the resource `$SYSTEM` is reserved"),
        (("acme", ""), &[("rpm", 1)], "the resource `` is empty"),
    ];
    for (subject, cost, sentence) in table {
        let error = limiter.try_acquire(subject, cost).await.unwrap_err();
        assert!(error.to_string().starts_with(sentence), "{error}");
        assert!(error.is_final() && error.retry_after().is_none());
    }
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    let error = lease.settle([("typo", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Cost(_)), "{error}");
    assert!(lease.adjust([("rpm", i64::MIN)]).await.is_err());
    assert!(lease.extend([("rpm", 0)]).await.is_err());
    assert_eq!(lease.held("rpm"), Some(1));
    lease.settle_full().await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 99);
}

#[tokio::test]
async fn invalid_limiter_options_name_field_and_bound() {
    let build = |change: fn(LimiterBuilder) -> LimiterBuilder| {
        change(Limiter::builder(Memory::new())).build().unwrap_err().to_string()
    };
    let second = Duration::from_secs(1);
    assert_eq!(
        build(|builder| builder.lease_deadline(Duration::ZERO)),
        "lease_deadline is 0s, outside 1ms..=30d"
    );
    assert_eq!(build(|builder| builder.waiters_max(0)), "waiters_max is 0, outside 1..=16777216");
    assert_eq!(
        build(|builder| builder.settler_max(usize::MAX)),
        format!("settler_max is {}, outside 1..=16777216", usize::MAX)
    );
    assert_eq!(
        build(|builder| builder.defaults([Limit::per_minute("rpm", 0)])),
        "the defaults: the limit `rpm`: 0 units per period, outside 1..=1099511627776"
    );
    let error = Limiter::builder(Memory::new()).cache_ttl(second * 90_000).build().unwrap_err();
    assert!(matches!(error, InvalidLimiter::Span { field: "cache_ttl", .. }), "{error}");
}

#[tokio::test]
async fn missing_policy_error_says_where_to_write_one() {
    let limiter = Limiter::new(Memory::new());
    let error = limiter.try_acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap_err();
    assert!(error.to_string().starts_with("no limits for acme on gpt: write a policy"), "{error}");
    // The negative result is cached as well, and invalidated by the first policy.
    limiter.try_acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap_err();
    assert_eq!(limiter.stats().cache.negative_hits, 1);
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, policy([Limit::per_day("rpm", 5)])).await.unwrap();
    limiter.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
}

#[tokio::test]
async fn changed_policy_applies_at_once_and_keeps_level() {
    let (limiter, _) = limiter([]);
    let admin = limiter.admin("ops");
    let resource = Scope::Resource(ResourceName::new("gpt").unwrap());
    let own = Scope::Subject(Subject::new("acme", "gpt").unwrap());
    admin.set_policy(resource, policy([Limit::per_day("rpm", 100)])).await.unwrap();
    admin.set_policy(own.clone(), policy([Limit::per_day("rpm", 500)])).await.unwrap();
    limiter.spend(("acme", "gpt"), [("rpm", 50)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 450);
    admin.remove_policy(own).await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 100);
    limiter.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 99);
}

#[tokio::test]
async fn limit_added_to_live_bucket_applies() {
    let (limiter, _) = limiter([]);
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, policy([Limit::per_day("rpm", 5)])).await.unwrap();
    let mut old = limiter.try_acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    let both = [Limit::per_day("rpm", 5), Limit::per_day("tpm", 10)];
    admin.set_policy(Scope::System, policy(both)).await.unwrap();
    limiter.spend(("acme", "gpt"), [("tpm", 10)]).await.unwrap();
    assert!(limiter.spend(("acme", "gpt"), [("tpm", 1)]).await.is_err());
    // An older lease keeps its limits and can still be settled.
    assert!(matches!(old.adjust([("tpm", 1)]).await.unwrap_err(), LimitError::Cost(_)));
    old.settle([("rpm", 2)]).await.unwrap();
    assert_eq!(available(&limiter, "acme", "rpm").await, 3);
}

#[tokio::test]
async fn child_draws_from_parents_and_refusal_names_owner() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let admin = limiter.admin("ops");
    let org = Scope::Entity(id("org"));
    admin.set_policy(org, policy([Limit::per_day("rpm", 5)])).await.unwrap();
    for (child, cascade) in [("org", false), ("team", true), ("user", true), ("loner", false)] {
        let entity = Entity::new(id(child));
        let entity = match child {
            "team" | "loner" => entity.parent(id("org")),
            "user" => entity.parent(id("team")),
            _ => entity,
        };
        let entity = if cascade { entity.cascade() } else { entity };
        admin.put_entity(&entity, Expect::Absent).await.unwrap();
    }
    limiter.spend(("user", "gpt"), [("rpm", 4)]).await.unwrap();
    limiter.spend(("loner", "gpt"), [("rpm", 4)]).await.unwrap();
    let error = limiter.try_acquire(("user", "gpt"), [("rpm", 2)]).await.unwrap_err();
    let short: Vec<_> = error.limited().unwrap().short().collect();
    assert_eq!(short.len(), 1);
    assert_eq!(short[0].balance.subject.entity.as_str(), "org");
    assert_eq!(short[0].source.to_string(), "entity org");
    let lines = limiter.balances(("user", "gpt")).await.unwrap();
    let left: Vec<_> =
        lines.iter().map(|line| (line.balance.subject.entity.as_str(), line.balance.available)).collect();
    assert_eq!(left, [("user", 96), ("team", 96), ("org", 1)]);
    // The usage of an entity and its ancestors in one call.
    let all = limiter.balances_of_entity("user").await.unwrap();
    assert_eq!(all.len(), 3);
}

#[tokio::test]
async fn parent_cycles_and_ninth_level_are_refused() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let admin = limiter.admin("ops");
    for level in 0..8 {
        let entity = Entity::new(id(&format!("e{level}"))).cascade();
        let entity = if level == 0 { entity } else { entity.parent(id(&format!("e{}", level - 1))) };
        admin.put_entity(&entity, Expect::Any).await.unwrap();
    }
    limiter.spend(("e7", "gpt"), [("rpm", 1)]).await.unwrap();
    let ninth = Entity::new(id("e8")).parent(id("e7"));
    let error = admin.put_entity(&ninth, Expect::Any).await.unwrap_err();
    assert_eq!(error.to_string(), "`e7` cannot be the parent of `e8`: more than 8 levels");
    // Added from above, the ninth level is detected by a draw.
    admin.put_entity(&Entity::new(id("top")), Expect::Any).await.unwrap();
    let moved = Entity::new(id("e0")).parent(id("top")).cascade();
    admin.put_entity(&moved, Expect::Any).await.unwrap();
    let error = limiter.spend(("e7", "gpt"), [("rpm", 1)]).await.unwrap_err();
    assert_eq!(error.to_string(), "the entity `e7` draws from more than 8 levels");
}

#[tokio::test]
async fn per_call_limits_have_their_own_buckets() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 10), Limit::per_day("tpm", 100)]);
    let cost = [("rpm", 5), ("tpm", 1)];
    let call = || limiter.request(("acme", "gpt"), &cost).limits([Limit::per_day("rpm", 7)]);
    call().spend().await.unwrap();
    let error = call().try_acquire().await.unwrap_err();
    assert_eq!(error.limited().unwrap().primary().unwrap().source.to_string(), "this call");
    // The stored limit of that name was not charged, and the other limit was.
    assert_eq!(available(&limiter, "acme", "rpm").await, 10);
    assert_eq!(available(&limiter, "acme", "tpm").await, 99);
    let other = limiter.request(("acme", "gpt"), &cost).limits([Limit::per_day("rpm", 8)]);
    other.spend().await.unwrap();
    let bad = limiter.request(("acme", "gpt"), &cost).limits([Limit::per_day("rpm", 0)]);
    assert!(matches!(bad.spend().await.unwrap_err(), LimitError::Policy(_)));
}

#[tokio::test]
async fn explain_reports_limits_and_outcome_without_charge() {
    let (limiter, _) = limiter([Limit::per_day("tpm", 1_000)]);
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, policy([Limit::per_day("rpm", 10)])).await.unwrap();
    let explanation = limiter.explain(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    assert_eq!(explanation.would, Would::Grant);
    let sources: Vec<_> = explanation.lines.iter().map(|line| line.source.to_string()).collect();
    assert_eq!(sources, ["system", "defaults"]);
    limiter.spend(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    let explanation = limiter.explain(("acme", "gpt"), [("rpm", 1), ("tpm", 1)]).await.unwrap();
    assert_eq!(explanation.would, Would::Wait(Duration::from_secs(DAYS / 10)));
    assert_eq!(
        explanation.to_string(),
        "acme on gpt would be refused; retry after 2h24m\n  \
         short  rpm of acme on gpt: 0 of 10 available, 1 requested (by system)\n  \
         ok     tpm of acme on gpt: 1000 of 1000 available, 1 requested (by defaults)\n"
    );
    let wait = limiter.time_until_available(("acme", "gpt"), [("rpm", 2)]).await.unwrap();
    assert_eq!(wait, Duration::from_secs(DAYS / 5));
    assert_eq!(limiter.time_until_available(("acme", "gpt"), [("tpm", 2)]).await.unwrap(), Duration::ZERO);
    assert_eq!(available(&limiter, "acme", "tpm").await, 1_000);
}

#[tokio::test]
async fn usage_and_capacity_are_reported() {
    let (limiter, clock) = limiter([Limit::per_day("rpm", 100), Limit::per_day("tpm", 1_000)]);
    for hours in 0..3 {
        for entity in ["acme", "beta"] {
            let mut lease = limiter.try_acquire((entity, "gpt"), [("rpm", 1), ("tpm", 200)]).await.unwrap();
            lease.settle([("tpm", 100 + hours)]).await.unwrap();
        }
        clock.advance(Duration::from_secs(3_600));
    }
    let (all, paging) = (Stamp::ZERO..Stamp::MAX, Paging::default());
    let page = limiter.usage_of_entity("acme", Window::Hour, all.clone(), &paging).await.unwrap();
    let lines: Vec<_> =
        page.items.iter().map(|line| (line.limit.as_str(), line.tally.units, line.tally.leases)).collect();
    let expected =
        [("rpm", 1, 1), ("rpm", 1, 1), ("rpm", 1, 1), ("tpm", 100, 1), ("tpm", 101, 1), ("tpm", 102, 1)];
    assert_eq!(lines, expected);
    let page = limiter.usage_of_resource("gpt", Window::Month, all.clone(), &paging).await.unwrap();
    assert_eq!(page.items.len(), 4);
    let of = UsageOf::Resource(ResourceName::new("gpt").unwrap());
    let sum = limiter.usage_sum(&UsageQuery { of, window: Window::Day, range: all }).await.unwrap();
    let totals: Vec<_> = sum.limits.iter().map(|(key, tally)| (key.name.as_str(), tally.own)).collect();
    assert_eq!(totals, [("rpm", 6), ("tpm", 606)]);
    let capacity = limiter.capacity("gpt").await.unwrap();
    let tpm = &capacity[&"tpm".parse().unwrap()];
    assert_eq!((tpm.buckets, tpm.burst, tpm.consumed), (2, 2_000, 606));
}

#[tokio::test]
async fn abandoned_lease_expires_by_policy() {
    for (on_expiry, left) in [(OnExpiry::Settle, 60), (OnExpiry::Return, 100)] {
        let clock = ManualWall::new(START);
        let limiter = Limiter::builder(Memory::with_clock(clock.clone()))
            .defaults([Limit::per_day("rpm", 100)])
            .on_expiry(on_expiry)
            .lease_deadline(Duration::from_secs(30))
            .build()
            .unwrap();
        let mut lease: Lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 40)]).await.unwrap();
        clock.advance(Duration::from_secs(31));
        assert_eq!(available(&limiter, "acme", "rpm").await, left);
        let error = lease.settle([("rpm", 1)]).await.unwrap_err();
        assert!(is_ended(&error), "{error}");
        drop(lease);
        assert_eq!(available(&limiter, "acme", "rpm").await, left);
    }
}

#[tokio::test]
async fn admin_changes_check_versions() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let admin = limiter.admin("ops");
    let version = admin.set_policy(Scope::System, policy([Limit::per_day("rpm", 7)])).await.unwrap();
    let change = |expect| PolicyChange { scope: Scope::System, expect, policy: None };
    let error = admin.change(vec![change(Expect::Absent)]).await.unwrap_err();
    assert_eq!(error.to_string(), "the policy for system is not as expected: it is at version 1");
    admin.change(vec![change(Expect::Version(version))]).await.unwrap();
    assert!(admin.policies().await.unwrap().is_empty());
}

#[tokio::test]
async fn request_deadline_is_bounded() {
    let (limiter, clock) = limiter([Limit::per_day("rpm", 100)]);
    let request = |deadline| limiter.request(("acme", "gpt"), &[("rpm", 40)]).deadline(deadline);
    let error = request(Duration::ZERO).try_acquire().await.unwrap_err();
    assert_eq!(error.to_string(), "lease deadline is 0s, outside 1ms..=30d");
    assert!(request(Duration::MAX).acquire_within(Duration::ZERO).await.is_err());
    assert!(format!("{:?}", request(Duration::ZERO)).contains("acme"));
    let lease = request(Duration::from_secs(5)).try_acquire().await.unwrap();
    clock.advance(Duration::from_secs(6));
    assert_eq!(available(&limiter, "acme", "rpm").await, 60);
    drop(lease);
    assert_eq!(available(&limiter, "acme", "rpm").await, 60, "it was settled in full");
}

#[tokio::test]
async fn entity_with_children_cannot_be_removed() {
    let (limiter, _) = limiter([Limit::per_day("rpm", 100)]);
    let admin = limiter.admin("ops");
    admin.put_entity(&Entity::new(id("org")), Expect::Absent).await.unwrap();
    admin.put_entity(&Entity::new(id("team")).parent(id("org")).cascade(), Expect::Absent).await.unwrap();
    let own = Scope::Subject(Subject::new("team", "gpt").unwrap());
    admin.set_policy(own, policy([Limit::per_day("rpm", 7)])).await.unwrap();
    let error = admin.remove_entity(&id("org"), Expect::Any).await.unwrap_err();
    assert_eq!(error.to_string(), "the entity `org` has children: 1; move or remove them first");
    admin.remove_entity(&id("team"), Expect::Any).await.unwrap();
    assert_eq!(available(&limiter, "team", "rpm").await, 100);
    admin.remove_entity(&id("org"), Expect::Any).await.unwrap();
    assert!(admin.policies().await.unwrap().is_empty());
}

/// Records the calls to a store.
#[derive(Debug, Default)]
struct CallLog(Mutex<Vec<Verb>>);

impl Watcher for CallLog {
    fn ended(&self, verb: Verb, _: Duration, _: CallEnd<'_>) {
        self.0.lock().expect("the lock is not poisoned").push(verb);
    }
}

#[tokio::test]
async fn spend_reports_balances_in_one_call() {
    let log = Arc::new(CallLog::default());
    let store = Measured::new(Memory::with_clock(ManualWall::new(START)), log.clone());
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 1_000), Limit::per_day("other", 5)];
    let limiter = Limiter::builder(store).defaults(limits).build().unwrap();
    let spend = async |id: Option<u128>| {
        let request = limiter.request(("acme", "gpt"), &[("rpm", 1), ("tpm", 300)]);
        let request = if let Some(id) = id { request.id(id) } else { request };
        let balances = request.spend_with_balances().await.unwrap();
        balances.iter().map(|left| (left.limit.to_string(), left.available)).collect::<Vec<_>>()
    };
    let left = |rpm, tpm| vec![("rpm".to_owned(), rpm), ("tpm".to_owned(), tpm)];
    assert_eq!(spend(None).await, left(99, 700));
    log.0.lock().unwrap().clear();
    assert_eq!(spend(None).await, left(98, 400));
    assert_eq!(*log.0.lock().unwrap(), [Verb::Version, Verb::Spend]);
    // A repeated spend charges nothing, and returns the current balances.
    for _ in 0..2 {
        assert_eq!(spend(Some(7)).await, left(97, 100));
    }
}
