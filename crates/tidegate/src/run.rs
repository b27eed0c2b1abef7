//! Runs work under a throttle, with retries.
//!
//! Every attempt is admitted anew and holds its permit only while it runs, never while it sleeps. A rejected
//! attempt waits for its full hint. If the upstream's hint paused all requests, that shared pause is the
//! wait. The decisions are made by [`RetryState`], which the async and the blocking driver share.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::classes::{Classes, Completion, CompletionClass};
use tidegate_core::cost::Cost;
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::refused::Refused;
use tidegate_core::retry::{Attempts, Failure, Retry, WhenRefused};
use tidegate_core::time::Instant;

use crate::permit::Permit;
use crate::state::{Effects, State};
use crate::throttle::{Inner, Throttle};

mod attempt;
mod error;
mod remote;

pub use attempt::Attempt;
pub(crate) use attempt::{AttemptPermit, Spend};
pub use error::{BoxedError, RunError, StopReason};

/// How a result is classified: its outcome, and whether to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a class does nothing until it is returned to a runner"]
pub struct Class {
    outcome: Outcome,
    again: bool,
}

impl Class {
    /// An outcome that must not be retried.
    pub const fn end(outcome: Outcome) -> Self {
        Self { outcome, again: false }
    }

    /// An outcome that may be retried.
    pub const fn again(outcome: Outcome) -> Self {
        Self { outcome, again: true }
    }

    /// Classifies a completion with `classes`.
    ///
    /// ```
    /// use tidegate::{Class, Classes, Completion, Cost, Retry, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let classes = Classes::new();
    /// let reply = Throttle::new()
    ///     .runner()
    ///     .retry(Retry::attempts(3))
    ///     .classify(|reply: &Result<&str, u16>| match reply {
    ///         Ok(_) => Class::of(&classes, Completion::Status(200)),
    ///         Err(status) => Class::of(&classes, Completion::Status(*status)),
    ///     })
    ///     .run(Cost::request(), |attempt| async move { if attempt.number == 0 { Err(503) } else { Ok("hello") } })
    ///     .await;
    /// assert_eq!(reply, Ok("hello"));
    /// # }
    /// ```
    pub fn of(classes: &Classes, completion: Completion) -> Self {
        Self::new(classes.classify(completion), classes.outcome(completion))
    }

    /// An outcome that is worth another attempt if `class` is retryable.
    pub const fn new(class: CompletionClass, outcome: Outcome) -> Self {
        Self { outcome, again: class.is_retryable() }
    }

    /// The outcome.
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Whether the attempt may be retried.
    pub const fn is_retryable(&self) -> bool {
        self.again
    }
}

/// Classifies results.
///
/// Implemented by any `Fn(&Result<T, E>) -> Class`; [`EveryError`] is the default.
pub trait Classify<T, E> {
    /// Classifies `result`.
    fn classify(&self, result: &Result<T, E>) -> Class;
}

/// Classifies every error as a retryable failure.
#[derive(Debug, Clone, Copy, Default)]
pub struct EveryError;

impl<T, E> Classify<T, E> for EveryError {
    fn classify(&self, result: &Result<T, E>) -> Class {
        match result {
            Ok(_) => Class::end(Outcome::success()),
            Err(_) => Class::again(Outcome::failure()),
        }
    }
}

impl<T, E, F: Fn(&Result<T, E>) -> Class> Classify<T, E> for F {
    fn classify(&self, result: &Result<T, E>) -> Class {
        self(result)
    }
}

/// The future of work that runs under a throttle.
pub type RunFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, RunError<E>>> + Send>>;

