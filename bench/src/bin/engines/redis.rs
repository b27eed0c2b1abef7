//! The Redis store, against hand-written fixed windows and against an empty script.

use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, Client};
use anyhow::{Context, Result};
use tidegate::{Across, Limit, Limiter, RedisOptions};
use tidegate_bench::measure::cpu_seconds;
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;

use crate::load::{ROUNDS_MAX, round};

const PLENTY: u64 = 1 << 39;
/// Entities that callers draw from: one shared budget, or many.
const ONE: usize = 1;
const SPREAD: usize = 1_024;
/// Entities that share a pool.
const HOT: usize = 64;
/// No timeout may expire on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A limiter and a connection on one server.
struct Sides {
    limiter: Limiter,
    peer: MultiplexedConnection,
    /// The hash of an empty script.
    empty_script: String,
    runtime: Runtime,
}

pub(crate) fn rows(rounds: u32) -> Result<Vec<Row>> {
    let sides = Sides::open()?;
    let mut best = [0.0_f64; 7];
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        let round = [
            sides.spends(ONE)?,
            sides.windows(ONE)?,
            sides.spends(SPREAD)?,
            sides.windows(SPREAD)?,
            sides.empty_script()?,
            sides.leases(ONE)?,
            sides.leases(SPREAD)?,
        ];
        for (best, rate) in best.iter_mut().zip(round) {
            *best = best.max(rate);
        }
    }
    let [ours, windows, spread, windows_spread, empty, leases, leases_spread] = best;
    let recipe = "spends of two limits by 64 callers on one entity, lease and ledger included, vs INCRBY and EXPIRE for each in one round trip";
    let recipe_spread = "the same over 1,024 entities";
    let script = "on one entity, vs an empty script";
    let script_spread = "over 1,024 entities, vs an empty script";
    let lease_note = "acquire + settle, two round trips, vs INCRBY and EXPIRE for each";
    let lease_spread_note = "the same over 1,024 entities";
    let spend = sides.cost(|sides| sides.spends(SPREAD))?;
    let window = sides.cost(|sides| sides.windows(SPREAD))?;
    let empty_script = sides.cost(Sides::empty_script)?;
    let micros = |name: &str, pair, what: &str| Row::new(name, pair, None, "µs", what);
    let per_call = "acquires per call, vs one";
    Ok(vec![
        Row::at_least("redis_acquire", (ours, windows), Some(0.5), "acquires/s", recipe),
        Row::at_least("redis_script", (ours, empty), Some(0.5), "acquires/s", script),
        Row::at_least(
            "redis_acquire_spread",
            (spread, windows_spread),
            Some(0.5),
            "acquires/s",
            recipe_spread,
        ),
        Row::at_least("redis_script_spread", (spread, empty), Some(0.5), "acquires/s", script_spread),
        Row::at_least("redis_lease", (leases, windows), None, "leases/s", lease_note),
        Row::at_least(
            "redis_lease_spread",
            (leases_spread, windows_spread),
            None,
            "leases/s",
            lease_spread_note,
        ),
        Row::at_least("redis_together", (spend.per_call, 1.0), None, "acquires", per_call),
        micros(
            "redis_script_time",
            (spend.script, empty_script.script),
            "script time per acquire by the server's statistics, vs an empty script",
        ),
        micros(
            "redis_server_cpu",
            (spend.server, window.server),
            "CPU time of the server per acquire, vs INCRBY and EXPIRE for each",
        ),
        micros("redis_client_cpu", (spend.client, window.client), "CPU time of the client"),
    ])
}

/// Spends of 64 entities on one pool.
pub(crate) fn pooled(rounds: u32) -> Result<Vec<Row>> {
    let (rpm, tpm) = (Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY));
    let limits = [rpm, tpm.clone(), tpm.across(Across::Entities)];
    let (pooled, plain) =
        (Sides::with_limits("bench pooled", &limits)?, Sides::with_limits("bench plain", &limits[..2])?);
    let mut best = (0.0_f64, 0.0_f64);
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        best.0 = best.0.max(pooled.spends(HOT)?);
        best.1 = best.1.max(plain.spends(HOT)?);
    }
    let what = "spends by 64 entities on one pool, vs without the pool";
    Ok(vec![Row::at_least("pooled_hot_redis", best, None, "spends/s", what)])
}

/// The cost of one call in microseconds (server scripts, server CPU, client CPU), and the calls per script.
struct Cost {
    script: f64,
    server: f64,
    client: f64,
    per_call: f64,
}

