//! Tests of the API over a real socket.

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, soon};

fn ask(cost: &Value) -> Value {
    json!({"entity": "acme", "resource": "gpt-4", "cost": cost})
}

#[tokio::test]
async fn lease_steps_are_idempotent() {
    let kit = Kit::new().await;
    let granted = kit.post("/v1/acquire", ask(&json!({"rpm": 1, "tpm": 500}))).await;
    assert_eq!(
        (granted.status, granted.header("content-type")),
        (200, "application/json"),
        "{}",
        granted.text
    );
    assert_eq!(granted.header("ratelimit"), "\"rpm\";r=9, \"tpm\";r=500");
    assert_eq!(granted.header("ratelimit-policy"), "\"rpm\";q=10;w=60, \"tpm\";q=1000;w=60");
    assert_eq!(granted.body["expires_in"], 300);
    let lease = format!("/v1/leases/{}", granted.body["lease"].as_str().unwrap());
    let step = async |verb: &str, body| kit.post(&format!("{lease}/{verb}"), body).await;

    for is_repeat in [false, true] {
        let extended = step("extend", json!({"step": 1, "cost": {"tpm": 100}})).await;
        assert_eq!(
            (extended.status, &extended.body["is_repeat"]),
            (200, &json!(is_repeat)),
            "{}",
            extended.text
        );
    }
    assert_eq!(step("adjust", json!({"step": 2, "changes": {"tpm": -50}})).await.status, 200);
    let renewed = step("renew", json!({"step": 3, "expires_in": 3_600})).await;
    assert_eq!((renewed.status, &renewed.body["expires_in"]), (200, &json!(3_600)), "{}", renewed.text);
    let shown = kit.get(&lease).await;
    assert_eq!((&shown.body["held"], &shown.body["step"]), (&json!({"rpm": 1, "tpm": 550}), &json!(3)));
    step("extend", json!({"step": 2, "cost": {"tpm": 1}})).await.is_problem(409, "late-step", "");
    step("extend", json!({"step": 4, "cost": {"tpm": 900}})).await.is_problem(429, "limited", "");
    step("extend", json!({"step": 0, "cost": {"tpm": 1}})).await.is_problem(422, "invalid", "step");
    let day = step("renew", json!({"step": 4, "expires_in": 86_401})).await;
    day.is_problem(422, "invalid", "expires_in");
    for is_repeat in [false, true] {
        let settled = step("settle", json!({"step": 4, "actual": {"tpm": 640}})).await;
        assert_eq!(
            (settled.status, &settled.body["is_repeat"]),
            (200, &json!(is_repeat)),
            "{}",
            settled.text
        );
    }
    step("settle", json!({"step": 4, "actual": {"tpm": 641}})).await.is_problem(410, "lease-ended", "");
    step("cancel", json!({"step": 5})).await.is_problem(410, "lease-ended", "");
    kit.get(&lease).await.is_problem(410, "lease-ended", "");

    let usage = kit.get("/v1/usage?entity=acme&window=day").await;
    assert_eq!(usage.body["items"][1]["units"], 640, "{}", usage.text);
    let summary = kit.get("/v1/usage/summary?resource=gpt-4&from=2020-01-01T00:00:00Z").await;
    assert_eq!(summary.body["limits"]["tpm"], json!({"units": 640, "own": 640, "leases": 1}));
}

#[tokio::test]
async fn cancelled_lease_returns_all_units() {
    let kit = Kit::new().await;
    let granted = kit.post("/v1/acquire", ask(&json!({"tpm": 1_000}))).await;
    kit.post("/v1/acquire", ask(&json!({"tpm": 1_000}))).await.is_problem(429, "limited", "");
    let lease = granted.body["lease"].as_str().unwrap();
    let cancelled = kit.post(&format!("/v1/leases/{lease}/cancel"), json!({"step": 1})).await;
    assert_eq!(cancelled.body["limits"][0]["available"], 1_000, "{}", cancelled.text);
    assert_eq!(kit.post("/v1/acquire", ask(&json!({"tpm": 1_000}))).await.status, 200);
}

