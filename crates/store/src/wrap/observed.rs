//! Counts the calls of an engine and logs their movements, for the exactness checker.
//!
//! The log is derived from replies. It is complete if every reply is awaited and no lease expires: an ending
//! by the store itself has no reply.

mod log;

use std::sync::{Mutex, MutexGuard};

use tidegate_core::limit::exactness;

use super::verb::{Calls, Counter, Verb};
use super::wrapper::Wrapper;
use crate::sync::lock;
use crate::{Capabilities, Engine, Reply, Step, StepResult};
use log::Log;

/// The default maximum of log entries.
const LOG_MAX: usize = 1_000_000;

/// An engine that counts its calls and logs their movements.
#[derive(Debug)]
pub struct Observed<E> {
    engine: E,
    calls: Counter,
    log: Mutex<Log>,
}

impl<E: Engine> Observed<E> {
    /// Wraps `engine`.
    pub fn new(engine: E) -> Self {
        Self { engine, calls: Counter::default(), log: Mutex::new(Log::new(LOG_MAX)) }
    }

    /// Sets the maximum number of log entries. Further ones are only [counted](Self::missed).
    #[must_use]
    pub fn log_max(self, max: usize) -> Self {
        Self { log: Mutex::new(Log::new(max)), ..self }
    }

    /// How often each verb was called.
    pub fn calls(&self) -> Calls {
        self.calls.calls()
    }

    /// The movements so far and the shapes of their buckets, in the order of replies.
    pub fn log(&self) -> Vec<exactness::Entry> {
        self.lock().entries()
    }

    /// The number of entries dropped because the log was full. The log is complete if it is 0.
    pub fn missed(&self) -> u64 {
        self.lock().missed()
    }

    /// The wrapped engine.
    pub const fn inner(&self) -> &E {
        &self.engine
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }
}

impl<E: Engine> Wrapper for Observed<E> {
    type Inner = E;

    fn inner(&self) -> &E {
        &self.engine
    }

    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        Reply::later(async move {
            self.calls.count(verb);
            call().await
        })
    }

    fn step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(async move {
            self.calls.count(step.verb());
            let answer = self.engine.apply_step(Step { is_watched: true, ..step }).await?;
            self.lock().applied(&step, &answer);
            Ok(answer)
        })
    }

    fn describe(&self) -> Capabilities {
        // A step is recorded when its reply is awaited.
        Capabilities { is_immediate: false, ..self.engine.about() }
    }
}
