//! Ending leases in the background: those that were dropped.
//!
//! A drop never waits. What it has to say is said by a task of the runtime that the lease was drawn in; there are at most so
//! many of them. Where there is no room, no runtime or no answer, the lease ends by its deadline, and that is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::call::Call;
use super::secret::Secret;
use super::{Inner, count};

/// How many endings there are, and how many were lost.
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
        // The sender is here: it is not gone.
        let _ = self.pending.subscribe().wait_for(|pending| *pending == 0).await;
    }

    fn enters(&self) -> bool {
        self.pending.send_if_modified(|pending| {
            let has_room = *pending < self.max;
            *pending += usize::from(has_room);
            has_room
        })
    }
}

impl Inner {
    /// Has a lease ended in the background.
    pub(super) fn end_later(self: &Arc<Self>, runtime: Option<&Handle>, token: Option<Secret>, call: Call) {
        let Some(runtime) = runtime.filter(|_| self.endings.enters()) else {
            count(&self.endings.lost);
            return;
        };
        // A runtime that is gone drops the task at once, and with it the job.
        let job = Job { inner: Arc::clone(self), is_heard: false };
        runtime.spawn(job.run(token, call));
    }
}

/// One ending. Dropped before it was heard, it is lost.
struct Job {
    inner: Arc<Inner>,
    is_heard: bool,
}

impl Job {
    async fn run(mut self, token: Option<Secret>, call: Call) {
        let answer = self.inner.ask(token.as_ref(), &call, None).await;
        // One that has ended otherwise has ended.
        self.is_heard = match answer {
            Ok(_) => true,
            Err(error) => matches!(error, super::ClientError::Ended { .. }),
        };
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.is_heard {
            count(&self.inner.endings.lost);
        }
        self.inner.endings.pending.send_modify(|pending| *pending -= 1);
    }
}
