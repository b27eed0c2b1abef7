//! The time the engine has had a call, excluding the time in local queues.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

tokio::task_local! {
    static CURRENT: EngineTime;
}

/// The time the engine has had a call.
///
/// A caller that bounds the time of a call [follows](Self::follow) its reply. A store that collects calls
/// before it sends them keeps the [current](Self::current) one with each call, and reports when the call
/// [waits](Self::wait), in which queue, and when it is [sent](Self::send). Otherwise the time counts from the start.
///
/// ```
/// use tidegate_store::EngineTime;
///
/// let time = EngineTime::default();
/// assert!(time.elapsed().is_some(), "the engine has it");
/// time.wait("writer");
/// assert_eq!(time.elapsed(), None, "it is in our queue");
/// time.send();
/// assert!(time.elapsed().is_some());
/// ```
#[derive(Debug, Clone)]
pub struct EngineTime(Arc<Mutex<State>>);

#[derive(Debug, Clone, Copy)]
struct State {
    is_queued: bool,
    queue: Option<&'static str>,
    since: Instant,
}

impl Default for EngineTime {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { is_queued: false, queue: None, since: Instant::now() })))
    }
}

impl EngineTime {
    /// Runs a call with this as its [current](Self::current) time.
    pub fn follow<F: Future>(&self, call: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self.clone(), call)
    }

    /// The time of the running call; a new one if the call is not followed.
    pub fn current() -> Self {
        CURRENT.try_with(Self::clone).unwrap_or_default()
    }

    /// Records that the call waits in a local queue of this name from now on. A reply to one call of a queue
    /// shows that the others make progress.
    pub fn wait(&self, queue: &'static str) {
        *lock(&self.0) = State { is_queued: true, queue: Some(queue), since: Instant::now() };
    }

    /// Records that the call is sent to the engine now.
    pub fn send(&self) {
        let mut state = lock(&self.0);
        *state = State { is_queued: false, since: Instant::now(), ..*state };
    }

    /// The local queue in which the call waits or has waited last.
    pub fn queue(&self) -> Option<&'static str> {
        lock(&self.0).queue
    }

    /// How long the engine has had the call; `None` while it waits in a local queue.
    pub fn elapsed(&self) -> Option<Duration> {
        let state = *lock(&self.0);
        (!state.is_queued).then(|| state.since.elapsed())
    }

    /// How long the call has waited in a local queue; `None` if it is not queued.
    pub fn queued_for(&self) -> Option<Duration> {
        let state = *lock(&self.0);
        state.is_queued.then(|| state.since.elapsed())
    }
}
