//! Tests of bounds: requests that are too large, too slow, too many or not HTTP; and of startup and shutdown.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_server::{Bounds, ServeError, Server, ServerOptions, ShutdownOutcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, ends_after};
use crate::kit::{Kit, any_port, bounds, reserved_port, send, soon};

/// Sends raw bytes, and reads until the server closes the connection.
async fn raw(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.expect("it listens");
    // The server may respond and close before everything is sent.
    let _ = stream.write_all(bytes).await;
    soon("an answer", rest(stream)).await
}

/// Reads until the server closes the connection.
async fn rest(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text).await;
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn invalid_bodies_are_reported_as_problems() {
    let kit = Kit::with(bounds(|bounds| bounds.body_max = 1_000)).await;
    let sent = async |kind: Option<&str>, body: String| {
        let request = kit.request("POST", "/v1/acquire").bearer_auth(&kit.token).body(body);
        send(match kind {
            Some(kind) => request.header("content-type", kind),
            None => request,
        })
        .await
    };
    let json = Some("application/json; charset=utf-8");
    let good = r#"{"entity": "a", "resource": "b", "cost": {"rpm": 1}}"#;
    assert_eq!(sent(json, good.to_owned()).await.status, 200);
    sent(None, good.to_owned()).await.is_problem(415, "not-json", "");
    sent(Some("text/plain"), good.to_owned()).await.is_problem(415, "not-json", "");
    sent(json, String::new()).await.is_problem(400, "not-json", "");
    sent(json, good[..20].to_owned()).await.is_problem(400, "not-json", "");
    sent(json, format!("{good} x")).await.is_problem(400, "not-json", "");
    sent(json, "[".repeat(900)).await.is_problem(422, "invalid", "");
    for (encoding, status) in [("gzip", 415), ("br", 415), ("Identity", 200)] {
        let request =
            kit.request("POST", "/v1/acquire").bearer_auth(&kit.token).header("content-encoding", encoding);
        let answer = send(request.header("content-type", "application/json").body(good)).await;
        assert_eq!(answer.status, status, "{encoding}: {}", answer.text);
    }
    let large = sent(json, format!("\"{}\"", "x".repeat(1_000))).await;
    large.is_problem(413, "large-body", "");
    assert!(large.text.contains("more than 1000 bytes"), "{}", large.text);
    for (body, field) in [
        (r#"{"entity": "a", "resource": "b", "cost": {"rpm": 1}, "colour": 1}"#, "colour"),
        (r#"{"entity": "a", "resource": "b", "cost": {"rpm": 1, "rpm": 2}}"#, "cost"),
        (r#"{"entity": "a", "resource": "b", "cost": {"rpm": 1.5}}"#, "cost.rpm"),
        (r#"{"entity": "a", "resource": "b"}"#, ""),
        (r#"["a", "b", {"rpm": 1}]"#, ""),
        (r#"{"entity": "a\u0000", "resource": "b", "cost": {"rpm": 1}}"#, "entity"),
    ] {
        sent(json, body.to_owned()).await.is_problem(422, "invalid", field);
    }
    kit.get("/v2/acquire").await.is_problem(404, "no-route", "");
    let method = kit.ask("DELETE", "/v1/entities", None).await;
    method.is_problem(405, "no-method", "");
    assert!(method.header("allow").contains("GET"), "{}", method.header("allow"));
}

#[tokio::test]
async fn oversized_body_is_refused_before_it_is_read() {
    let kit = Kit::new().await;
    let head = format!(
        "POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
         content-length: 1000000000\r\n\r\n",
        kit.token
    );
    let mut bytes = head.into_bytes();
    bytes.extend(std::iter::repeat_n(b'x', 300_000));
    assert!(raw(kit.addr, &bytes).await.starts_with("HTTP/1.1 413 "));
    let unnamed = b"POST /v1/acquire HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n";
    assert!(raw(kit.addr, unnamed).await.starts_with("HTTP/1.1 401 "), "a body without a token is not read");
}

#[tokio::test]
async fn slow_heads_and_bodies_are_closed_in_time() {
    let kit = Kit::new().await;
    let _frozen = Frozen::new();
    let Bounds { head_time, body_time, .. } = *kit.state.bounds();
    // The client never closes the connection.
    let mut stream = TcpStream::connect(kit.addr).await.unwrap();
    stream.write_all(b"POST /v1/acquire HTTP/1.1\r\nhost: x\r\nx-slow: ").await.unwrap();
    // Connections are accepted in order: once a later one is served, the server waits for this one.
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
    let answer = ends_after(head_time, rest(stream)).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");

    let head = format!(
        "POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
         expect: 100-continue\r\ncontent-length: 50\r\n\r\n",
        kit.token
    );
    let mut stream = TcpStream::connect(kit.addr).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut goes_on = [0; 25];
    stream.read_exact(&mut goes_on).await.unwrap();
    assert!(goes_on.starts_with(b"HTTP/1.1 100"), "it waits for the body");
    stream.write_all(b"{").await.unwrap();
    let answer = ends_after(body_time, rest(stream)).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("/problems/slow-body"), "{answer}");
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
}

#[tokio::test]
async fn request_heads_are_bounded() {
    let kit = Kit::new().await;
    let long = format!("GET /health/live HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "x".repeat(64 * 1_024));
    assert!(raw(kit.addr, long.as_bytes()).await.starts_with("HTTP/1.1 431 "));
    let many = format!("GET /health/live HTTP/1.1\r\nhost: x\r\n{}\r\n", "x-many: 1\r\n".repeat(100));
    assert!(raw(kit.addr, many.as_bytes()).await.starts_with("HTTP/1.1 431 "));
    assert!(raw(kit.addr, b"\x16\x03\x01hello\r\n\r\n").await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn concurrent_requests_are_bounded_but_not_health() {
    let kit = Kit::with(bounds(|bounds| bounds.requests_max = 1)).await;
    let ask = |tpm: u32| json!({"entity": "a", "resource": "b", "cost": {"tpm": tpm}, "within": 60});
    let first = kit.post("/v1/acquire", ask(1_000)).await;
    assert_eq!(first.status, 200, "{}", first.text);
    let waits = kit.post("/v1/acquire", ask(500));
    let others = async {
        while kit.limiter.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        let busy = kit.get("/v1/upstreams").await;
        busy.is_problem(503, "busy", "");
        assert_eq!(busy.header("retry-after"), "1");
        assert!(busy.text.contains("too many requests: 1 are in flight"), "{}", busy.text);
        assert_eq!(send(kit.request("GET", "/health/live")).await.status, 204);
        kit.limiter.close();
    };
    let (refused, ()) = soon("a wait", async { tokio::join!(waits, others) }).await;
    refused.is_problem(503, "stopping", "");
    assert_eq!(send(kit.request("GET", "/health/ready")).await.kind(), "stopping");
}

#[tokio::test]
async fn abandoned_leases_are_swept_and_counted() {
    let kit = Kit::with(bounds(|bounds| bounds.sweep_every = Duration::from_millis(1))).await;
    for entity in 0..100 {
        let ask =
            json!({"entity": format!("e{entity}"), "resource": "b", "cost": {"tpm": 10}, "deadline": 5});
        assert_eq!(kit.post("/v1/acquire", ask).await.status, 200);
    }
    kit.clock.advance(Duration::from_secs(6));
    let counted = async {
        while !kit.get("/metrics").await.text.contains("tidegate_leases_expired_total{how=\"settled\"} 100") {
            tokio::task::yield_now().await;
        }
    };
    soon("a sweep", counted).await;
    let usage = kit.get("/v1/usage/summary?resource=b").await;
    assert_eq!(usage.body["limits"]["tpm"]["units"], 1_000, "{}", usage.text);
}

#[tokio::test]
async fn stopping_server_refuses_waiters_and_drains() {
    let (_reserved, addr) = reserved_port();
    let kit = Kit::at(addr).await;
    let ask = |tpm: u32| json!({"entity": "a", "resource": "b", "cost": {"tpm": tpm}, "within": 60});
    assert_eq!(kit.post("/v1/acquire", ask(1_000)).await.status, 200);
    let stops = async {
        while kit.limiter.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        kit.stopper.stop();
    };
    let (refused, ()) =
        soon("a wait", async { tokio::join!(kit.post("/v1/acquire", ask(500)), stops) }).await;
    refused.is_problem(503, "stopping", "");
    assert_eq!(soon("the end", kit.stopped()).await, ShutdownOutcome::Drained);
    assert!(TcpStream::connect(addr).await.is_err(), "it no longer listens");
}

#[tokio::test]
async fn second_stop_ends_server_at_once() {
    let kit = Kit::new().await;
    // An open lease of this process, which a drain would wait for.
    let lease = kit.limiter.try_acquire(("a", "b"), [("tpm", 1)]).await.unwrap();
    kit.stopper.stop();
    kit.stopper.stop();
    assert_eq!(soon("the end", kit.stopped()).await, ShutdownOutcome::AtOnce);
    drop(lease);
}

/// There is no connection, so paused time advances whenever all tasks wait.
#[tokio::test(start_paused = true)]
async fn drain_times_out() {
    let kit = Kit::new().await;
    let lease = kit.limiter.try_acquire(("a", "b"), [("tpm", 1)]).await.unwrap();
    let (began, drain_time) = (tokio::time::Instant::now(), kit.state.bounds().drain_time);
    kit.stopper.stop();
    assert_eq!(soon("the end", kit.stopped()).await, ShutdownOutcome::TimedOut);
    assert!(began.elapsed() >= drain_time, "{:?}", began.elapsed());
    drop(lease);
}

#[tokio::test]
async fn bind_errors_are_one_sentence() {
    let first = Server::bind(&ServerOptions::new(any_port())).await.unwrap();
    let addr = first.local_addr();
    let error = Server::bind(&ServerOptions::new(addr)).await.unwrap_err();
    assert!(matches!(error, ServeError::InUse { .. }));
    let sentence = format!("{addr} is in use by another program: stop it, or listen on another port");
    assert_eq!(error.to_string(), sentence);
    let open = ServerOptions::new(SocketAddr::from(([0, 0, 0, 0], 0)));
    let error = Server::bind(&open).await.unwrap_err().to_string();
    assert!(error.starts_with("0.0.0.0:0 can be reached from other machines"), "{error}");
    assert!(Server::bind(&open.without_tls_anywhere()).await.is_ok());
}

#[tokio::test]
async fn metrics_can_have_own_listener() {
    let options = ServerOptions::new(any_port()).metrics(any_port());
    let server = Server::bind(&options).await.unwrap();
    assert!(server.metrics_addr().is_some());
    let kit = Kit::new().await;
    let (stopper, shutdown) = tidegate_server::Shutdown::new();
    let metrics = server.metrics_addr().unwrap();
    let running = tokio::spawn(server.run(kit.state.clone(), shutdown));
    let text = raw(metrics, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(text.contains("tidegate_waiting 0"), "{text}");
    let other = raw(metrics, b"GET /v1/policies HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(other.contains("/problems/no-route"), "{other}");
    stopper.stop();
    assert_eq!(soon("the end", running).await.unwrap(), ShutdownOutcome::Drained);
}
