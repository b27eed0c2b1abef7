//! Tests that no caller can starve others: shares of slots and connections, the reserve of operators, log lines
//! and the backlog.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::{Limiter, Memory, Store};
use tidegate_server::{Bounds, Server, ServerOptions, Shutdown};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::kit::codec::json;
use crate::kit::frozen::Frozen;
use crate::kit::{ApiResponse, Kit, NOW, any_port, bounds, send, soon};

/// Makes requests that wait for a limit, until all slots are taken or refused. Returns the refused ones.
async fn wait_with(kit: &Arc<Kit>, token: &str, count: usize) -> (JoinSet<ApiResponse>, Vec<ApiResponse>) {
    let ask = json!({"entity": "a", "resource": "b", "cost": {"tpm": 10}, "within": 60});
    let (mut waits, mut refused) = (JoinSet::new(), Vec::new());
    let before = kit.limiter.stats().waiting;
    for _ in 0..count {
        let (kit, token, ask) = (Arc::clone(kit), token.to_owned(), ask.clone());
        waits.spawn(async move { kit.ask_as(&token, "POST", "/v1/acquire", Some(ask)).await });
    }
    while kit.limiter.stats().waiting - before + refused.len() < count {
        match waits.try_join_next() {
            Some(answer) => refused.push(answer.expect("no panic")),
            None => tokio::task::yield_now().await,
        }
    }
    (waits, refused)
}

async fn spend_all(kit: &Kit) {
    let all = json!({"entity": "a", "resource": "b", "cost": {"tpm": 1_000}});
    assert_eq!(kit.post("/v1/spend", all).await.status, 204);
}

#[tokio::test]
async fn greedy_token_leaves_slots_to_others() {
    let kit = Arc::new(Kit::with(bounds(|bounds| bounds.requests_max = 8)).await);
    spend_all(&kit).await;
    let (waits, refused) = wait_with(&kit, &kit.token, 8).await;
    assert_eq!((waits.len(), refused.len()), (7, 1), "one slot stays free for others");
    for answer in refused {
        answer.is_problem(503, "busy", "");
        assert!(
            answer.text.contains("too many requests of the token `all`: 7 are in flight"),
            "{}",
            answer.text
        );
    }
    let other = json!({"entity": "good", "resource": "b", "cost": {"tpm": 1}});
    let served = kit.ask_as(&kit.other, "POST", "/v1/spend", Some(other)).await;
    assert_eq!(served.status, 204, "{}", served.text);
}

#[tokio::test]
async fn operators_have_slots_when_all_are_taken() {
    let kit = Arc::new(Kit::with(bounds(|bounds| bounds.requests_max = 1)).await);
    spend_all(&kit).await;
    let (_waits, refused) = wait_with(&kit, &kit.token, 1).await;
    assert!(refused.is_empty());
    kit.get("/v1/upstreams").await.is_problem(503, "busy", "");
    for path in ["/metrics", "/v1/status", "/v1/snapshot", "/v1/tokens"] {
        assert_eq!(kit.ask_as(&kit.other, "GET", path, None).await.status, 200, "{path}");
    }
    assert_eq!(kit.ask_as(&kit.other, "DELETE", "/v1/tokens/all", None).await.status, 200);
}

/// They shared the readers of the store with the lookups of tokens: with thousands of them, no token that was not
/// cached could be used, not even to revoke theirs.
#[tokio::test]
async fn reports_leave_store_readers_to_token_lookups() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let bounds = bounds(|bounds| bounds.report_time = Duration::from_hours(1));
    let kit = Arc::new(Kit::over(Limiter::over(shared).build().unwrap(), clock, bounds).await);
    assert_eq!(kit.get("/v1/upstreams").await.status, 200, "its token is cached");
    store.hang();
    let mut reports = JoinSet::new();
    for number in 0..40 {
        let kit = Arc::clone(&kit);
        let paths = ["/v1/usage/summary?entity=a", "/v1/capacity?resource=b", "/v1/balances?entity=a"];
        reports.spawn(async move { kit.get(paths[number % 3]).await });
    }
    for _ in 0..10 {
        let refused = soon("a refusal", reports.join_next()).await.unwrap().unwrap();
        refused.is_problem(503, "busy", "");
        let expected = "too many reports of the token `all`: 30 are in flight, and the rest of 32";
        assert!(refused.text.contains(expected), "{}", refused.text);
    }
    assert_eq!(reports.len(), 30);
    store.come_back();
    let other = |method, path| kit.ask_as(&kit.other, method, path, None);
    assert_eq!(other("GET", "/v1/policies").await.status, 200, "another token has a share");
    assert_eq!(other("DELETE", "/v1/tokens/all").await.status, 200);
}

/// Requests that waited for a limit were granted a lease up to a minute after the revocation of their token.
#[tokio::test]
async fn revocation_ends_waiting_requests() {
    let kit = Arc::new(Kit::new().await);
    spend_all(&kit).await;
    let (waits, _) = wait_with(&kit, &kit.token, 20).await;
    assert_eq!(kit.ask_as(&kit.other, "DELETE", "/v1/tokens/all", None).await.status, 200);
    for answer in soon("the waits", waits.join_all()).await {
        answer.is_problem(401, "bad-token", "");
        assert!(answer.text.contains("the token was revoked"), "{}", answer.text);
    }
    assert_eq!(kit.limiter.stats().waiting, 0);
}

