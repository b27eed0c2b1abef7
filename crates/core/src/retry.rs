//! Retry policy and its state machine: how many attempts, how far apart, and the retry budget.

use std::time::Duration;

use crate::backoff::{Backoff, Jitter};
use crate::time::Instant;
use crate::window::Tally;

/// Slices of a retry budget's window.
const SLICES: u32 = 10;

/// When and how often a request is retried.
#[derive(Debug, Clone, PartialEq)]
pub struct Retry {
    pub(crate) attempts: u32,
    pub(crate) backoff: Backoff,
    pub(crate) budget: RetryBudget,
    pub(crate) when_refused: WhenRefused,
}

/// What happens when an attempt is not admitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WhenRefused {
    /// Stop retrying.
    #[default]
    Stop,
    /// Wait for the refusal's `retry_after` and try again; stop if it has none.
    Wait,
}

impl Default for Retry {
    /// Three attempts.
    fn default() -> Self {
        Self::attempts(3)
    }
}

impl Retry {
    /// At most `attempts` in total, with exponential backoff from 200 ms up to 5 s with full jitter, and the
    /// [default budget](RetryBudget::default).
    pub const fn attempts(attempts: u32) -> Self {
        let backoff = Backoff::exponential(Duration::from_millis(200), Duration::from_secs(5));
        let budget = RetryBudget::new(0.2, 10, Duration::from_secs(10));
        Self { attempts, backoff: backoff.jitter(Jitter::Full), budget, when_refused: WhenRefused::Stop }
    }

    /// One attempt: nothing is retried.
    pub const fn off() -> Self {
        Self::attempts(1)
    }

    /// Sets the delays between attempts.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Bounds the share of the traffic that may be retries.
    #[must_use]
    pub const fn budget(mut self, budget: RetryBudget) -> Self {
        self.budget = budget;
        self
    }

    /// Sets what happens when an attempt is refused.
    #[must_use]
    pub const fn when_refused(mut self, when_refused: WhenRefused) -> Self {
        self.when_refused = when_refused;
        self
    }

    /// Attempts in total, at least one.
    pub const fn attempts_max(&self) -> u32 {
        if self.attempts == 0 { 1 } else { self.attempts }
    }

    /// The delays between attempts.
    pub const fn delays(&self) -> &Backoff {
        &self.backoff
    }

    /// The retry budget; `None` if nothing is retried.
    pub const fn retry_budget(&self) -> Option<RetryBudget> {
        if self.is_off() { None } else { Some(self.budget) }
    }

    /// Whether nothing is retried.
    pub const fn is_off(&self) -> bool {
        self.attempts_max() == 1
    }

    /// What happens when an attempt is refused.
    pub const fn refusal(&self) -> WhenRefused {
        self.when_refused
    }
}

/// The share of the traffic that may be retries, so that retries do not multiply the load on a failing
/// upstream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryBudget {
    pub(crate) share: f64,
    pub(crate) at_least: u32,
    pub(crate) window: Duration,
}

impl Default for RetryBudget {
    /// A fifth of the requests started in the last 10 s, and at least ten.
    fn default() -> Self {
        Retry::attempts(1).budget
    }
}

impl RetryBudget {
    /// Allows retries up to `share` of the requests started in `window`, and at least `at_least`.
    pub const fn new(share: f64, at_least: u32, window: Duration) -> Self {
        Self { share, at_least, window }
    }

    /// Allows every retry.
    pub const fn unlimited() -> Self {
        // The highest valid count.
        Self::new(1.0, 1 << 30, Duration::from_secs(10))
    }

    /// The window over which requests and retries are counted.
    pub const fn window(&self) -> Duration {
        self.window
    }
}

/// Requests started and retried within one window, for all budgets with that window.
#[derive(Debug, Clone)]
pub struct Retries {
    window: Duration,
    tally: Tally,
}

impl Retries {
    /// Creates an empty count.
    pub fn new(budget: &RetryBudget) -> Self {
        Self { window: budget.window, tally: Tally::new(budget.window, SLICES) }
    }

    /// The counted window.
    pub const fn window(&self) -> Duration {
        self.window
    }

    /// Whether the window holds any request at `now`.
    pub fn has_any(&self, now: Instant) -> bool {
        self.tally.counts(now).total > 0
    }

    /// Counts the first attempt of a request.
    pub fn begin(&mut self, now: Instant) {
        self.tally.record(now, false);
    }

    /// Takes one retry from the budget, if one is left.
    #[expect(clippy::cast_precision_loss, reason = "a share of counts")]
    pub fn take(&mut self, budget: &RetryBudget, now: Instant) -> bool {
        let counts = self.tally.counts(now);
        let begun = counts.total - counts.bad;
        let allowed = counts.bad < u64::from(budget.at_least)
            || ((counts.bad + 1) as f64) <= begun as f64 * budget.share;
        if allowed {
            self.tally.record(now, true);
        }
        allowed
    }
}