#[tokio::test]
async fn refusal_reports_limit_source_and_retry_after() {
    let kit = Kit::new().await;
    assert_eq!(kit.post("/v1/spend", ask(&json!({"tpm": 900}))).await.status, 204);
    let refused = kit.post("/v1/acquire", ask(&json!({"rpm": 1, "tpm": 200}))).await;
    refused.is_problem(429, "limited", "");
    let tpm = refused.body["limits"].as_array().unwrap().iter().find(|line| line["limit"] == "tpm").unwrap();
    for (field, value) in
        [("entity", json!("acme")), ("resource", json!("gpt-4")), ("source", json!("system"))]
    {
        assert_eq!(tpm[field], value);
    }
    assert_eq!((&tpm["asked"], &tpm["burst"]), (&json!(200), &json!(1_000)));
    assert_eq!((&refused.body["retry_after"], refused.header("retry-after")), (&json!(6), "6"));
    assert_eq!(refused.header("ratelimit"), "\"rpm\";r=10, \"tpm\";r=100;t=6");

    let never = kit.post("/v1/acquire", ask(&json!({"tpm": 1_001}))).await;
    never.is_problem(422, "too-large", "");
    assert_eq!(never.header("retry-after"), "");
    let unknown = kit.post("/v1/acquire", ask(&json!({"usd": 1}))).await;
    unknown.is_problem(422, "invalid", "cost");
    assert!(unknown.body["detail"].as_str().unwrap().contains("it has `rpm`, `tpm`"), "{}", unknown.text);
    kit.post("/v1/acquire", ask(&json!({"tpm": 0}))).await.is_problem(422, "invalid", "cost");
}

#[tokio::test]
async fn waiting_acquire_fails_fast_if_it_cannot_succeed() {
    let kit = Kit::new().await;
    let first = kit.post("/v1/acquire", ask(&json!({"tpm": 1_000}))).await;
    let mut late = ask(&json!({"tpm": 1_000}));
    late["within"] = json!(30);
    kit.post("/v1/acquire", late.clone()).await.is_problem(429, "limited", "");
    late["within"] = json!(61);
    kit.post("/v1/acquire", late.clone()).await.is_problem(422, "invalid", "within");
    kit.get("/v1/balances?entity=%ff").await.is_problem(422, "invalid", "");
    late["within"] = json!(60);
    late["cost"] = json!({"tpm": 500});
    let settle = format!("/v1/leases/{}/cancel", first.body["lease"].as_str().unwrap());
    let waits = kit.post("/v1/acquire", late);
    let returns = async {
        while kit.limiter.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        kit.post(&settle, json!({"step": 1})).await
    };
    let (granted, freed) = soon("a wait", async { tokio::join!(waits, returns) }).await;
    assert_eq!((granted.status, freed.status), (200, 200), "{}", granted.text);
}

#[tokio::test]
async fn batch_requests_are_independent() {
    let kit = Kit::new().await;
    let one = |tpm: u64| ask(&json!({"tpm": tpm}));
    let done = kit.post("/v1/acquire/batch", json!({"requests": [one(600), one(600), one(400)]})).await;
    let results = done.body["results"].as_array().unwrap();
    assert!(results[0]["granted"]["lease"].is_string() && results[2]["granted"]["lease"].is_string());
    assert_eq!(results[1]["refused"]["type"], "/problems/limited");
    kit.post("/v1/acquire/batch", json!({"requests": []})).await.is_problem(422, "invalid", "requests");
    let many: Vec<_> = (0..101).map(|_| one(1)).collect();
    kit.post("/v1/acquire/batch", json!({"requests": many})).await.is_problem(422, "invalid", "requests");
    let mut waits = one(1);
    waits["within"] = json!(1);
    let refused = kit.post("/v1/acquire/batch", json!({"requests": [one(1), waits]})).await;
    refused.is_problem(422, "invalid", "requests[1].within");
}

