//! Envoy's rate limit service over loopback, against a minimal server of the same protocol: `cargo xtask
//! bench rls`.
//!
//! Both servers are separate processes, so that their CPU time is not mixed with that of the callers. Ours is
//! the program `tidegate` as users run it, and it checks a token, which the peer does not.

mod load;
mod peer;

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::latencies::Latencies;
use tidegate_bench::report::Row;
use tidegate_bench::side::Side;
use tidegate_bench::{Case, Options};
use tokio::runtime::Builder;

use crate::load::{Callers, Load};

/// The duration of a round.
const ROUND: Duration = Duration::from_secs(1);

/// One rule, whose hits draw from two limits that are never reached.
const RULES: &str = r#"
[envoy]
listen = "127.0.0.1:0"
[[envoy.rules]]
match = [{ key = "user", value = "*" }]
entity = "{user}"
resource = "web"
cost = { rpm = 1, tpm = 800 }
"#;

const CASES: [Case; 1] = [("rls", rls)];

/// Measures Envoy's rate limit service over loopback.
#[derive(Debug, Parser)]
#[command(name = "rls")]
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
        None => tidegate_bench::run("rls", &CASES, &arguments.options),
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
    async fn round(&mut self, side: &Side, callers: &mut Callers) -> Result<()> {
        let cpu = side.cpu()?;
        let Load { decisions, elapsed } = callers.run_closed_loop(ROUND).await?;
        let cpu = side.cpu()?.saturating_sub(cpu);
        self.per_second = self.per_second.max(decisions / elapsed.as_secs_f64());
        self.cpu_micros = self.cpu_micros.min(cpu.as_secs_f64() * 1e6 / decisions);
        Ok(())
    }
}

fn rls(rounds: u32) -> Result<Vec<Row>> {
    // One thread for all callers leaves the other cores to the server.
    Builder::new_current_thread().enable_all().build()?.block_on(async {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("tidegate.toml");
        fs::write(&config, RULES)?;
        let config = config.display().to_string();
        let program = env::current_exe()?.with_file_name("tidegate");
        let arguments =
            ["serve", "--json", "--store", "memory:", "--listen", "127.0.0.1:0", "--config", &config];
        let ours =
            Side::start(program.as_os_str(), &[&arguments[..], &["--log-level", "warn"]].concat()).await?;
        let peer = Side::start(env::current_exe()?.as_os_str(), &["--peer", "127.0.0.1:0"]).await?;
        load::write_ample_limits(&ours).await?;
        let (mut at_ours, mut at_peer) = (Callers::connect(&ours).await?, Callers::connect(&peer).await?);
        let (mut best, mut best_peer) = (Best::NONE, Best::NONE);
        for _ in 0..rounds.div_ceil(4) {
            best.round(&ours, &mut at_ours).await?;
            best_peer.round(&peer, &mut at_peer).await?;
        }
        // The same load for both: half of what both can sustain.
        let half = best.per_second.min(best_peer.per_second) / 2.0;
        let (mut latencies, mut peer_latencies) = (Latencies::NONE, Latencies::NONE);
        for _ in 0..rounds.div_ceil(4) {
            latencies = latencies.or(at_ours.run_at_rate(half, ROUND).await?);
            peer_latencies = peer_latencies.or(at_peer.run_at_rate(half, ROUND).await?);
        }
        let bare = "a bare tonic service that decodes the same request and answers OK";
        let in_flight = load::IN_FLIGHT;
        let what = format!("decisions on two limits each, memory store, {in_flight} concurrent | {bare}");
        let at_half = format!("latency at {half:.0} decisions/s | {bare}");
        Ok(vec![
            Row::at_least("rls_rate", (best.per_second, best_peer.per_second), Some(0.6), "1/s", &what),
            Row::new("rls_cpu", (best.cpu_micros, best_peer.cpu_micros), Some(1.6), "µs", &what),
            Row::new("rls_p50", (latencies.p50, peer_latencies.p50), None, "µs", &at_half),
            Row::new("rls_p99", (latencies.p99, peer_latencies.p99), None, "µs", &at_half),
        ])
    })
}
