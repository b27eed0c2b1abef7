//! Estimates: what is drawn before a call, and what is booked if the upstream reports no usage, or absurd usage.

use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::Upstream;

use crate::kit::client::{Caller, eventually, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw;
use crate::kit::tenants::Store;

/// A caller with a token of acme.
async fn acme(store: &Store, upstream: Upstream) -> Caller {
    let token = store.token("acme", TokenScope::Acquire).await;
    let through = start(proxy(&[upstream.key("sk-real")], Some(store.tenants()))).await;
    Caller::new(through).with("authorization", &format!("Bearer {token}"))
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
