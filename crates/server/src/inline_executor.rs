//! Runs the calls of one connection in the connection's own task as long as they do not block.
//!
//! With an in-process store a decision costs less than spawning a task and moving it to another thread.
//! Requests that arrive together are therefore decided together, and their responses are flushed together. A
//! call that returns `Pending` is spawned as a task.

use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;

/// Time budget for polling calls inline. The remaining calls are spawned, so that a connection does not hold
/// a worker thread for long and the first response does not wait for the last.
const INLINE_BUDGET: Duration = Duration::from_millis(1);

/// An executor that polls the calls of one connection inline. Clones share the same queue.
#[derive(Clone)]
pub(crate) struct InlineExecutor {
    queue: Arc<Mutex<Vec<Call>>>,
    budget: Duration,
}

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The connection submits its calls here while it [runs](InlineExecutor::run). Upgrades, which would also
/// spawn a future, are not supported.
impl<F: Future<Output = ()> + Send + 'static> Executor<F> for InlineExecutor {
    fn execute(&self, call: F) {
        self.lock().push(Box::pin(call));
    }
}

impl Default for InlineExecutor {
    fn default() -> Self {
        Self { queue: Arc::default(), budget: INLINE_BUDGET }
    }
}

impl InlineExecutor {
    /// Drives a connection that submits its calls to this executor until it ends. Calls still
    /// pending then continue as tasks.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection. Pending calls continue as tasks.
    pub(crate) async fn run<C: Future>(self, connection: C) -> C::Output {
        let mut connection = pin!(connection);
        let mut calls = Vec::new();
        poll_fn(move |cx| {
            let polled = connection.as_mut().poll(cx);
            mem::swap(&mut *self.lock(), &mut calls);
            if !calls.is_empty() {
                let began = Instant::now();
                for call in calls.drain(..) {
                    // A response wakes the connection, which then flushes all of them.
                    let pending = if began.elapsed() < self.budget { poll_inline(call) } else { Some(call) };
                    pending.map(tokio::spawn);
                }
            }
            polled
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Call>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Polls the call once and returns it if it is pending. The no-op waker is sufficient: spawning the call
/// polls it again.
fn poll_inline(mut call: Call) -> Option<Call> {
    // The call is dropped inside `catch_unwind` too: a panic ends this call as it would end a task, and the
    // connection continues.
    let polled = catch_unwind(AssertUnwindSafe(move || {
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        polled.is_pending().then_some(call)
    }));
    polled.unwrap_or(None)
}

impl fmt::Debug for InlineExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InlineExecutor")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn ready_calls_run_inline_and_pending_ones_spawn() {
        let calls = InlineExecutor { budget: Duration::MAX, ..InlineExecutor::default() };
        let done = Arc::new(AtomicUsize::new(0));
        let (go, wait) = oneshot::channel::<()>();
        let (end, ended) = oneshot::channel::<()>();
        let waits = calls.clone();
        let count = Arc::clone(&done);
        calls
            .run(async move {
                waits.execute(async {
                    let _ = wait.await;
                    let _ = end.send(());
                });
                waits.execute(async { panic!("in a call") });
                for _ in 0..3 {
                    let count = Arc::clone(&count);
                    waits.execute(async move {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            })
            .await;
        assert_eq!(done.load(Ordering::Relaxed), 3, "before anything else could run");
        go.send(()).unwrap();
        ended.await.unwrap();
    }

    #[tokio::test]
    async fn pending_calls_outlive_dropped_connection() {
        let calls = InlineExecutor { budget: Duration::MAX, ..InlineExecutor::default() };
        let (go, wait) = oneshot::channel::<()>();
        let (end, ended) = oneshot::channel::<()>();
        let given = calls.clone();
        let mut connection = Box::pin(calls.run(async move {
            given.execute(async {
                let _ = wait.await;
                let _ = end.send(());
            });
            std::future::pending::<()>().await;
        }));
        let polled = poll_fn(|cx| Poll::Ready(connection.as_mut().poll(cx))).await;
        assert!(polled.is_pending());
        drop(connection);
        go.send(()).unwrap();
        ended.await.unwrap();
    }

    #[tokio::test]
    async fn calls_over_time_budget_are_spawned_and_complete() {
        let calls = InlineExecutor { budget: Duration::ZERO, ..InlineExecutor::default() };
        let done = Arc::new(AtomicUsize::new(0));
        let (given, count) = (calls.clone(), Arc::clone(&done));
        calls
            .run(async move {
                for _ in 0..5 {
                    let count = Arc::clone(&count);
                    given.execute(async move {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            })
            .await;
        assert_eq!(done.load(Ordering::Relaxed), 0);
        while done.load(Ordering::Relaxed) < 5 {
            tokio::task::yield_now().await;
        }
    }
}
