//! Rows that another program has corrupted: calls that need one get an error that names it, and others
//! succeed.

use std::time::Duration;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope};
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets, Entities, Ledger, ManualWall, Paging, Policies, PolicyChange, Store, StoreError,
    Terms,
};

use crate::kit::common::{START, balance, draw_of, draw_on, granted, own, settle_of, slow, subject, used};
use crate::kit::sqlite::TempFile;

/// Ways to corrupt a lease.
const CORRUPTIONS: [&str; 10] = [
    "held = 'x'",
    "held = NULL",
    "held = '1,2'",
    "levels = '{}'",
    "levels = NULL",
    "step = -1",
    "step = 5000000000",
    "drawn_at = -1",
    "on_expiry = 7",
    "levels = CAST(x'ff' AS TEXT)",
];

/// One such lease that was due used to block every call of its namespace.
#[tokio::test]
async fn corrupt_lease_is_named_and_others_continue() {
    for corruption in CORRUPTIONS {
        let (place, clock) = (TempFile::new(), ManualWall::new(START));
        let store = place.open(&clock).await;
        let levels = own("acme", 100);
        let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
        let (bad, good) = (draw_on(terms, &levels, 5), draw_on(terms, &levels, 3));
        granted(store.draw(&bad).await);
        granted(store.draw(&good).await);
        let id = bad.lease.number().to_be_bytes();
        let changed = place.outside().execute(&format!("UPDATE leases SET {corruption} WHERE id = ?1"), [id]);
        assert_eq!(changed, Ok(1), "{corruption}");
        // In one transaction with another call.
        let (settle, other_draw) = (settle_of(&bad, 5), draw_of(&levels, 1));
        let (answer, other) = tokio::join!(store.settle(&settle), store.draw(&other_draw));
        granted(other);
        match answer {
            Err(StoreError::Corrupt { what }) => {
                assert!(what.starts_with(&format!("the lease {}: ", bad.lease)), "{corruption}: {what}");
            }
            other => panic!("{corruption}: {other:?}"),
        }
        // Past their deadlines.
        clock.advance(Duration::from_secs(120));
        granted(store.draw(&draw_of(&levels, 1)).await);
        assert_eq!(balance(&store, "acme").await, Some((93, 7)), "{corruption}: its units stay taken");
        assert_eq!(used(&store, "acme").await, 0);
        let swept = [store.sweep(10).await.unwrap(), store.sweep(10).await.unwrap()];
        assert_eq!(swept.map(|swept| swept.returned), [1, 0], "the intact lease, which the draw has ended");
        assert!(matches!(
            store.cancel(&crate::kit::common::cancel_of(&bad)).await,
            Err(StoreError::Corrupt { .. })
        ));
    }
}

#[tokio::test]
async fn corrupt_limit_is_named_and_others_continue() {
    for corruption in ["amount = 0", "part = 86400000", "burst = -5", "row = 'rpm~9'", "row = '#'"] {
        let (place, clock) = (TempFile::new(), ManualWall::new(START));
        let store = place.open(&clock).await;
        let due = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
        for entity in ["bad", "good"] {
            granted(store.draw(&draw_on(due, &own(entity, 100), 5)).await);
        }
        let sql = format!(
            "UPDATE meters SET {corruption} WHERE subject = (SELECT id FROM subjects WHERE entity = 'bad')"
        );
        assert_eq!(place.outside().execute(&sql, []), Ok(1), "{corruption}");
        clock.advance(Duration::from_secs(120));
        let (bad, good) = (draw_of(&own("bad", 100), 1), draw_of(&own("good", 100), 1));
        let (bad, good) = tokio::join!(store.draw(&bad), store.draw(&good));
        granted(good);
        assert!(
            matches!(&bad, Err(StoreError::Corrupt { what }) if what.contains("the limit")),
            "{corruption}: {bad:?}"
        );
        assert_eq!(balance(&store, "good").await, Some((99, 1)), "{corruption}");
    }
}

/// A removal used to delete the readable policies, and left the rest and the audit inconsistent.
#[tokio::test]
async fn entity_with_a_corrupt_policy_is_removed_atomically() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let id = EntityId::new("acme").unwrap();
    store.put(&Entity::new(id.clone()), Expect::Any, "ops").await.unwrap();
    let scopes = [Scope::Entity(id.clone()), Scope::Subject(subject("acme"))];
    for scope in &scopes {
        let policy = Some(Policy::new([slow(10)]).unwrap());
        let change = PolicyChange { scope: scope.clone(), expect: Expect::Any, policy };
        store.apply(&[change], "ops").await.unwrap();
    }
    let version = store.version().await.unwrap();
    let body: String =
        place.outside().query_row("SELECT body FROM records WHERE kind = 3", [], |row| row.get(0)).unwrap();
    place.outside().execute("UPDATE records SET body = 'x' WHERE kind = 3", []).unwrap();
    let error = store.remove(&id, Expect::Any, "ops").await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert_eq!(store.version().await.unwrap(), version);
    assert!(store.read(&scopes[..1]).await.unwrap().policies[0].is_some(), "the policy still exists");
    place.outside().execute("UPDATE records SET body = ?1 WHERE kind = 3", [body]).unwrap();
    store.remove(&id, Expect::Any, "ops").await.unwrap();
    let everything = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    assert_eq!(store.audit(&everything, &Paging::default()).await.unwrap().items.len(), 6);
    assert!(store.get(&id).await.unwrap().is_none());
}

/// An invalid id used to block every call of its namespace, once the lease was due.
#[tokio::test]
async fn lease_with_a_corrupt_id_blocks_no_call() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
    granted(store.draw(&draw_on(terms, &own("acme", 10), 1)).await);
    place.outside().execute("UPDATE leases SET id = x'01'", []).unwrap();
    clock.advance(Duration::from_secs(120));
    for _ in 0..3 {
        granted(store.draw(&draw_of(&own("other", 10), 1)).await);
    }
}

/// A missing table used to count as transient, so a fail-open policy admitted every request for ever.
#[tokio::test]
async fn missing_table_is_not_transient() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 10), 1)).await);
    place.outside().execute_batch("DROP TABLE meters").unwrap();
    let error = store.draw(&draw_of(&own("acme", 10), 1)).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    store.close().await;
    let store = place.open(&clock).await;
    let error = store.draw(&draw_of(&own("acme", 10), 1)).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
}