impl Sides {
    fn open() -> Result<Self> {
        Self::with_limits("bench", &[Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)])
    }

    fn with_limits(name: &str, limits: &[Limit]) -> Result<Self> {
        let url = std::env::var("TIDEGATE_TEST_REDIS")
            .context("TIDEGATE_TEST_REDIS is not set: run it with `cargo xtask bench engines`")?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let namespace = format!("{name} {}", std::process::id());
        let store = runtime.block_on(RedisOptions::new(&url).namespace(namespace).timeout(TIMEOUT).open())?;
        let limiter =
            Limiter::builder(store).defaults(limits.iter().cloned()).store_deadline(TIMEOUT).build()?;
        let (peer, empty_script) = runtime.block_on(async {
            let config = AsyncConnectionConfig::new().set_response_timeout(Some(TIMEOUT));
            let client = Client::open(url)?;
            let mut peer = client.get_multiplexed_async_connection_with_config(&config).await?;
            let empty_script =
                ::redis::cmd("SCRIPT").arg("LOAD").arg("return 0").query_async(&mut peer).await?;
            ::redis::cmd("CONFIG").arg("RESETSTAT").exec_async(&mut peer).await?;
            anyhow::Ok((peer, empty_script))
        })?;
        Ok(Self { limiter, peer, empty_script, runtime })
    }

    fn spends(&self, entities: usize) -> Result<f64> {
        let limiter = self.limiter.clone();
        round(&self.runtime, entities, move |name| {
            let limiter = limiter.clone();
            async move {
                limiter.spend((&*name, "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
                Ok(())
            }
        })
    }

    fn leases(&self, entities: usize) -> Result<f64> {
        let limiter = self.limiter.clone();
        round(&self.runtime, entities, move |name| {
            let limiter = limiter.clone();
            async move {
                let mut lease = limiter.try_acquire((&*name, "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
                lease.settle_full().await?;
                Ok(())
            }
        })
    }

    fn windows(&self, entities: usize) -> Result<f64> {
        let peer = self.peer.clone();
        round(&self.runtime, entities, move |name| {
            let mut peer = peer.clone();
            async move {
                let (rpm, tpm) = (format!("window:{name}:rpm"), format!("window:{name}:tpm"));
                let mut calls = ::redis::pipe();
                calls.cmd("INCRBY").arg(&rpm).arg(1).cmd("EXPIRE").arg(&rpm).arg(60).ignore();
                calls.cmd("INCRBY").arg(&tpm).arg(800).cmd("EXPIRE").arg(&tpm).arg(60).ignore();
                calls.query_async::<(i64, i64)>(&mut peer).await?;
                Ok(())
            }
        })
    }

    fn empty_script(&self) -> Result<f64> {
        let (peer, empty_script) = (self.peer.clone(), self.empty_script.clone());
        round(&self.runtime, ONE, move |_| {
            let (mut peer, empty_script) = (peer.clone(), empty_script.clone());
            async move {
                ::redis::cmd("EVALSHA").arg(empty_script).arg(0).query_async::<i64>(&mut peer).await?;
                Ok(())
            }
        })
    }

    /// The cost per call of a round.
    fn cost(&self, round: impl Fn(&Self) -> Result<f64>) -> Result<Cost> {
        let (before, own, start) = (self.server()?, cpu_seconds(), Instant::now());
        let count = round(self)? * start.elapsed().as_secs_f64();
        let (after, own) = (self.server()?, cpu_seconds() - own);
        let of_scripts = |at: usize| after.scripts[at] - before.scripts[at];
        Ok(Cost {
            script: of_scripts(1) / count,
            server: (after.seconds - before.seconds) * 1e6 / count,
            client: own * 1e6 / count,
            per_call: count / of_scripts(0).max(1.0),
        })
    }

    /// The server's statistics.
    fn server(&self) -> Result<ServerStats> {
        let mut peer = self.peer.clone();
        let info: String = self.runtime.block_on(::redis::cmd("INFO").arg("all").query_async(&mut peer))?;
        let number = |text: &str| text.trim().parse::<f64>().unwrap_or(0.0);
        let seconds = info.lines().filter_map(|line| line.split_once(':'));
        let seconds = seconds.filter(|(name, _)| matches!(*name, "used_cpu_user" | "used_cpu_sys"));
        let seconds = seconds.map(|(_, value)| number(value)).sum();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")).unwrap_or_default();
        let field = |name: &str| {
            let value = line.split(',').find_map(|field| field.strip_prefix(name));
            value.map_or(0.0, number)
        };
        Ok(ServerStats { seconds, scripts: [field("calls="), field("usec=")] })
    }
}

struct ServerStats {
    /// CPU seconds.
    seconds: f64,
    /// Calls, and their microseconds.
    scripts: [f64; 2],
}
