//! Callers: connections that acquire and settle, as fast as it goes or at a rate.
//!
//! They write and read HTTP by hand: a client library would take more of the machine than what is measured.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::future::try_join_all;
use tidegate_bench::waits::Waits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::side::Side;

/// Far more than anybody draws.
const PLENTY: &str =
    r#"{"policy": {"limits": ["rpm:1000000000/s:1000000000000", "tpm:1000000000/s:1000000000000"]}}"#;
const SETTLE: &str = r#"{"step": 1, "actual": {"tpm": 750}}"#;

/// A connection that is kept, and what it sends.
pub(crate) struct Connection {
    stream: TcpStream,
    head: String,
    acquire: String,
    buffer: Vec<u8>,
}

/// What callers have done.
pub(crate) struct Load {
    pub(crate) requests: f64,
    pub(crate) took: Duration,
}

/// Writes limits that nobody reaches.
pub(crate) async fn give_plenty(side: &Side) -> Result<()> {
    let mut connection = Connection::open(side, 0).await?;
    connection.request("PUT", "/v1/policy", PLENTY).await?;
    Ok(())
}

/// Opens connections, each for an entity of its own.
pub(crate) async fn connect(side: &Side, count: usize) -> Result<Vec<Connection>> {
    try_join_all((0..count).map(|number| Connection::open(side, number))).await
}

/// Each connection sends its next request as soon as its last is answered.
pub(crate) async fn as_fast_as_it_goes(connections: &mut [Connection], span: Duration) -> Result<Load> {
    let began = Instant::now();
    let rounds = connections.iter_mut().map(async |connection| {
        let mut requests = 0.0;
        while began.elapsed() < span {
            connection.acquire_and_settle().await?;
            requests += 2.0;
        }
        anyhow::Ok(requests)
    });
    let requests = try_join_all(rounds).await?.into_iter().sum();
    Ok(Load { requests, took: began.elapsed() })
}

/// The connections together send so many requests in a second. A request that had to wait for the one before it has waited since
/// it was due.
pub(crate) async fn at_a_rate(
    connections: &mut [Connection],
    per_second: f64,
    span: Duration,
) -> Result<Waits> {
    let began = Instant::now();
    let count = u32::try_from(connections.len())?;
    let every = Duration::from_secs_f64(f64::from(count) / per_second);
    let rounds = connections.iter_mut().zip(0_u32..).map(async |(connection, number)| {
        let mut waits = Vec::new();
        let mut due = began + every * number / count;
        while due < began + span {
            sleep_until(due).await;
            let lease = connection.acquire().await?;
            waits.push(due.elapsed());
            due += every;
            sleep_until(due).await;
            connection.settle(&lease).await?;
            waits.push(due.elapsed());
            due += every;
        }
        anyhow::Ok(waits)
    });
    Ok(Waits::of(try_join_all(rounds).await?.concat()))
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
        let answer = self.request("POST", "/v1/acquire", &body).await?;
        let (_, lease) = answer.split_once(r#""lease":""#).context("a lease")?;
        let (lease, _) = lease.split_once('"').context("the end of its name")?;
        Ok(lease.to_owned())
    }

    async fn settle(&mut self, lease: &str) -> Result<()> {
        self.request("POST", &format!("/v1/leases/{lease}/settle"), SETTLE).await.map(|_| ())
    }

    /// Sends a request, and answers with the body of its answer.
    async fn request(&mut self, method: &str, path: &str, body: &str) -> Result<&str> {
        let text =
            format!("{method} {path} HTTP/1.1\r\n{}content-length: {}\r\n\r\n{body}", self.head, body.len());
        self.stream.write_all(text.as_bytes()).await?;
        self.buffer.clear();
        loop {
            if let Some(begin) = whole(&self.buffer)? {
                let text = str::from_utf8(&self.buffer)?;
                ensure!(text.starts_with("HTTP/1.1 2"), "{method} {path} was answered with {text}");
                return Ok(&text[begin..]);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                bail!("{method} {path} was not answered");
            }
        }
    }
}

/// Where the body begins, if the answer is whole.
fn whole(answer: &[u8]) -> Result<Option<usize>> {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let head = str::from_utf8(&answer[..end])?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim())
    });
    let length: usize = length.context("the length of an answer")?.parse()?;
    Ok((answer.len() >= end + 4 + length).then_some(end + 4))
}
