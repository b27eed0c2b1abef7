//! Callers wait instead of a 429, and are refused at once if they would wait for too long.

use std::num::NonZero;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::RetryBudget;
use tidegate_proxy::{Profiles, Proxy, ProxyBounds, Upstream};
use tokio::time::{Instant, advance};

use crate::kit::client::{Caller, eventually, mock, proxy, read, start, upstream};
use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, advance_until};
use crate::kit::raw::{self, Seen};

/// How far the frozen clock advances at a time.
const STEP: Duration = Duration::from_millis(50);

/// Advances the frozen clock until `work` ends.
async fn advancing<T>(step: Duration, work: impl Future<Output = T>) -> T {
    advance_until(step, work).await.0
}

#[tokio::test]
async fn no_caller_gets_a_429_of_a_hidden_limit() {
    let addr = mock("openai", |options| {
        options.limits = vec!["requests:40/s".parse().unwrap()];
        options.is_hidden = true;
    })
    .await;
    let through = start(proxy(&[upstream("openai", addr)], None)).await;
    let caller = Caller::new(through);
    let body = json!({"model": "m", "input": "hello"});
    let calls = (0..120).map(|_| caller.post("/openai/v1/responses", &body));
    let statuses: Vec<u16> = join_all(calls).await.into_iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [200; 120]);
    let totals = Caller::new(addr).get("/mock/totals").await.json();
    assert_eq!(totals["completed"], 120);
}

