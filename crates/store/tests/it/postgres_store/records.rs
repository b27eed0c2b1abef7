//! Records have the same row format in every version of the schema.

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Version};
use tidegate_core::limit::token::{TokenHash, TokenId};
use tidegate_core::time::Stamp;
use tidegate_store::{AuditQuery, Entities, Ledger, ManualWall, Paging, Policies, Tokens};

use crate::kit::common::START;
use crate::kit::engine::{POSTGRES, skip_without, unique};
use crate::kit::postgres::{open, options, options_at, outside, url};

fn entity(id: &str) -> EntityId {
    EntityId::new(id).expect("a valid name")
}

#[tokio::test]
async fn rows_of_earlier_programs_are_read_and_added_to() {
    skip_without!(POSTGRES);
    let (schema, outside) = (unique("t"), outside(&url()).await);
    let store = open(options_at(url()).schema(&schema).connections(4).clock(ManualWall::new(START))).await;
    let token =
        r#"{"id":"ci","name":"b","namespace":"prod","scopes":["read"],"created_at":7,"created_by":"ops"}"#;
    let rows = format!(
        r#"SET search_path = "{schema}"; UPDATE namespaces SET version = 2, audited = 2;
        INSERT INTO entities (namespace, id, version, parent, body) SELECT id, 'acme', 1, NULL, '{{"id":"acme"}}' FROM namespaces;
        INSERT INTO tokens (namespace, id, hash, version, body)
        SELECT id, 'ci', decode(repeat('a5', 32), 'hex'), 2, '{token}' FROM namespaces;
        INSERT INTO audit (namespace, number, version, at, actor, filed, change)
        SELECT id, 0, 1, 7, 'ops', 'acme', '{{"entity":{{"after":{{"id":"acme"}}}}}}' FROM namespaces
        UNION ALL SELECT id, 1, 2, 8, 'ops', '$TOKEN:ci', '{{"token":{{"after":{token}}}}}' FROM namespaces"#
    );
    outside.batch_execute(&rows).await.unwrap();
    let (hash, id) = (TokenHash::new([0xa5; 32]), TokenId::new("ci").unwrap());
    assert_eq!(store.find_token(&hash).await.unwrap().unwrap().version, Version::new(2));
    assert_eq!(store.token(&id).await.unwrap().unwrap().0.as_bytes(), hash.as_bytes());
    let child = Entity::new(entity("child")).parent(entity("acme"));
    assert_eq!(store.put(&child, Expect::Absent, "ops").await.unwrap(), Version::new(3));
    let everything = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let entries = store.audit(&everything, &Paging::default()).await.unwrap().items;
    let listed: Vec<_> = entries.iter().map(|entry| (entry.version.number(), entry.filed.as_str())).collect();
    assert_eq!(listed, [(1, "acme"), (2, "$TOKEN:ci"), (3, "child")]);

    let written = outside
        .query_one(
            "SELECT entities.version, parent, body, number, at, actor, filed, change, audited
             FROM entities, audit, namespaces WHERE entities.id = 'child' AND number = 2",
            &[],
        )
        .await
        .unwrap();
    let body = r#"{"id":"child","parent":"acme"}"#;
    assert_eq!((written.get(0), written.get(1), written.get(2)), (3_i64, "acme", body));
    assert_eq!(
        (written.get(3), written.get(4), written.get(8)),
        (2_i64, i64::try_from(START.as_micros()).unwrap(), 3_i64)
    );
    let change = format!(r#"{{"entity":{{"after":{body}}}}}"#);
    assert_eq!((written.get(5), written.get(6), written.get(7)), ("ops", "child", change.as_str()));
}

/// Entries used to be ordered by the text of their numbers.
#[tokio::test]
async fn audit_entries_are_in_the_order_of_changes() {
    skip_without!(POSTGRES);
    let store = open(options()).await;
    for number in 0..12 {
        store.put(&Entity::new(entity(&format!("e{number}"))), Expect::Absent, "ops").await.unwrap();
    }
    let everything = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let entries = store.audit(&everything, &Paging::default()).await.unwrap().items;
    let versions: Vec<_> = entries.iter().map(|entry| entry.version.number()).collect();
    assert_eq!(versions, (1..=12).collect::<Vec<_>>());
    let changed = store.changed(Version::new(10)).await.unwrap().expect("the audit reaches back");
    assert_eq!(changed.version, Version::new(12));
}
