//! Closed-loop load: many concurrent callers for the duration of a round.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::runtime::Runtime;

/// Concurrent callers.
const CALLERS: usize = 64;
/// Rounds take about a second: fewer are enough.
pub(crate) const ROUNDS_MAX: u32 = 7;
const ROUND: Duration = Duration::from_secs(1);

/// Acquires per second of concurrent callers, each acquiring in sequence over `count` names.
pub(crate) fn round<F>(
    runtime: &Runtime,
    count: usize,
    acquire: impl Fn(Arc<str>) -> F + Clone + Send + 'static,
) -> Result<f64>
where
    F: Future<Output = Result<()>> + Send,
{
    let names: Arc<[Arc<str>]> = (0..count).map(|number| format!("user-{number}").into()).collect();
    let (start, done) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    runtime.block_on(async {
        let caller = |caller: usize| {
            let (acquire, names, done) = (acquire.clone(), Arc::clone(&names), Arc::clone(&done));
            tokio::spawn(async move {
                // Each caller starts at another name, and the stride visits all of them.
                let mut number = caller * 16;
                while start.elapsed() < ROUND {
                    acquire(Arc::clone(&names[number % names.len()])).await?;
                    number += 17;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        };
        let callers: Vec<_> = (0..CALLERS).map(caller).collect();
        for caller in callers {
            caller.await??;
        }
        anyhow::Ok(())
    })?;
    Ok(to_f64(done.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64())
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^53")]
pub(crate) const fn to_f64(count: u64) -> f64 {
    count as f64
}
