//! A store that counts its calls and writes down what they move, for the exactness checker.
//!
//! The log is made from the store's replies. It is whole as long as every reply is awaited and no lease is left to
//! its deadline: what a store ends by itself answers no caller.

mod log;

use std::sync::{Mutex, MutexGuard};

use tidegate_core::limit::check;

use super::verb::{Calls, Counter, Verb};
use super::wrapper::Wrapper;
use crate::sync::lock;
use crate::{Applied, Capabilities, Engine, Reply, Step};
use log::Log;

/// Entries a log holds unless said otherwise.
const LOG_MAX: usize = 1_000_000;

/// A store that counts its calls and writes down what they move.
#[derive(Debug)]
pub struct Observed<E> {
    engine: E,
    calls: Counter,
    log: Mutex<Log>,
}

impl<E: Engine> Observed<E> {
    /// Watches `engine`.
    pub fn new(engine: E) -> Self {
        Self { engine, calls: Counter::default(), log: Mutex::new(Log::new(LOG_MAX)) }
    }

    /// Writes down at most so many entries; those beyond are only [counted](Self::missed).
    #[must_use]
    pub fn log_max(self, max: usize) -> Self {
        Self { log: Mutex::new(Log::new(max)), ..self }
    }

    /// How often each verb was called.
    pub fn calls(&self) -> Calls {
        self.calls.calls()
    }

    /// What has moved so far, and the shapes it moved under, in the order the replies came in.
    pub fn log(&self) -> Vec<check::Entry> {
        self.lock().entries()
    }

    /// Entries that found the log full: above 0, it is not whole.
    pub fn missed(&self) -> u64 {
        self.lock().missed()
    }

    /// The store that is watched.
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

    fn step<'a>(&'a self, step: Step<'a>) -> Reply<'a, Applied> {
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
