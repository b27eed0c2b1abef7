//! Calls to a store that may be unavailable: a timeout per call, and a circuit breaker so that callers do not
//! all wait for the timeout.
//!
//! The timeout covers the time that the engine has a call, not the time in the store's own queue. The breaker
//! is a throttle with only a circuit. Calls travel in batches, so one slow round trip fails many of them: at
//! most one failure per timeout counts. A store that replies immediately is called without either.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::cost::Cost;
use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::plan::{Circuit, Controller};
use tidegate_store::{EngineTime, Reply, StoreError};
use tokio::time::Instant;

use super::events::{LimitEvent, Listeners};
use super::runtime::timeout;
use crate::sync::Mutex;
use crate::throttle::Throttle;

/// Consecutive failures after which the breaker opens. At most one counts per timeout: they span at least
/// two.
const FAILURES: u32 = 3;
/// Timeouts without a response after which calls in the store's queue fail.
const STUCK: u32 = 3;
/// Timeout of changes, reports and lookups, unless the timeout of decisions is longer.
const SLOW_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the circuit stays open the first time.
const OPEN_FOR: Duration = Duration::from_secs(1);

/// Timeout and circuit breaker for calls to the store.
pub(super) struct Breaker {
    deadline: Duration,
    circuit: Throttle,
    /// When a failure was last counted.
    failed_at: Mutex<Option<Instant>>,
    /// When a call that had waited in a queue of the store last got a response, by queue: one may be stuck while
    /// another moves.
    last_replies: Mutex<Vec<(&'static str, Instant)>>,
}

/// A failed call, and whether the store may have carried it out.
#[derive(Debug)]
pub(super) struct CallFailure {
    pub(super) error: StoreError,
    pub(super) may_be_done: bool,
}

impl From<CallFailure> for StoreError {
    fn from(failed: CallFailure) -> Self {
        failed.error
    }
}

impl Breaker {
    pub(super) fn new(deadline: Duration, listeners: &Arc<Listeners>) -> Self {
        let listeners = Arc::clone(listeners);
        let circuit = Throttle::builder()
            .circuit(Circuit::after_failures(FAILURES).open_for(OPEN_FOR))
            .controller(Controller::Fixed)
            .on_state_change(move |notice| match notice.event {
                Event::CircuitOpened { span, .. } => listeners.notify(&LimitEvent::StoreAway { span }),
                Event::CircuitClosed => listeners.notify(&LimitEvent::StoreBack),
                _ => {}
            })
            .build()
            .expect("a circuit within its bounds");
        Self { deadline, circuit, failed_at: Mutex::new(None), last_replies: Mutex::default() }
    }

    /// Waits for a reply within the timeout of decisions, unless the circuit is open.
    pub(super) async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, CallFailure> {
        self.call_within(self.deadline, reply).await
    }

    /// The same for a change, a report or a lookup of a lease, which may take longer and blocks no draw.
    pub(super) async fn call_slow<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, CallFailure> {
        self.call_within(self.deadline.max(SLOW_TIMEOUT), reply).await
    }

    async fn call_within<T: Unpin>(&self, span: Duration, reply: Reply<'_, T>) -> Result<T, CallFailure> {
        let permit = match self.circuit.try_acquire(Cost::request()) {
            Ok(permit) => permit,
            Err(refused) => {
                let error =
                    StoreError::unavailable(format!("circuit open after repeated failures: {refused}"));
                return Err(CallFailure { error, may_be_done: false });
            }
        };
        match self.within(span, reply).await {
            Ok(answer) => {
                permit.settle(Outcome::success());
                Ok(answer)
            }
            Err(error) if error.is_unavailable() => {
                if permit.is_probe() || self.is_next_failure() {
                    permit.settle(Outcome::failure());
                }
                Err(CallFailure { error, may_be_done: true })
            }
            // A full queue of our own is not a failure of the engine.
            Err(error @ StoreError::Busy { .. }) => Err(CallFailure { error, may_be_done: false }),
            // A refusal is a response: the store is available.
            Err(error) => {
                permit.settle(Outcome::success());
                Err(CallFailure { error, may_be_done: false })
            }
        }
    }

