//! What is done after the verdict is clear, and changes nothing of it.
//!
//! An answer that comes too late lets everybody through, so it waits a moment only. What takes longer goes on without it, as far as
//! there are places.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// An answer waits at most so long for what changes nothing of it.
pub(super) const A_MOMENT: Duration = Duration::from_millis(10);

/// Places for what goes on after its answer.
#[derive(Debug)]
pub(super) struct Afterwards(Arc<Semaphore>);

/// There is no place: it was given up, in the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("as much as may is still under way after its answer")]
pub(super) struct NoPlace;

impl Afterwards {
    /// At most [`Semaphore::MAX_PERMITS`].
    pub(super) fn new(places: usize) -> Self {
        Self(Arc::new(Semaphore::new(places)))
    }

    /// Waits a moment for it; what is not done by then goes on as a task.
    ///
    /// # Errors
    /// [`NoPlace`] if it takes longer, and others do too.
    ///
    /// # Cancel safety
    /// Dropping the future drops what is not yet a task.
    pub(super) async fn finish(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), NoPlace> {
        let mut work = Box::pin(work);
        if timeout(A_MOMENT, &mut work).await.is_ok() {
            return Ok(());
        }
        let place = Arc::clone(&self.0).try_acquire_owned().map_err(|_| NoPlace)?;
        tokio::spawn(async move {
            work.await;
            drop(place);
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
    async fn nobody_waits_longer_than_a_moment_and_what_is_slow_is_done_all_the_same() {
        let afterwards = Afterwards::new(1);
        let (began, (go, wait), (done, ended)) = (Instant::now(), oneshot::channel(), oneshot::channel());
        let slow = async move {
            let _ = wait.await;
            let _ = done.send(());
        };
        assert_eq!(afterwards.finish(slow).await, Ok(()));
        assert_eq!(began.elapsed(), A_MOMENT);
        go.send(()).unwrap();
        assert_eq!(ended.await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_finds_no_place_is_given_up_and_a_place_returns_with_what_had_it() {
        let afterwards = Afterwards::new(1);
        let (go, wait) = oneshot::channel::<()>();
        assert_eq!(afterwards.finish(async move { drop(wait.await) }).await, Ok(()));
        let (held, dropped) = oneshot::channel::<()>();
        let second = async move {
            let _held = held;
            std::future::pending::<()>().await;
        };
        assert_eq!(afterwards.finish(second).await, Err(NoPlace));
        assert!(dropped.await.is_err(), "nothing of it is left");
        // What is done at once needs no place.
        assert_eq!(afterwards.finish(async {}).await, Ok(()));
        go.send(()).unwrap();
        while afterwards.0.available_permits() == 0 {
            yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_panics_gives_its_place_back() {
        let afterwards = Afterwards::new(1);
        let (go, wait) = oneshot::channel::<()>();
        let panics = async move {
            let _ = wait.await;
            panic!("of a rule");
        };
        assert_eq!(afterwards.finish(panics).await, Ok(()));
        go.send(()).unwrap();
        while afterwards.0.available_permits() == 0 {
            yield_now().await;
        }
    }
}
