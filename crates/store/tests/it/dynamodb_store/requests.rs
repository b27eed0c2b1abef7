//! The number and kind of requests that each call sends to the engine.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::lifecycle::Lifecycle as _;
use tidegate_store::{
    AuditQuery, Buckets as _, Draw, DynamoDb, Entities as _, LeaseStatus, Ledger as _, Listing, Lookup,
    ManualWall, Paging, Policies as _, PolicyChange, Prune, Retention, Store as _, StoreError, UsageOf,
    UsageQuery,
};

use super::ENGINE;
use crate::kit::common;
use crate::kit::common::{
    adjust_of, draw_of, eventually, granted, is_granted, levels, own, settle_of, subject,
};
use crate::kit::dynamodb::{START, open_new, unswept};
use crate::kit::dynamodb_items::RawTable;
use crate::kit::dynamodb_proxy::Proxy;
use crate::kit::engine::skip_without;

async fn watched() -> (Proxy, DynamoDb, ManualWall) {
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let store = open_new(unswept(ENGINE).endpoint(proxy.url()).clock(clock.clone())).await;
    proxy.take_requests();
    (proxy, store, clock)
}

#[tokio::test]
async fn acquire_of_a_cached_item_is_one_request() {
    skip_without!(ENGINE);
    let (proxy, store, clock) = watched().await;
    let limits: Vec<Limit> =
        ["rpm", "tpm", "rpd", "tpd", "usd"].map(|name| Limit::per_second(name, 1_000).burst(1_000)).into();
    let levels = levels(&[("acme", &limits)]);
    let units = levels.amounts(&[("rpm", 1), ("tpm", 9), ("rpd", 1), ("tpd", 9), ("usd", 2)]).unwrap();
    let draw = || Draw { units: units.clone(), ..draw_of(&levels, 1) };
    granted(store.draw(&draw()).await);
    assert_eq!(proxy.take_requests(), ["UpdateItem"], "the first use of a bucket is one request too");
    for round in 0..20 {
        // In every other round the bucket has refilled completely: a full bucket is set, a partly full one is
        // updated by addition.
        if round % 2 == 0 {
            clock.advance(Duration::from_secs(2));
        }
        let drawn = draw();
        granted(store.draw(&drawn).await);
        assert_eq!(proxy.take_requests(), ["UpdateItem"], "round {round}");
        store.settle(&settle_of(&drawn, 1)).await.unwrap();
        assert_eq!(proxy.take_requests(), ["UpdateItem"], "its settle in round {round}");
    }
}

#[tokio::test]
async fn acquire_of_a_changed_item_is_two_requests() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = unswept(ENGINE).clock(clock);
    let others = open_new(options.clone()).await;
    let store = options.endpoint(proxy.url()).open().await.unwrap();
    proxy.take_requests();
    let levels = own("acme", 10);
    let mut left = 10;
    for round in 0_u64..12 {
        if round % 2 == 0 {
            let drawn = is_granted(&others.draw(&draw_of(&levels, 1)).await);
            left -= i64::from(drawn);
        }
        let request = draw_of(&levels, 1);
        let is_drawn = is_granted(&store.draw(&request).await);
        assert_eq!(is_drawn, left > 0, "round {round}");
        left -= i64::from(is_drawn);
        let requests = proxy.take_requests();
        assert!(requests.len() <= 2, "round {round}: {requests:?}");
    }
}

#[tokio::test]
async fn cascade_is_one_transaction_per_step() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    let (child, parent) = ([common::slow(100)], [common::slow(1_000)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    for _ in 0..5 {
        let draw = draw_of(&levels, 1);
        granted(store.draw(&draw).await);
        assert_eq!(proxy.take_requests(), ["TransactWriteItems"]);
        store.adjust(&adjust_of(&draw, 1, 1)).await.unwrap();
        assert_eq!(proxy.take_requests(), ["TransactWriteItems"]);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        assert_eq!(proxy.take_requests(), ["TransactWriteItems"]);
        granted(store.spend(&draw_of(&levels, 1)).await);
        assert_eq!(proxy.take_requests(), ["TransactWriteItems"]);
    }
}

#[tokio::test]
async fn chosen_lease_is_read_and_drawn_with_a_check() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    let levels = own("acme", 100);
    let draw = || Draw { lease: LeaseId::chosen(common::next_lease().number()), ..draw_of(&levels, 1) };
    granted(store.draw(&draw()).await);
    assert_eq!(proxy.take_requests(), ["UpdateItem"], "no end was counted yet");
    granted(store.spend(&draw()).await);
    assert_eq!(common::used(&store, "acme").await, 1, "reading usage counts the lease");
    for _ in 0..3 {
        let draw = draw();
        proxy.take_requests();
        granted(store.draw(&draw).await);
        assert_eq!(proxy.take_requests(), ["BatchGetItem", "TransactWriteItems"]);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        assert_eq!(proxy.take_requests(), ["UpdateItem"]);
        assert!(store.draw(&draw).await.is_err(), "the lease has ended");
    }
}

