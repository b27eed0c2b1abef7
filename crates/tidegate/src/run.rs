//! Work under a throttle, tried again as often as it is worth it.
//!
//! Every attempt is admitted anew and holds its permit only while it runs, never while it sleeps. A rejected attempt waits
//! for its full hint. If the upstream's hint paused all requests, that shared pause is the wait. What decides is one
//! [`Course`]; a future and a thread drive the same.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::classes::{Classes, Ended, Sort};
use tidegate_core::cost::Cost;
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::refused::Refused;
use tidegate_core::retry::{Retry, WhenRefused};
use tidegate_core::time::Instant;

use crate::permit::Permit;
use crate::state::{Effects, State};
use crate::throttle::{Inner, Throttle};

mod error;

pub use error::{RunError, Stopped};

/// Which attempt is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// Counted from 0.
    pub number: u32,
}

/// What an attempt's result means: how it went, and whether it is worth another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a class does nothing until it is answered to a runner"]
pub struct Class {
    outcome: Outcome,
    again: bool,
}

impl Class {
    /// It went like this, and that is the end of it.
    pub const fn end(outcome: Outcome) -> Self {
        Self { outcome, again: false }
    }

    /// It went like this, and is worth another attempt.
    pub const fn again(outcome: Outcome) -> Self {
        Self { outcome, again: true }
    }

    /// It ended like this, and `classes` says what that means.
    ///
    /// ```
    /// use tidegate::{Class, Classes, Cost, Ended, Retry, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let classes = Classes::new();
    /// let reply = Throttle::new()
    ///     .runner()
    ///     .retry(Retry::attempts(3))
    ///     .classify(|reply: &Result<&str, u16>| match reply {
    ///         Ok(_) => Class::of(&classes, Ended::Status(200)),
    ///         Err(status) => Class::of(&classes, Ended::Status(*status)),
    ///     })
    ///     .run(Cost::request(), |attempt| async move { if attempt.number == 0 { Err(503) } else { Ok("hello") } })
    ///     .await;
    /// assert_eq!(reply, Ok("hello"));
    /// # }
    /// ```
    pub fn of(classes: &Classes, ended: Ended) -> Self {
        Self::sorted(classes.sort(ended), classes.outcome(ended))
    }

    /// It was of this sort and went like this: worth another attempt where the sort is.
    pub const fn sorted(sort: Sort, outcome: Outcome) -> Self {
        Self { outcome, again: sort.is_worth_another() }
    }

    /// How it went.
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Whether it is worth another attempt.
    pub const fn is_worth_another(&self) -> bool {
        self.again
    }
}

/// Reads a result.
///
/// Any `Fn(&Result<T, E>) -> Class` does; [`EveryError`] is the default.
pub trait Classify<T, E> {
    /// What `result` means.
    fn classify(&self, result: &Result<T, E>) -> Class;
}

/// Every error is a failure and worth another attempt.
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

/// Work that runs under a throttle.
pub type Running<T, E> = Pin<Box<dyn Future<Output = Result<T, RunError<E>>> + Send>>;

impl Throttle {
    /// Runs `work` under a permit, and again as the throttle's [`Retry`] says.
    ///
    /// ```
    /// use tidegate::{Cost, Retry, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::gentle().retry(Retry::attempts(3)).build()?;
    /// let reply = throttle
    ///     .run(Cost::request(), |attempt| async move {
    ///         if attempt.number < 2 { Err("503") } else { Ok("hello") }
    ///     })
    ///     .await;
    /// assert_eq!(reply, Ok("hello"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RunError::Refused`] if the work never ran, else the work's own last error and why it was the last.
    ///
    /// # Cancel safety
    /// Dropping the future drops the running attempt, which counts as ignored; nothing is tried again.
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

