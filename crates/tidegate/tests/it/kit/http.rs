//! A scripted HTTP server on a real socket, and a clock that advances only while no request is in flight.
//!
//! Throttles and scripts share a manual clock that advances only when every task waits. So assertions do not
//! depend on the speed of the machine, although every request goes through the operating system.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use tidegate::{Authority, Clock as _, Instant, Keyed, KeyedBuilder, ManualClock, Random};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How far the clock advances at a time.
const STEP: Duration = Duration::from_millis(10);
/// Yields to the other tasks before all of them are assumed to be waiting.
const YIELDS: usize = 40;

/// One request as the server received it.
#[derive(Debug, Clone)]
pub(crate) struct RecordedRequest {
    pub(crate) at: Instant,
    pub(crate) number: usize,
    pub(crate) method: String,
    pub(crate) path: String,
    /// Keyed by lower-case names.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
    /// The status of the response; 0 without one.
    pub(crate) status: u16,
}

/// A scripted response.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
    end: End,
}

/// How a response ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// The connection closes in the middle of the body.
    Cut,
    /// The connection closes before the response.
    Silent,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: "hello".to_owned(), end: End::Whole }
    }

    pub(crate) fn header(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub(crate) fn body(mut self, body: &str) -> Self {
        body.clone_into(&mut self.body);
        self
    }

    /// Closes the connection in the middle of the body.
    pub(crate) fn cut(mut self) -> Self {
        self.end = End::Cut;
        self
    }

    /// Closes the connection without a response.
    pub(crate) fn hang_up() -> Self {
        Self { end: End::Silent, ..Self::status(200) }
    }
}

/// A scripted HTTP server.
#[derive(Debug, Clone)]
pub(crate) struct TestServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl TestServer {
    /// Starts a server that responds as `script` decides.
    pub(crate) async fn start(
        clock: &ManualClock,
        script: impl Fn(&RecordedRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = Self { address, requests: Arc::default() };
        let (requests, clock, script) = (Arc::clone(&server.requests), clock.clone(), Arc::new(script));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (requests, clock, script) = (Arc::clone(&requests), clock.clone(), Arc::clone(&script));
                tokio::spawn(async move { serve(stream, &requests, &clock, &*script).await });
            }
        });
        server
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn authority(&self) -> Authority {
        Authority::new(&self.address.to_string()).expect("an address")
    }

    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        lock(&self.requests).clone()
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.requests).len()
    }
}

/// Serves one request.
async fn serve(
    mut stream: TcpStream,
    requests: &Mutex<Vec<RecordedRequest>>,
    clock: &ManualClock,
    script: &(dyn Fn(&RecordedRequest) -> Reply + Send + Sync),
) -> Option<()> {
    let mut text = Vec::new();
    let head = loop {
        if let Some(end) = text.windows(4).position(|end| end == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut text).await.ok()? == 0 {
            return None;
        }
    };
    let lines = String::from_utf8_lossy(&text[..head]).into_owned();
    let mut lines = lines.lines();
    let mut first = lines.next()?.split(' ');
    let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let is_chunked = headers.contains_key("transfer-encoding");
    let is_whole = |text: &[u8]| {
        if is_chunked { text.ends_with(b"0\r\n\r\n") } else { text.len() >= head + length }
    };
    while !is_whole(&text) {
        stream.read_buf(&mut text).await.ok()?;
    }
    let body = String::from_utf8_lossy(&text[head..]).into_owned();
    let reply = {
        let mut requests = lock(requests);
        let mut request = RecordedRequest {
            at: clock.now(),
            number: requests.len(),
            method,
            path,
            headers,
            body,
            status: 0,
        };
        let reply = script(&request);
        request.status = if reply.end == End::Silent { 0 } else { reply.status };
        requests.push(request);
        reply
    };
    if reply.end == End::Silent {
        return None;
    }
    let headers: Vec<_> = reply.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let headers = headers.concat();
    let missing = if reply.end == End::Cut { 10 } else { 0 };
    let length = reply.body.len() + missing;
    let text = format!(
        "HTTP/1.1 {} Scripted\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{}",
        reply.status, reply.body
    );
    stream.write_all(text.as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

/// Throttles by host on this clock, without randomness.
pub(crate) fn keyed_on(clock: &ManualClock, builder: KeyedBuilder<Authority>) -> Keyed<Authority> {
    builder.clock(clock.clone()).random(Random::fixed(0.0)).build().expect("within the bounds")
}

/// Runs `work`, and advances the clock whenever no request is in flight and a task sleeps.
pub(crate) async fn pass_time<T>(
    clock: &ManualClock,
    hosts: &Keyed<Authority>,
    work: impl Future<Output = T>,
) -> T {
    let mut work = pin!(work);
    loop {
        for _ in 0..YIELDS {
            let done = std::future::poll_fn(|context| match work.as_mut().poll(context) {
                Poll::Ready(done) => Poll::Ready(Some(done)),
                Poll::Pending => Poll::Ready(None),
            });
            if let Some(done) = done.await {
                return done;
            }
            tokio::task::yield_now().await;
        }
        let is_in_flight = hosts.snapshot(0).in_flight > 0;
        if !is_in_flight && clock.sleeping() > 0 {
            clock.advance(STEP);
        }
    }
}

/// Seconds since the clock's origin.
pub(crate) fn seconds(at: Instant) -> f64 {
    at.since(Instant::ZERO).as_secs_f64()
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("the lock is not poisoned")
}
