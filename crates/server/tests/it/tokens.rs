//! Tests of tokens over the API, and of actors in the audit log.

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, send};

#[tokio::test]
async fn reserved_tokens_are_hidden_and_protected() {
    let kit = Kit::new().await;
    let listed = kit.get("/v1/tokens").await;
    let ids: Vec<_> = listed.body["items"].as_array().unwrap().iter().map(|token| &token["id"]).collect();
    assert_eq!(ids, ["all", "other"], "without the lease key");
    let made = kit.post("/v1/tokens", json!({"id": ".lease-key", "scopes": "read"})).await;
    made.is_problem(422, "invalid", "id");
    assert!(made.text.contains("begins with `.`"), "{}", made.text);
    kit.ask("DELETE", "/v1/tokens/.lease-key", None).await.is_problem(422, "invalid", "token");
}

#[tokio::test]
async fn token_cannot_revoke_itself() {
    let kit = Kit::new().await;
    kit.ask("DELETE", "/v1/tokens/all", None).await.is_problem(409, "own-token", "");
    assert_eq!(kit.get("/v1/tokens").await.status, 200);
    assert_eq!(kit.ask_as(&kit.other, "DELETE", "/v1/tokens/all", None).await.status, 200);
    kit.get("/v1/tokens").await.is_problem(401, "bad-token", "");
}

#[tokio::test]
async fn every_change_is_audited_with_version_and_actor() {
    let kit = Kit::new().await;
    let policy = json!({"policy": {"limits": ["rpm:5/min"]}});
    let bucket = json!({"entity": "acme", "resource": "gpt-4", "limit": "rpm", "units": 3});
    let apply = json!({"changes": [{"entity": "acme", "policy": {"limits": ["tpm:7/s"]}}]});
    let changes: [(&str, &str, Option<Value>, &str); 8] = [
        ("PUT", "/v1/entities/acme", Some(json!({})), "acme"),
        ("PUT", "/v1/policy?resource=gpt-4", Some(policy), "$RESOURCE:gpt-4"),
        ("POST", "/v1/apply", Some(apply), "acme"),
        ("PUT", "/v1/bucket", Some(bucket), "acme"),
        ("DELETE", "/v1/policy?resource=gpt-4", None, "$RESOURCE:gpt-4"),
        ("POST", "/v1/tokens", Some(json!({"id": "ci", "scopes": "read"})), "$TOKEN:ci"),
        ("DELETE", "/v1/tokens/ci", None, "$TOKEN:ci"),
        ("DELETE", "/v1/entities/acme", None, "acme"),
    ];
    let changing = tidegate_server::routes().into_iter().filter(|route| {
        let is_admin =
            matches!(route.access, tidegate_server::Access::Scope(scope) if scope.as_str() == "admin");
        is_admin && route.method != "GET"
    });
    assert_eq!(changing.count(), changes.len(), "every writing route is tested");
    for (number, (method, path, body, filed)) in changes.into_iter().enumerate() {
        // By two callers alternately.
        let (token, actor) = [(&kit.token, "token:all"), (&kit.other, "token:other")][number % 2];
        let done = kit.ask_as(token, method, path, body).await;
        assert_eq!(done.status, 200, "{method} {path}: {}", done.text);
        let audit = kit.get("/v1/audit?max=1000").await;
        let of_this = |entry: &&Value| entry["version"] == done.body["version"];
        let entries: Vec<_> = audit.body["items"].as_array().unwrap().iter().filter(of_this).collect();
        assert!(!entries.is_empty(), "{method} {path} is not in {}", audit.text);
        assert!(entries.iter().all(|entry| entry["actor"] == actor), "{method} {path}: {entries:?}");
        assert!(entries.iter().any(|entry| entry["filed"] == filed), "{method} {path}: {entries:?}");
        let secret = done.body["secret"].as_str().unwrap_or("no secret");
        assert!(!audit.text.contains(secret), "the audit log contains a secret");
    }
    // Rejected requests change nothing and are not audited.
    let before = kit.get("/v1/audit?max=1000").await.text;
    send(kit.request("DELETE", "/v1/policy")).await.is_problem(401, "no-token", "");
    assert_eq!(kit.get("/v1/audit?max=1000").await.text, before);
}

/// Without a scope the request removed the limits of the whole system.
#[tokio::test]
async fn system_policy_is_removed_only_by_name() {
    let kit = Kit::new().await;
    kit.ask("DELETE", "/v1/policy", None).await.is_problem(422, "invalid", "system");
    kit.ask("DELETE", "/v1/policy?system=false", None).await.is_problem(422, "invalid", "system");
    kit.ask("DELETE", "/v1/policy?system=true&resource=b", None).await.is_problem(422, "invalid", "system");
    assert_eq!(kit.get("/v1/policy?system=true").await.status, 200, "nothing was removed");
    assert_eq!(kit.ask("DELETE", "/v1/policy?system=true", None).await.status, 200);
    kit.get("/v1/policy").await.is_problem(404, "no-policy", "");
}