#[tokio::test]
async fn balances_and_explanations_draw_nothing() {
    let kit = Kit::new().await;
    let explain = kit.post("/v1/explain", ask(&json!({"tpm": 400}))).await;
    assert_eq!((&explain.body["would"], &explain.body["on_expiry"]), (&json!("grant"), &json!("settle")));
    assert_eq!(kit.post("/v1/explain", ask(&json!({"tpm": 4_000}))).await.body["would"], "never");
    kit.post("/v1/spend", ask(&json!({"tpm": 800}))).await;
    let wait = kit.post("/v1/explain", ask(&json!({"tpm": 400}))).await;
    assert_eq!(wait.body["would"], "wait", "{}", wait.text);
    let balances = kit.get("/v1/balances?entity=acme&resource=gpt-4").await;
    assert_eq!(balances.body["limits"][1]["available"], 200, "{}", balances.text);
    assert_eq!(kit.get("/v1/balances?entity=acme").await.body["limits"].as_array().unwrap().len(), 1);
    kit.get("/v1/balances").await.is_problem(422, "invalid", "entity");
    kit.get("/v1/balances?entity=a%23b").await.is_problem(422, "invalid", "entity");
    kit.get("/v1/balances?who=acme").await.is_problem(422, "invalid", "who");
    let capacity = kit.get("/v1/capacity?resource=gpt-4").await;
    let sum = &capacity.body["limits"][0];
    assert_eq!(
        (&sum["limit"], &sum["buckets"], &sum["available"]),
        (&json!("tpm"), &json!(1), &json!(200)),
        "{sum}"
    );
    kit.get("/v1/capacity").await.is_problem(422, "invalid", "resource");
}

#[tokio::test]
async fn entity_writes_are_conditional() {
    let kit = Kit::new().await;
    let put = async |id: &str, body| kit.ask("PUT", &format!("/v1/entities/{id}"), Some(body)).await;
    let org = put("org", json!({"name": "Org", "expect": "absent"})).await;
    assert_eq!(org.status, 200, "{}", org.text);
    let taken = put("org", json!({"expect": "absent"})).await;
    taken.is_problem(409, "stale", "");
    assert_eq!(taken.body["version"], org.body["version"]);
    assert_eq!(put("org%2Fteam%201", json!({"parent": "org", "cascade": true})).await.status, 200);
    put("x", json!({"parent": "unknown"})).await.is_problem(422, "invalid", "");
    let team = kit.get("/v1/entities/org%2Fteam%201").await;
    assert_eq!(
        (&team.body["id"], &team.body["parent"]),
        (&json!("org/team 1"), &json!("org")),
        "{}",
        team.text
    );
    assert_eq!(kit.get("/v1/entities/org/children").await.body["items"][0]["id"], "org/team 1");
    kit.get("/v1/entities/unknown/children").await.is_problem(404, "no-entity", "");
    let page = kit.get("/v1/entities?max=1").await;
    let next = page.body["next"].as_str().unwrap();
    assert_eq!(kit.get(&format!("/v1/entities?after={next}")).await.body["items"][0]["id"], "org/team 1");
    kit.get("/v1/entities?max=0").await.is_problem(422, "invalid", "max");
    kit.get("/v1/entities?max=x").await.is_problem(422, "invalid", "max");
    kit.ask("DELETE", "/v1/entities/org", None).await.is_problem(409, "has-children", "");
    kit.ask("DELETE", "/v1/entities/org?expect=absent", None).await.is_problem(409, "stale", "");
    assert_eq!(kit.ask("DELETE", "/v1/entities/org%2Fteam%201", None).await.status, 200);
    kit.get("/v1/entities/org%2Fteam%201").await.is_problem(404, "no-entity", "");
    kit.get("/v1/entities/%ff").await.is_problem(422, "invalid", "entity");
    let audit = kit.get("/v1/audit?entity=org").await;
    assert_eq!(audit.body["items"][0]["actor"], "token:all", "{}", audit.text);
    assert_eq!(audit.body["items"][0]["change"]["entity"]["after"]["name"], "Org");
    kit.get("/v1/audit?entity=a&system=true").await.is_problem(422, "invalid", "entity");
}