    /// A runner with the throttle's [`Retry`], to be changed.
    pub fn runner(&self) -> Runner<'_, EveryError> {
        Runner { throttle: self, retry: self.retry_rule(), classify: EveryError }
    }

    /// The rule for trying again that its limits have.
    pub(crate) fn retry_rule(&self) -> Retry {
        self.inner.lock().plan.draft().retry.clone()
    }

    /// Makes a throttled function of `work`: each call is a [`run`](Self::run) of its own.
    ///
    /// ```
    /// use tidegate::{Cost, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let double = Throttle::new().wrap(Cost::request(), |number: u32| async move { Ok::<_, ()>(2 * number) });
    /// assert_eq!(double(21).await, Ok(42));
    /// # }
    /// ```
    pub fn wrap<A, T, E, F, W>(&self, cost: Cost, work: F) -> impl Fn(A) -> Running<T, E> + use<A, T, E, F, W>
    where
        A: Clone + Send + Sync + 'static,
        T: Send + 'static,
        E: Send + 'static,
        F: Fn(A) -> W + Send + Sync + 'static,
        W: Future<Output = Result<T, E>> + Send,
    {
        let (throttle, work) = (self.clone(), Arc::new(work));
        move |argument| {
            let (throttle, work) = (throttle.clone(), Arc::clone(&work));
            Box::pin(async move { throttle.run(cost, |_| work(argument.clone())).await })
        }
    }
}

/// Runs work under a throttle; made by [`Throttle::runner`].
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
///         Err(_) => Class::end(Outcome::ignored()), // our own mistake
///     })
///     .run(Cost::request(), |_| async { Err(404) })
///     .await;
/// assert_eq!(reply.unwrap_err().into_error(), Some(404));
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a runner does nothing until it runs something"]
pub struct Runner<'a, C> {
    throttle: &'a Throttle,
    retry: Retry,
    classify: C,
}

impl<'a, C> Runner<'a, C> {
    /// Another rule for trying again.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Another reading of results.
    ///
    /// An `Ok` may be worth another attempt too (a response that says 429); the last one is answered as it is.
    pub fn classify<T, E, D: Fn(&Result<T, E>) -> Class>(self, classify: D) -> Runner<'a, D> {
        Runner { throttle: self.throttle, retry: self.retry, classify }
    }

    /// Another reading of results, by a type made for that. Closures go to [`classify`](Self::classify).
    pub fn classified_by<D>(self, classify: D) -> Runner<'a, D> {
        Runner { throttle: self.throttle, retry: self.retry, classify }
    }

    /// Runs `work`, and again as the rule says.
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
        let mut course = Course::begin(&self.throttle.inner, &self.retry);
        loop {
            let step = match self.throttle.acquire(cost).await {
                Err(refused) => course.refused(refused),
                Ok(permit) => {
                    let result = work(course.admitted()).await;
                    let class = self.classify.classify(&result);
                    course.judge(permit, result, class)
                }
            };
            match step {
                Step::Done(result) => return result,
                Step::AskAgain(None) => {}
                Step::AskAgain(Some(at)) => self.throttle.inner.clock().sleep_until(at).await,
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
        let mut course = Course::begin(&self.throttle.inner, &self.retry);
        loop {
            let step = match self.throttle.acquire_blocking(cost) {
                Err(refused) => course.refused(refused),
                Ok(permit) => {
                    let result = work(course.admitted());
                    let class = self.classify.classify(&result);
                    course.judge(permit, result, class)
                }
            };
            match step {
                Step::Done(result) => return result,
                Step::AskAgain(None) => {}
                Step::AskAgain(Some(at)) => {
                    let clock = self.throttle.inner.clock();
                    while clock.now() < at {
                        clock.park_until(at);
                    }
                }
            }
        }
    }
}

/// The course of one piece of work: what has been tried, and what comes next.
pub(crate) struct Course<'a, T, E> {
    inner: &'a Arc<Inner>,
    retry: &'a Retry,
    attempts: u32,
    /// What the last attempt came to, while another is to follow.
    last: Option<Result<T, E>>,
    last_kind: Kind,
}

/// What comes next.
pub(crate) enum Step<T, E> {
    Done(Result<T, RunError<E>>),
    /// Asks for admission again, not before the time if there is one.
    AskAgain(Option<Instant>),
}

