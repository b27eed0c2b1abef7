//! Cancels dropped leases at the server, in the background.
//!
//! Dropping a lease must not block, so a task of the lease's runtime sends its ending. The number of these
//! tasks is bounded. Without a free slot, a runtime or a response the ending is counted as lost, and the
//! lease ends at its deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::call::Call;
use super::secret::Secret;
use super::{Inner, count};

/// Counts pending and lost endings.
pub(super) struct Endings {
    pending: watch::Sender<usize>,
    max: usize,
    lost: AtomicU64,
}

impl Endings {
    pub(super) fn new(max: usize) -> Self {
        Self { pending: watch::Sender::new(0), max, lost: AtomicU64::new(0) }
    }

    pub(super) fn pending(&self) -> usize {
        *self.pending.borrow()
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) async fn drained(&self) {
        // The sender outlives this borrow, so the channel is open.
        let _ = self.pending.subscribe().wait_for(|pending| *pending == 0).await;
    }

    fn try_reserve(&self) -> bool {
        self.pending.send_if_modified(|pending| {
            let has_capacity = *pending < self.max;
            *pending += usize::from(has_capacity);
            has_capacity
        })
    }
}

impl Inner {
    /// Ends a lease in the background.
    pub(super) fn spawn_ending(
        self: &Arc<Self>,
        runtime: Option<&Handle>,
        token: Option<Secret>,
        call: Call,
    ) {
        let Some(runtime) = runtime.filter(|_| self.endings.try_reserve()) else {
            count(&self.endings.lost);
            return;
        };
        // A runtime that has shut down drops the task at once, which counts it as lost.
        let ending = Ending { inner: Arc::clone(self), is_delivered: false };
        runtime.spawn(ending.run(token, call));
    }
}

/// One pending ending. If it is dropped before it was delivered, it counts as lost.
struct Ending {
    inner: Arc<Inner>,
    is_delivered: bool,
}

impl Ending {
    async fn run(mut self, token: Option<Secret>, call: Call) {
        let result = self.inner.send_with_retries(token.as_ref(), &call, None).await;
        // A lease that ended otherwise needs no ending.
        self.is_delivered = match result {
            Ok(_) => true,
            Err(error) => matches!(error, super::ClientError::Ended { .. }),
        };
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.is_delivered {
            count(&self.inner.endings.lost);
        }
        self.inner.endings.pending.send_modify(|pending| *pending -= 1);
    }
}
