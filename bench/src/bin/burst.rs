//! Admissions per second under a rate of 5,000 per second with a small and a large burst: the row `small_burst` of
//! `bench local`. Apart from it, because a second caller of `acquire` changes how the first is compiled.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::{Cost, Outcome, Rate, Throttle};

const CALLERS: usize = 64;

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    for burst in [10, 5_000] {
        println!("burst_{burst} {}", admissions(&runtime, burst));
    }
    Ok(())
}

/// Admissions per second at 5,000 per second with this burst, after the first burst is spent.
fn admissions(runtime: &tokio::runtime::Runtime, burst: u64) -> f64 {
    let throttle = Throttle::builder().rate(Rate::per_second(5_000).burst(burst)).build();
    let throttle = throttle.expect("within the bounds");
    runtime.block_on(async {
        while throttle.try_acquire(Cost::request()).is_ok() {}
        let mut callers = tokio::task::JoinSet::new();
        let start = Instant::now();
        let end = start + Duration::from_millis(500);
        for _ in 0..CALLERS {
            let throttle = throttle.clone();
            callers.spawn(async move {
                let mut count = 0_u32;
                while Instant::now() < end {
                    throttle
                        .acquire(Cost::request())
                        .await
                        .expect("no gate refuses")
                        .settle(Outcome::success());
                    count += 1;
                }
                count
            });
        }
        let count: u32 = callers.join_all().await.into_iter().sum();
        f64::from(count) / start.elapsed().as_secs_f64()
    })
}