impl Throttle {
    /// Runs `work` under a permit, with retries according to the throttle's [`Retry`]: three attempts by default.
    ///
    /// ```
    /// use tidegate::Throttle;
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::gentle().build()?; // with three attempts
    /// let reply = throttle
    ///     .run((), |attempt| async move {
    ///         if attempt.number < 2 { Err("503") } else { Ok("hello") }
    ///     })
    ///     .await;
    /// assert_eq!(reply, Ok("hello"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RunError::Refused`] if the work never ran, else the last error of the work and why it was not
    /// retried.
    ///
    /// # Cancel safety
    /// Dropping the future drops the running attempt, which counts as ignored; nothing is retried.
    pub async fn run<T, E, F, W>(&self, cost: impl Into<Cost>, work: F) -> Result<T, RunError<E>>
    where
        F: FnMut(Attempt) -> W,
        W: Future<Output = Result<T, E>>,
    {
        self.runner().run(cost, work).await
    }

    /// [`run`](Self::run) for blocking code.
    ///
    /// # Errors
    /// As `run`.
    pub fn run_blocking<T, E>(
        &self,
        cost: impl Into<Cost>,
        work: impl FnMut(Attempt) -> Result<T, E>,
    ) -> Result<T, RunError<E>> {
        self.runner().run_blocking(cost, work)
    }

    /// A runner with the throttle's [`Retry`], which can be changed.
    pub fn runner(&self) -> Runner<'_, EveryError> {
        Runner { source: Cow::Borrowed(self), retry: self.retry_rule(), classify: EveryError }
    }

    /// The retry rule of the current plan.
    pub(crate) fn retry_rule(&self) -> Retry {
        self.inner.lock().plan.draft().retry.clone()
    }

    /// Wraps `work` in a throttled function: each call is a separate [`run`](Self::run).
    ///
    /// ```
    /// use tidegate::Throttle;
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let double = Throttle::new().wrap((), |number: u32| async move { Ok::<_, ()>(2 * number) });
    /// assert_eq!(double(21).await, Ok(42));
    /// # }
    /// ```
    pub fn wrap<A, T, E, C, F, W>(
        &self,
        cost: C,
        work: F,
    ) -> impl Fn(A) -> RunFuture<T, E> + use<A, T, E, C, F, W>
    where
        C: Into<Cost>,
        A: Clone + Send + Sync + 'static,
        T: Send + 'static,
        E: Send + 'static,
        F: Fn(A) -> W + Send + Sync + 'static,
        W: Future<Output = Result<T, E>> + Send,
    {
        let (throttle, cost, work) = (self.clone(), cost.into(), Arc::new(work));
        move |argument| {
            let (throttle, work) = (throttle.clone(), Arc::clone(&work));
            Box::pin(async move { throttle.run(cost, |_| work(argument.clone())).await })
        }
    }
}

/// Runs work under a throttle. Created by [`Throttle::runner`], [`Keyed::runner`](crate::Keyed::runner) and
/// `Joined::runner`.
///
/// ```
/// use tidegate::{Class, Cost, Outcome, Retry, Throttle};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let throttle = Throttle::new();
/// let reply = throttle
///     .runner()
///     .retry(Retry::attempts(4))
///     .classify(|reply: &Result<u32, u16>| match reply {
///         Ok(tokens) => Class::end(Outcome::success().spent(Cost::request().tokens(u64::from(*tokens)))),
///         Err(429) => Class::again(Outcome::overload()),
///         Err(500..) => Class::again(Outcome::failure()),
///         Err(_) => Class::end(Outcome::mistake()),
///     })
///     .run(Cost::request(), |_| async { Err(404) })
///     .await;
/// assert_eq!(reply.unwrap_err().into_error(), Some(404));
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a runner does nothing until it runs something"]
pub struct Runner<'a, C, S: Clone = Throttle> {
    pub(crate) source: Cow<'a, S>,
    pub(crate) retry: Retry,
    pub(crate) classify: C,
}

impl<'a, C, S: Clone> Runner<'a, C, S> {
    /// Replaces the retry rule.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Replaces the classification of results.
    ///
    /// An `Ok` may be retried too (a response with status 429); the last one is returned unchanged.
    pub fn classify<T, E, D: Fn(&Result<T, E>) -> Class>(self, classify: D) -> Runner<'a, D, S> {
        Runner { source: self.source, retry: self.retry, classify }
    }

    /// Replaces the classification of results by a named type. For closures use [`classify`](Self::classify).
    pub fn classified_by<D>(self, classify: D) -> Runner<'a, D, S> {
        Runner { source: self.source, retry: self.retry, classify }
    }
}

