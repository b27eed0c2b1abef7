//! A far side on a real socket that answers by a script, and a time that passes only while nothing is in the air.
//!
//! Throttles and scripts have a clock that is moved by hand, and it is moved only when everybody waits: so what is asserted
//! does not depend on how fast the machine is, though every request goes through the operating system.

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

/// How far the time moves at once.
const STEP: Duration = Duration::from_millis(10);
/// So often everybody else is let run before it is believed that nobody wants to.
const YIELDS: usize = 40;

/// One request as the far side saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) number: usize,
    pub(crate) method: String,
    pub(crate) path: String,
    /// By lower-case names.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
    /// The status of the answer; 0 where there was none.
    pub(crate) said: u16,
}

/// What a far side says.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
    end: End,
}

/// How an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// Before its body is whole.
    Cut,
    /// Before it has begun.
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

    /// Ends in the middle of its body.
    pub(crate) fn cut(mut self) -> Self {
        self.end = End::Cut;
        self
    }

    /// Says nothing, and hangs up.
    pub(crate) fn hangs_up() -> Self {
        Self { end: End::Silent, ..Self::status(200) }
    }
}

/// A far side.
#[derive(Debug, Clone)]
pub(crate) struct Far {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Far {
    /// A far side that answers as `script` says.
    pub(crate) async fn start(
        clock: &ManualClock,
        script: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let far = Self { address, seen: Arc::default() };
        let (seen, clock, script) = (Arc::clone(&far.seen), clock.clone(), Arc::new(script));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, clock, script) = (Arc::clone(&seen), clock.clone(), Arc::clone(&script));
                tokio::spawn(async move { serve(stream, &seen, &clock, &*script).await });
            }
        });
        far
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn authority(&self) -> Authority {
        Authority::new(&self.address.to_string()).expect("an address")
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        hold(&self.seen).clone()
    }

    pub(crate) fn count(&self) -> usize {
        hold(&self.seen).len()
    }
}

/// One request, one answer.
async fn serve(
    mut stream: TcpStream,
    all: &Mutex<Vec<Seen>>,
    clock: &ManualClock,
    script: &(dyn Fn(&Seen) -> Reply + Send + Sync),
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
        let mut all = hold(all);
        let mut seen = Seen { at: clock.now(), number: all.len(), method, path, headers, body, said: 0 };
        let reply = script(&seen);
        seen.said = if reply.end == End::Silent { 0 } else { reply.status };
        all.push(seen);
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
        "HTTP/1.1 {} Said\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{}",
        reply.status, reply.body
    );
    stream.write_all(text.as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

/// Throttles by host on this clock, where nothing is left to chance.
pub(crate) fn on(clock: &ManualClock, builder: KeyedBuilder<Authority>) -> Keyed<Authority> {
    builder.clock(clock.clone()).random(Random::fixed(0.0)).build().expect("within the bounds")
}

/// Does `work`, and lets the time pass whenever nothing is in the air at any of the hosts and somebody sleeps.
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
        let is_in_the_air = hosts.snapshot(0).in_flight > 0;
        if !is_in_the_air && clock.sleeping() > 0 {
            clock.advance(STEP);
        }
    }
}

/// Seconds of a moment, since the beginning.
pub(crate) fn seconds(at: Instant) -> f64 {
    at.since(Instant::ZERO).as_secs_f64()
}

pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}
