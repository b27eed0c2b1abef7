//! The handle that work gets for its attempt, and the permit behind it.
//!
//! The work does not get the permit itself: it could settle or keep it, and no backoff may hold a permit.

use std::fmt;
use std::sync::Arc;

use tidegate_core::cost::Cost;

use crate::permit::Permit;
use crate::sync::Mutex;

/// The running attempt. Clones are the same attempt, and can be sent to other tasks and threads.
#[derive(Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// Counted from 0.
    pub number: u32,
    permit: Arc<dyn Reports>,
}

impl Attempt {
    /// Reports tokens as they are used, as [`Permit::spend`](crate::Permit::spend). They stay used regardless of how the
    /// attempt ends: by a result, a retry, a cancelled run or a panic. Reports after its end are ignored.
    ///
    /// What exceeds the estimate counts in the budgets at once, whichever task or thread reports it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Budget, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::auto().budget(Budget::tokens(90_000, Duration::from_secs(3_600))).build()?;
    /// let streamed = throttle.run(800, |attempt| async move {
    ///     attempt.spend(100); // a part of the stream
    ///     if attempt.number == 0 { return Err("connection lost") }
    ///     attempt.spend(500); // the rest of it
    ///     Ok("text")
    /// });
    /// assert_eq!(streamed.await, Ok("text"));
    /// assert_eq!(throttle.snapshot().tokens_used, 700);
    /// # Ok(())
    /// # }
    /// ```
    pub fn spend(&self, tokens: impl Into<Cost>) {
        self.permit.spend(tokens.into());
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A permit that takes reports.
pub(crate) trait Spend: Send + 'static {
    /// Adds tokens to those reported. Returns the throttle's permit, and what it had reported before and reports now.
    fn add(&mut self, tokens: Cost) -> (&Permit<'static>, Option<Cost>, Cost);
}

/// Takes reports of an attempt.
trait Reports: Send + Sync {
    fn spend(&self, tokens: Cost);
}

/// The permit of an attempt, shared with its handles. `None` once the attempt has ended.
struct SharedPermit<P>(Mutex<Option<P>>);

impl<P: Spend> Reports for SharedPermit<P> {
    fn spend(&self, tokens: Cost) {
        let mut shared = self.0.lock();
        let Some(permit) = &mut *shared else { return };
        let (permit, before, reported) = permit.add(tokens);
        let Some((inner, charge)) = permit.budgets() else { return };
        let inner = Arc::clone(inner);
        let booked = inner.book(charge, before, reported);
        // Before listeners are called.
        drop(shared);
        if let Some((state, effects)) = booked {
            inner.release(state, effects);
        }
    }
}

/// The permit of a running attempt. Dropped, it drops the permit, whatever handles the work has kept.
pub(crate) struct AttemptPermit<P: Spend>(Arc<SharedPermit<P>>);

impl<P: Spend> AttemptPermit<P> {
    pub(crate) fn new(permit: P) -> Self {
        Self(Arc::new(SharedPermit(Mutex::new(Some(permit)))))
    }

    /// The handle for the work.
    pub(crate) fn attempt(&self, number: u32) -> Attempt {
        Attempt { number, permit: Arc::<SharedPermit<P>>::clone(&self.0) }
    }

    /// The attempt has completed.
    pub(crate) fn into_permit(self) -> P {
        self.take().unwrap_or_else(|| unreachable!("only this call and the drop take it"))
    }

    fn take(&self) -> Option<P> {
        self.0.0.lock().take()
    }
}

impl<P: Spend> Drop for AttemptPermit<P> {
    fn drop(&mut self) {
        // Dropped without the lock.
        let permit = self.take();
        drop(permit);
    }
}
