//! Calling a store that may be away: a deadline, and a breaker so that not every caller waits for it.
//!
//! The breaker is a throttle with nothing but a circuit. A store that answers at once is called without either.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::cost::Cost;
use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::plan::{Circuit, Controller};
use tidegate_store::{Reply, StoreError};

use super::events::{LimitEvent, Listeners};
use super::home::timeout;
use crate::throttle::Throttle;

/// Failures in a row after which the store is left alone.
const FAILURES: u32 = 5;
/// How long a change or a report may take, unless a decision may take longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For how long, the first time.
const LEFT_ALONE: Duration = Duration::from_secs(1);

/// The way to the store.
pub(super) struct Guard {
    deadline: Duration,
    breaker: Throttle,
}

/// A call that failed, and whether the store may have done it all the same.
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
        Self { deadline, breaker }
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
        let millis = || u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let answer = match timeout(span, reply).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::TimedOut { millis: millis() }),
        };
        match answer {
            Ok(answer) => {
                permit.settle(Outcome::success());
                Ok(answer)
            }
            Err(error) if error.is_transient() => {
                permit.settle(Outcome::failure());
                Err(Failed { error, may_be_done: true })
            }
            // A refusal is an answer: the store is there.
            Err(error) => {
                permit.settle(Outcome::success());
                Err(Failed { error, may_be_done: false })
            }
        }
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
