//! The load: gRPC calls over a few connections, as Envoy makes them, closed-loop or at a constant rate.
//!
//! The callers speak HTTP/2 directly: a gRPC client would use more CPU than the server under test.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use futures_util::future::try_join_all;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};
use tidegate_bench::latencies::Latencies;
use tidegate_bench::side::Side;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

/// Concurrent calls.
pub(crate) const IN_FLIGHT: usize = 64;
/// Envoy opens one connection per worker thread.
const CONNECTIONS: usize = 4;
/// Far more than the callers draw.
const PLENTY: &str =
    r#"{"policy": {"limits": ["rpm:1000000000/s:1000000000000", "tpm:1000000000/s:1000000000000"]}}"#;
/// The first bytes of an OK response: the field of the overall code, and 1.
const OK: [u8; 2] = [0x08, 0x01];

/// All callers.
pub(crate) struct Callers(Vec<Caller>);

struct Caller {
    calls: SendRequest<Bytes>,
    head: Request<()>,
    message: Bytes,
}

/// The result of one round.
pub(crate) struct Load {
    pub(crate) decisions: f64,
    pub(crate) elapsed: Duration,
}

/// Writes limits that are never reached.
pub(crate) async fn write_ample_limits(side: &Side) -> Result<()> {
    let addr = side.ready_field("url")?.strip_prefix("http://").context("an HTTP address")?;
    let mut stream = TcpStream::connect(addr).await?;
    let head = format!(
        "host: {addr}\r\nauthorization: Bearer {}\r\nconnection: close\r\ncontent-type: application/json",
        side.ready_field("token")?
    );
    let length = PLENTY.len();
    let text = format!("PUT /v1/policy HTTP/1.1\r\n{head}\r\ncontent-length: {length}\r\n\r\n{PLENTY}");
    stream.write_all(text.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    ensure!(response.starts_with("HTTP/1.1 2"), "writing limits returned {response}");
    Ok(())
}

impl Callers {
    /// Connects, with an entity for each caller.
    pub(crate) async fn connect(side: &Side) -> Result<Self> {
        let mut callers = Vec::with_capacity(IN_FLIGHT);
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect(side.ready_field("envoy")?).await?;
            stream.set_nodelay(true)?;
            let (calls, connection) = h2::client::handshake(stream).await?;
            tokio::spawn(connection);
            for _ in 0..IN_FLIGHT / CONNECTIONS {
                callers.push(Caller::new(side, calls.clone(), callers.len())?);
            }
        }
        Ok(Self(callers))
    }

    /// Closed loop: each caller sends its next call after the last response.
    pub(crate) async fn run_closed_loop(&mut self, span: Duration) -> Result<Load> {
        let start = Instant::now();
        let rounds = self.0.iter_mut().map(async |caller| {
            let mut decisions = 0.0;
            while start.elapsed() < span {
                caller.call().await?;
                decisions += 1.0;
            }
            anyhow::Ok(decisions)
        });
        let decisions = try_join_all(rounds).await?.into_iter().sum();
        Ok(Load { decisions, elapsed: start.elapsed() })
    }

    /// Open loop: all callers together send at a constant rate. A latency counts from when the call was due
    /// (no coordinated omission).
    pub(crate) async fn run_at_rate(&mut self, per_second: f64, span: Duration) -> Result<Latencies> {
        let start = Instant::now();
        let count = u32::try_from(self.0.len())?;
        let every = Duration::from_secs_f64(f64::from(count) / per_second);
        let rounds = self.0.iter_mut().zip(0_u32..).map(async |(caller, number)| {
            let mut latencies = Vec::new();
            let mut due = start + every * number / count;
            while due < start + span {
                sleep_until(due).await;
                caller.call().await?;
                latencies.push(due.elapsed());
                due += every;
            }
            anyhow::Ok(latencies)
        });
        Ok(Latencies::of(try_join_all(rounds).await?.concat()))
    }
}

impl Caller {
    fn new(side: &Side, calls: SendRequest<Bytes>, number: usize) -> Result<Self> {
        let entry = Entry { key: "user".to_owned(), value: format!("user-{number}") };
        let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        let request =
            RateLimitRequest { domain: "web".to_owned(), descriptors: vec![descriptor], hits_addend: 0 };
        let mut message = BytesMut::new();
        message.put_u8(0);
        message.put_u32(u32::try_from(request.encoded_len())?);
        request.encode(&mut message)?;
        let path = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
        let head = Request::post(format!("http://{}/{path}", side.ready_field("envoy")?))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {}", side.ready_field("token")?))
            .body(())?;
        Ok(Self { calls, head, message: message.freeze() })
    }

    /// One call, which must return OK.
    async fn call(&mut self) -> Result<()> {
        let mut calls = self.calls.clone().ready().await?;
        let (response, mut body) = calls.send_request(self.head.clone(), false)?;
        body.send_data(self.message.clone(), true)?;
        let response = response.await?;
        ensure!(response.status() == StatusCode::OK, "the response is {response:?}");
        let mut body = response.into_body();
        let mut code = None;
        while let Some(data) = body.data().await {
            let data = data?;
            code = code.or_else(|| data.get(5..7).map(|begin| begin == OK));
            body.flow_control().release_capacity(data.len())?;
        }
        let trailers: HeaderMap = body.trailers().await?.unwrap_or_default();
        let status = trailers.get("grpc-status").map(HeaderValue::as_bytes);
        ensure!(
            status == Some(b"0") && code == Some(true),
            "the response has code {code:?} and trailers {trailers:?}"
        );
        Ok(())
    }
}
