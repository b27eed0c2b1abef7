//! Retries of work that another program does: it acquires a permit for each attempt, and learns from the answer
//! whether another attempt may follow.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::retry::Attempts;

use super::{Class, RetryState, Step};
use crate::permit::Permit;

impl Permit<'_> {
    /// Ends an attempt of work that another program does, and takes a retry from the throttle's budget if its
    /// [`Retry`](crate::Retry) rule allows another one. `number` is that of the attempt, counted from 0.
    ///
    /// Returns how long to wait before the permit of the next attempt is acquired; `None` if the work must not be
    /// repeated.
    ///
    /// ```
    /// use tidegate::{Class, Cost, Outcome, Retry, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::builder().retry(Retry::attempts(2)).build()?;
    /// let failed = Class::again(Outcome::failure());
    /// let first = throttle.acquire(Cost::request()).await?;
    /// assert!(first.settle_attempt(0, failed).is_some());
    /// let second = throttle.acquire(Cost::request()).await?;
    /// assert!(second.settle_attempt(1, failed).is_none(), "all attempts were made");
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle_attempt(mut self, number: u32, class: Class) -> Option<Duration> {
        let inner = Arc::clone(self.inner());
        let retry = inner.lock().plan.draft().retry.clone();
        let mut state =
            RetryState::<(), ()> { attempts: Attempts::after(number), ..RetryState::begin(&inner, &retry) };
        state.admitted();
        let ending = state.completed::<()>(class);
        self.settle(ending.outcome());
        let Step::Retry(at) = state.settled(ending, Ok(())) else { return None };
        let now = inner.clock().now();
        // A pause of all requests is the wait of this one.
        let at = at.or_else(|| inner.lock().gates.paused_until(now));
        Some(at.map_or(Duration::ZERO, |at| at.since(now)))
    }
}