/// The policy lacked `DescribeTimeToLive`: a program with it could not open the table that the template makes.
#[tokio::test]
async fn template_allows_all_requests_of_a_store() {
    skip_without!(ENGINE);
    let (proxy, clock, table) = (Proxy::new(ENGINE).await, ManualWall::new(START), unswept(ENGINE));
    // A table as the template makes it is empty.
    RawTable::on(ENGINE, &open_new(table.clone()).await).clear().await;
    let day = Duration::from_secs(86_400);
    let kept = Retention { hours: Some(day), audit: Some(day), ..Retention::default() };
    let table = table.endpoint(proxy.url()).clock(clock.clone()).retention(kept);
    let store = table.clone().open().await.unwrap();
    let scope = Scope::System;
    let policy = Some(Policy::new([common::slow(9)]).unwrap());
    let change = PolicyChange { scope: scope.clone(), expect: Expect::Any, policy };
    store.apply(&[change], "tests").await.unwrap();
    store.read(&[scope]).await.unwrap();
    store.list(&Listing::All, &Paging::default()).await.unwrap();
    let id = EntityId::new("acme").unwrap();
    store.put(&Entity::new(id.clone()), Expect::Absent, "tests").await.unwrap();
    store.lineage(&id).await.unwrap();
    store.entities(&Paging::default()).await.unwrap();
    store.remove(&id, Expect::Any, "tests").await.unwrap();
    let levels = levels(&[("child", &[common::slow(100)]), ("parent", &[common::slow(100)])]);
    let draws: [Draw; 4] = std::array::from_fn(|_| draw_of(&levels, 2));
    for draw in &draws {
        granted(store.draw(draw).await);
    }
    store.adjust(&adjust_of(&draws[0], 1, 1)).await.unwrap();
    store.settle(&settle_of(&draws[1], 1)).await.unwrap();
    store.cancel(&common::cancel_of(&draws[2])).await.unwrap();
    let chosen = Draw { lease: LeaseId::chosen(common::next_lease().number()), ..draw_of(&levels, 1) };
    granted(store.spend(&chosen).await);
    store.lease(common::next_lease()).await.unwrap_err();
    store.balances(&Lookup::Subjects([subject("child")].into())).await.unwrap();
    store.buckets(&subject("child").resource, &Paging::default()).await.unwrap();
    assert_eq!(common::used(&store, "child").await, 2);
    clock.advance(4 * day);
    store.sweep(100).await.unwrap();
    let always = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    store.audit(&always, &Paging::default()).await.unwrap();
    store.prune(&Prune::Usage { window: Window::Day, before: Stamp::MAX }, 100).await.unwrap();
    table.clone().lifecycle().unwrap().check().await.unwrap();
    let template = table.lifecycle().unwrap().template().unwrap();
    let allowed: BTreeSet<String> = template
        .lines()
        .filter_map(|line| Some(line.trim().strip_prefix("- dynamodb:")?.to_owned()))
        .collect();
    let sent = proxy.actions();
    assert!(sent.is_subset(&allowed), "{sent:?} with only {allowed:?}");
}

#[tokio::test]
async fn balances_are_one_read() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    for entity in ["a", "b", "c"] {
        granted(store.draw(&draw_of(&own(entity, 10), 1)).await);
    }
    proxy.take_requests();
    let lookup = Lookup::Subjects(["a", "b", "c", "unused"].map(subject).into());
    assert_eq!(store.balances(&lookup).await.unwrap().buckets.len(), 3);
    assert_eq!(proxy.take_requests(), ["BatchGetItem"]);
    let entities = ["a", "b"].map(|name| EntityId::new(name).unwrap());
    store.balances(&Lookup::Entities(entities.into())).await.unwrap();
    assert_eq!(proxy.take_requests(), ["Query", "Query"]);
}

/// Drains a bucket of three, so that this process has cached that it is empty.
async fn drain(
    store: &DynamoDb,
    levels: &std::sync::Arc<tidegate_core::limit::cascade::Levels>,
) -> Vec<Draw> {
    let draws: Vec<Draw> = (0..3).map(|_| draw_of(levels, 1)).collect();
    for draw in &draws {
        granted(store.draw(draw).await);
    }
    // The first refusal reads the item, later ones use the cached refusal.
    assert!(!is_granted(&store.draw(&draw_of(levels, 1)).await));
    draws
}

#[tokio::test]
async fn repeated_refusals_read_once_a_second() {
    skip_without!(ENGINE);
    let (proxy, store, clock) = watched().await;
    let levels = levels(&[("acme", &[Limit::per_second("rpm", 1).burst(3)])]);
    drain(&store, &levels).await;
    proxy.take_requests();
    let before = tokio::time::Instant::now();
    for _ in 0..2_000 {
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
    }
    let requests = proxy.take_requests();
    assert!(requests.iter().all(|request| request == "BatchGetItem"), "{requests:?}");
    let seconds = usize::try_from(before.elapsed().as_secs()).unwrap() + 1;
    assert!(requests.len() <= seconds, "{} in {seconds} s", requests.len());
    assert!(store.rejections() >= 2_000 - seconds as u64);
    // The refusal is cached no longer than its retry time.
    clock.advance(Duration::from_secs(1));
    granted(store.draw(&draw_of(&levels, 1)).await);
}

