//! Where background work runs: the caller's runtime, the one that was chosen, or a thread of our own.

use std::future::Future;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::time::Timeout;

/// One thread for all limiters of a process whose callers have no runtime.
static THREAD: OnceLock<Handle> = OnceLock::new();

/// Where background work runs.
#[derive(Debug, Default)]
pub(super) struct Home {
    pub(super) chosen: Option<Handle>,
}

impl Home {
    /// The runtime to spawn on, from wherever this is called.
    pub(super) fn handle(&self) -> Handle {
        self.chosen.clone().or_else(|| Handle::try_current().ok()).unwrap_or_else(own_thread)
    }

    /// Runs a future on the calling thread.
    pub(super) fn block_on<F: Future>(&self, future: F) -> F::Output {
        let handle = self.chosen.clone().unwrap_or_else(own_thread);
        handle.block_on(future)
    }
}

/// Waits for a future no longer than `span`, by the timer of the caller's runtime, or by ours where the caller has none: a
/// thread may poll for itself.
pub(super) fn timeout<F: Future>(span: Duration, future: F) -> Timeout<F> {
    let own = Handle::try_current().is_err().then(own_thread);
    // A timer belongs to the runtime that it was made in, wherever it is polled.
    let _within = own.as_ref().map(Handle::enter);
    tokio::time::timeout(span, future)
}

/// A runtime on a thread of its own, which outlives every other.
pub(super) fn own_thread() -> Handle {
    let start = || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        let handle = runtime.handle().clone();
        let run = move || runtime.block_on(std::future::pending::<()>());
        thread::Builder::new().name("tidegate-limiter".into()).spawn(run).expect("a thread can be started");
        handle
    };
    THREAD.get_or_init(start).clone()
}
