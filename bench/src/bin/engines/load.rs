//! Many callers at once, for the time of a round.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::runtime::Runtime;

/// Callers at a time.
const CALLERS: usize = 64;
/// Rounds of a second or so: fewer are enough.
pub(crate) const ROUNDS_MAX: u32 = 7;
const ROUND: Duration = Duration::from_secs(1);

/// What callers do a second who acquire one after the other, each of one of `count` names.
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
                // Each begins elsewhere, and goes on in steps that meet every row.
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
    Ok(counted(done.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64())
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^53")]
pub(crate) const fn counted(count: u64) -> f64 {
    count as f64
}
