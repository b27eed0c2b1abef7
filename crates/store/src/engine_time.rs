//! How long the engine has had a call: time in a queue of our own does not count.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

tokio::task_local! {
    static CURRENT: EngineTime;
}

/// How long the engine has had a call.
///
/// A caller that bounds the time of a call [follows](Self::follow) its reply. A store that collects calls before it sends them
/// takes the [current](Self::current) one along with each call, and says when the call [waits](Self::wait) and when it is
/// [sent](Self::send). Without that the engine has had it from the start.
///
/// ```
/// use tidegate_store::EngineTime;
///
/// let time = EngineTime::default();
/// assert!(time.elapsed().is_some(), "the engine has it");
/// time.wait();
/// assert_eq!(time.elapsed(), None, "it is in our queue");
/// time.send();
/// assert!(time.elapsed().is_some());
/// ```
#[derive(Debug, Clone)]
pub struct EngineTime(Arc<Mutex<State>>);

#[derive(Debug, Clone, Copy)]
struct State {
    is_queued: bool,
    was_queued: bool,
    since: Instant,
}

impl Default for EngineTime {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { is_queued: false, was_queued: false, since: Instant::now() })))
    }
}

impl EngineTime {
    /// Waits for a call, whose queues use this one.
    pub fn follow<F: Future>(&self, call: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self.clone(), call)
    }

    /// That of the call in progress; a new one if the call is not followed.
    pub fn current() -> Self {
        CURRENT.try_with(Self::clone).unwrap_or_default()
    }

    /// The call waits in our queue from now on.
    pub fn wait(&self) {
        self.set(true);
    }

    /// The call is sent to the engine now.
    pub fn send(&self) {
        self.set(false);
    }

    fn set(&self, is_queued: bool) {
        let mut state = lock(&self.0);
        let was_queued = state.was_queued || is_queued;
        *state = State { is_queued, was_queued, since: Instant::now() };
    }

    /// Whether the call has waited in a queue of ours.
    pub fn was_queued(&self) -> bool {
        lock(&self.0).was_queued
    }

    /// How long the engine has had the call; `None` while it waits in our queue.
    pub fn elapsed(&self) -> Option<Duration> {
        let state = *lock(&self.0);
        (!state.is_queued).then(|| state.since.elapsed())
    }

    /// How long the call has waited in our queue; `None` if it does not.
    pub fn queued_for(&self) -> Option<Duration> {
        let state = *lock(&self.0);
        state.is_queued.then(|| state.since.elapsed())
    }
}
