//! A joined permit (throttle and limiter), against calling a throttle and then a limiter.

use std::hint::black_box;
use std::time::Duration;

use anyhow::Result;
use tidegate::{Budget, Cost, Limit, Limiter, Memory, Outcome, Slots, Throttle};
use tidegate_bench::measure::best_of_batches;
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;

const PLENTY: u64 = 1 << 39;
const SUBJECT: (&str, &str) = ("acme", "gpt-4");
const ESTIMATE: Cost = Cost::request().tokens(800);
const USED: Cost = Cost::request().tokens(640);

/// Rows for both kinds of throttle.
pub(crate) fn rows(rounds: u32) -> Result<Vec<Row>> {
    let slots = Throttle::builder().slots(Slots::fixed(64)).build()?;
    let budget = Budget::tokens(1 << 50, Duration::from_mins(1));
    let tokens = Throttle::builder().slots(Slots::adaptive(1..=64)).budget(budget).build()?;
    let what = "acquire + settle of slots and two limits in memory, joined, vs one after the other";
    let budget_note = "the same with adaptive slots and a token budget";
    Ok(vec![
        Row::new("joined_overhead", pair(rounds, &slots)?, Some(1.3), "ns", what),
        Row::new("joined_overhead_budget", pair(rounds, &tokens)?, None, "ns", budget_note),
    ])
}

fn pair(rounds: u32, throttle: &Throttle) -> Result<(f64, f64)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let limits = [Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)];
    let limiter = Limiter::builder(Memory::new()).defaults(limits).build()?;
    Ok(best_of_batches(
        rounds,
        |times| joined(&runtime, throttle, &limiter, times),
        |times| separate(&runtime, throttle, &limiter, times),
    ))
}

fn joined(runtime: &Runtime, throttle: &Throttle, limiter: &Limiter, times: u32) {
    let joined = throttle.limited_by(limiter);
    runtime.block_on(async {
        for _ in 0..times {
            let permit = joined.acquire(SUBJECT, ESTIMATE).await.expect("there is plenty");
            let settled = permit.settle(Outcome::success().spent(USED)).await;
            black_box(settled).expect("the store is in memory");
        }
    });
}

fn separate(runtime: &Runtime, throttle: &Throttle, limiter: &Limiter, times: u32) {
    runtime.block_on(async {
        for _ in 0..times {
            let permit = throttle.acquire(ESTIMATE).await.expect("there is plenty");
            let amounts = [("rpm", 1), ("tpm", ESTIMATE.tokens)];
            let mut lease = limiter.try_acquire(SUBJECT, amounts).await.expect("there is plenty");
            permit.settle(Outcome::success().spent(USED));
            let settled = lease.settle([("rpm", 1), ("tpm", USED.tokens)]).await;
            black_box(settled).expect("the store is in memory");
        }
    });
}
