//! Indexes are eventually consistent: they list deleted items, and do not yet list new ones.
//!
//! A listing used to end at a page whose only key was deleted. An archive that missed an entry wrote the ones
//! after it, and then pruned all of them.

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
use crate::kit::common::{draw_of, granted, own, used};
use crate::kit::dynamodb::{START, open_new, options, unswept};
use crate::kit::dynamodb_items::RawTable;
use crate::kit::engine::skip_without;

const ALWAYS: AuditQuery = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };

fn text(text: &str) -> AttributeValue {
    AttributeValue::S(text.to_owned())
}

fn scope(entity: &str) -> Scope {
    Scope::Entity(EntityId::new(entity).expect("a valid name"))
}

/// Writes a policy for each of these entities, in one change.
async fn write(store: &DynamoDb, entities: &[&str]) -> Version {
    let policy = Policy::new([Limit::per_day("rpm", 1)]).expect("a valid policy");
    let change = |entity: &&str| PolicyChange {
        scope: scope(entity),
        expect: Expect::Any,
        policy: Some(policy.clone()),
    };
    let changes: Vec<_> = entities.iter().map(change).collect();
    store.apply(&changes, "tests").await.expect("the change is applied")
}

#[tokio::test]
async fn retention_bounds_usage_and_audit() {
    skip_without!(ENGINE);
    let (day, clock) = (Duration::from_secs(86_400), ManualWall::new(START));
    let retention = Retention { hours: Some(day), audit: Some(day), ..Retention::default() };
    let store = open_new(unswept(ENGINE).clock(clock.clone()).retention(retention)).await;
    write(&store, &["a", "b"]).await;
    granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
    assert_eq!(used(&store, "acme").await, 1);
    let expires = RawTable::on(ENGINE, &store).items("ENTITY#acme").await;
    let mut expires: Vec<u64> = expires
        .iter()
        .filter(|item| item["SK"].as_s().is_ok_and(|sk| sk.starts_with("#USAGE#")))
        .filter_map(|item| item.get("ttl")?.as_n().ok()?.parse().ok())
        .collect();
    expires.sort_unstable();
    let start = START.as_micros() / 1_000_000;
    let ends = [start / 60 * 60 + 60, start / 3_600 * 3_600 + 3_600].map(|end| end + day.as_secs());
    assert_eq!(expires[..2], ends, "minutes expire first, then hours");
    clock.advance(day / 2);
    write(&store, &["c"]).await;
    clock.advance(day / 2 + Duration::from_secs(1));
    store.sweep(100).await.expect("the sweep succeeds");
    let left = store.audit(&ALWAYS, &Paging::default()).await.expect("the audit is listed").items;
    assert_eq!(left.iter().map(|entry| entry.version).collect::<Vec<_>>(), [Version::new(2)]);
}

#[tokio::test]
async fn page_of_policies_skips_a_deleted_one() {
    skip_without!(ENGINE);
    let store = open_new(options(ENGINE)).await;
    write(&store, &["a", "b", "c", "d", "e"]).await;
    let raw = RawTable::on(ENGINE, &store);
    // A stale index entry of a policy that was just removed.
    for entity in ["b1", "c1", "c2"] {
        let stale =
            [("PK", entity), ("SK", "x"), ("GSI2PK", "CONFIGS#")].map(|(name, value)| (name, text(value)));
        let mut stale: HashMap<String, AttributeValue> =
            stale.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let real = raw.items("ENTITY#a").await.remove(0)["GSI2SK"].as_s().expect("a text").clone();
        stale.insert("GSI2SK".to_owned(), text(&real.replace("\u{1}a\u{1}", &format!("\u{1}{entity}\u{1}"))));
        raw.put(stale).await;
    }
    let (mut paging, mut found) = (Paging::first(1).expect("a page"), Vec::new());
    loop {
        let page = store.list(&Listing::All, &paging).await.expect("policies are listed");
        assert!(page.items.len() <= 1);
        found.extend(page.items.into_iter().map(|(scope, _)| scope));
        let Some(next) = page.next else { break };
        paging = paging.after(next);
    }
    assert_eq!(found, ["a", "b", "c", "d", "e"].map(scope));
}

/// Removes an audit entry from its index, and returns the item that restores it.
async fn hide(raw: &RawTable, number: u64) -> HashMap<String, AttributeValue> {
    let items = raw.items("AUDIT#").await;
    let shown = items.into_iter().find(|item| item["number"] == AttributeValue::N(number.to_string()));
    let shown = shown.expect("the entry exists");
    let mut hidden = shown.clone();
    hidden.remove("GSI2PK");
    raw.put(hidden).await;
    shown
}

#[tokio::test]
async fn unindexed_audit_entry_is_not_skipped_or_pruned() {
    skip_without!(ENGINE);
    let store = open_new(options(ENGINE)).await;
    for entity in ["a", "b", "c", "d"] {
        write(&store, &[entity]).await;
    }
    let raw = RawTable::on(ENGINE, &store);
    let left = async || raw.items("AUDIT#").await.len();
    let paging = Paging::default();
    // In the middle and at the beginning, before and after a prune.
    for (hidden, pruned) in [(1, 1), (1, 1), (2, 2)] {
        let shown = hide(&raw, hidden).await;
        let listed = store.audit(&ALWAYS, &paging).await;
        assert!(listed.as_ref().is_err_and(tidegate_store::StoreError::is_transient), "{hidden}: {listed:?}");
        let before = left().await;
        let answer = store.prune(&Prune::Audit { through: Version::new(4) }, 100).await;
        assert!(answer.as_ref().is_err_and(tidegate_store::StoreError::is_transient), "{hidden}: {answer:?}");
        assert_eq!(left().await, before, "{hidden}");
        raw.put(shown).await;
        let through = Version::new(pruned);
        store.prune(&Prune::Audit { through }, 100).await.expect("the index is complete");
        let page = store.audit(&ALWAYS, &paging).await.expect("the index is complete");
        let versions: Vec<u64> = page.items.iter().map(|entry| entry.version.number()).collect();
        assert_eq!(versions, (pruned + 1..=4).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn partly_indexed_change_is_not_listed_or_pruned() {
    skip_without!(ENGINE);
    let store = open_new(options(ENGINE)).await;
    write(&store, &["a"]).await;
    write(&store, &["b", "c", "d"]).await;
    let raw = RawTable::on(ENGINE, &store);
    let shown = hide(&raw, 3).await;
    let versions = async || {
        let page = store.audit(&ALWAYS, &Paging::default()).await.expect("only complete changes are listed");
        page.items.iter().map(|entry| entry.version.number()).collect::<Vec<_>>()
    };
    assert_eq!(versions().await, [1], "a partly indexed change is not listed");
    store
        .prune(&Prune::Audit { through: Version::new(2) }, 100)
        .await
        .expect("only complete changes are listed");
    assert_eq!(raw.items("AUDIT#").await.len(), 3);
    raw.put(shown).await;
    assert_eq!(versions().await, [2, 2, 2]);
    assert_eq!(
        store.prune(&Prune::Audit { through: Version::new(2) }, 100).await.expect("the index is complete"),
        3
    );
}