/// The token was cached: it stayed valid for two seconds.
#[tokio::test]
async fn revocation_is_immediate_with_remote_store() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let kit =
        Kit::over(Limiter::over(store as Arc<dyn Store>).build().unwrap(), clock, Bounds::default()).await;
    assert_eq!(kit.get("/v1/policies").await.status, 200);
    assert_eq!(kit.ask_as(&kit.other, "DELETE", "/v1/tokens/all", None).await.status, 200);
    kit.get("/v1/policies").await.is_problem(401, "bad-token", "");
}

/// The captured log of one thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Captures the log of this thread until the guard is dropped.
    fn capture() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let guard = tracing::subscriber::set_default(lines);
        (log, guard)
    }

    fn count(&self, text: &str) -> usize {
        String::from_utf8_lossy(&self.0.lock().expect("no panic")).matches(text).count()
    }
}

/// Each request that failed because of the store wrote a line: 73,000 lines in five seconds.
#[tokio::test]
async fn log_lines_of_an_outage_are_counted_instead() {
    let (log, _guard) = Log::capture();
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let kit = Kit::over(Limiter::over(shared).build().unwrap(), clock, Bounds::default()).await;
    assert_eq!(kit.get("/v1/policies").await.status, 200);
    store.go_away();
    for _ in 0..200 {
        kit.get("/v1/policies").await.is_problem(503, "store-away", "");
    }
    let suppressed = async || -> usize {
        let text = kit.get("/metrics").await.text;
        let line = text.lines().find_map(|line| line.strip_prefix("tidegate_log_lines_suppressed_total "));
        line.expect("it is counted").parse().expect("a number")
    };
    // Other tests of this program log such lines too.
    assert!(log.count("store unavailable") <= 20, "{}", log.count("store unavailable"));
    assert!(suppressed().await >= 180, "{}", suppressed().await);
}

/// The backlog had 128 places: further clients had to send their SYN again, after a second or more.
#[tokio::test]
async fn many_clients_connect_before_they_are_accepted() {
    let most: usize = std::fs::read_to_string("/proc/sys/net/core/somaxconn")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(128);
    let server = Server::bind(&ServerOptions::new(any_port())).await.unwrap();
    let addr = server.local_addr();
    let connects = (0..most.min(600)).map(|_| TcpStream::connect(addr)).map(tokio::spawn);
    let connects: Vec<_> = connects.collect();
    let mut open = Vec::new();
    for connect in connects {
        open.push(soon("a connection", connect).await.unwrap().unwrap());
    }
    // Then all are served.
    let kit = Kit::new().await;
    let (stopper, shutdown) = Shutdown::new();
    let running = tokio::spawn(server.run(kit.state.clone(), shutdown));
    for stream in &mut open {
        stream.write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    }
    for stream in &mut open {
        let mut answer = Vec::new();
        soon("an answer", stream.read_to_end(&mut answer)).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 204"), "{}", String::from_utf8_lossy(&answer));
    }
    stopper.stop();
    soon("the end", running).await.unwrap();
}

/// Idle sockets held all places of the metrics listener for 15 seconds at a time.
#[tokio::test]
async fn idle_sockets_do_not_deny_metrics() {
    let (log, _guard) = Log::capture();
    let server = Server::bind(&ServerOptions::new(any_port()).metrics(any_port())).await.unwrap();
    let metrics = server.metrics_addr().unwrap();
    let kit = Kit::new().await;
    let (_stopper, shutdown) = Shutdown::new();
    tokio::spawn(server.run(kit.state.clone(), shutdown));
    let _frozen = Frozen::new();
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(metrics).await.unwrap());
    }
    let mut stream = TcpStream::connect(metrics).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    soon("an answer", stream.read_to_string(&mut text)).await.unwrap();
    assert!(text.contains("tidegate_connections_open{listener=\"metrics\"} 60"), "15 of 16 places: {text}");
    let evicted = "tidegate_connections_closed_total{listener=\"metrics\",reason=\"evicted\"} 141";
    assert!(text.contains(evicted), "{text}");
    assert_eq!(log.count("connection bound reached"), 1, "the bound is reported once");
}

#[tokio::test]
async fn busy_address_is_refused_beyond_its_share() {
    let kit = Kit::with(bounds(|bounds| bounds.connections_max = 6)).await;
    let head = format!(
        "POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 50\r\n\r\n",
        kit.token
    );
    let mut busy = Vec::new();
    for _ in 0..5 {
        let mut stream = TcpStream::connect(kit.addr).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut goes_on = [0; 25];
        stream.read_exact(&mut goes_on).await.unwrap();
        busy.push(stream);
    }
    let _frozen = Frozen::new();
    let mut sixth = TcpStream::connect(kit.addr).await.unwrap();
    let closed = soon("its end", sixth.read(&mut [0; 8])).await;
    assert!(!matches!(closed, Ok(1..)), "closed without a response: {closed:?}");
    drop(busy);
    let served = async { while kit.request("GET", "/health/live").send().await.is_err() {} };
    soon("a place", served).await;
    let text = kit.get("/metrics").await.text;
    let refused = "tidegate_connections_closed_total{listener=\"api\",reason=\"refused\"} ";
    let refused = text.split_once(refused).and_then(|(_, rest)| rest.lines().next());
    assert!(refused.is_some_and(|count| count.parse::<u64>().unwrap() >= 1), "{text}");
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
}