#[tokio::test]
async fn policy_changes_are_conditional_on_version() {
    let kit = Kit::new().await;
    let body = json!({"policy": {"limits": ["tpm:100k/min:150k"], "only": true}, "expect": "absent"});
    let set = kit.ask("PUT", "/v1/policy?entity=acme", Some(body.clone())).await;
    assert_eq!(set.status, 200, "{}", set.text);
    kit.ask("PUT", "/v1/policy?entity=acme", Some(body)).await.is_problem(409, "stale", "");
    let got = kit.get("/v1/policy?entity=acme").await;
    assert_eq!(got.body["policy"], json!({"limits": ["tpm:100k/min:150k"], "only": true}));
    kit.get("/v1/policy?entity=unknown").await.is_problem(404, "no-policy", "");
    let twice = json!({"policy": {"limits": ["a:1/s", "a:2/s"]}});
    kit.ask("PUT", "/v1/policy", Some(twice)).await.is_problem(422, "invalid", "policy");
    let bad = json!({"policy": {"limits": ["a:1/s", "a"]}});
    kit.ask("PUT", "/v1/policy", Some(bad)).await.is_problem(422, "invalid", "policy.limits[1]");

    let declared =
        json!({"policies": [{"resource": "gpt-4", "policy": {"limits": ["rpm:5/s"]}}], "prune": true});
    let plan = kit.post("/v1/plan", declared.clone()).await;
    assert_eq!(plan.body["changes"].as_array().unwrap().len(), 3, "{}", plan.text);
    assert_eq!(plan.body["steps"][1]["text"], "+ resource gpt-4\n    + rpm:5/s");
    let changes = json!({"changes": plan.body["changes"]});
    let applied = kit.post("/v1/apply", changes.clone()).await;
    assert_eq!(applied.status, 200, "{}", applied.text);
    kit.post("/v1/apply", changes).await.is_problem(409, "stale", "");
    assert_eq!(kit.post("/v1/plan", declared).await.body["changes"], json!([]));
    assert_eq!(kit.post("/v1/apply", json!({"changes": []})).await.body, applied.body);
    assert_eq!(kit.get("/v1/policies").await.body["items"].as_array().unwrap().len(), 1);
    kit.get("/v1/policies?entity=a&custom=b").await.is_problem(422, "invalid", "custom");
    assert_eq!(kit.ask("DELETE", "/v1/policy?resource=gpt-4", None).await.status, 200);
    let nothing = kit.post("/v1/acquire", ask(&json!({"rpm": 1}))).await;
    nothing.is_problem(422, "no-limits", "");
}

#[tokio::test]
async fn token_lifecycle_never_lists_secret() {
    let kit = Kit::new().await;
    let made = kit.post("/v1/tokens", json!({"id": "ci", "scopes": "acquire"})).await;
    assert_eq!((made.status, made.header("cache-control")), (200, "no-store"), "{}", made.text);
    let secret = made.body["secret"].as_str().unwrap();
    let acquire = async || kit.ask_as(secret, "POST", "/v1/acquire", Some(ask(&json!({"rpm": 1})))).await;
    assert_eq!(acquire().await.status, 200);
    kit.post("/v1/tokens", json!({"id": "ci", "scopes": "read"})).await.is_problem(409, "stale", "");
    let bad = kit.post("/v1/tokens", json!({"id": "x", "scopes": "write"})).await;
    bad.is_problem(422, "invalid", "scopes");
    for path in ["/v1/tokens", "/v1/audit", "/v1/audit?token=ci"] {
        let listed = kit.get(path).await;
        assert!(listed.text.contains("\"ci\""), "{}", listed.text);
        assert!(!listed.text.contains(secret.rsplit('_').next().unwrap()), "{path} contains a secret");
    }
    assert_eq!(kit.ask("DELETE", "/v1/tokens/ci", None).await.status, 200);
    acquire().await.is_problem(401, "bad-token", "");
    kit.ask("DELETE", "/v1/tokens/unknown", None).await.is_problem(404, "unknown-token", "");
}
