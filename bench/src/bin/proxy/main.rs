//! The proxy over loopback, against nginx and `LiteLLM`'s proxy: `cargo xtask bench proxy`.
//!
//! Each proxy is a process with one worker, and so is each upstream. Ours is the program `tidegate` as users run
//! it. It does more than nginx: each call draws and settles its tenant's limits in the memory store, and waits
//! for a throttle that learns what the upstream accepts.

mod load;
mod peers;
mod upstream;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use tidegate_bench::latencies::Latencies;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};
use tokio::runtime::{Builder, Runtime};

use crate::load::{CONNECTIONS, Connection, Target, run_at_rate, run_closed_loop};
use crate::peers::{Ours, Peer, addr, mock, upstream};

/// The duration of a round.
const ROUND: Duration = Duration::from_secs(1);
/// Rounds are long: few are enough.
const ROUNDS_MAX: u32 = 5;
/// Bytes of the streamed body.
const STREAMED: usize = 512 << 20;
/// The hidden quota of the mock, per second, and how long calls are counted.
const QUOTA: (f64, &str) = (200.0, "requests:200/s");
const LEARN_TIME: Duration = Duration::from_secs(10);
const COUNT_TIME: Duration = Duration::from_secs(20);
/// A small body, as most calls have.
const BODY: &str =
    r#"{"model": "gpt-4", "messages": [{"role": "user", "content": "how is the tide today?"}]}"#;
/// The path of a call, without the name of an upstream.
const PATH: &str = "/v1/chat/completions";

const CASES: [Case; 4] = [
    ("proxy_rate", rate),
    ("proxy_stream", stream),
    ("proxy_litellm_p50", litellm),
    ("proxy_hidden_quota", hidden_quota),
];

/// Measures the program's proxy over loopback.
#[derive(Debug, Parser)]
#[command(name = "proxy")]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Runs the upstream at this address.
    #[arg(long, hide = true)]
    upstream: Option<SocketAddr>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.upstream {
        Some(listen) => callers()?.block_on(upstream::serve(listen)),
        None => tidegate_bench::run("proxy", &CASES, &arguments.options),
    }
}

/// One side, and its best round.
struct Side {
    target: Target,
    per_second: f64,
    latencies: Latencies,
}

impl Side {
    const fn new(target: Target) -> Self {
        Self { target, per_second: 0.0, latencies: Latencies::NONE }
    }

    /// Some peers close connections that are idle between rounds.
    async fn connect(&self) -> Result<Vec<Connection>> {
        self.target.connect(BODY).await
    }

    /// Runs one more round as fast as the side responds. Returns the number of its calls.
    async fn round(&mut self) -> Result<f64> {
        let per_second = run_closed_loop(&mut self.connect().await?, ROUND).await?;
        self.per_second = self.per_second.max(per_second);
        Ok(per_second * ROUND.as_secs_f64())
    }

    /// Runs one more round at this rate.
    async fn round_at(&mut self, per_second: f64) -> Result<()> {
        let latencies = run_at_rate(&mut self.connect().await?, per_second, ROUND).await?;
        self.latencies = self.latencies.or(latencies);
        Ok(())
    }
}

/// Small calls, in front of an upstream that responds at once.
fn rate(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let upstream = upstream().await?;
        let upstream = addr(&upstream, "url")?;
        let ours = Ours::with_tenants("generic", &upstream).await?;
        let plain = Ours::plain("generic", &upstream).await?;
        let nginx = Peer::nginx(&upstream).await?;
        let mut at_ours = Side::new(ours.target(PATH)?);
        let mut at_plain = Side::new(plain.target(PATH)?);
        let mut at_nginx = Side::new(nginx.target(PATH));
        let (mut cpu, mut cpu_plain, mut cpu_nginx) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        let micros =
            |from: Duration, to: Duration, calls: f64| to.saturating_sub(from).as_secs_f64() * 1e6 / calls;
        for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
            let from = ours.side.cpu()?;
            let calls = at_ours.round().await?;
            cpu = cpu.min(micros(from, ours.side.cpu()?, calls));
            let from = nginx.cpu()?;
            let calls = at_nginx.round().await?;
            cpu_nginx = cpu_nginx.min(micros(from, nginx.cpu()?, calls));
            let from = plain.side.cpu()?;
            let calls = at_plain.round().await?;
            cpu_plain = cpu_plain.min(micros(from, plain.side.cpu()?, calls));
        }
        let what = format!(
            "small calls of a tenant, generic profile, memory store, {CONNECTIONS} connections | nginx"
        );
        let what_plain = "the same without tenants | nginx";
        let pair = |ours: &Side| (ours.per_second, at_nginx.per_second);
        Ok(vec![
            Row::at_least("proxy_rate", pair(&at_ours), Some(0.4), "1/s", &what),
            Row::at_least("proxy_rate_without_tenants", pair(&at_plain), None, "1/s", what_plain),
            Row::new("proxy_cpu", (cpu, cpu_nginx), None, "µs", "CPU time of a call | nginx"),
            Row::new("proxy_cpu_without_tenants", (cpu_plain, cpu_nginx), None, "µs", what_plain),
        ])
    })
}

