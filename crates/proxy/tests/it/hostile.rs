//! A hostile upstream harms one call only.

use std::time::Duration;

use tidegate_proxy::{ListenBounds, serve};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::kit::client::{Caller, listen, mock, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw::{self, Seen};

#[tokio::test]
async fn hostile_upstreams_harm_one_call_only() {
    let endless = format!("HTTP/1.1 200 OK\r\n{}", "x-more: yes\r\n".repeat(100_000)).leak();
    let absurd = "{\"usage\":{\"prompt_tokens\":99999999999999999999,\"completion_tokens\":99999999999}}";
    let absurd = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{absurd}",
        absurd.len()
    );
    let cases: [(&str, u16); 5] = [
        (endless, 502),
        ("SSH-2.0-OpenSSH\r\n", 502),
        ("HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", 502),
        (absurd.leak(), 200),
        ("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nbomb", 200),
    ];
    let healthy = upstream("openai", mock("openai", |_| {}).await);
    for (reply, status) in cases {
        let (addr, _seen) = raw::upstream(reply).await;
        let through = start(proxy(&[upstream("other:openai", addr), healthy.clone()], None)).await;
        let caller = Caller::new(through);
        let body = json!({"model": "m", "input": "x"});
        let head: String = reply.chars().take(40).collect();
        assert_eq!(caller.post("/other/v1/responses", &body).await.status, status, "{head}");
        assert_eq!(caller.post("/openai/v1/responses", &body).await.status, 200);
        let metrics = caller.get("/tidegate/metrics").await.text;
        assert!(metrics.contains("tidegate_proxy_estimated_total 1\n"), "{head}: {metrics}");
    }
}

#[tokio::test]
async fn unreachable_upstream_is_answered_in_its_format() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let through = start(proxy(&[upstream("anthropic", closed)], None)).await;
    let reply = Caller::new(through).post("/anthropic/v1/messages", &json!({"model": "c"})).await;
    assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (502, Some("api_error")));
    assert!(!reply.text.contains(&closed.port().to_string()), "{}", reply.text);
}

#[tokio::test]
async fn calls_end_with_their_listener() {
    let (addr, mut seen) = raw::upstream("").await;
    for is_dropped in [false, true] {
        let listener = listen();
        let caller = Caller::new(listener.local_addr());
        let (stop, stopped) = oneshot::channel::<()>();
        let mut bounds = ListenBounds::default();
        bounds.drain_time = Duration::ZERO;
        let service = proxy(&[upstream("openai", addr)], None);
        let running = tokio::spawn(serve(listener, service, None, bounds, async { drop(stopped.await) }));
        let call = tokio::spawn(async move { caller.try_post("/openai/v1/responses", "{}").await });
        assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
        if is_dropped {
            running.abort();
        } else {
            stop.send(()).unwrap();
            assert!(!running.await.unwrap(), "a call was in flight");
        }
        let closed = timeout(Duration::from_mins(1), seen.recv()).await;
        assert_eq!(closed, Ok(Some(Seen::Closed)), "its connection is closed");
        assert!(!call.await.unwrap(), "the caller too");
    }
}
