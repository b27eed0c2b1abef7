//! Calling a store that may be unavailable: a deadline for the engine, and a breaker so that not every caller waits for it.
//!
//! The deadline covers the time that the engine has a call, not the time in a queue of the store's own. The breaker is a throttle
//! with nothing but a circuit. Calls travel in batches, so that one slow round trip fails many of them: at most one failure per
//! deadline counts. A store that answers at once is called without either.

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
use super::home::timeout;
use crate::sync::Mutex;
use crate::throttle::Throttle;

/// Failures in a row after which the breaker opens. At most one counts per deadline: they span at least two.
const FAILURES: u32 = 3;
/// Deadlines without an answer after which calls in the store's queue fail.
const STUCK: u32 = 3;
/// How long a change or a report may take, unless a decision may take longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For how long, the first time.
const LEFT_ALONE: Duration = Duration::from_secs(1);

/// The way to the store.
pub(super) struct Guard {
    deadline: Duration,
    breaker: Throttle,
    /// When a failure was last counted.
    failed_at: Mutex<Option<Instant>>,
    /// When a call that had waited in the store's queue was last answered.
    answered_at: Mutex<Option<Instant>>,
}

/// A call that failed, and whether the store may have done it all the same.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: StoreError,
    pub(super) may_be_done: bool,
}

impl From<Failed> for StoreError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

impl Guard {
    pub(super) fn new(deadline: Duration, listeners: &Arc<Listeners>) -> Self {
        let listeners = Arc::clone(listeners);
        let breaker = Throttle::builder()
            .circuit(Circuit::after_failures(FAILURES).open_for(LEFT_ALONE))
            .controller(Controller::Fixed)
            .on_state_change(move |notice| match notice.event {
                Event::CircuitOpened { span, .. } => listeners.tell(&LimitEvent::StoreAway { span }),
                Event::CircuitClosed => listeners.tell(&LimitEvent::StoreBack),
                _ => {}
            })
            .build()
            .expect("a circuit within its bounds");
        Self { deadline, breaker, failed_at: Mutex::new(None), answered_at: Mutex::new(None) }
    }

    /// Waits for a reply as long as the store may take to decide, unless it is being left alone.
    pub(super) async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failed> {
        self.call_within(self.deadline, reply).await
    }

    /// The same for a change or a report, which may be long, and which nobody's request waits for.
    pub(super) async fn call_patiently<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failed> {
        self.call_within(self.deadline.max(PATIENCE), reply).await
    }

    async fn call_within<T: Unpin>(&self, span: Duration, reply: Reply<'_, T>) -> Result<T, Failed> {
        let permit = match self.breaker.try_acquire(Cost::request()) {
            Ok(permit) => permit,
            Err(refused) => {
                let error =
                    StoreError::unavailable(format!("it failed before, and is left alone: {refused}"));
                return Err(Failed { error, may_be_done: false });
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
                Err(Failed { error, may_be_done: true })
            }
            // A full queue of our own says nothing of the engine.
            Err(error @ StoreError::Busy { .. }) => Err(Failed { error, may_be_done: false }),
            // A refusal is an answer: the store is there.
            Err(error) => {
                permit.settle(Outcome::success());
                Err(Failed { error, may_be_done: false })
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
                if time.was_queued() && !answer.as_ref().is_err_and(StoreError::is_unavailable) {
                    *self.answered_at.lock() = Some(Instant::now());
                }
                return answer;
            }
            wait = match time.elapsed().map(|elapsed| span.saturating_sub(elapsed)) {
                Some(Duration::ZERO) => {
                    let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
                    return Err(StoreError::TimedOut { millis });
                }
                Some(left) => left,
                None if self.is_stuck(start) => {
                    return Err(StoreError::unavailable("calls before this one are not answered"));
                }
                None => span,
            };
        }
    }

    /// Whether the store's queue does not move for a call that waits in it since `start`.
    fn is_stuck(&self, start: Instant) -> bool {
        let since = self.answered_at.lock().map_or(start, |at| at.max(start));
        self.away().is_some() || since.elapsed() >= self.deadline.saturating_mul(STUCK)
    }

    /// Whether a failure counts: the first for a deadline.
    fn is_next_failure(&self) -> bool {
        let mut failed_at = self.failed_at.lock();
        let is_next = failed_at.is_none_or(|at| at.elapsed() >= self.deadline);
        if is_next {
            *failed_at = Some(Instant::now());
        }
        is_next
    }

    /// How long the store may take to decide.
    pub(super) const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// How long the store is left alone, if it is.
    pub(super) fn away(&self) -> Option<Duration> {
        let circuit = self.breaker.snapshot().circuit?;
        Some(circuit.retry_after).filter(|span| !span.is_zero())
    }

