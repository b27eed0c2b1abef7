//! The load: connections that acquire and settle, closed-loop or at a constant rate.
//!
//! They write and read HTTP by hand: a client library would use more CPU than the server under test.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::future::try_join_all;
use tidegate_bench::latencies::Latencies;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::side::Side;

/// Far more than the callers draw.
const PLENTY: &str =
    r#"{"policy": {"limits": ["rpm:1000000000/s:1000000000000", "tpm:1000000000/s:1000000000000"]}}"#;
const SETTLE: &str = r#"{"step": 1, "actual": {"tpm": 750}}"#;

/// A keep-alive connection, and the request that it sends.
pub(crate) struct Connection {
    stream: TcpStream,
    head: String,
    acquire: String,
    buffer: Vec<u8>,
}

/// The result of one round.
pub(crate) struct Load {
    pub(crate) requests: f64,
    pub(crate) elapsed: Duration,
}

/// Writes limits that are never reached.
pub(crate) async fn write_ample_limits(side: &Side) -> Result<()> {
    let mut connection = Connection::open(side, 0).await?;
    connection.request("PUT", "/v1/policy", PLENTY).await?;
    Ok(())
}

/// Opens connections, each with its own entity.
pub(crate) async fn connect(side: &Side, count: usize) -> Result<Vec<Connection>> {
    try_join_all((0..count).map(|number| Connection::open(side, number))).await
}

/// Closed loop: each connection sends its next request after the last response.
pub(crate) async fn run_closed_loop(connections: &mut [Connection], span: Duration) -> Result<Load> {
    let start = Instant::now();
    let rounds = connections.iter_mut().map(async |connection| {
        let mut requests = 0.0;
        while start.elapsed() < span {
            connection.acquire_and_settle().await?;
            requests += 2.0;
        }
        anyhow::Ok(requests)
    });
    let requests = try_join_all(rounds).await?.into_iter().sum();
    Ok(Load { requests, elapsed: start.elapsed() })
}

/// Open loop: all connections together send at a constant rate. A latency counts from when the request was
/// due (no coordinated omission).
pub(crate) async fn run_at_rate(
    connections: &mut [Connection],
    per_second: f64,
    span: Duration,
) -> Result<Latencies> {
    let start = Instant::now();
    let count = u32::try_from(connections.len())?;
    let every = Duration::from_secs_f64(f64::from(count) / per_second);
    let rounds = connections.iter_mut().zip(0_u32..).map(async |(connection, number)| {
        let mut latencies = Vec::new();
        let mut due = start + every * number / count;
        while due < start + span {
            sleep_until(due).await;
            let lease = connection.acquire().await?;
            latencies.push(due.elapsed());
            due += every;
            sleep_until(due).await;
            connection.settle(&lease).await?;
            latencies.push(due.elapsed());
            due += every;
        }
        anyhow::Ok(latencies)
    });
    Ok(Latencies::of(try_join_all(rounds).await?.concat()))
}

impl Connection {
    async fn open(side: &Side, number: usize) -> Result<Self> {
        let stream = TcpStream::connect(side.addr).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "host: {}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n",
            side.addr, side.token
        );
        let acquire = format!(
            r#"{{"entity": "entity-{number}", "resource": "gpt-4", "cost": {{"rpm": 1, "tpm": 800}}}}"#
        );
        Ok(Self { stream, head, acquire, buffer: Vec::with_capacity(4_096) })
    }

    async fn acquire_and_settle(&mut self) -> Result<()> {
        let lease = self.acquire().await?;
        self.settle(&lease).await
    }

    async fn acquire(&mut self) -> Result<String> {
        let body = self.acquire.clone();
        let response = self.request("POST", "/v1/acquire", &body).await?;
        let (_, lease) = response.split_once(r#""lease":""#).context("a lease")?;
        let (lease, _) = lease.split_once('"').context("the end of the lease id")?;
        Ok(lease.to_owned())
    }

    async fn settle(&mut self, lease: &str) -> Result<()> {
        self.request("POST", &format!("/v1/leases/{lease}/settle"), SETTLE).await.map(|_| ())
    }

    /// Sends a request and returns the response body.
    async fn request(&mut self, method: &str, path: &str, body: &str) -> Result<&str> {
        let text =
            format!("{method} {path} HTTP/1.1\r\n{}content-length: {}\r\n\r\n{body}", self.head, body.len());
        self.stream.write_all(text.as_bytes()).await?;
        self.buffer.clear();
        loop {
            if let Some(begin) = body_offset(&self.buffer)? {
                let text = str::from_utf8(&self.buffer)?;
                ensure!(text.starts_with("HTTP/1.1 2"), "{method} {path} returned {text}");
                return Ok(&text[begin..]);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("{method} {path} got no response");
            }
        }
    }
}

/// The offset of the body, if the response is complete.
fn body_offset(response: &[u8]) -> Result<Option<usize>> {
    let Some(end) = response.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let head = str::from_utf8(&response[..end])?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim())
    });
    let length: usize = length.context("a content-length header")?.parse()?;
    Ok((response.len() >= end + 4 + length).then_some(end + 4))
}
