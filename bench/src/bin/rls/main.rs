//! Envoy's rate limit service over loopback, against the least that any server of it would do: `cargo xtask bench rls`.
//!
//! Both sides are programs of their own, so that the processor's time of each can be told from that of the callers. Ours is the
//! program `tidegate` as users run it, and it checks a token, which the other does not.

mod load;
mod peer;

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::report::Row;
use tidegate_bench::side::Side;
use tidegate_bench::waits::Waits;
use tidegate_bench::{Case, Options};
use tokio::runtime::Builder;

use crate::load::{Callers, Load};

/// How long both sides are measured at a time.
const ROUND: Duration = Duration::from_secs(1);

/// One rule, whose hits draw from two limits that nobody reaches.
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
    /// Is the peer, at this address, and nothing else.
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

/// The best of a side's rounds.
struct Best {
    per_second: f64,
    cpu_micros: f64,
}

impl Best {
    const NONE: Self = Self { per_second: 0.0, cpu_micros: f64::INFINITY };

    /// One more round.
    async fn round(&mut self, side: &Side, callers: &mut Callers) -> Result<()> {
        let cpu = side.cpu()?;
        let Load { decisions, took } = callers.as_fast_as_it_goes(ROUND).await?;
        let cpu = side.cpu()?.saturating_sub(cpu);
        self.per_second = self.per_second.max(decisions / took.as_secs_f64());
        self.cpu_micros = self.cpu_micros.min(cpu.as_secs_f64() * 1e6 / decisions);
        Ok(())
    }
}

fn rls(rounds: u32) -> Result<Vec<Row>> {
    // One thread for all callers: the rest of the machine is the server's.
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
        load::give_plenty(&ours).await?;
        let (mut at_ours, mut at_peer) = (Callers::connect(&ours).await?, Callers::connect(&peer).await?);
        let (mut best, mut best_peer) = (Best::NONE, Best::NONE);
        for _ in 0..rounds.div_ceil(4) {
            best.round(&ours, &mut at_ours).await?;
            best_peer.round(&peer, &mut at_peer).await?;
        }
        // The same load for both: half of what both can bear.
        let half = best.per_second.min(best_peer.per_second) / 2.0;
        let (mut waits, mut waits_peer) = (Waits::NONE, Waits::NONE);
        for _ in 0..rounds.div_ceil(4) {
            waits = waits.or(at_ours.at_a_rate(half, ROUND).await?);
            waits_peer = waits_peer.or(at_peer.at_a_rate(half, ROUND).await?);
        }
        let bare = "a bare tonic service that decodes the same request and answers OK";
        let in_flight = load::IN_FLIGHT;
        let what = format!("decisions of two limits each, memory store, {in_flight} in flight | {bare}");
        let at_half = format!("answered at {half:.0} decisions/s | {bare}");
        Ok(vec![
            Row::at_least("rls_rate", (best.per_second, best_peer.per_second), Some(0.6), "1/s", &what),
            Row::new("rls_cpu", (best.cpu_micros, best_peer.cpu_micros), Some(1.6), "µs", &what),
            Row::new("rls_p50", (waits.p50, waits_peer.p50), None, "µs", &at_half),
            Row::new("rls_p99", (waits.p99, waits_peer.p99), None, "µs", &at_half),
        ])
    })
}
