//! Stores with default options under stress: more callers than connections, a server that pauses, concurrent
//! policy writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tidegate::{EntityId, Limit, Limiter, Policy, Scope};
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;

use crate::load::{ROUNDS_MAX, to_f64};

const PLENTY: u64 = 1 << 39;
const ENTITIES: usize = 1_024;
const FEW: usize = 64;
const MANY: usize = 256;
const ROUND: Duration = Duration::from_secs(1);
/// The pause of a caller after an error.
const ERROR_PAUSE: Duration = Duration::from_millis(20);
/// The interval between policy writes.
const WRITE_EVERY: Duration = Duration::from_millis(100);
/// The pause of the server: longer than the store's deadline.
const PAUSE: Duration = Duration::from_millis(80);

pub(crate) fn redis(rounds: u32) -> Result<Vec<Row>> {
    Ok(vec![crowd("crowd_redis", "TIDEGATE_TEST_REDIS", rounds)?])
}

pub(crate) fn postgres(rounds: u32) -> Result<Vec<Row>> {
    Ok(vec![crowd("crowd_postgres", "TIDEGATE_TEST_POSTGRES", rounds)?])
}

/// Leases per second with many callers, against few.
fn crowd(name: &str, variable: &str, rounds: u32) -> Result<Row> {
    let side = Side::open(variable)?;
    let (mut many, mut few) = (0.0_f64, 0.0_f64);
    side.run(FEW, ROUND)?;
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        many = many.max(side.run(MANY, ROUND)?.per_second());
        few = few.max(side.run(FEW, ROUND)?.per_second());
    }
    let what = "acquire + settle by 256 callers over 1,024 entities, vs by 64; default options";
    Ok(Row::at_least(name, (many, few), Some(0.9), "leases/s", what))
}

/// The longest time without a grant when the server pauses.
pub(crate) fn hiccup(rounds: u32) -> Result<Vec<Row>> {
    let side = Side::open("TIDEGATE_TEST_REDIS")?;
    let url = std::env::var("TIDEGATE_TEST_REDIS")?;
    let mut peer = side.runtime.block_on(::redis::Client::open(url)?.get_multiplexed_async_connection())?;
    let mut best = Duration::MAX;
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        let pause = async {
            tokio::time::sleep(ROUND / 4).await;
            let mut pause = ::redis::cmd("CLIENT");
            let millis = u64::try_from(PAUSE.as_millis())?;
            pause.arg("PAUSE").arg(millis).arg("ALL").exec_async(&mut peer).await?;
            anyhow::Ok(())
        };
        let (run, paused) =
            side.runtime.block_on(async { tokio::join!(side.callers(FEW, 2 * ROUND), pause) });
        paused?;
        best = best.min(run?.gap);
    }
    let what = "longest time without a grant, vs a server pause of 80 ms; 64 callers, default options";
    let pair = (best.as_secs_f64() * 1e3, PAUSE.as_secs_f64() * 1e3);
    Ok(vec![Row::new("hiccup_redis", pair, Some(2.0), "ms", what)])
}

/// Spends per second while policies of other entities are written, against no writes.
pub(crate) fn policy_writes(rounds: u32) -> Result<Vec<Row>> {
    let side = Side::open("TIDEGATE_TEST_REDIS")?;
    let (mut busy, mut calm) = (0.0_f64, 0.0_f64);
    side.runtime.block_on(side.limiter.admin("bench").set_policy(Scope::System, Policy::default()))?;
    side.runtime.block_on(side.spends())?;
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        let limiter = side.limiter.clone();
        let writer = side.runtime.spawn(async move {
            for number in 0_u64.. {
                let other_scope = Scope::Entity(EntityId::new(&format!("other-{}", number % 100))?);
                let policy = Policy::new([Limit::per_minute("rpm", 1 + number)])?;
                limiter.admin("bench").set_policy(other_scope, policy).await?;
                tokio::time::sleep(WRITE_EVERY).await;
            }
            anyhow::Ok(())
        });
        busy = busy.max(side.runtime.block_on(side.spends())?.per_second());
        writer.abort();
        calm = calm.max(side.runtime.block_on(side.spends())?.per_second());
    }
    let what = "spends by 64 callers over 1,024 entities, during 10 policy writes/s for other entities, vs no writes";
    Ok(vec![Row::at_least("policy_writes_redis", (busy, calm), Some(0.9), "spends/s", what)])
}

struct Side {
    limiter: Limiter,
    runtime: Runtime,
}

/// The result of one round.
struct Run {
    grants: u64,
    took: Duration,
    /// The longest time between two grants.
    gap: Duration,
}

impl Run {
    fn per_second(&self) -> f64 {
        to_f64(self.grants) / self.took.as_secs_f64()
    }
}

impl Side {
    fn open(variable: &str) -> Result<Self> {
        let url = std::env::var(variable)
            .with_context(|| format!("{variable} is not set: run it with `cargo xtask bench engines`"))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let url = format!("{url}?namespace=crowd-{}", std::process::id());
        let store = runtime.block_on(tidegate::store::open(&url))?;
        let limits = [Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)];
        Ok(Self { limiter: Limiter::over(store).defaults(limits).build()?, runtime })
    }

    async fn spends(&self) -> Result<Run> {
        let (start, grants) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let caller = |caller: usize| {
            let (limiter, grants) = (self.limiter.clone(), Arc::clone(&grants));
            tokio::spawn(async move {
                let mut number = caller * 16;
                while start.elapsed() < ROUND {
                    let name = format!("user-{}", number % ENTITIES);
                    number += 17;
                    limiter.spend((name.as_str(), "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
                    grants.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        };
        let callers: Vec<_> = (0..FEW).map(caller).collect();
        for caller in callers {
            caller.await??;
        }
        Ok(Run { grants: grants.load(Ordering::Relaxed), took: start.elapsed(), gap: Duration::ZERO })
    }

    fn run(&self, callers: usize, span: Duration) -> Result<Run> {
        self.runtime.block_on(self.callers(callers, span))
    }

    async fn callers(&self, callers: usize, span: Duration) -> Result<Run> {
        let (start, grants) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let (last, gap) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let micros = move || u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let caller = |caller: usize| {
            let (limiter, grants) = (self.limiter.clone(), Arc::clone(&grants));
            let (last, gap) = (Arc::clone(&last), Arc::clone(&gap));
            tokio::spawn(async move {
                let mut number = caller * 16;
                while start.elapsed() < span {
                    let name = format!("user-{}", number % ENTITIES);
                    number += 17;
                    match limiter.try_acquire((name.as_str(), "gpt-4"), [("rpm", 1), ("tpm", 800)]).await {
                        Ok(mut lease) => {
                            grants.fetch_add(1, Ordering::Relaxed);
                            let now = micros();
                            gap.fetch_max(
                                now - last.fetch_max(now, Ordering::Relaxed).min(now),
                                Ordering::Relaxed,
                            );
                            // A lease that was not settled here is settled in the background.
                            drop(lease.settle_full().await);
                        }
                        Err(_) => tokio::time::sleep(ERROR_PAUSE).await,
                    }
                }
            })
        };
        let callers: Vec<_> = (0..callers).map(caller).collect();
        for caller in callers {
            caller.await?;
        }
        let gap = Duration::from_micros(gap.load(Ordering::Relaxed));
        Ok(Run { grants: grants.load(Ordering::Relaxed), took: start.elapsed(), gap })
    }
}