impl<C> Runner<'_, C> {
    /// Runs `work`, with retries according to the rule.
    ///
    /// # Errors
    /// As [`Throttle::run`].
    ///
    /// # Cancel safety
    /// As [`Throttle::run`].
    pub async fn run<T, E, F, W>(&self, cost: impl Into<Cost>, mut work: F) -> Result<T, RunError<E>>
    where
        C: Classify<T, E>,
        F: FnMut(Attempt) -> W,
        W: Future<Output = Result<T, E>>,
    {
        let cost = cost.into();
        let mut retry_state = RetryState::begin(&self.source.inner, &self.retry);
        loop {
            let step = match self.source.acquire(cost).await {
                Err(refused) => retry_state.refused(refused.retry_after(), refused),
                Ok(permit) => {
                    let running = AttemptPermit::new(permit.into_owned());
                    let result = work(running.attempt(retry_state.admitted())).await;
                    let class = self.classify.classify(&result);
                    retry_state.settle_attempt(running.into_permit(), result, class)
                }
            };
            match step {
                Step::Done(result) => return result,
                Step::Retry(None) => {}
                Step::Retry(Some(at)) => self.source.inner.clock().sleep_until(at).await,
            }
        }
    }

    /// [`run`](Self::run) for blocking code.
    ///
    /// # Errors
    /// As [`Throttle::run`].
    pub fn run_blocking<T, E>(
        &self,
        cost: impl Into<Cost>,
        mut work: impl FnMut(Attempt) -> Result<T, E>,
    ) -> Result<T, RunError<E>>
    where
        C: Classify<T, E>,
    {
        let cost = cost.into();
        let mut retry_state = RetryState::begin(&self.source.inner, &self.retry);
        loop {
            let step = match self.source.acquire_blocking(cost) {
                Err(refused) => retry_state.refused(refused.retry_after(), refused),
                Ok(permit) => {
                    let running = AttemptPermit::new(permit.into_owned());
                    let result = work(running.attempt(retry_state.admitted()));
                    let class = self.classify.classify(&result);
                    retry_state.settle_attempt(running.into_permit(), result, class)
                }
            };
            match step {
                Step::Done(result) => return result,
                Step::Retry(None) => {}
                Step::Retry(Some(at)) => {
                    let clock = self.source.inner.clock();
                    while clock.now() < at {
                        clock.park_until(at);
                    }
                }
            }
        }
    }
}

/// The retry state machine of one piece of work: the attempts so far, and the next step.
pub(crate) struct RetryState<'a, T, E> {
    inner: &'a Arc<Inner>,
    retry: &'a Retry,
    attempts: Attempts,
    /// The result of the last attempt, if a retry follows.
    last: Option<Result<T, E>>,
    last_kind: Kind,
}

/// How an attempt ended, and why it is the last one, if it is.
pub(crate) struct AttemptEnding<R = Refused> {
    class: Class,
    why: Option<StopReason<R>>,
}

impl<R> AttemptEnding<R> {
    pub(crate) const fn is_last(&self) -> bool {
        self.why.is_some()
    }

    /// The outcome to settle the attempt with.
    pub(crate) const fn outcome(&self) -> Outcome {
        if self.is_last() { self.class.outcome } else { self.class.outcome.retried() }
    }
}

/// The next step.
pub(crate) enum Step<T, E, R = Refused> {
    Done(Result<T, RunError<E, R>>),
    /// Acquire again, not before the given time.
    Retry(Option<Instant>),
}

impl<'a, T, E> RetryState<'a, T, E> {
    pub(crate) fn begin(inner: &'a Arc<Inner>, retry: &'a Retry) -> Self {
        Self { inner, retry, attempts: Attempts::default(), last: None, last_kind: Kind::Ignored }
    }

