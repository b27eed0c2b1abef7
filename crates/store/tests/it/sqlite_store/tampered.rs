//! Rows that somebody has changed from outside: who asks for one is told which it is, and others go on.

use std::time::Duration;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope};
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets, Entities, Ledger, ManualWall, Paging, Policies, PolicyChange, Store, StoreError,
    Terms,
};

use crate::kit::sqlite::Place;
use crate::kit::words::{START, draw_of, draw_on, granted, own, settle_of, shows, slow, subject, used};

/// Every way to spoil a lease.
const SPOILED: [&str; 10] = [
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

/// One such lease that was due kept every call of its namespace from being answered.
#[tokio::test]
async fn a_spoiled_lease_is_named_and_others_go_on() {
    for spoiled in SPOILED {
        let (place, clock) = (Place::new(), ManualWall::new(START));
        let store = place.open(&clock).await;
        let levels = own("acme", 100);
        let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
        let (bad, good) = (draw_on(terms, &levels, 5), draw_on(terms, &levels, 3));
        granted(store.draw(&bad).await);
        granted(store.draw(&good).await);
        let id = bad.lease.number().to_be_bytes();
        let changed = place.outside().execute(&format!("UPDATE leases SET {spoiled} WHERE id = ?1"), [id]);
        assert_eq!(changed, Ok(1), "{spoiled}");
        // In one transaction with others.
        let (settle, beside) = (settle_of(&bad, 5), draw_of(&levels, 1));
        let (answer, other) = tokio::join!(store.settle(&settle), store.draw(&beside));
        granted(other);
        match answer {
            Err(StoreError::Corrupt { what }) => {
                assert!(what.starts_with(&format!("the lease {}: ", bad.lease)), "{spoiled}: {what}");
            }
            other => panic!("{spoiled}: {other:?}"),
        }
        // Past their deadlines.
        clock.advance(Duration::from_secs(120));
        granted(store.draw(&draw_of(&levels, 1)).await);
        assert_eq!(shows(&store, "acme").await, Some((93, 7)), "{spoiled}: what it took stays taken");
        assert_eq!(used(&store, "acme").await, 0);
        let swept = [store.sweep(10).await.unwrap(), store.sweep(10).await.unwrap()];
        assert_eq!(
            swept.map(|swept| swept.returned),
            [1, 0],
            "the good one, which the draw has ended in passing"
        );
        assert!(matches!(
            store.cancel(&crate::kit::words::cancel_of(&bad)).await,
            Err(StoreError::Corrupt { .. })
        ));
    }
}

#[tokio::test]
async fn a_spoiled_limit_is_named_and_others_go_on() {
    for spoiled in ["amount = 0", "part = 86400000", "burst = -5", "row = 'rpm~9'", "row = '#'"] {
        let (place, clock) = (Place::new(), ManualWall::new(START));
        let store = place.open(&clock).await;
        let due = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
        for entity in ["bad", "good"] {
            granted(store.draw(&draw_on(due, &own(entity, 100), 5)).await);
        }
        let sql = format!(
            "UPDATE meters SET {spoiled} WHERE subject = (SELECT id FROM subjects WHERE entity = 'bad')"
        );
        assert_eq!(place.outside().execute(&sql, []), Ok(1), "{spoiled}");
        clock.advance(Duration::from_secs(120));
        let (bad, good) = (draw_of(&own("bad", 100), 1), draw_of(&own("good", 100), 1));
        let (bad, good) = tokio::join!(store.draw(&bad), store.draw(&good));
        granted(good);
        assert!(
            matches!(&bad, Err(StoreError::Corrupt { what }) if what.contains("the limit")),
            "{spoiled}: {bad:?}"
        );
        assert_eq!(shows(&store, "good").await, Some((99, 1)), "{spoiled}");
    }
}

/// It removed the policies that it could read, and left the rest and the audit in disorder.
#[tokio::test]
async fn an_entity_with_a_spoiled_policy_is_removed_whole_or_not_at_all() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let id = EntityId::new("acme").unwrap();
    store.put(&Entity::new(id.clone()), Expect::Any, "somebody").await.unwrap();
    let scopes = [Scope::Entity(id.clone()), Scope::Subject(subject("acme"))];
    for scope in &scopes {
        let policy = Some(Policy::new([slow(10)]).unwrap());
        let change = PolicyChange { scope: scope.clone(), expect: Expect::Any, policy };
        store.apply(&[change], "somebody").await.unwrap();
    }
    let version = store.version().await.unwrap();
    let body: String =
        place.outside().query_row("SELECT body FROM records WHERE kind = 3", [], |row| row.get(0)).unwrap();
    place.outside().execute("UPDATE records SET body = 'x' WHERE kind = 3", []).unwrap();
    let error = store.remove(&id, Expect::Any, "somebody").await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert_eq!(store.version().await.unwrap(), version);
    assert!(store.read(&scopes[..1]).await.unwrap().policies[0].is_some(), "it is still there");
    place.outside().execute("UPDATE records SET body = ?1 WHERE kind = 3", [body]).unwrap();
    store.remove(&id, Expect::Any, "somebody").await.unwrap();
    let everything = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    assert_eq!(store.audit(&everything, &Paging::default()).await.unwrap().items.len(), 6);
    assert!(store.get(&id).await.unwrap().is_none());
}

/// An id that is none kept every call of its namespace from being answered, once the lease was due.
#[tokio::test]
async fn a_lease_with_a_spoiled_id_holds_up_nobody() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
    granted(store.draw(&draw_on(terms, &own("acme", 10), 1)).await);
    place.outside().execute("UPDATE leases SET id = x'01'", []).unwrap();
    clock.advance(Duration::from_secs(120));
    for _ in 0..3 {
        granted(store.draw(&draw_of(&own("other", 10), 1)).await);
    }
}

/// What is missing was taken for trouble that passes, and a policy that lets everybody in meanwhile did so for ever.
#[tokio::test]
async fn a_table_that_is_gone_is_no_passing_trouble() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
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
