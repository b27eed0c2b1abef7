//! The runtime of background work: the caller's, the configured one, or a background thread.

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
pub(super) struct BackgroundRuntime {
    pub(super) configured: Option<Handle>,
}

impl BackgroundRuntime {
    /// The runtime to spawn on.
    pub(super) fn handle(&self) -> Handle {
        self.configured.clone().or_else(|| Handle::try_current().ok()).unwrap_or_else(background_runtime)
    }

    /// Runs a future on the calling thread.
    pub(super) fn block_on<F: Future>(&self, future: F) -> F::Output {
        let handle = self.configured.clone().unwrap_or_else(background_runtime);
        handle.block_on(future)
    }
}

/// A timeout that also works outside a runtime: it then uses the timer of the background thread, as the
/// caller may poll the future itself.
pub(super) fn timeout<F: Future>(span: Duration, future: F) -> Timeout<F> {
    let own = Handle::try_current().is_err().then(background_runtime);
    // A timer belongs to the runtime it was created in, wherever it is polled.
    let _within = own.as_ref().map(Handle::enter);
    tokio::time::timeout(span, future)
}

/// The runtime of the background thread, which runs until the process exits.
pub(super) fn background_runtime() -> Handle {
    let start = || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        let handle = runtime.handle().clone();
        let run = move || runtime.block_on(std::future::pending::<()>());
        thread::Builder::new().name("tidegate-limiter".into()).spawn(run).expect("a thread can be started");
        handle
    };
    THREAD.get_or_init(start).clone()
}
