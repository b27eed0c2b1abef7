//! Retry state of one call: attempts so far, whether to retry, and when.
//!
//! Retries never execute a call twice, and honor `Retry-After`. Delays use exponential backoff with jitter.
//! Attempts, total time and the share of retries in the traffic (retry budget) are bounded.

use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::classes::{Classes, Completion};
use tidegate_core::random::Random;
use tidegate_core::retry::{Attempts, Failure, LastAttempt, WhenRefused};
use tidegate_core::time::{self, nanos};
use tokio::time::{Instant, sleep};

use super::call::{Call, Idempotency};
use super::error::{Cause, ClientError, Outage, StopReason};
use super::secret::Secret;
use super::send::{Outcome, Payload, invalid};
use super::{Inner, count, lock};
use crate::problem::Problem;
use crate::seconds::Seconds;

/// Classifies HTTP statuses by whether they are retryable.
static CLASSES: Classes = Classes::new();

/// The next action after an attempt.
enum Action {
    Done(Result<Payload, ClientError>),
    Retry(Duration),
}

/// The retry state of one call.
struct RetryState<'a> {
    inner: &'a Inner,
    call: &'a Call,
    began: Instant,
    until: Instant,
    attempts: Attempts,
    /// Whether an earlier attempt may have been executed.
    may_be_done: bool,
}

impl Inner {
    /// Sends a call and retries it, within `total` or the client's total timeout.
    pub(super) async fn send_with_retries(
        &self,
        token: Option<&Secret>,
        call: &Call,
        total: Option<Duration>,
    ) -> Result<Payload, ClientError> {
        let url = call.url(&self.base).map_err(|why| invalid(call, why))?;
        let mut state = RetryState::begin(self, call, total);
        loop {
            let outcome = self.attempt(token, call, &url, state.span()).await;
            match state.next_action(outcome) {
                Action::Done(result) => return result,
                Action::Retry(delay) => sleep(delay).await,
            }
        }
    }

    /// The time since the client was created, as the retry budget counts it.
    fn now(&self) -> time::Instant {
        time::Instant::from_nanos(nanos(self.created_at.elapsed()))
    }

    /// Takes one retry from the retry budget.
    fn take_retry(&self) -> bool {
        let (Some(retries), Some(budget)) = (&self.retries, self.settings.retry.retry_budget()) else {
            return true;
        };
        lock(retries).take(&budget, self.now())
    }
}

impl<'a> RetryState<'a> {
    fn begin(inner: &'a Inner, call: &'a Call, total: Option<Duration>) -> Self {
        if let Some(retries) = &inner.retries {
            lock(retries).begin(inner.now());
        }
        let began = Instant::now();
        let total = total.unwrap_or(inner.settings.total).saturating_add(call.queue_time);
        // Falls back to the client's timeout if the sum overflows.
        let until = began.checked_add(total).unwrap_or(began + inner.settings.total);
        Self { inner, call, began, until, attempts: Attempts::default(), may_be_done: false }
    }

    /// The timeout of the next attempt.
    fn span(&self) -> Duration {
        let span = self.inner.settings.request.saturating_add(self.call.queue_time);
        span.min(self.until.saturating_duration_since(Instant::now()))
    }

    fn next_action(&mut self, outcome: Outcome) -> Action {
        self.attempts.complete();
        match outcome {
            Outcome::Success(payload) => Action::Done(Ok(payload)),
            Outcome::Fatal(error) => Action::Done(Err(error)),
            Outcome::Problem { status: 429, problem } => self.refused(problem),
            Outcome::Problem { status, problem }
                if !CLASSES.classify(Completion::Status(status)).is_retryable() =>
            {
                Action::Done(Err(ClientError::from_problem(problem, status, self.may_be_done)))
            }
            Outcome::Problem { status, problem } => {
                let retry_after = problem.retry_after.map(Seconds::as_duration);
                self.failed(Cause::Status { status, problem: Some(problem), retry_after })
            }
            Outcome::Failed(cause) => self.failed(cause),
        }
    }

    /// A limit refused the call: returns the refusal, or waits if configured.
    fn refused(&self, problem: Box<Problem>) -> Action {
        let after = problem.retry_after.map(Seconds::as_duration);
        match (self.inner.settings.retry.refusal(), after) {
            (WhenRefused::Wait, Some(after)) if self.is_in_time(with_jitter(after)) => {
                Action::Retry(with_jitter(after))
            }
            _ => Action::Done(Err(ClientError::Refused { problem })),
        }
    }

    /// The server is unavailable.
    fn failed(&mut self, cause: Cause) -> Action {
        let may_retry = self.may_retry(&cause);
        self.may_be_done |= !is_not_executed(&cause);
        let retry = &self.inner.settings.retry;
        let own = retry.delays().delay(self.attempts.completed() - 1, &mut Random::seeded(rand::random()));
        let delay = match &cause {
            Cause::Status { retry_after: Some(after), .. } => own.max(with_jitter(*after)),
            _ => own,
        };
        let failure = Failure { is_retryable: may_retry, is_in_time: self.is_in_time(delay) };
        let why = match self.attempts.next(retry, failure, || self.inner.take_retry()) {
            Ok(()) => {
                count(&self.inner.counters.retries);
                return Action::Retry(delay);
            }
            Err(LastAttempt::NotRetryable) => StopReason::MayBeDone,
            Err(LastAttempt::Off | LastAttempt::Spent) => StopReason::Attempts,
            Err(LastAttempt::Deadline) => StopReason::Deadline,
            Err(LastAttempt::Budget) => {
                count(&self.inner.counters.out_of_budget);
                StopReason::Budget
            }
        };
        Action::Done(Err(self.give_up(why, cause)))
    }

    fn may_retry(&self, cause: &Cause) -> bool {
        self.call.idempotency == Idempotency::Yes || is_not_executed(cause)
    }

    fn is_in_time(&self, delay: Duration) -> bool {
        Instant::now().checked_add(delay).is_some_and(|then| then < self.until)
    }

    fn give_up(&self, why: StopReason, cause: Cause) -> ClientError {
        let method = self.call.method.to_string();
        // A status below 500 is the server's own decision.
        if let Cause::Status { status: status @ ..500, problem: Some(problem), .. } = cause {
            return ClientError::from_problem(problem, status, self.may_be_done);
        }
        ClientError::Unavailable(Box::new(Outage {
            method,
            route: self.call.route,
            attempts: self.attempts.completed(),
            took: self.began.elapsed(),
            why,
            cause,
            may_be_done: self.may_be_done,
        }))
    }
}

/// Whether the server certainly did not execute the call.
fn is_not_executed(cause: &Cause) -> bool {
    match cause {
        Cause::Connect(_) => true,
        // The server was at capacity, was stopping, or did not receive the whole body.
        Cause::Status { problem: Some(problem), .. } => {
            ["busy", "stopping", "slow-body"].iter().any(|kind| problem.is(kind))
        }
        _ => false,
    }
}

/// Adds up to 10% jitter to `Retry-After`, so that clients refused together do not retry together.
fn with_jitter(after: Duration) -> Duration {
    let more = Backoff::fixed(after / 10).jitter(Jitter::Full);
    after.saturating_add(more.delay(0, &mut Random::seeded(rand::random())))
}
