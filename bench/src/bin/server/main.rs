//! The server over loopback, against a minimal server of the same API: `cargo xtask bench server`.
//!
//! Both servers are separate processes, so that their CPU time is not mixed with that of the callers. Ours is
//! the program `tidegate` as users run it.

mod load;
mod peer;
mod side;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::latencies::Latencies;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};
use tokio::runtime::{Builder, Runtime};

use crate::load::{Connection, Load};
use crate::side::Side;

const CONNECTIONS: usize = 64;
/// The duration of a round.
const ROUND: Duration = Duration::from_secs(1);

const CASES: [Case; 2] = [("http", http), ("ready", ready)];

/// Measures the program's server over loopback.
#[derive(Debug, Parser)]
#[command(name = "server")]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Runs the peer at this address.
    #[arg(long, hide = true)]
    peer: Option<SocketAddr>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.peer {
        Some(listen) => Builder::new_multi_thread().enable_all().build()?.block_on(peer::serve(listen)),
        None => tidegate_bench::run("server", &CASES, &arguments.options),
    }
}

/// The best round of a side.
struct Best {
    per_second: f64,
    cpu_micros: f64,
}

impl Best {
    const NONE: Self = Self { per_second: 0.0, cpu_micros: f64::INFINITY };

    /// Runs one more round.
    async fn round(&mut self, side: &Side, connections: &mut [Connection]) -> Result<()> {
        let cpu = side.cpu()?;
        let Load { requests, elapsed } = load::run_closed_loop(connections, ROUND).await?;
        let cpu = side.cpu()?.saturating_sub(cpu);
        self.per_second = self.per_second.max(requests / elapsed.as_secs_f64());
        self.cpu_micros = self.cpu_micros.min(cpu.as_secs_f64() * 1e6 / requests);
        Ok(())
    }
}

fn http(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let (ours, peer) = (Side::tidegate("memory:").await?, Side::peer().await?);
        load::write_ample_limits(&ours).await?;
        let (mut at_ours, mut at_peer) =
            (load::connect(&ours, CONNECTIONS).await?, load::connect(&peer, CONNECTIONS).await?);
        let (mut best, mut best_peer) = (Best::NONE, Best::NONE);
        for _ in 0..rounds.div_ceil(4) {
            best.round(&ours, &mut at_ours).await?;
            best_peer.round(&peer, &mut at_peer).await?;
        }
        // The same load for both: half of what ours can sustain.
        let half = best.per_second / 2.0;
        let (mut latencies, mut peer_latencies) = (Latencies::NONE, Latencies::NONE);
        for _ in 0..rounds.div_ceil(4) {
            latencies = latencies.or(load::run_at_rate(&mut at_ours, half, ROUND).await?);
            peer_latencies = peer_latencies.or(load::run_at_rate(&mut at_peer, half, ROUND).await?);
        }
        let bare = "an axum handler that parses the same JSON and checks a token";
        let what =
            format!("acquire and settle, each counted, memory store, {CONNECTIONS} connections | {bare}");
        let at_half = format!("latency at {half:.0} requests/s | {bare}");
        Ok(vec![
            Row::at_least("http_requests", (best.per_second, best_peer.per_second), Some(0.6), "1/s", &what),
            Row::new("http_cpu", (best.cpu_micros, best_peer.cpu_micros), Some(2.0), "µs", &what),
            Row::new("http_p50", (latencies.p50, peer_latencies.p50), None, "µs", &at_half),
            Row::new("http_p99", (latencies.p99, peer_latencies.p99), None, "µs", &at_half),
        ])
    })
}

/// The time until the server responds, with a store in a new file.
fn ready(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let (mut ours, mut peer) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..rounds.div_ceil(4) {
            let folder = tempfile::tempdir()?;
            let url = format!("sqlite:{}", folder.path().join("limits.db").display());
            ours = ours.min(Side::tidegate(&url).await?.ready_after.as_secs_f64() * 1e3);
            peer = peer.min(Side::peer().await?.ready_after.as_secs_f64() * 1e3);
        }
        let what =
            "from start to the first response, with a new store file | an axum server with one handler";
        Ok(vec![Row::new("time_to_ready", (ours, peer), None, "ms", what)])
    })
}

/// One thread for all callers leaves the other cores to the server.
fn callers() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}
