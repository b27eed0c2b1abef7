//! Estimates: what is drawn before a call, and what is booked if the upstream reports no usage, or absurd usage.

use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::Upstream;

use crate::kit::client::{Caller, eventually, mock, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw;
use crate::kit::tenants::Store;

/// A caller with a token of acme.
async fn acme(store: &Store, upstream: Upstream) -> Caller {
    let token = store.token("acme", TokenScope::Acquire).await;
    let through = start(proxy(&[upstream.key("sk-real")], Some(store.tenants()))).await;
    Caller::new(through).with("authorization", &format!("Bearer {token}"))
}

/// The next calls requested more than the limit can ever grant, and refused calls taught the estimate nothing.
#[tokio::test]
async fn long_answer_locks_no_tenant_out() {
    for limit in ["tokens:10k/100ms", "tpm:10k/100ms", "output_tokens:10k/100ms"] {
        let store = Store::new(&[limit]).await;
        let addr = mock("openai", |options| options.output_tokens = 12_000).await;
        let caller = acme(&store, upstream("openai", addr)).await;
        let body = json!({"model": "m", "input": "hello"});
        for calls in 1..4 {
            let reply = caller.post("/openai/v1/responses", &body).await;
            assert_eq!(reply.status, 200, "{limit}: {}", &reply.text[..reply.text.len().min(300)]);
            eventually("it is booked", async || store.used("acme", "m", "requests").await == calls).await;
        }
        assert_eq!(store.used("acme", "m", "output_tokens").await, 36_000);
    }
}

/// The first estimate is 256 tokens.
#[tokio::test]
async fn limit_below_the_estimate_admits_calls() {
    let store = Store::new(&["output_tokens:100/100ms", "tokens:200/100ms"]).await;
    let caller = acme(&store, upstream("openai", mock("openai", |_| {}).await)).await;
    let reply = caller.post("/openai/v1/responses", &json!({"model": "m", "input": "hello"})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let large = json!({"model": "m", "input": "words ".repeat(300)});
    let reply = caller.post("/openai/v1/responses", &large).await;
    assert_eq!((reply.status, reply.header("x-should-retry")), (429, "false"), "its input alone is too much");
}

/// It was booked: the tenant had the largest debt, and the estimates of all tenants were twenty times as high.
#[tokio::test]
async fn absurd_usage_is_booked_as_an_estimate() {
    let report = |input: u64, output: u64| {
        let body = format!("{{\"usage\":{{\"input_tokens\":{input},\"output_tokens\":{output}}}}}");
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        format!("{head}: {}\r\n\r\n{body}", body.len())
    };
    // What the upstream reports, and what is booked.
    let cases = [
        ((50_000_000, 5), (9, 5)),
        ((9, 50_000_000), (9, 256)),
        ((50_000_000, 50_000_000), (9, 256)),
        ((150_000, 90_000), (150_000, 90_000)),
    ];
    for ((input, output), booked) in cases {
        let store = Store::new(&["tokens:300k/day"]).await;
        let (addr, _seen) = raw::upstream(report(input, output).leak()).await;
        let caller = acme(&store, upstream("openai", addr)).await;
        let body = json!({"model": "m", "input": "hello"});
        assert_eq!(caller.post("/openai/v1/responses", &body).await.status, 200);
        let used = async |limit: &str| store.used("acme", "m", limit).await;
        eventually("the call is booked", async || used("requests").await == 1).await;
        assert_eq!((used("input_tokens").await, used("output_tokens").await), booked);
        let is_plausible = booked == (input, output);
        assert_eq!(used("estimated").await, u64::from(!is_plausible), "{input} and {output}");
        let available = store.available("acme", "m", "tokens").await;
        let wanted = 300_000 - i64::try_from(booked.0 + booked.1).unwrap();
        assert!((wanted..wanted + 500).contains(&available), "{available}");
        let long = json!({"model": "m", "max_tokens": 500, "input": "hello ".repeat(1_000)});
        let next = caller.post("/openai/v1/responses", &long).await;
        assert_eq!(next.status, 200, "a normal call: {}", next.text);
    }
}

/// A tenant that refused usage was booked at one token per event.
#[tokio::test]
async fn refused_usage_is_reported_and_removed() {
    let store = Store::new(&[]).await;
    let addr = mock("openai", |options| options.output_tokens = 1_000).await;
    let caller = acme(&store, upstream("openai", addr)).await;
    let options = [json!({"include_usage": false}), json!(null), json!({"include_usage": true})];
    for (calls, options) in (1..).zip(options) {
        let is_asked = options["include_usage"] == true;
        let body = json!({"model": "m", "messages": [], "stream": true, "stream_options": options});
        let reply = caller.post("/openai/v1/chat/completions", &body).await;
        assert_eq!((reply.status, reply.text.contains("usage")), (200, is_asked), "{options}");
        let used = async |limit: &str| store.used("acme", "m", limit).await;
        eventually("the call is booked", async || used("requests").await == calls).await;
        assert_eq!((used("output_tokens").await, used("estimated").await), (1_000 * calls, 0));
    }
}

/// A limit of tokens counted long words a hundredth.
#[tokio::test]
async fn words_without_spaces_count_as_text() {
    let store = Store::new(&["tokens:5k/day"]).await;
    let caller = acme(&store, upstream("openai", mock("openai", |_| {}).await)).await;
    let words = "word,word.".repeat(4_000);
    let cases = [(words.clone(), 429), (format!("data:image/png;base64,{words}"), 200)];
    for (text, status) in cases {
        let body = json!({"model": "m", "max_output_tokens": 5, "input": text});
        assert_eq!(caller.post("/openai/v1/responses", &body).await.status, status);
    }
}
