//! Bounded background work that does not affect the verdict.
//!
//! Envoy allows a request whose verdict is late, so a response waits only for a grace period. Work that takes
//! longer continues as a task, up to a maximum number of tasks.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// How long a response waits for work that does not affect it.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(10);

/// Limits the number of background tasks.
#[derive(Debug)]
pub(super) struct BackgroundTasks(Arc<Semaphore>);

/// All slots are in use: the work was dropped midway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("too many background tasks are running")]
pub(super) struct AtCapacity;

impl BackgroundTasks {
    /// `slots` is at most [`Semaphore::MAX_PERMITS`].
    pub(super) fn new(slots: usize) -> Self {
        Self(Arc::new(Semaphore::new(slots)))
    }

    /// Runs `work` for the grace period, and continues it as a task if it takes longer.
    ///
    /// # Errors
    /// [`AtCapacity`] if it takes longer and all slots are in use.
    ///
    /// # Cancel safety
    /// Dropping the future drops work that is not yet a task.
    pub(super) async fn run(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), AtCapacity> {
        let mut work = Box::pin(work);
        if timeout(GRACE_PERIOD, &mut work).await.is_ok() {
            return Ok(());
        }
        let slot = Arc::clone(&self.0).try_acquire_owned().map_err(|_| AtCapacity)?;
        tokio::spawn(async move {
            work.await;
            drop(slot);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::task::yield_now;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_work_continues_after_grace_period() {
        let tasks = BackgroundTasks::new(1);
        let (began, (go, wait), (done, ended)) = (Instant::now(), oneshot::channel(), oneshot::channel());
        let slow = async move {
            let _ = wait.await;
            let _ = done.send(());
        };
        assert_eq!(tasks.run(slow).await, Ok(()));
        assert_eq!(began.elapsed(), GRACE_PERIOD);
        go.send(()).unwrap();
        assert_eq!(ended.await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn work_beyond_capacity_is_dropped() {
        let tasks = BackgroundTasks::new(1);
        let (go, wait) = oneshot::channel::<()>();
        assert_eq!(tasks.run(async move { drop(wait.await) }).await, Ok(()));
        let (held, dropped) = oneshot::channel::<()>();
        let second = async move {
            let _held = held;
            std::future::pending::<()>().await;
        };
        assert_eq!(tasks.run(second).await, Err(AtCapacity));
        assert!(dropped.await.is_err(), "the work is dropped");
        // Work that completes at once needs no slot.
        assert_eq!(tasks.run(async {}).await, Ok(()));
        go.send(()).unwrap();
        while tasks.0.available_permits() == 0 {
            yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_task_frees_its_slot() {
        let tasks = BackgroundTasks::new(1);
        let (go, wait) = oneshot::channel::<()>();
        let panics = async move {
            let _ = wait.await;
            panic!("in a rule");
        };
        assert_eq!(tasks.run(panics).await, Ok(()));
        go.send(()).unwrap();
        while tasks.0.available_permits() == 0 {
            yield_now().await;
        }
    }
}
