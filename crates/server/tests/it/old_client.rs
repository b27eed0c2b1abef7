//! Requests of the first client, as it sent them, and the fields that it reads: it refuses a response with any other.
//!
//! It works with this server, or gets one problem that it can read.

use crate::kit::Kit;
use crate::kit::codec::{Value, json};

/// The fields of a limit's state, in all responses that have one.
const STATE: &[&str] = &[
    "entity",
    "resource",
    "limit",
    "source",
    "available",
    "burst",
    "amount",
    "period",
    "consumed",
    "asked",
    "retry_after",
];
const PROBLEM: &[&str] =
    &["type", "title", "status", "detail", "field", "retry_after", "limits", "version", "step"];
const STEP: &[&str] = &["at", "is_repeat", "limits"];
const POLICY: &[&str] = &["limits", "only", "on_unavailable", "on_expiry", "local_share"];
const ENTITY: &[&str] = &["id", "name", "parent", "cascade", "metadata", "version", "tier"];
const TOKEN: &[&str] =
    &["id", "name", "namespace", "scopes", "created_at", "created_by", "expires_at", "revoked_at", "version"];
const USAGE: &[&str] = &["entity", "resource", "limit", "window", "start", "units", "own", "leases"];

/// All names of fields in a body. The names of limits, which are fields too, are left out.
fn fields(body: &Value, found: &mut Vec<String>) {
    match body {
        Value::Object(object) => {
            for (name, value) in object {
                if !["rpm", "tpm"].contains(&name.as_str()) {
                    found.push(name.clone());
                }
                fields(value, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| fields(item, found)),
        _ => {}
    }
}

/// Sends a request, expects this status, and returns the body, which has only these fields.
async fn sent(
    kit: &Kit,
    (method, path): (&str, &str),
    body: Option<Value>,
    status: u16,
    known: &[&[&str]],
) -> Value {
    let response = kit.ask(method, path, body).await;
    assert_eq!(response.status, status, "{method} {path}: {}", response.text);
    let mut found = Vec::new();
    fields(&response.body, &mut found);
    let is_known = |name: &String| known.iter().any(|known| known.contains(&name.as_str()));
    let unknown: Vec<_> = found.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "{method} {path} returned {unknown:?}: {}", response.text);
    response.body
}

#[tokio::test]
async fn first_client_draws_and_ends_leases() {
    let kit = Kit::new().await;
    let granted: &[&str] = &["lease", "expires_in", "is_repeat", "degraded"];
    let acquire = json!({
        "entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1, "tpm": 500}, "within": 2.5, "deadline": 60,
        "id": "01890a5d-ac96-774b-bcce-b302099a8057",
    });
    let draw = ("POST", "/v1/acquire");
    let first = sent(&kit, draw, Some(acquire.clone()), 200, &[granted]).await;
    let again = sent(&kit, draw, Some(acquire), 200, &[granted]).await;
    assert_eq!((&first["lease"], &again["is_repeat"]), (&again["lease"], &json!(true)));
    let lease = format!("/v1/leases/{}", first["lease"].as_str().unwrap());
    let known: &[&[&str]] = &[STEP, STATE];
    let open: &[&str] = &["held", "step", "drawn_at", "deadline", "expires_in", "on_expiry"];
    sent(&kit, ("GET", &lease), None, 200, &[open, STATE]).await;
    let renewed: &[&str] = &["at", "is_repeat", "deadline", "expires_in"];
    for (verb, body, known) in [
        ("extend", json!({"step": 1, "cost": {"tpm": 5}}), known),
        ("adjust", json!({"step": 2, "changes": {"tpm": -5}}), known),
        ("renew", json!({"step": 3, "expires_in": 30}), &[renewed]),
        ("settle", json!({"step": 4, "actual": {"tpm": 640}}), known),
    ] {
        sent(&kit, ("POST", &format!("{lease}/{verb}")), Some(body), 200, known).await;
    }
    let cancel = format!("{lease}/cancel");
    sent(&kit, ("POST", &cancel), Some(json!({"step": 5})), 410, &[PROBLEM]).await;

    let one = |units: u64| json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": units}});
    sent(&kit, ("POST", "/v1/spend"), Some(one(300)), 204, &[]).await;
    sent(&kit, ("POST", "/v1/spend"), Some(one(300)), 429, &[PROBLEM, STATE]).await;
    sent(&kit, ("POST", "/v1/spend"), Some(one(2_000)), 422, &[PROBLEM, STATE]).await;
    let with_limits = json!({
        "entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}, "limits": ["tpm:1k/s"],
    });
    sent(&kit, draw, Some(with_limits), 200, &[granted]).await;
    let batch = json!({"requests": [one(1), one(900)]});
    let results: &[&str] = &["results", "granted", "refused"];
    let batched =
        sent(&kit, ("POST", "/v1/acquire/batch"), Some(batch), 200, &[results, granted, PROBLEM, STATE])
            .await;
    assert_eq!(batched["results"][1]["refused"]["type"], "/problems/limited");
}

#[tokio::test]
async fn first_client_reads_and_changes_policies() {
    let kit = Kit::new().await;
    let written: &[&str] = &["version"];
    let put = |policy: Value| Some(json!({"policy": policy, "expect": "any"}));
    let policy = json!({
        "limits": ["rpm:60/min", "tpm:100k/min:150k"], "only": true, "on_unavailable": {"local_share": 0.25},
        "on_expiry": "return",
    });
    let entity = json!({
        "name": "Acme", "parent": "org", "cascade": true, "metadata": {"tier": "gold"}, "expect": "absent",
    });
    let root = json!({"cascade": false, "expect": "any"});
    sent(&kit, ("PUT", "/v1/entities/org"), Some(root), 200, &[written]).await;
    sent(&kit, ("PUT", "/v1/entities/acme"), Some(entity), 200, &[written]).await;
    sent(&kit, ("GET", "/v1/entities/acme"), None, 200, &[ENTITY]).await;
    let page: &[&str] = &["items", "next"];
    for path in ["/v1/entities", "/v1/entities?max=1", "/v1/entities/org/children"] {
        sent(&kit, ("GET", path), None, 200, &[page, ENTITY]).await;
    }
    let scope = "/v1/policy?entity=acme&resource=gpt-4";
    let shown: &[&str] = &["entity", "resource", "version", "policy"];
    sent(&kit, ("PUT", scope), put(policy.clone()), 200, &[written]).await;
    sent(&kit, ("GET", scope), None, 200, &[shown, POLICY]).await;
    sent(&kit, ("GET", "/v1/policies?max=10"), None, 200, &[page, shown, POLICY]).await;
    let declared = json!({"policies": [{"entity": "acme", "policy": policy}], "prune": true});
    let plan: &[&str] = &["changes", "steps", "text", "expect"];
    let plan = sent(&kit, ("POST", "/v1/plan"), Some(declared), 200, &[plan, shown, POLICY]).await;
    let apply = json!({"changes": plan["changes"]});
    sent(&kit, ("POST", "/v1/apply"), Some(apply), 200, &[written]).await;
    sent(&kit, ("DELETE", "/v1/policy?resource=gpt-4&expect=any"), None, 200, &[written]).await;
    sent(&kit, ("DELETE", "/v1/entities/acme?expect=7"), None, 409, &[PROBLEM]).await;
    let token = json!({"id": "ci", "scopes": "acquire,read", "expires_at": "2096-02-01T00:00:00Z"});
    let made: &[&str] = &["token", "secret"];
    sent(&kit, ("POST", "/v1/tokens"), Some(token), 200, &[made, TOKEN]).await;
    sent(&kit, ("GET", "/v1/tokens"), None, 200, &[page, TOKEN]).await;
    sent(&kit, ("DELETE", "/v1/tokens/ci"), None, 200, &[written]).await;
    let entry: &[&str] = &["at", "actor", "filed", "change", "policy", "token", "before", "after"];
    let known: &[&[&str]] = &[page, entry, shown, POLICY, ENTITY, TOKEN];
    sent(&kit, ("GET", "/v1/audit?max=100"), None, 200, known).await;
}

/// The first client named the system's policy by naming no scope. To remove it takes `system=true` by now.
#[tokio::test]
async fn first_client_cannot_remove_the_system_policy() {
    let kit = Kit::new().await;
    let put = json!({"policy": {"limits": ["rpm:60/min"]}, "expect": "any"});
    sent(&kit, ("PUT", "/v1/policy"), Some(put), 200, &[&["version"]]).await;
    sent(&kit, ("GET", "/v1/policy"), None, 200, &[&["version", "policy"], POLICY]).await;
    let refused = sent(&kit, ("DELETE", "/v1/policy"), None, 422, &[PROBLEM]).await;
    assert!(refused["detail"].as_str().is_some_and(|detail| detail.contains("system=true")), "{refused}");
}

#[tokio::test]
async fn first_client_reads_balances_and_reports() {
    let kit = Kit::new().await;
    let cost = json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}});
    sent(&kit, ("POST", "/v1/spend"), Some(cost.clone()), 204, &[]).await;
    sent(&kit, ("GET", "/v1/balances?entity=acme&resource=gpt-4"), None, 200, &[STATE, STEP]).await;
    let explained: &[&str] =
        &["would", "on_unavailable", "on_unavailable_source", "on_expiry", "on_expiry_source", "version"];
    sent(&kit, ("POST", "/v1/explain"), Some(cost), 200, &[explained, STATE, STEP]).await;
    let page: &[&str] = &["items", "next"];
    for window in ["hour", "day", "month"] {
        let usage = format!("/v1/usage?entity=acme&window={window}&from=2020-01-01T00:00:00Z&max=5");
        let found = sent(&kit, ("GET", &usage), None, 200, &[page, USAGE]).await;
        assert_eq!(found["items"][0]["units"], 1);
    }
    let summary = "/v1/usage/summary?resource=gpt-4";
    sent(&kit, ("GET", summary), None, 200, &[&["limits", "windows"], USAGE]).await;
    let status: &[&str] = &["namespace", "engine", "is_durable", "clock", "at", "version"];
    sent(&kit, ("GET", "/v1/status"), None, 200, &[status]).await;
    sent(&kit, ("GET", "/health/ready"), None, 204, &[]).await;
}