impl<'a, T, E> Course<'a, T, E> {
    pub(crate) const fn begin(inner: &'a Arc<Inner>, retry: &'a Retry) -> Self {
        Self { inner, retry, attempts: 0, last: None, last_kind: Kind::Ignored }
    }

    /// An attempt was admitted. The first one begins the work: what is never admitted pays for no retries.
    pub(crate) fn admitted(&self) -> Attempt {
        if let (0, Some(budget)) = (self.attempts, self.retry.retry_budget()) {
            let now = self.inner.clock().now();
            let mut state = self.inner.lock();
            let now = now.max(state.gates.latest());
            state.retries(&budget).begin(now);
        }
        if let (1.., Some(tally)) = (self.attempts, &self.inner.setup().tally) {
            tally.retry();
        }
        Attempt { number: self.attempts }
    }

    /// An attempt was not admitted.
    pub(crate) fn refused(&mut self, refused: Refused) -> Step<T, E> {
        if let (WhenRefused::Wait, Some(span)) = (self.retry.refusal(), refused.retry_after()) {
            // Spread: whoever was refused with this one was told the same.
            let spread = Backoff::fixed(span / 10).jitter(Jitter::Full);
            let now = self.inner.clock().now();
            let extra = self.inner.lock().gates.delay(&spread, 0);
            return Step::AskAgain(Some(now + span + extra));
        }
        let Some(last) = self.last.take() else { return Step::Done(Err(RunError::Refused(refused))) };
        // The last attempt was settled as one that would be followed by another, and so not counted.
        if self.last_kind != Kind::Ignored {
            self.inner.complete();
        }
        Step::Done(self.end(last, Stopped::Refused(refused)))
    }

    /// An attempt ended: settles it, and says what comes next.
    fn judge(&mut self, permit: Permit<'_>, result: Result<T, E>, class: Class) -> Step<T, E> {
        self.judge_held(permit, result, class, |permit, outcome, value| {
            permit.settle(outcome);
            value
        })
    }

    /// The same where the last attempt's answer is not the end of it: `hold` settles the permit when it is.
    pub(crate) fn judge_held<'b>(
        &mut self,
        permit: Permit<'b>,
        result: Result<T, E>,
        class: Class,
        hold: impl FnOnce(Permit<'b>, Outcome, T) -> T,
    ) -> Step<T, E> {
        self.attempts += 1;
        let why = if !class.again {
            Some(Stopped::NotRetryable)
        } else if self.attempts >= self.retry.attempts_max() {
            Some(Stopped::Spent)
        } else if !self.takes_retry() {
            Some(Stopped::Budget)
        } else {
            None
        };
        if let Some(why) = why {
            let result = match result {
                Ok(value) => Ok(hold(permit, class.outcome, value)),
                Err(error) => {
                    permit.settle(class.outcome);
                    Err(error)
                }
            };
            return Step::Done(self.end(result, why));
        }
        permit.settle(class.outcome.retried());
        self.last = Some(result);
        self.last_kind = class.outcome.kind();
        Step::AskAgain(self.delay(class.outcome.hint()))
    }

    fn end(&self, result: Result<T, E>, why: Stopped) -> Result<T, RunError<E>> {
        result.map_err(|error| RunError::Failed { error, attempts: self.attempts, why })
    }

    fn takes_retry(&self) -> bool {
        let Some(budget) = self.retry.retry_budget() else { return true };
        let now = self.inner.clock().now();
        let mut state = self.inner.lock();
        let now = now.max(state.gates.latest());
        state.retries(&budget).take(&budget, now)
    }

    /// When to ask again: after the back-off and after the hint, capped as pauses are. A pause of all requests that lasts as
    /// long replaces both.
    fn delay(&self, hint: Option<Duration>) -> Option<Instant> {
        let now = self.inner.clock().now();
        let mut state = self.inner.lock();
        let State { plan, gates, .. } = &mut *state;
        let hinted = hint.map(|hint| now + hint.min(plan.draft().pause.longest()));
        if let Some(until) = gates.paused_until(now) {
            return hinted.filter(|hinted| *hinted > until);
        }
        let delay = gates.delay(self.retry.delays(), self.attempts - 1);
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
