//! Bodies of requests: how far they are read to find their model, and how many are kept.

use std::num::NonZero;

use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::{Proxy, ProxyBounds};

use crate::kit::client::{Caller, eventually, mock, read, start, upstream};
use crate::kit::codec::json;
use crate::kit::tenants::Store;

const CHAT: &str = "/openai/v1/chat/completions";

/// A proxy before a mock of OpenAI, with these bounds, and a tenant.
async fn tenant(limit: &str, change: impl FnOnce(&mut ProxyBounds)) -> (Store, Caller) {
    let store = Store::new(&[limit]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let mut bounds = ProxyBounds::default();
    change(&mut bounds);
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let builder =
        Proxy::builder().upstream(upstream).expect("an upstream").tenants(store.tenants()).bounds(bounds);
    let through = start(builder.build().expect("a proxy")).await;
    (store, Caller::new(through).with("authorization", &format!("Bearer {token}")))
}

/// The official Python SDKs write `messages` before `model`, and images into them: the call was refused, because
/// only the first MiB was read.
#[tokio::test]
async fn model_after_a_large_image_is_found() {
    let (store, caller) = tenant("tokens:100k/min", |_| {}).await;
    let url = format!("data:image/png;base64,{}", "iVBORw0K".repeat(300_000));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let body = json!({"messages": [{"role": "user", "content": content}], "model": "gpt-4", "stream": true})
        .to_string();
    assert!(body.find("\"model\"").unwrap() > 1 << 20);
    let reply = read(caller.begin("POST", CHAT, body).await).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(!reply.text.contains("usage"), "it was asked for by the proxy: {}", reply.text);
    let used = async |limit: &str| store.used("acme", "gpt-4", limit).await;
    eventually("the call is booked", async || used("requests").await == 1).await;
    assert_eq!((used("output_tokens").await, used("estimated").await), (16, 0));
}

#[tokio::test]
async fn model_is_searched_within_a_bound() {
    let (_store, caller) =
        tenant("tokens:1G/day", |bounds| (bounds.replay_max, bounds.search_max) = (1_000, 10_000)).await;
    for (size, status) in [(5_000, 200), (200_000, 400)] {
        let reply = caller.post(CHAT, &json!({"messages": "x ".repeat(size / 2), "model": "m"})).await;
        assert_eq!(reply.status, status, "{size} bytes: {}", reply.text);
        assert_eq!(reply.text.contains("must begin with its model"), status == 400, "{}", reply.text);
    }
}

#[tokio::test]
async fn memory_of_large_bodies_is_bounded() {
    let (_store, caller) = tenant("tokens:1G/day", |bounds| bounds.kept_max = 3 << 20).await;
    for (size, status) in [(2 << 20, 200), (4 << 20, 429), (2 << 20, 200)] {
        let reply = caller.post(CHAT, &json!({"messages": "x".repeat(size), "model": "m"})).await;
        assert_eq!(reply.status, status, "{size} bytes: {}", reply.text);
        assert_eq!(reply.header("retry-after"), if status == 429 { "1" } else { "" });
    }
}

#[tokio::test]
async fn body_beyond_the_memory_is_sent_once() {
    for (kept_max, statuses) in [(1 << 20, [200; 3]), (0, [200, 529, 200])] {
        let addr = mock("anthropic", |options| options.overload_every = NonZero::new(2)).await;
        let mut bounds = ProxyBounds::default();
        bounds.kept_max = kept_max;
        let builder = Proxy::builder().upstream(upstream("anthropic", addr)).unwrap().bounds(bounds);
        let caller = Caller::new(start(builder.build().unwrap()).await);
        let body = json!({"model": "c", "max_tokens": 4, "messages": []});
        for status in statuses {
            assert_eq!(caller.post("/anthropic/v1/messages", &body).await.status, status, "{kept_max} bytes");
        }
    }
}
