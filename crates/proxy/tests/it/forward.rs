//! Bytes pass unchanged, except what concerns the connection and what the proxy added itself.

use crate::kit::client::{Caller, mock, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw::{self, Seen};

/// Without ids, which differ from call to call.
fn without_ids(text: &str) -> String {
    let mut text = text.to_owned();
    for number in 1..9 {
        for prefix in ["chatcmpl-", "msg_", "resp_"] {
            text = text.replace(&format!("{prefix}{number}"), prefix);
        }
    }
    let created = text.split("\"created\":").nth(1).or_else(|| text.split("\"created_at\":").nth(1));
    match created.and_then(|rest| rest.split([',', '}']).next()).map(str::to_owned) {
        Some(created) => text.replace(&created, "0"),
        None => text,
    }
}

#[tokio::test]
async fn responses_are_the_same_with_and_without_proxy() {
    let cases = [
        (
            "openai",
            "/v1/chat/completions",
            json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ),
        ("openai", "/v1/chat/completions", json!({"model": "m", "stream": true, "messages": []})),
        (
            "openai",
            "/v1/chat/completions",
            json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}, "messages": []}),
        ),
        ("openai", "/v1/responses", json!({"model": "m", "input": "hi", "max_output_tokens": 70})),
        ("openai", "/v1/responses", json!({"model": "m", "input": "hi", "stream": true})),
        ("anthropic", "/v1/messages", json!({"model": "c", "max_tokens": 9, "messages": []})),
        ("anthropic", "/v1/messages", json!({"model": "c", "max_tokens": 9, "messages": [], "stream": true})),
        ("gemini", "/v1beta/models/g:generateContent", json!({"contents": []})),
        ("generic", "/any/path?x=1", json!({"a": 1})),
    ];
    for (profile, path, body) in cases {
        let direct = mock(profile, |_| {}).await;
        let behind = mock(profile, |_| {}).await;
        let through = start(proxy(&[upstream(profile, behind)], None)).await;
        let direct = Caller::new(direct).post(path, &body).await;
        let through = Caller::new(through).post(&format!("/{profile}{path}"), &body).await;
        assert_eq!((direct.status, through.status), (200, 200), "{profile} {path}");
        assert_eq!(without_ids(&through.text), without_ids(&direct.text), "{profile} {path} {body}");
        assert_eq!(through.header("content-type"), direct.header("content-type"));
    }
}

#[tokio::test]
async fn errors_of_the_upstream_pass_unchanged() {
    let reply = "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nx-own: 1\r\nconnection: x-hop, close\r\n\
                 x-hop: 1\r\ncontent-length: 15\r\n\r\n{\"error\": \"no\"}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let through = start(proxy(&[upstream("openai", addr)], None)).await;
    let caller = Caller::new(through)
        .with("authorization", "Bearer sk-1")
        .with("x-tidegate-within", "5")
        .with("te", "trailers")
        .with("accept-encoding", "br");
    let answer = caller.post("/openai/v1/chat/completions?a=b", &json!({"model": "m"})).await;
    assert_eq!((answer.status, answer.text.as_str()), (404, "{\"error\": \"no\"}"));
    assert_eq!((answer.header("x-own"), answer.header("x-hop")), ("1", ""));
    let Some(Seen::Request(request)) = seen.recv().await else { panic!("a request") };
    assert!(request.starts_with("POST /v1/chat/completions?a=b HTTP/1.1\r\n"), "{request}");
    assert!(
        request.contains("authorization: Bearer sk-1\r\n") && request.ends_with("{\"model\":\"m\"}"),
        "{request}"
    );
    assert!(!request.contains("tidegate") && !request.contains("te: trailers"), "{request}");
    assert!(request.contains("accept-encoding: identity"), "usage could not be read: {request}");
}

#[tokio::test]
async fn large_bodies_stream_in_both_directions() {
    let through = start(proxy(&[upstream("generic", mock("generic", |_| {}).await)], None)).await;
    let caller = Caller::new(through);
    assert_eq!(caller.get("/generic/bytes/5000001").await.text.len(), 5_000_001);
    let large = json!({"input": "x".repeat(3 << 20), "model": "m"});
    assert_eq!(caller.post("/generic/upload", &large).await.status, 200);
    let openai = start(proxy(&[upstream("openai", mock("openai", |_| {}).await)], None)).await;
    let reply = Caller::new(openai).post("/openai/v1/responses", &large).await;
    assert_eq!(reply.status, 200, "more than is kept for another attempt");
    assert_eq!(reply.json()["usage"]["input_tokens"], large.to_string().len().div_ceil(4));
}

#[tokio::test]
async fn unknown_upstream_is_answered_with_the_known_ones() {
    let addr = mock("openai", |_| {}).await;
    let through = Caller::new(start(proxy(&[upstream("openai", addr)], None)).await);
    let reply = through.get("/v1/models").await;
    assert_eq!(reply.status, 404);
    assert!(reply.text.contains("must begin with the name of an upstream: openai"), "{}", reply.text);
    assert_eq!(through.get("/openai/v1/models").await.json()["object"], "list");
    assert_eq!(through.get("/tidegate/health").await.text, "ok\n");
    assert_eq!(through.post("/openai/v1/responses", &json!({"model": "m"})).await.status, 200);
    let scopes = through.get("/tidegate/scopes").await.json();
    let groups: Vec<&str> =
        scopes["scopes"].as_array().unwrap().iter().map(|scope| scope["group"].as_str().unwrap()).collect();
    assert!(groups.contains(&"m"), "{scopes}");
    let metrics = through.get("/tidegate/metrics").await.text;
    assert!(metrics.contains("tidegate_proxy_calls_total 2\n"), "{metrics}");
    assert!(metrics.contains("tidegate_proxy_output_tokens_total 16\n"), "{metrics}");
}
