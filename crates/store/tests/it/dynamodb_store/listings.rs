//! Indexes follow the table with a delay: they show what is gone, and do not show yet what is there.
//!
//! A listing whose page had one key of something that is gone ended there. An archive that had not been shown an entry wrote
//! the ones after it, and then pruned all of them.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets as _, DynamoDb, Ledger as _, Listing, ManualWall, Paging, Policies as _,
    PolicyChange, Prune, Retention, Store as _,
};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, options, unswept};
use crate::kit::dynamodb_items::Hand;
use crate::kit::engine::skip_without;
use crate::kit::words::{draw_of, granted, own, used};

const ALWAYS: AuditQuery = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };

fn text(text: &str) -> AttributeValue {
    AttributeValue::S(text.to_owned())
}

fn scope(entity: &str) -> Scope {
    Scope::Entity(EntityId::new(entity).expect("a valid name"))
}

/// Writes a policy of each of these entities, all of one change.
async fn write(store: &DynamoDb, entities: &[&str]) -> Version {
    let policy = Policy::new([Limit::per_day("rpm", 1)]).expect("a valid policy");
    let change = |entity: &&str| PolicyChange {
        scope: scope(entity),
        expect: Expect::Any,
        policy: Some(policy.clone()),
    };
    let changes: Vec<_> = entities.iter().map(change).collect();
    store.apply(&changes, "tests").await.expect("it is changed")
}

#[tokio::test]
async fn retention_bounds_usage_and_audit() {
    skip_without!(ENGINE);
    let (day, clock) = (Duration::from_secs(86_400), ManualWall::new(START));
    let retention = Retention { hours: Some(day), audit: Some(day), ..Retention::default() };
    let store = made(unswept(ENGINE).clock(clock.clone()).retention(retention)).await;
    write(&store, &["a", "b"]).await;
    granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
    assert_eq!(used(&store, "acme").await, 1);
    let expires = Hand::on(ENGINE, &store).items("ENTITY#acme").await;
    let mut expires: Vec<u64> = expires
        .iter()
        .filter(|item| item["SK"].as_s().is_ok_and(|sk| sk.starts_with("#USAGE#")))
        .filter_map(|item| item.get("ttl")?.as_n().ok()?.parse().ok())
        .collect();
    expires.sort_unstable();
    let hour = START.as_micros() / 1_000_000 / 3_600 * 3_600;
    assert_eq!(expires.first(), Some(&(hour + 3_600 + day.as_secs())), "hours; days and months live longer");
    clock.advance(day / 2);
    write(&store, &["c"]).await;
    clock.advance(day / 2 + Duration::from_secs(1));
    store.sweep(100).await.expect("a sweep is answered");
    let left = store.audit(&ALWAYS, &Paging::default()).await.expect("the audit is listed").items;
    assert_eq!(left.iter().map(|entry| entry.version).collect::<Vec<_>>(), [Version::new(2)]);
}

#[tokio::test]
async fn page_of_policies_skips_a_deleted_one() {
    skip_without!(ENGINE);
    let store = made(options(ENGINE)).await;
    write(&store, &["a", "b", "c", "d", "e"]).await;
    let hand = Hand::on(ENGINE, &store);
    // What an index shows of a policy that was removed a moment ago.
    for entity in ["b1", "c1", "c2"] {
        let stale =
            [("PK", entity), ("SK", "x"), ("GSI2PK", "CONFIGS#")].map(|(name, value)| (name, text(value)));
        let mut stale: HashMap<String, AttributeValue> =
            stale.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let real = hand.items("ENTITY#a").await.remove(0)["GSI2SK"].as_s().expect("a text").clone();
        stale.insert("GSI2SK".to_owned(), text(&real.replace("\u{1}a\u{1}", &format!("\u{1}{entity}\u{1}"))));
        hand.put(stale).await;
    }
    let (mut paging, mut found) = (Paging::first(1).expect("a page"), Vec::new());
    loop {
        let page = store.list(&Listing::All, &paging).await.expect("it is listed");
        assert!(page.items.len() <= 1);
        found.extend(page.items.into_iter().map(|(scope, _)| scope));
        let Some(next) = page.next else { break };
        paging = paging.after(next);
    }
    assert_eq!(found, ["a", "b", "c", "d", "e"].map(scope));
}

/// Takes an entry of the audit out of its index, and gives back what puts it there again.
async fn hide(hand: &Hand, number: u64) -> HashMap<String, AttributeValue> {
    let items = hand.items("AUDIT#").await;
    let shown = items.into_iter().find(|item| item["number"] == AttributeValue::N(number.to_string()));
    let shown = shown.expect("there is such an entry");
    let mut hidden = shown.clone();
    hidden.remove("GSI2PK");
    hand.put(hidden).await;
    shown
}

#[tokio::test]
async fn unindexed_audit_entry_is_not_skipped_or_pruned() {
    skip_without!(ENGINE);
    let store = made(options(ENGINE)).await;
    for entity in ["a", "b", "c", "d"] {
        write(&store, &[entity]).await;
    }
    let hand = Hand::on(ENGINE, &store);
    let left = async || hand.items("AUDIT#").await.len();
    let paging = Paging::default();
    // In the middle, and at the beginning, before anything was pruned and after.
    for (hidden, pruned) in [(1, 1), (1, 1), (2, 2)] {
        let shown = hide(&hand, hidden).await;
        let listed = store.audit(&ALWAYS, &paging).await;
        assert!(listed.as_ref().is_err_and(tidegate_store::StoreError::is_transient), "{hidden}: {listed:?}");
        let before = left().await;
        let answer = store.prune(&Prune::Audit { through: Version::new(4) }, 100).await;
        assert!(answer.as_ref().is_err_and(tidegate_store::StoreError::is_transient), "{hidden}: {answer:?}");
        assert_eq!(left().await, before, "{hidden}");
        hand.put(shown).await;
        let through = Version::new(pruned);
        store.prune(&Prune::Audit { through }, 100).await.expect("all of it is shown");
        let page = store.audit(&ALWAYS, &paging).await.expect("all of it is shown");
        let versions: Vec<u64> = page.items.iter().map(|entry| entry.version.number()).collect();
        assert_eq!(versions, (pruned + 1..=4).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn partly_indexed_change_is_not_listed_or_pruned() {
    skip_without!(ENGINE);
    let store = made(options(ENGINE)).await;
    write(&store, &["a"]).await;
    write(&store, &["b", "c", "d"]).await;
    let hand = Hand::on(ENGINE, &store);
    let shown = hide(&hand, 3).await;
    let versions = async || {
        let page = store.audit(&ALWAYS, &Paging::default()).await.expect("what is shown is whole");
        page.items.iter().map(|entry| entry.version.number()).collect::<Vec<_>>()
    };
    assert_eq!(versions().await, [1], "an archive would take the change for all of it");
    store.prune(&Prune::Audit { through: Version::new(2) }, 100).await.expect("what is shown is whole");
    assert_eq!(hand.items("AUDIT#").await.len(), 3);
    hand.put(shown).await;
    assert_eq!(versions().await, [2, 2, 2]);
    assert_eq!(store.prune(&Prune::Audit { through: Version::new(2) }, 100).await.expect("it is"), 3);
}
