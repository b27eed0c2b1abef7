//! The server over loopback, against the least that any server would do: `cargo xtask bench server`.
//!
//! Both sides are programs of their own, so that the processor's time of each can be told from that of the callers. Ours is the
//! program `tidegate` as users run it.

mod load;
mod peer;
mod side;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::report::Row;
use tidegate_bench::waits::Waits;
use tidegate_bench::{Case, Options};
use tokio::runtime::{Builder, Runtime};

use crate::load::{Connection, Load};
use crate::side::Side;

const CONNECTIONS: usize = 64;
/// How long both sides are measured at a time.
const ROUND: Duration = Duration::from_secs(1);

const CASES: [Case; 2] = [("http", http), ("ready", ready)];

/// Measures the program's server over loopback.
#[derive(Debug, Parser)]
#[command(name = "server")]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Is the peer, at this address, and nothing else.
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

/// The best of a side's rounds.
struct Best {
    per_second: f64,
    cpu_micros: f64,
}

impl Best {
    const NONE: Self = Self { per_second: 0.0, cpu_micros: f64::INFINITY };

    /// One more round.
    async fn round(&mut self, side: &Side, connections: &mut [Connection]) -> Result<()> {
        let cpu = side.cpu()?;
        let Load { requests, took } = load::as_fast_as_it_goes(connections, ROUND).await?;
        let cpu = side.cpu()?.saturating_sub(cpu);
        self.per_second = self.per_second.max(requests / took.as_secs_f64());
        self.cpu_micros = self.cpu_micros.min(cpu.as_secs_f64() * 1e6 / requests);
        Ok(())
    }
}

fn http(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let (ours, peer) = (Side::tidegate("memory:").await?, Side::peer().await?);
        load::give_plenty(&ours).await?;
        let (mut at_ours, mut at_peer) =
            (load::connect(&ours, CONNECTIONS).await?, load::connect(&peer, CONNECTIONS).await?);
        let (mut best, mut best_peer) = (Best::NONE, Best::NONE);
        for _ in 0..rounds.div_ceil(4) {
            best.round(&ours, &mut at_ours).await?;
            best_peer.round(&peer, &mut at_peer).await?;
        }
        // The same load for both: half of what ours can bear.
        let half = best.per_second / 2.0;
        let (mut waits, mut waits_peer) = (Waits::NONE, Waits::NONE);
        for _ in 0..rounds.div_ceil(4) {
            waits = waits.or(load::at_a_rate(&mut at_ours, half, ROUND).await?);
            waits_peer = waits_peer.or(load::at_a_rate(&mut at_peer, half, ROUND).await?);
        }
        let bare = "an axum handler that parses the same JSON and checks a token";
        let what =
            format!("acquire and settle, each counted, memory store, {CONNECTIONS} connections | {bare}");
        let at_half = format!("answered at {half:.0} requests/s | {bare}");
        Ok(vec![
            Row::at_least("http_requests", (best.per_second, best_peer.per_second), Some(0.6), "1/s", &what),
            Row::new("http_cpu", (best.cpu_micros, best_peer.cpu_micros), Some(2.0), "µs", &what),
            Row::new("http_p50", (waits.p50, waits_peer.p50), None, "µs", &at_half),
            Row::new("http_p99", (waits.p99, waits_peer.p99), None, "µs", &at_half),
        ])
    })
}

/// How long it takes until it answers, on a store in a file that is not there yet.
fn ready(rounds: u32) -> Result<Vec<Row>> {
    callers()?.block_on(async {
        let (mut ours, mut peer) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..rounds.div_ceil(4) {
            let folder = tempfile::tempdir()?;
            let url = format!("sqlite:{}", folder.path().join("limits.db").display());
            ours = ours.min(Side::tidegate(&url).await?.ready_after.as_secs_f64() * 1e3);
            peer = peer.min(Side::peer().await?.ready_after.as_secs_f64() * 1e3);
        }
        let what = "until it answers, a new store in a file made | an axum server with one handler";
        Ok(vec![Row::new("time_to_ready", (ours, peer), None, "ms", what)])
    })
}

/// One thread for all callers: the rest of the machine is the server's.
fn callers() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}
