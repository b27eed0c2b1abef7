//! Tests that every body round-trips through JSON, and that invalid bodies are rejected.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidegate_client::*;
use tidegate_core::limit::name;
use tidegate_core::limit::policy as core_policy;

/// Asserts that the body round-trips through a `T`, and that an unknown field is rejected.
fn assert_round_trip<T: Serialize + DeserializeOwned>(body: &Value) {
    let read: T = serde_json::from_value(body.clone()).unwrap_or_else(|error| panic!("{body}: {error}"));
    assert_eq!(&serde_json::to_value(&read).expect("a body is written"), body);
    let mut more = body.clone();
    let Value::Object(fields) = &mut more else { panic!("a body is an object") };
    fields.insert("colour".to_owned(), json!("blue"));
    let error = serde_json::from_value::<T>(more).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("unknown field `colour`"), "{body}: {error}");
}

fn state() -> Value {
    json!({
        "entity": "acme", "resource": "gpt-4", "limit": "tpm", "source": "entity acme", "available": -5, "consumed": 7,
        "burst": 150_000, "amount": 100_000, "period": 60, "asked": 800, "retry_after": 0.5,
    })
}

fn policy() -> Value {
    json!({
        "limits": ["rpm:60/min", "tpm:100k/min:150k"], "only": true, "on_unavailable": {"local_share": 0.25},
        "on_expiry": "return",
    })
}

#[test]
fn lease_bodies_round_trip() {
    let lease = "0".repeat(63) + "7";
    assert_round_trip::<Acquire>(&json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}}));
    assert_round_trip::<Acquire>(&json!({
        "entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1, "tpm": 800}, "within": 2.5, "deadline": 60,
        "limits": ["tpm:1k/s"], "id": "01890a5d-ac96-774b-bcce-b302099a8057",
    }));
    assert_round_trip::<Granted>(
        &json!({"lease": lease, "expires_in": 60, "is_repeat": false, "degraded": "local_share"}),
    );
    assert_round_trip::<Spend>(&json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}}));
    assert_round_trip::<Batch>(&json!({"requests": [{"entity": "a", "resource": "b", "cost": {"rpm": 1}}]}));
    let refused = json!({"type": "/problems/limited", "title": "t", "status": 429, "detail": "d"});
    let granted = json!({"lease": lease, "expires_in": 60, "is_repeat": true});
    assert_round_trip::<BatchDone>(&json!({"results": [{"granted": granted}, {"refused": refused}]}));
    assert_round_trip::<Extend>(&json!({"step": 1, "cost": {"tpm": 5}}));
    assert_round_trip::<Adjust>(&json!({"step": 2, "changes": {"tpm": -5}}));
    assert_round_trip::<Renew>(&json!({"step": 3, "expires_in": 30}));
    assert_round_trip::<Settle>(&json!({"step": 4, "actual": {"tpm": 640}}));
    assert_round_trip::<Cancel>(&json!({"step": 5}));
    assert_round_trip::<StepDone>(
        &json!({"at": "2026-01-31T09:30:00Z", "is_repeat": false, "limits": [state()]}),
    );
    assert_round_trip::<Renewed>(&json!({
        "at": "2026-01-31T09:30:00Z", "is_repeat": true, "deadline": "2026-01-31T09:31:00.000250Z",
        "expires_in": 60.00025,
    }));
    assert_round_trip::<OpenLease>(&json!({
        "entity": "acme", "resource": "gpt-4", "held": {"tpm": 640}, "step": 4, "drawn_at": "2026-01-31T09:30:00Z",
        "deadline": "2026-01-31T10:30:00Z", "expires_in": 3600, "on_expiry": "settle",
    }));
}