    /// Waits for a reply until the engine has had the call for `span`.
    async fn within<T: Unpin>(&self, span: Duration, reply: Reply<'_, T>) -> Result<T, StoreError> {
        let (start, time) = (Instant::now(), EngineTime::default());
        let mut reply = pin!(time.follow(reply));
        let mut wait = span;
        loop {
            if let Ok(answer) = timeout(wait, reply.as_mut()).await {
                let is_reply = !answer.as_ref().is_err_and(StoreError::is_unavailable);
                if let Some(queue) = time.queue().filter(|_| is_reply) {
                    self.record_reply(queue);
                }
                return answer;
            }
            wait = match time.elapsed().map(|elapsed| span.saturating_sub(elapsed)) {
                Some(Duration::ZERO) => {
                    let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
                    return Err(StoreError::TimedOut { millis });
                }
                Some(left) => left,
                None if self.is_stuck(start, time.queue()) => {
                    return Err(StoreError::unavailable("earlier calls got no response"));
                }
                None => span,
            };
        }
    }

    fn record_reply(&self, queue: &'static str) {
        let mut replies = self.last_replies.lock();
        replies.retain(|(other, _)| *other != queue);
        replies.push((queue, Instant::now()));
    }

    /// Whether a queue of the store is stuck for a call that has waited in it since `start`.
    fn is_stuck(&self, start: Instant, queue: Option<&'static str>) -> bool {
        let replies = self.last_replies.lock();
        let last = replies.iter().find(|(other, _)| queue == Some(*other));
        let since = last.map_or(start, |(_, at)| start.max(*at));
        drop(replies);
        self.open_for().is_some() || since.elapsed() >= self.deadline.saturating_mul(STUCK)
    }

    /// Whether a failure counts: only the first per timeout.
    fn is_next_failure(&self) -> bool {
        let mut failed_at = self.failed_at.lock();
        let is_next = failed_at.is_none_or(|at| at.elapsed() >= self.deadline);
        if is_next {
            *failed_at = Some(Instant::now());
        }
        is_next
    }

    /// The timeout of decisions.
    pub(super) const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// How long the circuit stays open; `None` if it is closed.
    pub(super) fn open_for(&self) -> Option<Duration> {
        let circuit = self.circuit.snapshot().circuit?;
        Some(circuit.retry_after).filter(|span| !span.is_zero())
    }