    /// An attempt was admitted; returns its number. The first one registers the work: work that is never admitted earns
    /// no retries.
    pub(crate) fn admitted(&self) -> u32 {
        if let (0, Some(budget)) = (self.attempts.completed(), self.retry.retry_budget()) {
            let now = self.inner.clock().now();
            let mut state = self.inner.lock();
            let now = now.max(state.gates.latest());
            state.retries(&budget).begin(now);
        }
        if let (1.., Some(counters)) = (self.attempts.completed(), &self.inner.setup().counters) {
            counters.record_retry();
        }
        self.attempts.completed()
    }

    /// An attempt was not admitted.
    pub(crate) fn refused<R>(&mut self, retry_after: Option<Duration>, refused: R) -> Step<T, E, R> {
        if let (WhenRefused::Wait, Some(span)) = (self.retry.refusal(), retry_after) {
            // Jitter: callers refused at the same time got the same retry time.
            let spread = Backoff::fixed(span / 10).jitter(Jitter::Full);
            let now = self.inner.clock().now();
            let extra = self.inner.lock().gates.delay(&spread, 0);
            return Step::Retry(Some(now + span + extra));
        }
        let Some(last) = self.last.take() else { return Step::Done(Err(RunError::Refused(refused))) };
        // The last attempt was settled as one that would be retried, and so not counted as completed.
        if self.last_kind != Kind::Ignored {
            self.inner.complete();
        }
        Step::Done(self.end(last, StopReason::Refused(refused)))
    }

    /// An attempt completed: settles it, and returns the next step.
    fn settle_attempt(&mut self, permit: Permit<'_>, result: Result<T, E>, class: Class) -> Step<T, E> {
        let ending = self.completed(class);
        permit.settle(ending.outcome());
        self.settled(ending, result)
    }

    /// An attempt completed. Its permit must be settled with the ending's outcome before [`settled`](Self::settled).
    pub(crate) fn completed<R>(&mut self, class: Class) -> AttemptEnding<R> {
        self.attempts.complete();
        // Work has no deadline of its own: a caller that gives up drops it.
        let failure = Failure { is_retryable: class.again, is_in_time: true };
        let why = self.attempts.next(self.retry, failure, || self.takes_retry()).err().map(StopReason::from);
        AttemptEnding { class, why }
    }

    /// The next step, after the attempt's permit was settled.
    pub(crate) fn settled<R>(&mut self, ending: AttemptEnding<R>, result: Result<T, E>) -> Step<T, E, R> {
        if let Some(why) = ending.why {
            return Step::Done(self.end(result, why));
        }
        let outcome = ending.class.outcome;
        self.last = Some(result);
        self.last_kind = outcome.kind();
        Step::Retry(self.delay(outcome.hint()))
    }

    fn end<R>(&self, result: Result<T, E>, why: StopReason<R>) -> Result<T, RunError<E, R>> {
        result.map_err(|error| RunError::Failed { error, attempts: self.attempts.completed(), why })
    }

    fn takes_retry(&self) -> bool {
        let Some(budget) = self.retry.retry_budget() else { return true };
        let now = self.inner.clock().now();
        let mut state = self.inner.lock();
        let now = now.max(state.gates.latest());
        state.retries(&budget).take(&budget, now)
    }

    /// When to acquire again: after the backoff and after the full hint. A pause of all requests that lasts as
    /// long replaces both.
    fn delay(&self, hint: Option<Duration>) -> Option<Instant> {
        let now = self.inner.clock().now();
        let mut state = self.inner.lock();
        let gates = &mut state.gates;
        let hinted = hint.map(|hint| now + hint);
        if let Some(until) = gates.paused_until(now) {
            return hinted.filter(|hinted| *hinted > until);
        }
        let delay = gates.delay(self.retry.delays(), self.attempts.completed() - 1);
        let at = hinted.map_or(now + delay, |hinted| hinted.max(now + delay));
        (at > now).then_some(at)
    }
}

impl Inner {
    /// Counts work as completed whose last attempt was not counted.
    fn complete(&self) {
        let mut effects = Effects::default();
        let mut state = self.lock();
        let State { plan, gates, .. } = &mut *state;
        gates.complete(plan, &mut effects.events);
        self.release(state, effects);
    }
}