/// A token of one customer could draw from, and read, all others.
#[tokio::test]
async fn bound_token_reaches_only_its_entity() {
    let kit = Kit::new().await;
    for (entity, parent) in
        [("acme", None), ("acme/web", Some("acme")), ("acme/web/1", Some("acme/web")), ("other", None)]
    {
        let path = format!("/v1/entities/{}", entity.replace('/', "%2F"));
        let body = parent.map_or(json!({}), |parent| json!({"parent": parent}));
        assert_eq!(kit.ask("PUT", &path, Some(body)).await.status, 200);
    }
    let admin = json!({"id": "no", "scopes": "read,admin", "entity": "acme"});
    kit.post("/v1/tokens", admin).await.is_problem(422, "invalid", "");
    let made =
        kit.post("/v1/tokens", json!({"id": "web", "scopes": "acquire,read", "entity": "acme/web"})).await;
    assert_eq!((made.status, &made.body["token"]["entity"]), (200, &json!("acme/web")), "{}", made.text);
    let token = made.body["secret"].as_str().unwrap();
    let ask = |entity: &str| json!({"entity": entity, "resource": "b", "cost": {"tpm": 1}});
    for (entity, is_allowed) in
        [("acme/web", true), ("acme/web/1", true), ("acme", false), ("other", false), ("unknown", false)]
    {
        let name = entity.replace('/', "%2F");
        let batch = json!({"requests": [ask(entity)]});
        let requests = [
            ("POST", "/v1/acquire".to_owned(), Some(ask(entity))),
            ("POST", "/v1/spend".to_owned(), Some(ask(entity))),
            ("POST", "/v1/upstreams/u/acquire".to_owned(), Some(ask(entity))),
            ("POST", "/v1/explain".to_owned(), Some(ask(entity))),
            ("GET", format!("/v1/balances?entity={name}&resource=b"), None),
            ("GET", format!("/v1/balances?entity={name}"), None),
            ("GET", format!("/v1/entities/{name}"), None),
            ("GET", format!("/v1/entities/{name}/children"), None),
            ("GET", format!("/v1/usage?entity={name}"), None),
            ("GET", format!("/v1/usage/summary?entity={name}"), None),
            ("GET", format!("/v1/policy?entity={name}"), None),
        ];
        for (method, path, body) in requests {
            let answer = kit.ask_as(token, method, &path, body).await;
            assert_eq!(answer.kind() == "entity", !is_allowed, "{method} {path}: {}", answer.text);
            assert_eq!(answer.status == 403, !is_allowed, "{method} {path}: {}", answer.text);
        }
        let batched = kit.ask_as(token, "POST", "/v1/acquire/batch", Some(batch)).await;
        assert_eq!(batched.text.contains("/problems/entity"), !is_allowed, "{}", batched.text);
    }
    // Whatever does not name an entity is refused.
    kit.ask_as(token, "POST", "/v1/upstreams/u/acquire", Some(json!({}))).await.is_problem(403, "entity", "");
    for path in
        ["/v1/usage?resource=b", "/v1/usage/summary?resource=b", "/v1/policy", "/v1/policy?resource=b"]
    {
        kit.ask_as(token, "GET", path, None).await.is_problem(403, "entity", "");
    }
    let of_one = ["/v1/acquire", "/v1/acquire/batch", "/v1/spend", "/v1/explain", "/v1/balances"];
    for route in tidegate_server::routes() {
        let needs_check = of_one.contains(&route.path)
            || route.path == "/v1/upstreams/{upstream}/acquire"
            || ["/v1/leases/", "/v1/permits/", "/v1/usage", "/v1/policy", "/v1/entities/"]
                .iter()
                .any(|path| route.path.starts_with(path));
        let is_admin =
            matches!(route.access, tidegate_server::Access::Scope(scope) if scope.as_str() == "admin");
        if route.access == tidegate_server::Access::Public
            || is_admin
            || needs_check && route.path != "/v1/policies"
        {
            continue;
        }
        let answer = kit.ask_as(token, route.method.as_str(), route.path, None).await;
        assert_eq!(answer.kind(), "entity", "{} {}: {}", route.method, route.path, answer.text);
    }
    // A lease is settled by the token that drew it.
    let granted = kit.ask_as(token, "POST", "/v1/acquire", Some(ask("acme/web"))).await;
    let path = format!("/v1/leases/{}/settle", granted.body["lease"].as_str().unwrap());
    assert_eq!(kit.ask_as(token, "POST", &path, Some(json!({"step": 1}))).await.status, 200);
}