    /// When it is worth trying again.
    pub(super) fn retry_after(&self) -> Duration {
        let open = self.breaker.snapshot().circuit.map(|circuit| circuit.retry_after);
        open.unwrap_or_default().max(self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const DEADLINE: Duration = Duration::from_millis(50);

    fn guard() -> Guard {
        Guard::new(DEADLINE, &Arc::new(Listeners::default()))
    }

    /// A reply that waits in our queue for one time, and is with the engine for another.
    fn reply(queued: Duration, engine: Duration) -> Reply<'static, ()> {
        Reply::later(async move {
            let time = EngineTime::current();
            time.wait();
            sleep(queued).await;
            time.send();
            sleep(engine).await;
            Ok(())
        })
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_our_queue_is_not_the_engines() {
        let guard = guard();
        guard.call(reply(2 * DEADLINE, DEADLINE / 2)).await.map_err(|failed| failed.error).unwrap();
        for (queued, engine) in [(Duration::ZERO, 2 * DEADLINE), (Duration::from_millis(120), 2 * DEADLINE)] {
            let start = Instant::now();
            let failed = guard.call(reply(queued, engine)).await.expect_err("the engine is too slow");
            assert!(matches!(failed.error, StoreError::TimedOut { millis: 50 }), "{}", failed.error);
            assert_eq!(start.elapsed(), queued + DEADLINE);
        }
    }

    /// A pause of the server of 80 ms opened the breaker for a second: one slow batch was as many failures as it had calls.
    #[tokio::test(start_paused = true)]
    async fn one_slow_round_trip_is_one_failure() {
        let guard = guard();
        let call = || async { guard.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err() };
        let failed = tokio::join!(call(), call(), call(), call(), call(), call());
        assert_eq!(failed, (true, true, true, true, true, true));
        assert_eq!(guard.away(), None);
        assert!(guard.call(reply(Duration::ZERO, DEADLINE / 2)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn breaker_opens_after_three_slow_trips() {
        let guard = guard();
        for is_open in [false, false, true] {
            assert!(guard.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert_eq!(guard.away().is_some(), is_open);
        }
        let failed =
            guard.call(reply(Duration::ZERO, Duration::ZERO)).await.expect_err("the breaker is open");
        assert!(!failed.may_be_done);
    }

    /// An answer in between: they are not in a row.
    #[tokio::test(start_paused = true)]
    async fn slow_trips_between_quick_ones_are_tolerated() {
        let guard = guard();
        for _ in 0..5 {
            assert!(guard.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert!(guard.call(reply(Duration::ZERO, 2 * DEADLINE)).await.is_err());
            assert!(guard.call(reply(Duration::ZERO, Duration::ZERO)).await.is_ok());
        }
        assert_eq!(guard.away(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn errors_at_once_count_once_per_deadline() {
        let guard = guard();
        let down = || Reply::<()>::later(async { Err(StoreError::unavailable("connection refused")) });
        for _ in 0..100 {
            assert!(guard.call(down()).await.is_err());
        }
        assert_eq!(guard.away(), None);
        for is_open in [false, true] {
            sleep(DEADLINE).await;
            assert!(guard.call(down()).await.is_err());
            assert_eq!(guard.away().is_some(), is_open);
        }
    }

    /// Callers behind a hung batch waited for minutes: `on_unavailable` did not apply to them.
    #[tokio::test(start_paused = true)]
    async fn calls_behind_a_hung_batch_fail() {
        let guard = guard();
        let call = async |queued| guard.call(reply(queued, Duration::MAX)).await.is_err();
        let start = Instant::now();
        let (first, second, third) =
            tokio::join!(call(Duration::ZERO), call(Duration::MAX), call(Duration::MAX));
        assert!(first && second && third);
        assert_eq!(start.elapsed(), STUCK * DEADLINE);
        // The next ones wait no longer once the breaker is open.
        for _ in 0..2 {
            sleep(DEADLINE).await;
            assert!(call(Duration::MAX).await);
        }
        assert!(guard.away().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn longest_deadline_is_never_over() {
        let guard = Guard::new(Duration::MAX, &Arc::new(Listeners::default()));
        assert!(!guard.is_stuck(Instant::now()));
    }

    /// A queue that moves is waited in.
    #[tokio::test(start_paused = true)]
    async fn calls_in_a_moving_queue_wait_on() {
        let guard = guard();
        let quick = async {
            for _ in 0..40 {
                assert!(guard.call(reply(DEADLINE / 2, DEADLINE / 2)).await.is_ok());
            }
        };
        let (slow, ()) = tokio::join!(guard.call(reply(30 * DEADLINE, DEADLINE / 2)), quick);
        assert!(slow.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_is_not_a_failure_of_the_engine() {
        let guard = guard();
        for _ in 0..5 {
            sleep(DEADLINE).await;
            let busy = StoreError::Busy { place: "here".to_owned(), waiting_max: 1, retry_after: DEADLINE };
            let failed = guard.call(Reply::<()>::later(async { Err(busy) })).await.expect_err("it is full");
            assert!(!failed.may_be_done && !failed.error.is_unavailable());
        }
        assert_eq!(guard.away(), None);
    }
}
