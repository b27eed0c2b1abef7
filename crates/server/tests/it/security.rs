//! Tests of access control: every route, with every kind of invalid token, from the route table.

use tidegate::store::Tokens;
use tidegate::{Expect, Stamp};
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::{Access, routes};

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, make_token, send};

/// A rejected request: its name, the `Authorization` header, the status and the kind of problem.
type RejectedRequest = (&'static str, Option<String>, u16, &'static str);

#[tokio::test]
async fn every_route_rejects_invalid_tokens() {
    let kit = Kit::new().await;
    let store = kit.limiter.store();
    let all = TokenScopes::new(TokenScope::ALL);
    let revoked = make_token(store, "revoked", all, "default").await;
    let id = TokenId::new("revoked").unwrap();
    Tokens::revoke_token(store, &id, Expect::Any, "test").await.unwrap();
    let elsewhere = make_token(store, "elsewhere", all, "prod").await;
    let secret = kit.token.rsplit('_').next().unwrap();
    let wrong_secret = format!("tg_all_{}", "0".repeat(64));
    let unknown = format!("tg_nobody_{secret}");
    let bearer = |token: &str| Some(format!("Bearer {token}"));
    let rejected: Vec<RejectedRequest> = vec![
        ("no token", None, 401, "no-token"),
        ("no scheme", Some(kit.token.clone()), 401, "bad-token"),
        ("another scheme", Some(format!("Basic {}", kit.token)), 401, "bad-token"),
        ("malformed", bearer("tg_all_xyz"), 401, "bad-token"),
        ("empty", bearer(""), 401, "bad-token"),
        ("a wrong secret", bearer(&wrong_secret), 401, "bad-token"),
        ("an unknown id", bearer(&unknown), 401, "bad-token"),
        ("revoked", bearer(&revoked), 401, "bad-token"),
        ("another namespace", bearer(&elsewhere), 403, "namespace"),
    ];
    let mut guarded = 0;
    for route in routes() {
        let path = route
            .path
            .replace("{lease}", &"0".repeat(64))
            .replace("{permit}", &"0".repeat(64))
            .replace("{entity}", "e")
            .replace("{token}", "t");
        let Access::Scope(needed) = route.access else {
            let answer = send(kit.request(route.method.as_str(), &path)).await;
            assert!(answer.status < 300, "{} {path}: {}", route.method, answer.text);
            continue;
        };
        guarded += 1;
        for (what, header, status, kind) in &rejected {
            let request = kit.request(route.method.as_str(), &path);
            let request = match header {
                Some(header) => request.header("authorization", header),
                None => request,
            };
            let answer = send(request).await;
            assert_eq!((answer.status, answer.kind()), (*status, *kind), "{what}: {} {path}", route.method);
            assert_eq!(answer.header("www-authenticate").starts_with("Bearer"), *status == 401);
            assert!(!answer.text.contains(secret), "{what}: the response contains a secret");
        }
        // All scopes except the required one.
        let lacks = TokenScopes::new(TokenScope::ALL.into_iter().filter(|scope| *scope != needed));
        let name = format!("lacks-{guarded}");
        let lacking = make_token(store, &name, lacks, "default").await;
        let answer = kit.ask_as(&lacking, route.method.as_str(), &path, None).await;
        answer.is_problem(403, "scope", "");
        assert!(answer.text.contains(&format!("lacks the scope `{needed}`")), "{}", answer.text);
        // Only the required scope: the request is authorized, even if its body is invalid.
        let only = make_token(store, &format!("only-{guarded}"), TokenScopes::new([needed]), "default").await;
        let answer = kit.ask_as(&only, route.method.as_str(), &path, None).await;
        assert!(
            !matches!(answer.kind(), "no-token" | "bad-token" | "scope" | "namespace"),
            "{}",
            answer.text
        );
    }
    assert!(guarded >= 34, "{guarded} routes need a token");

    // Expired tokens are rejected.
    kit.clock.set(Stamp::from_secs(4_000_000_000));
    for route in routes().into_iter().filter(|route| route.access != Access::Public) {
        let path = route.path.replace(['{', '}'], "");
        let answer = kit.ask(route.method.as_str(), &path, None).await;
        assert_eq!((answer.status, answer.kind()), (401, "bad-token"), "expired: {} {path}", route.method);
        assert!(answer.text.contains("expired"), "{}", answer.text);
    }
}