#[tokio::test]
async fn own_returns_end_cached_refusals() {
    skip_without!(ENGINE);
    let (_proxy, store, _) = watched().await;
    for (entity, is_settled) in [("one", true), ("two", false)] {
        let levels = own(entity, 3);
        let draws = drain(&store, &levels).await;
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        if is_settled {
            store.settle(&settle_of(&draws[0], 0)).await.unwrap();
        } else {
            store.cancel(&common::cancel_of(&draws[0])).await.unwrap();
        }
        granted(store.draw(&draw_of(&levels, 1)).await);
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        let lowered = adjust_of(&draws[1], 1, -1);
        store.adjust(&lowered).await.unwrap();
        granted(store.draw(&draw_of(&levels, 1)).await);
    }
    eventually("a draw is refused without a request", async || {
        assert!(!is_granted(&store.draw(&draw_of(&own("two", 3), 1)).await));
        store.rejections() > 0
    })
    .await;
}

#[tokio::test]
async fn newer_rule_ends_cached_refusals() {
    skip_without!(ENGINE);
    let (_proxy, store, _) = watched().await;
    let old = own("acme", 3);
    drain(&store, &old).await;
    assert!(!is_granted(&store.draw(&draw_of(&old, 1)).await));
    let new = common::levels_of_version(
        7,
        &[("acme", &[Limit::per_day("rpm", 1).burst(3), Limit::per_day("tpm", 5)])],
    );
    let before = store.rejections();
    assert!(!is_granted(&store.draw(&draw_of(&new, 1)).await), "the level is kept at zero");
    assert_eq!(store.rejections(), before, "a request was sent");
}

#[tokio::test]
async fn refusals_are_not_cached_without_rejections() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let store = open_new(unswept(ENGINE).endpoint(proxy.url()).rejections(Duration::ZERO)).await;
    let levels = own("acme", 3);
    drain(&store, &levels).await;
    proxy.take_requests();
    for _ in 0..3 {
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        assert_eq!(proxy.take_requests(), ["BatchGetItem"]);
    }
    assert_eq!(store.rejections(), 0);
}

#[tokio::test]
async fn lease_of_another_process_is_found_by_the_index() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = unswept(ENGINE).clock(clock);
    let others = open_new(options.clone()).await;
    let store = options.endpoint(proxy.url()).open().await.unwrap();
    let draws = ["a", "b", "c"].map(|entity| draw_of(&own(entity, 10), 2));
    for draw in &draws {
        granted(others.draw(draw).await);
    }
    let ended = draw_of(&own("d", 10), 1);
    granted(others.draw(&ended).await);
    others.settle(&settle_of(&ended, 1)).await.unwrap();
    proxy.take_requests();
    let standing = store.lease(draws[1].lease).await.unwrap();
    assert!(
        matches!(&standing, LeaseStatus::Open(held) if held.levels.subject() == &subject("b")),
        "{standing:?}"
    );
    assert!(matches!(store.lease(ended.lease).await, Ok(LeaseStatus::Ended(_))));
    assert!(matches!(store.lease(common::next_lease()).await, Err(StoreError::NoLease { .. })));
    let requests = proxy.take_requests();
    assert!(
        requests.iter().all(|request| ["GetItem", "Query", "BatchGetItem"].contains(&request.as_str())),
        "{requests:?}"
    );
    store.settle(&settle_of(&draws[1], 2)).await.unwrap();
}

/// Regression: each page of an entity's usage read all of its usage.
#[tokio::test]
async fn page_of_usage_starts_after_the_last_one() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
    assert_eq!(common::used(&store, "acme").await, 1);
    let raw = RawTable::on(ENGINE, &store);
    let is_hour = |item: &&HashMap<String, AttributeValue>| {
        item["SK"].as_s().is_ok_and(|key| key.starts_with("#USAGE#gpt#hour#"))
    };
    let items = raw.items("ENTITY#acme").await;
    let item = items.iter().find(is_hour).expect("the usage of an hour");
    let key = item["SK"].as_s().expect("a key");
    for number in 0..1_500 {
        let mut other = item.clone();
        other.insert("SK".to_owned(), AttributeValue::S(key.replace("gpt", &format!("a-{number:04}"))));
        raw.put(other).await;
    }
    let of = UsageOf::Entity(EntityId::new("acme").unwrap());
    let query = UsageQuery { of, window: Window::Hour, range: Stamp::ZERO..Stamp::MAX };
    let (mut paging, mut names) = (Paging::first(10).unwrap(), Vec::new());
    for _ in 0..3 {
        proxy.take_requests();
        let page = store.usage(&query, &paging).await.unwrap();
        names.extend(page.items.iter().map(|line| line.subject.resource.to_string()));
        paging = paging.after(page.next.expect("there is more"));
    }
    assert_eq!(proxy.take_requests(), ["Query"]);
    assert_eq!(names, (0..30).map(|number| format!("a-{number:04}")).collect::<Vec<_>>());
}