#[test]
fn admin_and_report_bodies_round_trip() {
    assert_round_trip::<Balances>(&json!({"limits": [state()]}));
    assert_round_trip::<PutBucket>(
        &json!({"entity": "acme", "resource": "gpt-4", "limit": "tpm,across=both", "units": 5}),
    );
    assert_round_trip::<BucketWritten>(&json!({"version": 3, "limit": state()}));
    let mut pool = state();
    pool.as_object_mut().expect("an object").remove("entity");
    assert_round_trip::<Balances>(&json!({"limits": [pool]}));
    assert_round_trip::<Ask>(&json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}}));
    assert_round_trip::<Explanation>(&json!({
        "would": "wait", "retry_after": 1.5, "limits": [state()], "on_unavailable": "block",
        "on_unavailable_source": "defaults", "on_expiry": "settle", "on_expiry_source": "system", "version": 7,
    }));
    assert_round_trip::<PutEntity>(&json!({
        "name": "Acme", "parent": "org", "cascade": true, "metadata": {"tier": "gold"}, "expect": 3,
    }));
    assert_round_trip::<Entity>(&json!({"id": "acme", "parent": "org", "cascade": false, "version": 3}));
    assert_round_trip::<PutPolicy>(&json!({"policy": policy(), "expect": "absent"}));
    assert_round_trip::<PolicyAt>(
        &json!({"entity": "acme", "resource": "gpt-4", "version": 3, "policy": policy()}),
    );
    assert_round_trip::<Written>(&json!({"version": 3}));
    assert_round_trip::<Declaration>(
        &json!({"policies": [{"entity": "acme", "policy": policy()}], "prune": true}),
    );
    let change = json!({"resource": "gpt-4", "expect": 4, "policy": policy()});
    assert_round_trip::<PolicyChanges>(
        &json!({"changes": [change], "steps": [{"text": "~ resource gpt-4"}]}),
    );
    assert_round_trip::<Apply>(&json!({"changes": [change, {"expect": "any"}]}));
    assert_round_trip::<EntityPage>(&json!({"items": [], "next": "acme"}));
    assert_round_trip::<PolicyPage>(&json!({"items": []}));
    let line = json!({
        "entity": "acme", "resource": "gpt-4", "limit": "tpm", "window": "day", "start": "2026-01-31T00:00:00Z",
        "units": 5, "own": 4, "leases": 3,
    });
    let mut pool = line.clone();
    pool.as_object_mut().expect("an object").remove("resource");
    assert_round_trip::<UsagePage>(&json!({"items": [line, pool]}));
    assert_round_trip::<UsageSummary>(
        &json!({"limits": {"tpm": {"units": 5, "own": 4, "leases": 3}}, "windows": 1}),
    );
    let entry = |change: Value| json!({"version": 3, "at": "2026-01-31T09:30:00Z", "actor": "ops", "filed": "acme", "change": change});
    let entity = entry(json!({"entity": {"after": {"id": "acme", "cascade": true}}}));
    let policy = entry(json!({"policy": {"entity": "acme", "before": policy()}}));
    let token = json!({
        "id": "ci", "name": "the build", "namespace": "default", "scopes": "acquire,read", "created_by": "ops",
        "created_at": "2026-01-31T09:30:00Z", "revoked_at": "2026-02-01T00:00:00Z",
    });
    let made = entry(json!({"token": {"after": token}}));
    let repaired = json!({"entity": "acme", "limit": "tpm", "before": -7, "after": 5});
    let repaired = entry(json!({"bucket": repaired}));
    assert_round_trip::<AuditPage>(&json!({"items": [entity, policy, made, repaired]}));
    assert_round_trip::<PutToken>(
        &json!({"id": "ci", "scopes": "admin", "expires_at": "2026-02-01T00:00:00Z"}),
    );
    assert_round_trip::<CreatedToken>(&json!({"token": token, "version": 3, "secret": "tg_ci_0"}));
    assert_round_trip::<TokenPage>(&json!({"items": [token]}));
    assert_round_trip::<Problem>(&json!({
        "type": "/problems/stale", "title": "t", "status": 409, "detail": "d", "field": "cost.tpm", "retry_after": 2,
        "limits": [state()], "version": 4, "step": 5,
    }));
}

#[test]
fn invalid_requests_are_rejected_when_parsed() {
    let table = [
        (json!({"entity": "$SYSTEM", "resource": "b", "cost": {}}), "is reserved"),
        (json!({"entity": "a", "resource": "", "cost": {}}), "the resource `` is empty"),
        (json!({"entity": "a", "resource": "b"}), "missing field `cost`"),
        (json!({"entity": "a", "resource": "b", "cost": {"r": 1}, "within": -1}), "outside 0..=4294967295"),
        (json!({"entity": "a", "resource": "b", "cost": {"r": 1}, "within": "1s"}), "invalid type: string"),
        (json!({"entity": "a", "resource": "b", "cost": {"r": 1}, "limits": ["r"]}), "`r` is not a limit"),
        (
            json!({"entity": "a", "resource": "b", "cost": {"r": 1}, "limits": ["r:0/s"]}),
            "0 units per period",
        ),
    ];
    for (body, sentence) in table {
        let error = serde_json::from_value::<Acquire>(body).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
    }
}

#[test]
fn policy_converts_between_wire_and_core() {
    let wire: Policy = serde_json::from_value(policy()).unwrap();
    let checked = core_policy::Policy::try_from(wire.clone()).unwrap();
    assert_eq!(checked.rules().len(), 2);
    assert_eq!(Policy::from(&checked), wire);
    let share: Policy = serde_json::from_value(json!({"on_unavailable": {"local_share": 2}})).unwrap();
    let error = core_policy::Policy::try_from(share).unwrap_err().to_string();
    assert_eq!(error, "a local share of 2, outside 0.000001..=1");
}

#[test]
fn entity_converts_between_wire_and_core() {
    let wire: PutEntity = serde_json::from_value(json!({
        "name": "Acme", "parent": "org", "cascade": true, "metadata": {"tier": "gold"},
    }))
    .unwrap();
    let entity = wire.clone().entity(name::EntityId::new("acme").unwrap());
    let shown = Entity::new(&entity, Some(core_policy::Version::new(3)));
    assert_eq!((shown.name, shown.parent, shown.cascade), (wire.name, wire.parent, true));
    assert_eq!((shown.metadata, shown.version), (wire.metadata, Some(3)));
}