/// One large body without a length.
fn stream(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let upstream = upstream().await?;
        let upstream = addr(&upstream, "url")?;
        let (ours, nginx) = (Ours::plain("generic", &upstream).await?, Peer::nginx(&upstream).await?);
        let path = format!("/bytes/{STREAMED}");
        let (at_ours, at_nginx) = (ours.target(&path)?, nginx.target(&path));
        let mut best = (0.0_f64, 0.0_f64);
        for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
            best.0 = best.0.max(at_ours.stream(&at_ours.path).await? / 1e6);
            best.1 = best.1.max(at_nginx.stream(&at_nginx.path).await? / 1e6);
        }
        let what = format!("one chunked body of {} MiB | nginx", STREAMED >> 20);
        Ok(vec![Row::at_least("proxy_stream", best, Some(0.7), "MB/s", &what)])
    })
}

/// Small calls in front of the mock, and latencies at half of what each side can sustain.
fn litellm(rounds: u32) -> Result<Vec<Row>> {
    let python = std::env::var("TIDEGATE_BENCH_LITELLM")
        .context("TIDEGATE_BENCH_LITELLM is not set: run it with `cargo xtask bench proxy`")?;
    callers()?.block_on(async {
        let mock = mock(&[]).await?;
        let mock = addr(&mock, "url")?;
        let litellm = Peer::litellm(&python, &mock).await?;
        let (ours, nginx) = (Ours::plain("openai", &mock).await?, Peer::nginx(&mock).await?);
        let direct = Target { addr: mock, path: PATH.to_owned(), key: "sk-bench".to_owned() };
        let mut at_mock = Side::new(direct);
        let names = ["proxy_p50", "nginx_p50", "litellm_p50"];
        let mut sides =
            [Side::new(ours.target(PATH)?), Side::new(nginx.target(PATH)), Side::new(litellm.target(PATH))];
        let rounds = rounds.clamp(1, ROUNDS_MAX);
        for _ in 0..rounds {
            for side in &mut sides {
                side.round().await?;
            }
        }
        let what = format!(
            "small calls, OpenAI profile, {CONNECTIONS} connections, tidegate mock | LiteLLM's proxy"
        );
        let pair = (sides[0].per_second, sides[2].per_second);
        let mut rows = vec![Row::at_least("proxy_litellm", pair, Some(10.0), "1/s", &what)];
        for (name, side) in names.into_iter().zip(&mut sides) {
            let half = side.per_second / 2.0;
            at_mock.latencies = Latencies::NONE;
            for _ in 0..rounds {
                side.round_at(half).await?;
                at_mock.round_at(half).await?;
            }
            let pair = (side.latencies.p50, at_mock.latencies.p50);
            let what =
                format!("latency at {half:.0} calls/s, half of what it sustains | the mock asked directly");
            rows.push(Row::new(name, pair, None, "µs", &what));
        }
        Ok(rows)
    })
}

/// Calls that succeed in front of a mock that refuses more than its quota, and says nothing of it.
fn hidden_quota(_: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let (quota, limit) = QUOTA;
        let mock = mock(&["--hidden", "--limit", limit]).await?;
        let mock = addr(&mock, "url")?;
        let ours = Ours::plain("openai", &mock).await?;
        // A call that fails ends the benchmark.
        let mut connections = ours.target(PATH)?.connect(BODY).await?;
        run_closed_loop(&mut connections, LEARN_TIME).await?;
        let per_second = run_closed_loop(&mut connections, COUNT_TIME).await?;
        let what = format!(
            "calls that succeed, {CONNECTIONS} connections, after the first {}s | the hidden quota of the mock",
            LEARN_TIME.as_secs()
        );
        Ok(vec![Row::at_least("proxy_hidden_quota", (per_second, quota), Some(0.95), "1/s", &what)])
    })
}

/// One thread for all callers leaves the other cores to the proxies.
fn callers() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}
