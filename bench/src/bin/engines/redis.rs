//! The store on Redis, against the fixed windows that one would write by hand, and against a script that does nothing.

use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, Client};
use anyhow::{Context, Result};
use tidegate::{Limit, Limiter, RedisOptions};
use tidegate_bench::measure::own_seconds;
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;

use crate::load::{ROUNDS_MAX, round};

const PLENTY: u64 = 1 << 39;
/// Entities that callers draw from: one budget that all share, or one that few do.
const ONE: usize = 1;
const SPREAD: usize = 1_024;
/// Nobody is to be away on a machine that has much to do.
const PATIENCE: Duration = Duration::from_secs(30);

/// A limiter and a connection on one server.
struct Sides {
    limiter: Limiter,
    peer: MultiplexedConnection,
    /// What the server knows a script by that does nothing.
    nothing: String,
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
            sides.nothing()?,
            sides.leases(ONE)?,
            sides.leases(SPREAD)?,
        ];
        for (best, rate) in best.iter_mut().zip(round) {
            *best = best.max(rate);
        }
    }
    let [ours, windows, spread, windows_spread, empty, leases, leases_spread] = best;
    let recipe = "64 callers that spend of two limits of one entity, lease and ledger included, vs INCRBY and EXPIRE for each, in one round trip";
    let recipe_spread = "the same, of 1,024 entities";
    let script = "of one entity, vs a script that does nothing";
    let script_spread = "of 1,024 entities, vs a script that does nothing";
    let told = "acquired and settled, two round trips, vs INCRBY and EXPIRE for each";
    let told_spread = "the same, of 1,024 entities";
    let spend = sides.cost(|sides| sides.spends(SPREAD))?;
    let window = sides.cost(|sides| sides.windows(SPREAD))?;
    let nothing = sides.cost(Sides::nothing)?;
    let micros = |name: &str, pair, what: &str| Row::new(name, pair, None, "µs", what);
    let together = "acquires in one call, against one";
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
        Row::at_least("redis_lease", (leases, windows), None, "leases/s", told),
        Row::at_least("redis_lease_spread", (leases_spread, windows_spread), None, "leases/s", told_spread),
        Row::at_least("redis_together", (spend.together, 1.0), None, "acquires", together),
        micros(
            "redis_script_time",
            (spend.script, nothing.script),
            "of the server for each acquire, by its own count of scripts, vs a script that does nothing",
        ),
        micros(
            "redis_server_cpu",
            (spend.server, window.server),
            "of the server's processor for each acquire, vs INCRBY and EXPIRE for each",
        ),
        micros("redis_client_cpu", (spend.client, window.client), "the same of this process"),
    ])
}

/// What a call took, in microseconds of the server's scripts, of its processor and of ours; and how many went in a script.
struct Cost {
    script: f64,
    server: f64,
    client: f64,
    together: f64,
}

impl Sides {
    fn open() -> Result<Self> {
        let url = std::env::var("TIDEGATE_TEST_REDIS")
            .context("TIDEGATE_TEST_REDIS is not set: run this by `cargo xtask bench engines`")?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let namespace = format!("bench {}", std::process::id());
        let store =
            runtime.block_on(RedisOptions::new(&url).namespace(namespace).timeout(PATIENCE).open())?;
        let limits = [Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)];
        let limiter = Limiter::builder(store).defaults(limits).store_deadline(PATIENCE).build()?;
        let (peer, nothing) = runtime.block_on(async {
            let config = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
            let client = Client::open(url)?;
            let mut peer = client.get_multiplexed_async_connection_with_config(&config).await?;
            let nothing = ::redis::cmd("SCRIPT").arg("LOAD").arg("return 0").query_async(&mut peer).await?;
            ::redis::cmd("CONFIG").arg("RESETSTAT").exec_async(&mut peer).await?;
            anyhow::Ok((peer, nothing))
        })?;
        Ok(Self { limiter, peer, nothing, runtime })
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
                let mut lease = limiter.acquire((&*name, "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
                lease.settle_as_held().await?;
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

    fn nothing(&self) -> Result<f64> {
        let (peer, nothing) = (self.peer.clone(), self.nothing.clone());
        round(&self.runtime, ONE, move |_| {
            let (mut peer, nothing) = (peer.clone(), nothing.clone());
            async move {
                ::redis::cmd("EVALSHA").arg(nothing).arg(0).query_async::<i64>(&mut peer).await?;
                Ok(())
            }
        })
    }

    /// What each of a round by itself costs.
    fn cost(&self, round: impl Fn(&Self) -> Result<f64>) -> Result<Cost> {
        let (before, own, start) = (self.server()?, own_seconds(), Instant::now());
        let count = round(self)? * start.elapsed().as_secs_f64();
        let (after, own) = (self.server()?, own_seconds() - own);
        let of_scripts = |at: usize| after.scripts[at] - before.scripts[at];
        Ok(Cost {
            script: of_scripts(1) / count,
            server: (after.seconds - before.seconds) * 1e6 / count,
            client: own * 1e6 / count,
            together: count / of_scripts(0).max(1.0),
        })
    }

    /// What the server counts.
    fn server(&self) -> Result<Counted> {
        let mut peer = self.peer.clone();
        let told: String = self.runtime.block_on(::redis::cmd("INFO").arg("all").query_async(&mut peer))?;
        let number = |text: &str| text.trim().parse::<f64>().unwrap_or(0.0);
        let seconds = told.lines().filter_map(|line| line.split_once(':'));
        let seconds = seconds.filter(|(name, _)| matches!(*name, "used_cpu_user" | "used_cpu_sys"));
        let seconds = seconds.map(|(_, value)| number(value)).sum();
        let line = told.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")).unwrap_or_default();
        let field = |name: &str| {
            let value = line.split(',').find_map(|field| field.strip_prefix(name));
            value.map_or(0.0, number)
        };
        Ok(Counted { seconds, scripts: [field("calls="), field("usec=")] })
    }
}

struct Counted {
    /// Of its processor.
    seconds: f64,
    /// How many, and how many microseconds they took.
    scripts: [f64; 2],
}