/// The attempts of one piece of work, and whether another one follows: the state machine that `run`, the HTTP middleware and the
/// client of the server share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempts {
    completed: u32,
}

/// An attempt that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Whether another attempt may succeed, and does no harm.
    pub is_retryable: bool,
    /// Whether another attempt would start before the deadline of the work.
    pub is_in_time: bool,
}

/// Why no attempt follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastAttempt {
    /// The failure is not retryable.
    NotRetryable,
    /// [`Retry::off`] allows one attempt only.
    Off,
    /// All attempts were made.
    Spent,
    /// The next attempt would start after the deadline.
    Deadline,
    /// The retry budget is used up.
    Budget,
}

impl Attempts {
    /// Work of which this many attempts completed.
    pub const fn after(completed: u32) -> Self {
        Self { completed }
    }

    /// Attempts that completed.
    pub const fn completed(self) -> u32 {
        self.completed
    }

    /// Counts an attempt that completed.
    pub const fn complete(&mut self) {
        self.completed = self.completed.saturating_add(1);
    }

    /// Decides whether an attempt follows the failed one. `take_retry` is called last, and only if everything else allows it:
    /// it takes from the retry budget.
    ///
    /// # Errors
    /// Why none follows.
    pub fn next(
        self,
        retry: &Retry,
        failure: Failure,
        take_retry: impl FnOnce() -> bool,
    ) -> Result<(), LastAttempt> {
        if !failure.is_retryable {
            Err(LastAttempt::NotRetryable)
        } else if retry.is_off() {
            Err(LastAttempt::Off)
        } else if self.completed >= retry.attempts_max() {
            Err(LastAttempt::Spent)
        } else if !failure.is_in_time {
            Err(LastAttempt::Deadline)
        } else if !take_retry() {
            Err(LastAttempt::Budget)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(secs: u64) -> Instant {
        Instant::from_nanos(secs * 1_000_000_000)
    }

    #[test]
    fn first_reason_ends_the_attempts() {
        let failure = |is_retryable, is_in_time| Failure { is_retryable, is_in_time };
        let three = Retry::attempts(3);
        let table = [
            (Retry::off(), 1, failure(false, false), Err(LastAttempt::NotRetryable)),
            (Retry::off(), 1, failure(true, false), Err(LastAttempt::Off)),
            (three.clone(), 3, failure(true, false), Err(LastAttempt::Spent)),
            (three.clone(), 2, failure(true, false), Err(LastAttempt::Deadline)),
            (three.clone(), 2, failure(true, true), Ok(())),
        ];
        for (retry, completed, failure, wanted) in table {
            let mut attempts = Attempts::default();
            (0..completed).for_each(|_| attempts.complete());
            let mut has_asked = false;
            let next = attempts.next(&retry, failure, || {
                has_asked = true;
                true
            });
            assert_eq!((next, has_asked), (wanted, wanted.is_ok()), "{completed} {failure:?}");
            let wanted = wanted.and(Err(LastAttempt::Budget));
            assert_eq!(attempts.next(&retry, failure, || false), wanted);
        }
    }

    #[test]
    fn retry_budget_is_a_fifth_and_at_least_ten() {
        for (begun, allowed) in [(0, 10), (10, 10), (49, 10), (55, 11), (100, 20)] {
            let budget = RetryBudget::default();
            let mut retries = Retries::new(&budget);
            (0..begun).for_each(|_| retries.begin(at(1)));
            let taken = (0..100).filter(|_| retries.take(&budget, at(1))).count();
            assert_eq!(taken, allowed, "of {begun} begun");
        }
    }

    #[test]
    fn retry_budget_recovers_with_time() {
        let budget = RetryBudget::new(0.0, 2, Duration::from_secs(10));
        let mut retries = Retries::new(&budget);
        let taken: Vec<bool> = [0, 0, 0, 5, 10, 11].map(|when| retries.take(&budget, at(when))).into();
        assert_eq!(taken, [true, true, false, false, true, true]);
    }

    #[test]
    fn no_attempts_count_as_one() {
        assert_eq!(Retry::attempts(0).attempts_max(), 1);
        assert_eq!(Retry::attempts(0).retry_budget(), None);
        assert_eq!(Retry::attempts(1), Retry::off());
    }

    #[test]
    fn default_retry_has_jitter_and_a_budget() {
        let retry = Retry::default();
        assert_eq!((retry.attempts_max(), retry.is_off()), (3, false));
        assert_eq!(retry.delays().span(), (Duration::from_millis(200), Duration::from_secs(5)));
        assert_eq!(retry.delays().spread(), &Jitter::Full);
        assert_eq!(retry.retry_budget(), Some(RetryBudget::default()));
    }

    #[test]
    fn unlimited_budget_allows_retries_without_requests() {
        let budget = RetryBudget::unlimited();
        let mut retries = Retries::new(&budget);
        assert!((0..10_000).all(|_| retries.take(&budget, at(1))));
    }
}
