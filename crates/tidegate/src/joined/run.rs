//! Runs work under joined limits, with the retries of [`Runner`].

use std::borrow::Cow;
use std::future::Future;

use tidegate_core::cost::Cost;

use super::{Joined, JoinedError};
use crate::limiter::SubjectRef;
use crate::run::{Attempt, AttemptPermit, Classify, EveryError, RetryState, RunError, Runner, Step};

impl Joined {
    /// Runs `work` under a permit for `subject`, with retries according to the throttle's [`Retry`](crate::Retry), as
    /// [`Throttle::run`](crate::Throttle::run).
    ///
    /// Every attempt draws anew. One that fails returns its units, except for tokens reported by
    /// [`Attempt::spend`].
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Memory, Slots, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::builder().slots(Slots::fixed(8)).build()?;
    /// let limits = [Limit::per_day("rpm", 60), Limit::per_day("tpm", 10_000)];
    /// let limiter = Limiter::builder(Memory::new()).defaults(limits).build()?;
    /// let joined = throttle.limited_by(&limiter);
    ///
    /// let reply = joined.run(("acme", "gpt-4"), 800, |attempt| async move {
    ///     attempt.spend(640);
    ///     Ok::<_, std::io::Error>("text")
    /// });
    /// assert_eq!(reply.await?, "text");
    /// assert_eq!(limiter.balances(("acme", "gpt-4")).await?[1].balance.available, 9_360);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RunError::Refused`] if the work never ran, else the last error of the work and why it was not retried. If the
    /// store does not confirm the end of a lease, the settler sends it again in the background, as
    /// [`JoinedPermit::settle`](super::JoinedPermit::settle) describes, and the work's result is returned.
    ///
    /// # Panics
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// Dropping the future drops the running attempt, which counts as ignored; nothing is retried.
    pub async fn run<'a, T, E, F, W>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
        work: F,
    ) -> Result<T, RunError<E, JoinedError>>
    where
        F: FnMut(Attempt) -> W,
        W: Future<Output = Result<T, E>>,
    {
        self.runner().run(subject, cost, work).await
    }

    /// A runner with the throttle's [`Retry`](crate::Retry), to change it or the classification of results.
    pub fn runner(&self) -> Runner<'_, EveryError, Self> {
        Runner { source: Cow::Borrowed(self), retry: self.throttle.retry_rule(), classify: EveryError }
    }
}

impl<'a, C> Runner<'a, C, Joined> {
    /// Runs `work` under a permit for `subject`, with retries according to the rule.
    ///
    /// # Errors
    /// As [`Joined::run`].
    ///
    /// # Panics
    /// As [`Joined::acquire`].
    ///
    /// # Cancel safety
    /// As [`Joined::run`].
    pub async fn run<T, E, F, W>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
        mut work: F,
    ) -> Result<T, RunError<E, JoinedError>>
    where
        C: Classify<T, E>,
        F: FnMut(Attempt) -> W,
        W: Future<Output = Result<T, E>>,
    {
        let (subject, cost) = (subject.into(), cost.into());
        let inner = &self.source.throttle.inner;
        let mut retry_state = RetryState::begin(inner, &self.retry);
        loop {
            let step = match self.source.acquire(subject, cost).await {
                Err(refused) => retry_state.refused(refused.retry_after(), refused),
                Ok(permit) => {
                    let running = AttemptPermit::new(permit.into_owned());
                    let result = work(running.attempt(retry_state.admitted())).await;
                    let ending = retry_state.completed(self.classify.classify(&result));
                    // What the store does not confirm is sent again by the settler.
                    let _unconfirmed = running.into_permit().settle(ending.outcome()).await;
                    retry_state.settled(ending, result)
                }
            };
            match step {
                Step::Done(result) => return result,
                Step::Retry(None) => {}
                Step::Retry(Some(at)) => inner.clock().sleep_until(at).await,
            }
        }
    }
}