#[tokio::test]
async fn call_limits_require_admin_scope() {
    let kit = Kit::new().await;
    let draws = TokenScopes::new([TokenScope::Acquire]);
    let token = make_token(kit.limiter.store(), "draws", draws, "default").await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 5}, "limits": ["tpm:20/s"]});
    for path in ["/v1/acquire", "/v1/spend"] {
        kit.ask_as(&token, "POST", path, Some(ask.clone())).await.is_problem(403, "scope", "");
        assert!(kit.post(path, ask.clone()).await.status < 300, "the admin scope allows call limits");
    }
    let batch = json!({"requests": [ask]});
    let answer = kit.ask_as(&token, "POST", "/v1/acquire/batch", Some(batch)).await;
    assert_eq!(answer.body["results"][0]["refused"]["status"], 403, "{}", answer.text);
}

#[test]
fn every_route_requires_expected_scope() {
    use TokenScope::{Acquire, Admin, Read};
    // Listed independently of the table, to detect mistakes in it.
    let open = ["/v1/openapi.json", "/health/live", "/health/ready"];
    let draws = ["/v1/acquire", "/v1/acquire/batch", "/v1/spend"];
    let looks = ["/v1/explain", "/v1/plan"];
    for route in routes() {
        let (method, path) = (route.method.as_str(), route.path);
        let needed = match method {
            _ if open.contains(&path) => Access::Public,
            _ if draws.contains(&path) || path.starts_with("/v1/leases/") => Access::Scope(Acquire),
            "POST" if path.starts_with("/v1/upstreams/") || path.starts_with("/v1/permits/") => {
                Access::Scope(Acquire)
            }
            _ if path.starts_with("/v1/tokens") => Access::Scope(Admin),
            _ if looks.contains(&path) => Access::Scope(Read),
            "GET" => Access::Scope(Read),
            _ => Access::Scope(Admin),
        };
        assert_eq!(route.access, needed, "{method} {path}");
    }
}

#[tokio::test]
async fn lease_is_accessible_only_to_its_token() {
    let kit = Kit::new().await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 100}});
    let granted = kit.post("/v1/acquire", ask).await;
    let lease = granted.body["lease"].as_str().unwrap();
    let verbs: [(&str, &str, Option<Value>); 6] = [
        ("GET", "", None),
        ("POST", "/extend", Some(json!({"step": 1, "cost": {"tpm": 1}}))),
        ("POST", "/adjust", Some(json!({"step": 1, "changes": {"tpm": 1}}))),
        ("POST", "/renew", Some(json!({"step": 1, "expires_in": 1}))),
        ("POST", "/settle", Some(json!({"step": 1}))),
        ("POST", "/cancel", Some(json!({"step": 1}))),
    ];
    let verbs_there = routes().into_iter().filter(|route| route.path.starts_with("/v1/leases/")).count();
    assert_eq!(verbs.len(), verbs_there, "every lease route is tested");
    for (method, verb, body) in verbs {
        let answer = kit.ask_as(&kit.other, method, &format!("/v1/leases/{lease}{verb}"), body.clone()).await;
        answer.is_problem(403, "not-your-lease", "");
        // The right id with a forged proof.
        let forged = format!("/v1/leases/{}{}{verb}", &lease[..32], "0".repeat(32));
        kit.ask(method, &forged, body.clone()).await.is_problem(403, "not-your-lease", "");
        let short = format!("/v1/leases/{}{verb}", &lease[..32]);
        kit.ask(method, &short, body).await.is_problem(422, "invalid", "lease");
    }
    let shown = kit.get(&format!("/v1/leases/{lease}")).await;
    assert_eq!(
        (shown.status, &shown.body["step"]),
        (200, &json!(0)),
        "the lease is unchanged: {}",
        shown.text
    );
}