    /// When to retry.
    pub(super) fn retry_after(&self) -> Duration {
        let open = self.circuit.snapshot().circuit.map(|circuit| circuit.retry_after);
        open.unwrap_or_default().max(self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const DEADLINE: Duration = Duration::from_millis(50);

    fn breaker() -> Breaker {
        Breaker::new(DEADLINE, &Arc::new(Listeners::default()))
    }

    /// A reply that waits in our queue for `queued`, and in the engine for `engine`.
    fn reply(queued: Duration, engine: Duration) -> Reply<'static, ()> {
        reply_in("writer", queued, engine)
    }

    fn reply_in(queue: &'static str, queued: Duration, engine: Duration) -> Reply<'static, ()> {
        Reply::later(async move {
            let time = EngineTime::current();
            time.wait(queue);
            sleep(queued).await;
            time.send();
            sleep(engine).await;
            Ok(())
        })
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_our_queue_is_not_the_engines() {
        let breaker = breaker();
        breaker.call(reply(2 * DEADLINE, DEADLINE / 2)).await.map_err(|failed| failed.error).unwrap();
        for (queued, engine) in [(Duration::ZERO, 2 * DEADLINE), (Duration::from_millis(120), 2 * DEADLINE)] {
            let start = Instant::now();
            let failed = breaker.call(reply(queued, engine)).await.expect_err("the engine is too slow");
            assert!(matches!(failed.error, StoreError::TimedOut { millis: 50 }), "{}", failed.error);
            assert_eq!(start.elapsed(), queued + DEADLINE);
        }
    }

    /// Regression: a server pause of 80 ms opened the breaker for a second, as one slow batch counted once
    /// per call.
    #[tokio::test(start_paused = true)]
    async fn one_slow_round_trip_is_one_failure() {
        let breaker = breaker();
        let call = || async { breaker.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err() };
        let failed = tokio::join!(call(), call(), call(), call(), call(), call());
        assert_eq!(failed, (true, true, true, true, true, true));
        assert_eq!(breaker.open_for(), None);
        assert!(breaker.call(reply(Duration::ZERO, DEADLINE / 2)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn breaker_opens_after_three_slow_trips() {
        let breaker = breaker();
        for is_open in [false, false, true] {
            assert!(breaker.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert_eq!(breaker.open_for().is_some(), is_open);
        }
        let failed =
            breaker.call(reply(Duration::ZERO, Duration::ZERO)).await.expect_err("the breaker is open");
        assert!(!failed.may_be_done);
    }

    /// With a response in between, failures are not consecutive.
    #[tokio::test(start_paused = true)]
    async fn slow_trips_between_quick_ones_are_tolerated() {
        let breaker = breaker();
        for _ in 0..5 {
            assert!(breaker.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert!(breaker.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert!(breaker.call(reply(Duration::ZERO, Duration::ZERO)).await.is_ok());
        }
        assert_eq!(breaker.open_for(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn errors_at_once_count_once_per_deadline() {
        let breaker = breaker();
        let down = || Reply::<()>::later(async { Err(StoreError::unavailable("connection refused")) });
        for _ in 0..100 {
            assert!(breaker.call(down()).await.is_err());
        }
        assert_eq!(breaker.open_for(), None);
        for is_open in [false, true] {
            sleep(DEADLINE).await;
            assert!(breaker.call(down()).await.is_err());
            assert_eq!(breaker.open_for().is_some(), is_open);
        }
    }

    /// Regression: callers behind a hung batch waited for minutes, so that `on_unavailable` did not apply to
    /// them.
    #[tokio::test(start_paused = true)]
    async fn calls_behind_a_hung_batch_fail() {
        let breaker = breaker();
        let call = async |queued| breaker.call(reply(queued, Duration::MAX)).await.is_err();
        let start = Instant::now();
        let (first, second, third) =
            tokio::join!(call(Duration::ZERO), call(Duration::MAX), call(Duration::MAX));
        assert!(first && second && third);
        assert_eq!(start.elapsed(), STUCK * DEADLINE);
        // Once the breaker is open, calls fail without waiting.
        for _ in 0..2 {
            sleep(DEADLINE).await;
            assert!(call(Duration::MAX).await);
        }
        assert!(breaker.open_for().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn longest_deadline_is_never_over() {
        let breaker = Breaker::new(Duration::MAX, &Arc::new(Listeners::default()));
        assert!(!breaker.is_stuck(Instant::now(), None));
    }

    /// Calls wait as long as the queue makes progress.
    #[tokio::test(start_paused = true)]
    async fn calls_in_a_moving_queue_wait_on() {
        let breaker = breaker();
        let quick = async {
            for _ in 0..40 {
                assert!(breaker.call(reply(DEADLINE / 2, DEADLINE / 2)).await.is_ok());
            }
        };
        let (slow, ()) = tokio::join!(breaker.call(reply(30 * DEADLINE, DEADLINE / 2)), quick);
        assert!(slow.is_ok());
    }

    /// Reads of a file are served from memory while its writer waits for the disk.
    #[tokio::test(start_paused = true)]
    async fn replies_of_one_queue_hide_no_other() {
        let breaker = breaker();
        let reads = async {
            for _ in 0..40 {
                assert!(breaker.call(reply_in("readers", DEADLINE / 2, DEADLINE / 2)).await.is_ok());
            }
        };
        let start = Instant::now();
        let write = async {
            assert!(breaker.call(reply(Duration::MAX, Duration::ZERO)).await.is_err());
            start.elapsed()
        };
        let (waited, ()) = tokio::join!(write, reads);
        assert_eq!(waited, STUCK * DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_is_not_a_failure_of_the_engine() {
        let breaker = breaker();
        for _ in 0..5 {
            sleep(DEADLINE).await;
            let busy = StoreError::Busy { place: "here".to_owned(), waiting_max: 1, retry_after: DEADLINE };
            let failed = breaker.call(Reply::<()>::later(async { Err(busy) })).await.expect_err("it is full");
            assert!(!failed.may_be_done && !failed.error.is_unavailable());
        }
        assert_eq!(breaker.open_for(), None);
    }
}
