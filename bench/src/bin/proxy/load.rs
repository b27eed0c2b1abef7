//! The load: connections that repeat one request, closed-loop or at a constant rate, and one that reads a large
//! body.
//!
//! They write and read HTTP by hand: a client library would use more CPU than the proxies under test.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::future::try_join_all;
use tidegate_bench::latencies::Latencies;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

/// Parallel callers.
pub(crate) const CONNECTIONS: usize = 64;

/// Where requests go, and as whom.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// The host and port.
    pub(crate) addr: String,
    /// The path of a call.
    pub(crate) path: String,
    /// The key or token of the callers.
    pub(crate) key: String,
}

/// A keep-alive connection, and the request that it repeats.
pub(crate) struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
}

impl Target {
    /// Sends one request over a connection of its own. Returns the response.
    pub(crate) async fn send(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let mut stream = TcpStream::connect(&self.addr).await?;
        let request = self.request(method, path, body);
        stream.write_all(&request).await?;
        let mut connection = Connection { stream, request, buffer: Vec::new() };
        let end = connection.response().await?;
        Ok(String::from_utf8(connection.buffer[..end].to_vec())?)
    }

    /// Opens connections that repeat this body.
    pub(crate) async fn connect(&self, body: &str) -> Result<Vec<Connection>> {
        try_join_all((0..CONNECTIONS).map(async |_| {
            let stream = TcpStream::connect(&self.addr).await?;
            stream.set_nodelay(true)?;
            let request = self.request("POST", &self.path, body);
            anyhow::Ok(Connection { stream, request, buffer: Vec::with_capacity(16_384) })
        }))
        .await
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Vec<u8> {
        let Self { addr, key, .. } = self;
        let length = body.len();
        format!(
            "{method} {path} HTTP/1.1\r\nhost: {addr}\r\nauthorization: Bearer {key}\r\n\
             content-type: application/json\r\nuser-agent: bench\r\naccept: */*\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }

    /// Reads one chunked body of this path to its end. Returns its bytes per second.
    pub(crate) async fn stream(&self, path: &str) -> Result<f64> {
        let mut stream = TcpStream::connect(&self.addr).await?;
        stream.write_all(&self.request("GET", path, "")).await?;
        let mut buffer = vec![0; 256 * 1_024];
        let (start, mut bytes, mut last) = (Instant::now(), 0_u64, Vec::new());
        while !last.ends_with(b"\r\n0\r\n\r\n") {
            let count = stream.read(&mut buffer).await?;
            ensure!(count > 0, "the body of {path} broke off after {bytes} bytes");
            ensure!(
                bytes > 0 || buffer.starts_with(b"HTTP/1.1 200"),
                "{}",
                String::from_utf8_lossy(&buffer[..count])
            );
            bytes += count as u64;
            // The end may come in two pieces.
            last.extend_from_slice(&buffer[count.saturating_sub(8)..count]);
            last.drain(..last.len().saturating_sub(8));
        }
        #[expect(clippy::cast_precision_loss, reason = "a size of a benchmark is far below 2^53")]
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }
}

/// Closed loop: each connection sends its next request after the last response. Returns calls per second.
pub(crate) async fn run_closed_loop(connections: &mut [Connection], span: Duration) -> Result<f64> {
    let start = Instant::now();
    let rounds = connections.iter_mut().map(async |connection| {
        let mut calls = 0.0;
        while start.elapsed() < span {
            connection.call().await?;
            calls += 1.0;
        }
        anyhow::Ok(calls)
    });
    let calls: f64 = try_join_all(rounds).await?.into_iter().sum();
    Ok(calls / start.elapsed().as_secs_f64())
}

/// Open loop: all connections together send at a constant rate. A latency counts from when the request was due
/// (no coordinated omission).
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
            connection.call().await?;
            latencies.push(due.elapsed());
            due += every;
        }
        anyhow::Ok(latencies)
    });
    Ok(Latencies::of(try_join_all(rounds).await?.concat()))
}

impl Connection {
    /// One call, which must succeed.
    async fn call(&mut self) -> Result<()> {
        self.stream.write_all(&self.request).await?;
        self.response().await?;
        Ok(())
    }

    /// Reads a response to its end. Returns its length in the buffer.
    async fn response(&mut self) -> Result<usize> {
        self.buffer.clear();
        loop {
            if let Some(end) = end_of_response(&self.buffer)? {
                let is_success = self.buffer.starts_with(b"HTTP/1.1 2");
                ensure!(is_success, "the response is {}", String::from_utf8_lossy(&self.buffer));
                return Ok(end);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("no response to {}", String::from_utf8_lossy(&self.request));
            }
        }
    }
}

/// Where the response ends, if it is complete.
fn end_of_response(response: &[u8]) -> Result<Option<usize>> {
    let Some(end) = response.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let head = str::from_utf8(&response[..end])?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim())
    });
    let length: usize = length.with_context(|| format!("no content-length in {head}"))?.parse()?;
    let all = end + 4 + length;
    Ok((response.len() >= all).then_some(all))
}
