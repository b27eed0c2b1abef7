//! The SQLite store: the gain of group commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tidegate::{Across, Durability, Limit, Limiter, Sqlite, SqliteOptions};
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;

const PLENTY: u64 = 1 << 39;
const COST: [(&str, u64); 2] = [("rpm", 1), ("tpm", 800)];
/// Concurrent callers.
const CALLERS: usize = 64;
/// Rounds take about a second: fewer are enough.
const ROUNDS_MAX: u32 = 7;
const ROUND: Duration = Duration::from_millis(700);

/// A limiter over its own file.
struct Ours {
    limiter: Limiter,
    store: Sqlite,
    runtime: Runtime,
    _folder: tempfile::TempDir,
}

/// The result of one round.
struct Round {
    acquires_per_second: f64,
    draws_per_transaction: f64,
}

impl Ours {
    fn new(durable: Durability, batch_max: Option<usize>) -> Result<Self> {
        let limits = [Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)];
        Self::with_limits(durable, batch_max, limits.into())
    }

    /// With a third limit, which all entities share.
    fn pooled() -> Result<Self> {
        let plain = Limit::per_minute("tpm", PLENTY);
        let limits = vec![Limit::per_minute("rpm", PLENTY), plain.clone(), plain.across(Across::Entities)];
        Self::with_limits(Durability::EverySecond, None, limits)
    }

    fn with_limits(durable: Durability, batch_max: Option<usize>, limits: Vec<Limit>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build()?;
        // Beside the program, so that the file is on a disk and not in a tmpfs.
        let program = std::env::current_exe()?;
        let folder = tempfile::tempdir_in(program.parent().context("a program is in a folder")?)?;
        let options = SqliteOptions::file(folder.path().join("limits.db")).durable(durable);
        let options = match batch_max {
            Some(calls) => options.batch_max(calls),
            None => options,
        };
        let store = runtime.block_on(options.open())?;
        let limiter = Limiter::builder(store.clone()).defaults(limits).build()?;
        Ok(Self { limiter, store, runtime, _folder: folder })
    }

    /// Concurrent callers acquire and settle in sequence for the duration of a round, for eight entities.
    fn round(&self, callers: usize) -> Result<Round> {
        self.round_of(callers, 8)
    }

    fn round_of(&self, callers: usize, entities: usize) -> Result<Round> {
        let before = self.store.stats();
        let (start, done) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        self.runtime.block_on(async {
            let caller = |number: usize| {
                let (limiter, done) = (self.limiter.clone(), Arc::clone(&done));
                tokio::spawn(async move {
                    let entity = format!("user-{}", number % entities);
                    while start.elapsed() < ROUND {
                        let mut lease = limiter.try_acquire((entity.as_str(), "gpt-4"), COST).await?;
                        lease.settle([("tpm", 640)]).await?;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    anyhow::Ok(())
                })
            };
            let callers: Vec<_> = (0..callers).map(caller).collect();
            for caller in callers {
                caller.await??;
            }
            anyhow::Ok(())
        })?;
        let (seconds, after) = (start.elapsed().as_secs_f64(), self.store.stats());
        let transactions = to_f64(after.transactions - before.transactions);
        Ok(Round {
            acquires_per_second: to_f64(done.load(Ordering::Relaxed)) / seconds,
            draws_per_transaction: to_f64(after.draws - before.draws) / transactions,
        })
    }
}

pub(crate) fn draws_per_transaction(rounds: u32) -> Result<Vec<Row>> {
    let (commit, second) = (Ours::new(Durability::Commit, None)?, Ours::new(Durability::EverySecond, None)?);
    let mean = |ours: &Ours| -> Result<f64> {
        let rounds = rounds.clamp(1, ROUNDS_MAX);
        let sum: Result<f64> = (0..rounds).map(|_| Ok(ours.round(CALLERS)?.draws_per_transaction)).sum();
        Ok(sum? / f64::from(rounds))
    };
    let what = "acquire + settle by 64 callers, durable=second, vs 16";
    let commit_note = "the same, durable=commit";
    Ok(vec![
        Row::at_least("draws_per_transaction", (mean(&second)?, 16.0), Some(1.0), "draws", what),
        Row::at_least("draws_per_transaction_commit", (mean(&commit)?, 16.0), None, "draws", commit_note),
    ])
}

/// One caller in sequence, and 64 entities on one pool.
pub(crate) fn pooled(rounds: u32) -> Result<Vec<Row>> {
    let (pooled, plain) = (Ours::pooled()?, Ours::new(Durability::EverySecond, None)?);
    let (mut best, mut hot) = ((0.0_f64, 0.0_f64), (0.0_f64, 0.0_f64));
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        best.0 = best.0.max(pooled.round_of(1, 1)?.acquires_per_second);
        best.1 = best.1.max(plain.round_of(1, 1)?.acquires_per_second);
        hot.0 = hot.0.max(pooled.round_of(CALLERS, CALLERS)?.acquires_per_second);
        hot.1 = hot.1.max(plain.round_of(CALLERS, CALLERS)?.acquires_per_second);
    }
    let times = (1e6 / best.0, 1e6 / best.1);
    let what = "acquire + settle of two limits and a pooled one, vs without the pooled one, one caller";
    let hot_note = "acquire + settle by 64 entities on one pool, vs without the pool";
    Ok(vec![
        Row::new("pooled_acquire_sqlite", times, Some(1.6), "µs", what),
        Row::at_least("pooled_hot_sqlite", hot, None, "acquires/s", hot_note),
    ])
}

pub(crate) fn group_commit(rounds: u32) -> Result<Vec<Row>> {
    let (ours, alone) = (Ours::new(Durability::Commit, None)?, Ours::new(Durability::Commit, Some(1))?);
    let second = Ours::new(Durability::EverySecond, None)?;
    let (mut best, mut best_alone, mut best_second) = (0.0_f64, 0.0_f64, 0.0_f64);
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        best = best.max(ours.round(CALLERS)?.acquires_per_second);
        best_alone = best_alone.max(alone.round(CALLERS)?.acquires_per_second);
        best_second = best_second.max(second.round(CALLERS)?.acquires_per_second);
    }
    let what = "acquire + settle by 64 callers, durable=commit, vs one call per transaction";
    let second_note = "durable=second vs durable=commit, both grouped";
    Ok(vec![
        Row::at_least("group_commit", (best, best_alone), Some(3.0), "acquires/s", what),
        Row::at_least("second_over_commit", (best_second, best), None, "acquires/s", second_note),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^53")]
const fn to_f64(count: u64) -> f64 {
    count as f64
}
