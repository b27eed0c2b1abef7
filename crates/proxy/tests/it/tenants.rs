//! Tenants: their limits are drawn before a call and settled with its usage.

use std::num::NonZero;

use futures_util::future::join_all;
use tidegate::{Entity, EntityId, Expect};
use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::{Profiles, Proxy, ProxyBounds, Upstream};

use crate::kit::client::{Caller, eventually, mock, proxy, read, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw::{self, Seen};
use crate::kit::tenants::Store;

const BODY: &str = "{\"model\":\"gpt-4\",\"input\":\"hello\"}";
/// Tokens of that body at the mock.
const INPUT: u64 = 9;

#[tokio::test]
async fn usage_of_a_tenant_is_what_the_upstream_counted() {
    let store = Store::new(&["rpm:100/min", "tokens:100k/min"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let addr = mock("openai", |_| {}).await;
    let upstream = upstream("openai", addr).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let calls =
        (0..8).map(|_| async { caller.begin("POST", "/openai/v1/responses", BODY).await.status().as_u16() });
    assert_eq!(join_all(calls).await, [200; 8]);
    let used = async |limit: &str| store.used("acme", "gpt-4", limit).await;
    eventually("8 calls are booked", async || used("requests").await == 8).await;
    let totals = Caller::new(addr).get("/mock/totals").await.json();
    assert_eq!(
        (totals["input_tokens"].as_u64(), totals["output_tokens"].as_u64()),
        (Some(8 * INPUT), Some(128))
    );
    assert_eq!((used("input_tokens").await, used("output_tokens").await), (8 * INPUT, 128));
    assert_eq!((used("tokens").await, used("rpm").await, used("estimated").await), (8 * INPUT + 128, 8, 0));
    assert!(store.available("acme", "gpt-4", "rpm").await >= 92, "it draws from the limit that exists");
}

#[tokio::test]
async fn bound_token_draws_for_its_entity() {
    let store = Store::new(&["requests:1/day"]).await;
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    for (id, status) in [("ci-1", 200), ("ci-2", 429)] {
        let token = store.bound_token(id, TokenScope::Acquire, Some("acme")).await;
        let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
        let answer = caller.begin("POST", "/openai/v1/responses", BODY).await;
        assert_eq!(answer.status().as_u16(), status, "both draw from the limit of acme");
    }
}

#[tokio::test]
async fn refusal_by_a_limit_names_it_in_providers_format() {
    let store = Store::new(&["requests:1/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstream = upstream("anthropic", mock("anthropic", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("x-api-key", &token);
    let body = json!({"model": "c", "max_tokens": 3, "messages": []});
    assert_eq!(caller.post("/anthropic/v1/messages", &body).await.status, 200);
    let refused = caller.post("/anthropic/v1/messages", &body).await;
    assert_eq!((refused.status, refused.json()["type"].as_str()), (429, Some("error")));
    assert!(refused.text.contains("limit \\\"requests\\\" exceeded for acme on c"), "{}", refused.text);
    assert_eq!(refused.header("x-should-retry"), "false", "tomorrow is longer than SDKs wait");
}

#[tokio::test]
async fn token_is_exchanged_for_the_kept_key() {
    let store = Store::new(&[]).await;
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let upstreams = [upstream("openai", addr).key("sk-real"), upstream("groq:openai", addr)];
    let through = start(proxy(&upstreams, Some(store.tenants()))).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let as_caller = |key: &str| Caller::new(through).with("authorization", &format!("Bearer {key}"));
    let post = async |key: &str, path: &str| as_caller(key).post(path, &json!({"model": "m"})).await;
    assert_eq!(post(&token, "/openai/v1/responses").await.status, 200);
    let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
    assert!(request.contains("authorization: Bearer sk-real\r\n") && !request.contains("tg_"), "{request}");
    assert_eq!(post("sk-own", "/openai/v1/responses").await.status, 200, "a key of the caller passes");
    let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
    assert!(request.contains("authorization: Bearer sk-own\r\n"), "{request}");

    let unkept = post(&token, "/groq/v1/responses").await;
    assert_eq!(unkept.status, 403, "{}", unkept.text);
    let reader = store.token("reader", TokenScope::Read).await;
    assert_eq!(post(&reader, "/openai/v1/responses").await.status, 403);
    let wrong = post(&format!("{token}0"), "/openai/v1/responses").await;
    assert_eq!((wrong.status, wrong.json()["error"]["code"].as_str()), (401, Some("invalid_api_key")));
    assert!(!wrong.text.contains("tg_"), "no secret in an error");
}

/// Only POST was checked: with other methods, the kept key reached any path of the upstream's host.
#[tokio::test]
async fn kept_key_stays_below_the_path_of_its_upstream() {
    let store = Store::new(&[]).await;
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let below = Upstream::parse(&format!("groq:openai=http://{addr}/openai"), &Profiles::built_in()).unwrap();
    let through = start(proxy(&[below.key("sk-real")], Some(store.tenants()))).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let as_caller = |key: &str| Caller::new(through).with("authorization", &format!("Bearer {key}"));
    let steps = ["..", "%2e%2e", ".%2E", "%252e%252e", "..;a=b", "%5c..", "."];
    for method in ["GET", "DELETE", "PUT", "PATCH", "POST"] {
        for step in steps {
            let path = format!("/groq/{step}/admin");
            let status = as_caller(&token).begin(method, &path, BODY).await.status();
            assert_eq!(status, 400, "{method} {path}");
        }
        let response = as_caller(&token).begin(method, "/groq/v1/responses", BODY).await;
        assert_eq!(read(response).await.status, 200, "{method}");
        let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
        assert!(request.starts_with(&format!("{method} /openai/v1/responses ")), "{request}");
    }
}

#[tokio::test]
async fn key_in_a_query_is_replaced_only_for_tenants() {
    let store = Store::new(&[]).await;
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let through = start(proxy(&[upstream("gemini", addr).key("kept")], Some(store.tenants()))).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let path = "/gemini/v1beta/models/g:generateContent?alt=sse&key=";
    let cases = [("own", "?alt=sse&key=own HTTP/1.1"), (token.as_str(), "?alt=sse HTTP/1.1")];
    for (key, line) in cases {
        let reply = Caller::new(through).post(&format!("{path}{key}"), &json!({"contents": []})).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
        assert!(request.contains(line), "{request}");
        assert_eq!(request.contains("x-goog-api-key: kept"), key != "own", "{request}");
    }
}

#[tokio::test]
async fn upstream_sees_no_token() {
    let store = Store::new(&[]).await;
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let upstreams = [upstream("openai", addr).key("sk-real"), upstream("gemini", addr).key("sk-real")];
    let through = start(proxy(&upstreams, Some(store.tenants()))).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let bearer = format!("Bearer {token}");
    let cases: [(&str, &[(&str, &str)]); 4] = [
        ("sk-real", &[("authorization", &bearer), ("x-api-key", &token), ("api-key", &token)]),
        ("sk-real", &[("authorization", "Bearer sk-own"), ("authorization", &bearer)]),
        ("sk-own", &[("authorization", "Bearer sk-own"), ("x-goog-api-key", &token)]),
        ("sk-own", &[("authorization", "Bearer sk-own"), ("x-api-key", &format!("Bearer  {token}"))]),
    ];
    let path = format!("/openai/v1/responses?a=1&key={token}&key=tg%5Fx");
    for (key, headers) in cases {
        let caller = Caller::new(through);
        let caller = headers.iter().fold(caller, |caller, (name, value)| caller.with(name, value));
        assert_eq!(caller.post(&path, &json!({"model": "m"})).await.status, 200);
        let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
        assert!(request.contains("?a=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains(&format!("authorization: Bearer {key}\r\n")), "{request}");
        assert!(!request.contains("tg_") && !request.contains("tg%5F"), "{request}");
    }
}

#[tokio::test]
async fn calls_without_a_required_token_are_refused() {
    let store = Store::new(&[]).await;
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let builder = Proxy::builder().upstream(upstream).unwrap().tenants(store.tenants());
    let through = start(builder.require_token().build().unwrap()).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let reader = store.token("reader", TokenScope::Read).await;
    // What is about all tenants needs another scope than calls.
    for (key, call, metrics) in
        [("sk-own", 401, 401), (token.as_str(), 200, 403), (reader.as_str(), 403, 200)]
    {
        let caller = Caller::new(through).with("authorization", &format!("Bearer {key}"));
        assert_eq!(caller.post("/openai/v1/responses", &json!({"model": "m"})).await.status, call);
        assert_eq!(caller.get("/tidegate/metrics").await.status, metrics);
        assert_eq!(caller.get("/tidegate/scopes").await.status, metrics);
    }
    assert_eq!(Caller::new(through).get("/tidegate/health").await.status, 200);
}

#[tokio::test]
async fn no_spelling_of_a_model_evades_limits() {
    let store = Store::new(&["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstreams = [
        upstream("openai", mock("openai", |_| {}).await).key("sk-real"),
        upstream("gemini", mock("gemini", |_| {}).await).key("sk-real"),
    ];
    let through = start(proxy(&upstreams, Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let post = async |path: &str, body: &str| caller.begin("POST", path, body.to_owned()).await.status();
    let used = async |limit: &str| store.used("acme", "gpt-4", limit).await;
    let responses = "/openai/v1/responses";
    let large = format!(r#"{{"input":"{}","model":"gpt-4"}}"#, "x".repeat(9 << 17));
    let spellings = [
        (responses, r#"{"mod\u0065l":"gpt-4"}"#),
        (responses, r#"{"model":"gpt\u002d4"}"#),
        ("/gemini/v1beta/models/gpt%2D4:generateContent", "{}"),
        ("/gemini/v1beta/%6dodels/gpt-4:generateContent", "{}"),
        (responses, &large),
    ];
    for (calls, (path, body)) in (1..).zip(spellings) {
        assert_eq!(post(path, body).await, 200, "{path} {}", &body[..body.len().min(40)]);
        eventually("the call is booked", async || used("requests").await == calls).await;
        assert!(used("output_tokens").await >= calls, "{path}");
    }
    let hidden = format!(r#"[{{"input":"{}","model":"gpt-4"}}]"#, "x".repeat(9 << 17));
    let wide: String = BODY.chars().flat_map(|letter| [letter, '\0']).collect();
    let refused = [
        (responses, hidden.as_str()),
        (responses, &wide),
        (responses, r#"{"model":"gpt-4\ud800"}"#),
        ("/gemini/v1beta/models/gpt%252D4:generateContent", "{}"),
        ("/gemini/v1beta/models//gpt-4:generateContent", "{}"),
        ("/gemini/v1beta/models/./gpt-4:generateContent", "{}"),
    ];
    for (path, body) in refused {
        assert_eq!(post(path, body).await, 400, "{path} {}", &body[..body.len().min(40)]);
    }
    let encoded = caller.clone().with("content-encoding", "gzip").begin("POST", responses, BODY).await;
    assert_eq!(encoded.status(), 400);
    assert_eq!(used("requests").await, spellings.len() as u64, "refused calls are not sent");
}

#[tokio::test]
async fn stream_that_breaks_off_is_booked_as_an_estimate() {
    let store = Store::new(&[]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let addr = mock("openai", |options| options.cut_every = NonZero::new(2)).await;
    let upstream = upstream("openai", addr).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let body = json!({"model": "m", "stream": true, "messages": []});
    let complete = caller.post("/openai/v1/chat/completions", &body).await;
    assert!(complete.text.ends_with("[DONE]\n\n"), "{}", complete.text);
    let used = async |limit: &str| store.used("acme", "m", limit).await;
    eventually("the first call is booked", async || used("requests").await == 1).await;
    assert_eq!((used("output_tokens").await, used("estimated").await), (16, 0));
    let cut = caller.post("/openai/v1/chat/completions", &body).await;
    assert!(cut.text.ends_with("<broken>"), "{}", cut.text);
    eventually("the second call is booked", async || used("requests").await == 2).await;
    assert_eq!(used("estimated").await, 1);
    let output = used("output_tokens").await - 16;
    assert!((1..16).contains(&output), "about what arrived: {output}");
}

/// It was booked as complete, at what it had reported so far.
#[tokio::test]
async fn stream_that_ends_early_is_an_estimate() {
    let event = "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n";
    let last = "data: {\"type\":\"message_stop\"}\n\n";
    for (events, estimated) in [([event, last], 0), ([event, ""], 1)] {
        let store = Store::new(&[]).await;
        let token = store.token("acme", TokenScope::Acquire).await;
        let body = events.concat();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length";
        let (addr, _seen) = raw::upstream(format!("{head}: {}\r\n\r\n{body}", body.len()).leak()).await;
        let through = start(proxy(&[upstream("anthropic", addr).key("k")], Some(store.tenants()))).await;
        let caller = Caller::new(through).with("x-api-key", &token);
        let body = json!({"model": "c", "max_tokens": 9, "messages": [], "stream": true});
        assert_eq!(caller.post("/anthropic/v1/messages", &body).await.status, 200);
        let used = async |limit: &str| store.used("acme", "c", limit).await;
        eventually("the call is booked", async || used("requests").await == 1).await;
        assert_eq!((used("input_tokens").await, used("estimated").await), (10, estimated));
    }
}

#[tokio::test]
async fn call_refused_by_the_upstream_costs_nothing() {
    let store = Store::new(&["requests:5/day", "tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let (addr, _seen) = raw::upstream("HTTP/1.1 400 Bad\r\ncontent-length: 2\r\n\r\n{}").await;
    let through = start(proxy(&[upstream("openai", addr).key("k")], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    assert_eq!(caller.begin("POST", "/openai/v1/responses", BODY).await.status(), 400);
    eventually("all returns", async || store.available("acme", "gpt-4", "requests").await == 5).await;
    assert_eq!(store.used("acme", "gpt-4", "requests").await, 0);
}

#[tokio::test]
async fn disabled_entity_is_refused_for_good() {
    let store = Store::new(&[]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let entity = Entity::new(EntityId::new("acme").unwrap()).disabled(true);
    store.limiter.admin("test").put_entity(&entity, Expect::Any).await.unwrap();
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let reply = caller.post("/openai/v1/responses", &json!({"model": "m"})).await;
    assert_eq!((reply.status, reply.header("x-should-retry")), (403, "false"), "{}", reply.text);
}

#[tokio::test]
async fn one_tenant_leaves_calls_for_others() {
    let store = Store::new(&[]).await;
    let (silent, mut seen) = raw::upstream("").await;
    let upstreams = [
        upstream("openai", silent).key("k"),
        upstream("other:openai", mock("openai", |_| {}).await).key("k"),
    ];
    let mut bounds = ProxyBounds::default();
    bounds.calls_max = 16;
    let builder = upstreams.into_iter().fold(Proxy::builder(), |builder, one| builder.upstream(one).unwrap());
    let through = start(builder.tenants(store.tenants()).bounds(bounds).build().unwrap()).await;
    let [greedy, other] = ["greedy", "other"].map(|id| store.token(id, TokenScope::Acquire));
    let as_tenant = |token: &str| Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let (greedy, other) = (as_tenant(&greedy.await), as_tenant(&other.await));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..15 {
        let greedy = greedy.clone();
        calls.spawn(async move { greedy.begin("POST", "/openai/v1/files", "x").await.status() });
        assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    }
    let refused = greedy.post("/openai/v1/files", &json!({})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"), "{}", refused.text);
    assert!(refused.text.contains("15 of 16 calls are the tenant's"), "{}", refused.text);
    assert_eq!(other.post("/other/v1/responses", &json!({"model": "m"})).await.status, 200);
    calls.shutdown().await;
    eventually("the calls end", async || {
        greedy.post("/other/v1/responses", &json!({"model": "m"})).await.status == 200
    })
    .await;
}
