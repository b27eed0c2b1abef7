//! Callers: calls over a few connections, as Envoy makes them, as fast as it goes or at a rate.
//!
//! They speak HTTP/2 by itself: a client of gRPC would take more of the machine than what is measured.

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
use tidegate_bench::side::Side;
use tidegate_bench::waits::Waits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

/// Calls that are under way at the same time.
pub(crate) const IN_FLIGHT: usize = 64;
/// Envoy has one connection for each of its threads.
const CONNECTIONS: usize = 4;
/// Far more than anybody draws.
const PLENTY: &str =
    r#"{"policy": {"limits": ["rpm:1000000000/s:1000000000000", "tpm:1000000000/s:1000000000000"]}}"#;
/// How an answer begins that says OK: the field of the overall code, and 1.
const OK: [u8; 2] = [0x08, 0x01];

/// All of them.
pub(crate) struct Callers(Vec<Caller>);

struct Caller {
    calls: SendRequest<Bytes>,
    head: Request<()>,
    message: Bytes,
}

/// What callers have done.
pub(crate) struct Load {
    pub(crate) decisions: f64,
    pub(crate) took: Duration,
}

/// Writes limits that nobody reaches.
pub(crate) async fn give_plenty(side: &Side) -> Result<()> {
    let addr = side.said("url")?.strip_prefix("http://").context("an address of HTTP")?;
    let mut stream = TcpStream::connect(addr).await?;
    let head = format!(
        "host: {addr}\r\nauthorization: Bearer {}\r\nconnection: close\r\ncontent-type: application/json",
        side.said("token")?
    );
    let length = PLENTY.len();
    let text = format!("PUT /v1/policy HTTP/1.1\r\n{head}\r\ncontent-length: {length}\r\n\r\n{PLENTY}");
    stream.write_all(text.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    ensure!(answer.starts_with("HTTP/1.1 2"), "limits were answered with {answer}");
    Ok(())
}

impl Callers {
    /// Connects, each caller with an entity of its own.
    pub(crate) async fn connect(side: &Side) -> Result<Self> {
        let mut callers = Vec::with_capacity(IN_FLIGHT);
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect(side.said("envoy")?).await?;
            stream.set_nodelay(true)?;
            let (calls, connection) = h2::client::handshake(stream).await?;
            tokio::spawn(connection);
            for _ in 0..IN_FLIGHT / CONNECTIONS {
                callers.push(Caller::new(side, calls.clone(), callers.len())?);
            }
        }
        Ok(Self(callers))
    }

    /// Each sends its next call as soon as its last is answered.
    pub(crate) async fn as_fast_as_it_goes(&mut self, span: Duration) -> Result<Load> {
        let began = Instant::now();
        let rounds = self.0.iter_mut().map(async |caller| {
            let mut decisions = 0.0;
            while began.elapsed() < span {
                caller.call().await?;
                decisions += 1.0;
            }
            anyhow::Ok(decisions)
        });
        let decisions = try_join_all(rounds).await?.into_iter().sum();
        Ok(Load { decisions, took: began.elapsed() })
    }

    /// Together they make so many calls in a second. One that had to wait for the one before it has waited since it was due.
    pub(crate) async fn at_a_rate(&mut self, per_second: f64, span: Duration) -> Result<Waits> {
        let began = Instant::now();
        let count = u32::try_from(self.0.len())?;
        let every = Duration::from_secs_f64(f64::from(count) / per_second);
        let rounds = self.0.iter_mut().zip(0_u32..).map(async |(caller, number)| {
            let mut waits = Vec::new();
            let mut due = began + every * number / count;
            while due < began + span {
                sleep_until(due).await;
                caller.call().await?;
                waits.push(due.elapsed());
                due += every;
            }
            anyhow::Ok(waits)
        });
        Ok(Waits::of(try_join_all(rounds).await?.concat()))
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
        let head = Request::post(format!("http://{}/{path}", side.said("envoy")?))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {}", side.said("token")?))
            .body(())?;
        Ok(Self { calls, head, message: message.freeze() })
    }

    /// One call, which must be answered with OK.
    async fn call(&mut self) -> Result<()> {
        let mut calls = self.calls.clone().ready().await?;
        let (answer, mut body) = calls.send_request(self.head.clone(), false)?;
        body.send_data(self.message.clone(), true)?;
        let answer = answer.await?;
        ensure!(answer.status() == StatusCode::OK, "it was answered with {answer:?}");
        let mut body = answer.into_body();
        let mut code = None;
        while let Some(data) = body.data().await {
            let data = data?;
            code = code.or_else(|| data.get(5..7).map(|begin| begin == OK));
            body.flow_control().release_capacity(data.len())?;
        }
        let trailers: HeaderMap = body.trailers().await?.unwrap_or_default();
        let status = trailers.get("grpc-status").map(HeaderValue::as_bytes);
        ensure!(status == Some(b"0") && code == Some(true), "it was answered with {code:?} and {trailers:?}");
        Ok(())
    }
}
