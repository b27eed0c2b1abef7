//! Bounded background work that does not affect the verdict.
//!
//! Envoy allows a request whose verdict is late, so a response waits only for a grace period. Work that takes
//! longer continues as a task, up to a maximum number of tasks.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// How long a response waits for work that does not affect it.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(10);

/// Limits the number of background tasks.
#[derive(Debug)]
pub(super) struct BackgroundTasks {
    slots: Arc<Semaphore>,
    max: usize,
    ended: Arc<Notify>,
}

/// The slot of one task.
struct Slot {
    permit: Option<OwnedSemaphorePermit>,
    ended: Arc<Notify>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.permit = None;
        self.ended.notify_waiters();
    }
}

/// All slots are in use: the work was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("too many background tasks are running")]
pub(super) struct AtCapacity;

impl BackgroundTasks {
    /// `slots` is at most [`Semaphore::MAX_PERMITS`].
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: Arc::new(Semaphore::new(slots)), max: slots, ended: Arc::default() }
    }

    fn slot(&self) -> Result<Slot, AtCapacity> {
        let permit = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| AtCapacity)?;
        Ok(Slot { permit: Some(permit), ended: Arc::clone(&self.ended) })
    }

    /// Starts `work`, and returns its output if it needs no waiting. Otherwise it continues as a task.
    ///
    /// # Errors
    /// [`AtCapacity`] if all slots are in use: the work was not started.
    pub(super) fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<Option<T>, AtCapacity> {
        let (slot, mut work) = (self.slot()?, Box::pin(work));
        // The no-op waker is sufficient: spawning the work polls it again.
        if let Poll::Ready(output) = work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Ok(Some(output));
        }
        tokio::spawn(async move {
            work.await;
            drop(slot);
        });
        Ok(None)
    }

    /// Waits until no task is running.
    pub(super) async fn idle(&self) {
        loop {
            let mut ended = pin!(self.ended.notified());
            // Subscribed before the check: a task that ends after it wakes this.
            ended.as_mut().enable();
            if self.slots.available_permits() == self.max {
                return;
            }
            ended.await;
        }
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
        let slot = self.slot()?;
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
        tasks.idle().await;
    }

    #[tokio::test(start_paused = true)]
    async fn started_work_outlives_its_caller() {
        let tasks = BackgroundTasks::new(1);
        assert_eq!(tasks.start(async { 7 }), Ok(Some(7)), "it needs no waiting");
        let ((go, wait), (done, mut ended)) = (oneshot::channel::<()>(), oneshot::channel());
        let slow = async move { drop((wait.await, done.send(()))) };
        assert_eq!(tasks.start(slow), Ok(None));
        assert_eq!(tasks.start(async { 7 }), Err(AtCapacity));
        assert!(ended.try_recv().is_err());
        go.send(()).unwrap();
        tasks.idle().await;
        assert_eq!(ended.try_recv(), Ok(()));
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
        tasks.idle().await;
    }
}