#[tokio::test]
async fn rejection_of_a_small_request_is_repeated() {
    let addr = mock("anthropic", |options| options.overload_every = NonZero::new(2)).await;
    let through = Caller::new(start(proxy(&[upstream("anthropic", addr)], None)).await);
    let body = json!({"model": "c", "max_tokens": 4, "messages": []});
    for _ in 0..3 {
        let reply = through.post("/anthropic/v1/messages", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    assert!(through.get("/tidegate/metrics").await.text.contains("tidegate_proxy_retries_total 2\n"));
    let large = json!({"model": "c", "max_tokens": 4, "system": "x".repeat(2 << 20)});
    let reply = through.post("/anthropic/v1/messages", &large).await;
    assert_eq!(reply.status, 529, "a large body is not kept");
    assert!(reply.text.contains("overloaded_error"), "{}", reply.text);
}

#[tokio::test]
async fn final_rejections_pass_at_once() {
    let cases = [
        ("openai", "{\"error\":{\"code\":\"insufficient_quota\"}}", "retry-after: 1\r\n"),
        (
            "openai",
            "{\"error\":{\"message\":\"Request too large for m: Limit 5, Requested 9\"}}",
            "retry-after: 1\r\n",
        ),
        ("anthropic", "{\"error\":{\"type\":\"rate_limit_error\"}}", ""),
        (
            "gemini",
            "{\"error\":{\"details\":[{\"@type\":\"google.rpc.QuotaFailure\",\"violations\":[{\"quotaId\":\"PerDay\"}]}]}}",
            "",
        ),
    ];
    for (profile, body, header) in cases {
        let reply = format!("HTTP/1.1 429 Too Many\r\n{header}content-length: {}\r\n\r\n{body}", body.len());
        let (addr, mut seen) = raw::upstream(reply.leak()).await;
        let through = Caller::new(start(proxy(&[upstream(profile, addr)], None)).await);
        let path = format!("/{profile}/v1beta/models/m:generateContent");
        let reply = through.post(&path, &json!({"model": "m"})).await;
        assert_eq!((reply.status, reply.text.as_str()), (429, body), "{profile}");
        assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
        let metrics = through.get("/tidegate/metrics").await.text;
        assert!(metrics.contains("retries_total 0\n") && metrics.contains("rejected_total 1\n"), "{metrics}");
    }
}

#[tokio::test]
async fn too_long_a_wait_is_refused_in_providers_format() {
    let body = "{\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\",\"message\":\"wait\"}}";
    let reply =
        format!("HTTP/1.1 429 Too Many\r\nretry-after: 500\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let (addr, _seen) = raw::upstream(reply.leak()).await;
    let through = start(proxy(&[upstream("anthropic", addr)], None)).await;
    let caller = Caller::new(through).with("x-tidegate-within", "30s");
    let reply = caller.post("/anthropic/v1/messages", &json!({"model": "c"})).await;
    assert_eq!(reply.status, 429, "{}", reply.text);
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    assert_eq!(reply.header("x-should-retry"), "false");
    let seconds: u64 = reply.header("retry-after").parse().unwrap();
    assert!((300..=500).contains(&seconds), "{seconds}");
    let bad = Caller::new(through).with("x-tidegate-within", "soon");
    let bad = bad.post("/anthropic/v1/messages", &json!({"model": "c"})).await;
    assert_eq!((bad.status, bad.json()["error"]["type"].as_str()), (400, Some("invalid_request_error")));
}

#[tokio::test]
async fn disconnected_caller_cancels_the_call_upstream() {
    // A stream that begins and never ends.
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                 9\r\ndata: {}\n\r\n";
    let (addr, mut seen) = raw::upstream(reply).await;
    let through = start(proxy(&[upstream("openai", addr)], None)).await;
    let response = Caller::new(through)
        .begin("POST", "/openai/v1/chat/completions", json!({"model": "m", "stream": true}).to_string())
        .await;
    assert_eq!(response.status(), 200);
    assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    drop(response);
    assert_eq!(seen.recv().await, Some(Seen::Closed));

    // A response that never begins.
    let (addr, mut seen) = raw::upstream("").await;
    let through = start(proxy(&[upstream("openai", addr)], None)).await;
    let caller = Caller::new(through);
    let call = tokio::spawn(async move { caller.post("/openai/v1/responses", &json!({"model": "m"})).await });
    assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    call.abort();
    assert_eq!(seen.recv().await, Some(Seen::Closed));
    tokio::time::timeout(Duration::from_mins(1), call).await.unwrap().unwrap_err();
}

/// They waited until their time was up, and `retry-after` was a second.
#[tokio::test]
async fn wait_behind_others_is_refused_at_once() {
    let _frozen = Frozen::new();
    let addr = mock("openai", |options| {
        options.limits = vec!["requests:1/s".parse().unwrap()];
        options.is_hidden = true;
    })
    .await;
    let through = start(proxy(&[upstream("openai", addr)], None)).await;
    let body = json!({"model": "m", "input": "hello"});
    let patient = Caller::new(through).with("x-tidegate-within", "5m");
    advancing(STEP, join_all((0..60).map(|_| patient.post("/openai/v1/responses", &body)))).await;
    let caller = Caller::new(through).with("x-tidegate-within", "8");
    let began = Instant::now();
    let calls = (0..60).map(|_| async {
        let reply = caller.post("/openai/v1/responses", &body).await;
        let seconds = reply.header("retry-after").parse::<u64>().unwrap_or_default();
        (reply.status, began.elapsed(), seconds)
    });
    let replies = advancing(STEP, join_all(calls)).await;
    let at_once = |reply: &&(u16, Duration, u64)| reply.0 == 429 && reply.1 < Duration::from_secs(3);
    assert!(replies.iter().filter(at_once).count() >= 40, "{replies:?}");
    assert!(replies.iter().filter(at_once).all(|reply| reply.2 >= 8), "{replies:?}");
    assert!(replies.iter().filter(|reply| reply.0 == 200).count() >= 6, "{replies:?}");
}

#[tokio::test]
async fn failing_upstream_is_not_called() {
    let (addr, mut seen) = raw::upstream("HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}").await;
    let caller = Caller::new(start(proxy(&[upstream("anthropic", addr)], None)).await);
    let mut statuses = Vec::new();
    let mut last = String::new();
    for _ in 0..6 {
        let reply = caller.post("/anthropic/v1/messages", &json!({"model": "c"})).await;
        statuses.push(reply.status);
        last = reply.text;
    }
    assert_eq!(statuses, [500, 500, 500, 500, 500, 503], "{last}");
    assert!(last.contains("api_error") && last.contains("circuit"), "{last}");
    let other = caller.post("/anthropic/v1/messages", &json!({"model": "d"})).await;
    assert_eq!(other.status, 500, "another model is another quota");
    let count = std::iter::from_fn(|| seen.try_recv().ok()).filter(|seen| matches!(seen, Seen::Request(_)));
    assert_eq!(count.count(), 6);
}

/// Each call was repeated until its time was up, and later the window of the budget was taken for 10 s.
#[tokio::test]
async fn repeated_calls_are_bounded_by_a_budget() {
    let _frozen = Frozen::new();
    let reply = "HTTP/1.1 429 Too Many\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n{}";
    let (addr, mut seen) = raw::upstream(reply).await;
    let mut bounds = ProxyBounds::default();
    bounds.retries = RetryBudget::new(0.0, 3, Duration::from_mins(10));
    let builder = Proxy::builder().upstream(upstream("openai", addr)).unwrap().bounds(bounds);
    let caller = Caller::new(start(builder.build().unwrap()).await);
    for _ in 0..4 {
        let body = json!({"model": "m"});
        let reply = advancing(STEP, caller.post("/openai/v1/responses", &body)).await;
        assert_eq!(reply.status, 429);
        advance(Duration::from_secs(11)).await;
    }
    let count = std::iter::from_fn(|| seen.try_recv().ok()).filter(|seen| matches!(seen, Seen::Request(_)));
    assert!(count.count() <= 7, "four calls, and three retries");
    let metrics = advancing(STEP, caller.get("/tidegate/metrics")).await.text;
    assert!(metrics.contains("tidegate_proxy_retries_total 3\n"), "{metrics}");
}

/// Its slot and its place at the upstream were free while the body went on.
#[tokio::test]
async fn error_response_is_in_flight_until_it_ends() {
    let _frozen = Frozen::new();
    for status in ["404 Not Found", "503 Unavailable"] {
        let head = format!("HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n");
        let piece = format!("11000\r\n{}\r\n", "x".repeat(0x11000));
        let (addr, _seen) = raw::upstream(format!("{head}{piece}").leak()).await;
        let caller = Caller::new(start(proxy(&[upstream("openai", addr)], None)).await);
        let began = Instant::now();
        let body = json!({"model": "m"}).to_string();
        let response = advancing(STEP, caller.begin("POST", "/openai/v1/responses", body)).await;
        let in_flight =
            async || caller.get("/tidegate/scopes").await.json()["scopes"][0]["in_flight"].clone();
        assert_eq!(in_flight().await, 1, "{status}");
        let reply = advancing(Duration::from_secs(20), read(response)).await;
        assert!(reply.text.ends_with("<broken>"), "it never ends: {status}");
        assert!(began.elapsed() >= Duration::from_mins(10), "it may pause for ten minutes");
        advancing(STEP, eventually("it has left", async || in_flight().await == 0)).await;
    }
}

#[tokio::test]
async fn body_of_a_rejection_names_what_is_cut() {
    let cases = [
        (
            "{\"error\":{\"message\":\"Rate limit reached on tokens per min (TPM): Limit 9\"}}",
            "tokens_quota",
            "quota",
        ),
        (
            "{\"error\":{\"message\":\"Rate limit reached on requests per min (RPM): Limit 9\"}}",
            "quota",
            "tokens_quota",
        ),
    ];
    for (body, cut, other) in cases {
        let reply = format!("HTTP/1.1 429 Too Many\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let (addr, _seen) = raw::upstream(reply.leak()).await;
        let through = start(proxy(&[upstream("openai", addr)], None)).await;
        let caller = Caller::new(through).with("x-tidegate-within", "0");
        assert_eq!(caller.post("/openai/v1/responses", &json!({"model": "m"})).await.status, 429);
        let scopes = caller.get("/tidegate/scopes").await.json();
        let scope = &scopes["scopes"][0];
        assert!(scope[cut].is_number() && scope[other].is_null(), "{scope}");
    }
}

/// They passed at once, and the throttle learned nothing: the words were taken for those of a spend limit.
#[tokio::test(start_paused = true)]
async fn anthropics_ordinary_429s_are_repeated() {
    let body = "{\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\",\"message\":\"This request would exceed your \
                organization's rate limit of 30,000 input tokens per minute (org: x, model: c).\"}}";
    let reply =
        format!("HTTP/1.1 429 Too Many\r\nretry-after: 1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let (addr, mut seen) = raw::upstream(reply.leak()).await;
    let caller = Caller::new(start(proxy(&[upstream("anthropic", addr)], None)).await);
    let waiting = caller.clone().with("x-tidegate-within", "5");
    let reply = waiting.post("/anthropic/v1/messages", &json!({"model": "c"})).await;
    assert_eq!(reply.status, 429, "{}", reply.text);
    let count = std::iter::from_fn(|| seen.try_recv().ok()).filter(|seen| matches!(seen, Seen::Request(_)));
    assert!(count.count() > 1);
    assert!(!caller.get("/tidegate/metrics").await.text.contains("tidegate_proxy_retries_total 0\n"));

    // The mock has the same words.
    let addr = mock("anthropic", |options| options.limits = vec!["input_tokens:30/s".parse().unwrap()]).await;
    let caller = Caller::new(start(proxy(&[upstream("anthropic", addr)], None)).await);
    let body = json!({"model": "c", "max_tokens": 4, "messages": [], "system": "a few words"});
    let calls = (0..8).map(|_| caller.post("/anthropic/v1/messages", &body));
    let statuses: Vec<u16> = join_all(calls).await.into_iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [200; 8]);
}

/// The upstream may have done the work.
#[tokio::test]
async fn nothing_is_repeated_after_a_lost_response() {
    let body = json!({"model": "m"});
    // It receives the call, and closes the connection.
    let (addr, mut seen) = raw::hanging_up_upstream().await;
    let caller = Caller::new(start(proxy(&[upstream("openai", addr)], None)).await);
    let reply = caller.post("/openai/v1/responses", &body).await;
    assert_eq!((reply.status, reply.text.contains("broke the connection")), (502, true), "{}", reply.text);
    assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    let metrics = caller.get("/tidegate/metrics").await.text;
    assert!(metrics.contains("retries_total 0\n") && metrics.contains("failed_total 1\n"), "{metrics}");
    assert!(seen.try_recv().is_err(), "one attempt");

    // It receives the call, and never responds.
    let _frozen = Frozen::new();
    let (addr, mut seen) = raw::upstream("").await;
    let mut bounds = ProxyBounds::default();
    bounds.response_time = Duration::from_mins(5);
    let builder = Proxy::builder().upstream(upstream("openai", addr)).unwrap().bounds(bounds);
    let caller = Caller::new(start(builder.build().unwrap()).await);
    let reply = advancing(Duration::from_secs(5), caller.post("/openai/v1/responses", &body)).await;
    assert_eq!((reply.status, reply.text.contains("within 300s")), (504, true), "{}", reply.text);
    assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    assert_eq!(seen.recv().await, Some(Seen::Closed), "one attempt, which is cancelled");
    let metrics = advancing(STEP, caller.get("/tidegate/metrics")).await.text;
    assert!(metrics.contains("retries_total 0\n") && metrics.contains("failed_total 1\n"), "{metrics}");
}

#[tokio::test]
async fn requested_wait_is_bounded() {
    let (addr, _seen) =
        raw::upstream("HTTP/1.1 429 Too Many\r\nretry-after: 500\r\ncontent-length: 2\r\n\r\n{}").await;
    let mut bounds = ProxyBounds::default();
    bounds.within_max = Duration::from_mins(1);
    let builder = Proxy::builder().upstream(upstream("openai", addr)).unwrap().bounds(bounds);
    let through = start(builder.build().unwrap()).await;
    for within in ["1h", "86400"] {
        let caller = Caller::new(through).with("x-tidegate-within", within);
        let refused = caller.post("/openai/v1/responses", &json!({"model": "m"})).await;
        // With an hour, it would wait for the upstream.
        assert_eq!((refused.status, refused.header("x-should-retry")), (429, "false"), "{}", refused.text);
    }
}

#[tokio::test]
async fn scopes_are_keys_and_groups_of_models() {
    let file = "[grouped]\nextends = 'openai'\ngroups = [{ prefix = 'gpt-4', group = 'gpt-4' }]";
    let profiles = Profiles::read(file).unwrap();
    let addr = mock("openai", |_| {}).await;
    let grouped = Upstream::parse(&format!("openai:grouped=http://{addr}"), &profiles).unwrap();
    let through = start(proxy(&[grouped], None)).await;
    for (key, model) in [("sk-1", "gpt-4"), ("sk-1", "gpt-4-turbo"), ("sk-2", "gpt-4"), ("sk-1", "o9")] {
        let caller = Caller::new(through).with("authorization", &format!("Bearer {key}"));
        assert_eq!(caller.post("/openai/v1/responses", &json!({"model": model})).await.status, 200);
    }
    let scopes = Caller::new(through).get("/tidegate/scopes").await.json();
    let scope = |scope: &Value| (scope["group"].as_str().unwrap().to_owned(), scope["admitted"].as_u64());
    let mut scopes: Vec<_> = scopes["scopes"].as_array().unwrap().iter().map(scope).collect();
    scopes.sort();
    let wanted = [("gpt-4", 1), ("gpt-4", 2), ("o9", 1)];
    assert_eq!(scopes, wanted.map(|(group, admitted)| (group.to_owned(), Some(admitted))));
}
