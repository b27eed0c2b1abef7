//! The course of one call: what was tried, whether it is worth another attempt, and when.
//!
//! A call is repeated only where that cannot do it twice. Whoever says when to come back is heeded, own delays are spread,
//! and there is a bound on the attempts, on the time of the whole, and on how much of the traffic may be retries.

use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::classes::{Classes, Ended};
use tidegate_core::random::Random;
use tidegate_core::retry::WhenRefused;
use tidegate_core::time::{self, nanos};
use tokio::time::{Instant, sleep};

use super::call::{Call, Repeat};
use super::error::{Away, Cause, ClientError, GaveUp};
use super::secret::Secret;
use super::send::{Answer, Heard, invalid};
use super::{Inner, count, lock};
use crate::problem::Problem;
use crate::seconds::Seconds;

/// Which statuses are worth another attempt.
static CLASSES: Classes = Classes::new();

/// What comes next.
enum Step {
    Done(Result<Answer, ClientError>),
    AskAgain(Duration),
}

/// What has been tried.
struct Course<'a> {
    inner: &'a Inner,
    call: &'a Call,
    began: Instant,
    until: Instant,
    attempts: u32,
    /// An attempt may have been heard.
    unheard: bool,
}

impl Inner {
    /// Sends a call, and again as the rules say, for `total` in all or as long as the client's patience lasts.
    pub(super) async fn ask(
        &self,
        token: Option<&Secret>,
        call: &Call,
        total: Option<Duration>,
    ) -> Result<Answer, ClientError> {
        let url = call.url(&self.base).map_err(|why| invalid(call, why))?;
        let mut course = Course::begin(self, call, total);
        loop {
            let heard = self.attempt(token, call, &url, course.span()).await;
            match course.judge(heard) {
                Step::Done(answer) => return answer,
                Step::AskAgain(delay) => sleep(delay).await,
            }
        }
    }

    /// The time on the line that budgets live on.
    fn now(&self) -> time::Instant {
        time::Instant::from_nanos(nanos(self.born.elapsed()))
    }

    /// Takes one retry from the budget.
    fn takes_retry(&self) -> bool {
        let (Some(retries), Some(budget)) = (&self.retries, self.patience.retry.retry_budget()) else {
            return true;
        };
        lock(retries).take(&budget, self.now())
    }
}

impl<'a> Course<'a> {
    fn begin(inner: &'a Inner, call: &'a Call, total: Option<Duration>) -> Self {
        if let Some(retries) = &inner.retries {
            lock(retries).begin(inner.now());
        }
        let began = Instant::now();
        let total = total.unwrap_or(inner.patience.total).saturating_add(call.waits);
        // No server lets anybody wait for longer than can be counted.
        let until = began.checked_add(total).unwrap_or(began + inner.patience.total);
        Self { inner, call, began, until, attempts: 0, unheard: false }
    }

    /// How long the next attempt may take.
    fn span(&self) -> Duration {
        let span = self.inner.patience.request.saturating_add(self.call.waits);
        span.min(self.until.saturating_duration_since(Instant::now()))
    }

    fn judge(&mut self, heard: Heard) -> Step {
        self.attempts += 1;
        match heard {
            Heard::Done(answer) => Step::Done(Ok(answer)),
            Heard::Strange(error) => Step::Done(Err(error)),
            Heard::Said { status: 429, problem } => self.refused(problem),
            Heard::Said { status, problem } if !CLASSES.sort(Ended::Status(status)).is_worth_another() => {
                Step::Done(Err(ClientError::of(problem, status, self.unheard)))
            }
            Heard::Said { status, problem } => {
                let retry_after = problem.retry_after.map(Seconds::as_duration);
                self.failed(Cause::Status { status, problem: Some(problem), retry_after })
            }
            Heard::Nothing(cause) => self.failed(cause),
        }
    }

    /// A limit says no: the caller is told, unless the rules say to wait for it.
    fn refused(&self, problem: Box<Problem>) -> Step {
        let after = problem.retry_after.map(Seconds::as_duration);
        match (self.inner.patience.retry.refusal(), after) {
            (WhenRefused::Wait, Some(after)) if self.is_in_time(spread(after)) => {
                Step::AskAgain(spread(after))
            }
            _ => Step::Done(Err(ClientError::Refused { problem })),
        }
    }

    /// The server is away, or says that it is.
    fn failed(&mut self, cause: Cause) -> Step {
        let may_repeat = self.may_repeat(&cause);
        self.unheard |= !is_undone(&cause);
        let retry = &self.inner.patience.retry;
        let own = retry.delays().delay(self.attempts - 1, &mut Random::seeded(rand::random()));
        let delay = match &cause {
            Cause::Status { retry_after: Some(after), .. } => own.max(spread(*after)),
            _ => own,
        };
        let why = if !may_repeat {
            GaveUp::MayBeDone
        } else if self.attempts >= retry.attempts_max() {
            GaveUp::Attempts
        } else if !self.is_in_time(delay) {
            GaveUp::Deadline
        } else if !self.inner.takes_retry() {
            count(&self.inner.counts.out_of_budget);
            GaveUp::Budget
        } else {
            count(&self.inner.counts.retries);
            return Step::AskAgain(delay);
        };
        Step::Done(Err(self.away(why, cause)))
    }

    fn may_repeat(&self, cause: &Cause) -> bool {
        self.call.repeat == Repeat::Freely || is_undone(cause)
    }

    fn is_in_time(&self, delay: Duration) -> bool {
        Instant::now().checked_add(delay).is_some_and(|then| then < self.until)
    }

    fn away(&self, why: GaveUp, cause: Cause) -> ClientError {
        let method = self.call.method.to_string();
        // A status below 500 is an answer of the server's own.
        if let Cause::Status { status: status @ ..500, problem: Some(problem), .. } = cause {
            return ClientError::of(problem, status, self.unheard);
        }
        ClientError::Away(Box::new(Away {
            method,
            route: self.call.route,
            attempts: self.attempts,
            took: self.began.elapsed(),
            why,
            cause,
            unheard: self.unheard,
        }))
    }
}

/// Whether it is certain that nothing was done.
fn is_undone(cause: &Cause) -> bool {
    match cause {
        Cause::Connect(_) => true,
        // The server had no place for it, stops, or did not get it whole.
        Cause::Status { problem: Some(problem), .. } => {
            ["busy", "stopping", "slow-body"].iter().any(|kind| problem.is(kind))
        }
        _ => false,
    }
}

/// A little later than was said: whoever was told the same would come at the same time.
fn spread(after: Duration) -> Duration {
    let more = Backoff::fixed(after / 10).jitter(Jitter::Full);
    after.saturating_add(more.delay(0, &mut Random::seeded(rand::random())))
}
