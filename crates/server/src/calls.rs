//! The calls of one connection, run in its own task as far as they go without waiting.
//!
//! A decision of a store in this process takes less time than it takes to make a task of it and to have another thread take that.
//! So what came in together is decided together, and its answers leave together. Whatever has to wait becomes a task.

use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;

/// For so long calls are tried where they are; those that are left then become tasks, so that no connection keeps a thread for long
/// and the first answer does not wait for the last.
const AT_ONCE: Duration = Duration::from_millis(1);

/// What a connection has to do for its calls. Clones are the same.
#[derive(Clone)]
pub(crate) struct Calls {
    given: Arc<Mutex<Vec<Call>>>,
    at_once: Duration,
}

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// It is given calls by its connection, while that is [run](Calls::run): upgrades, which a call would give, are not answered.
impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        self.lock().push(Box::pin(call));
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self { given: Arc::default(), at_once: AT_ONCE }
    }
}

impl Calls {
    /// Runs a connection that gives its calls to this, until it ends. Calls that wait then go on as tasks.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection. Calls that wait go on.
    pub(crate) async fn run<C: Future>(self, connection: C) -> C::Output {
        let mut connection = pin!(connection);
        let mut calls = Vec::new();
        poll_fn(move |cx| {
            let polled = connection.as_mut().poll(cx);
            mem::swap(&mut *self.lock(), &mut calls);
            if !calls.is_empty() {
                let began = Instant::now();
                for call in calls.drain(..) {
                    // An answer wakes the connection, which then sends all of them.
                    let waiting = if began.elapsed() < self.at_once { at_once(call) } else { Some(call) };
                    waiting.map(tokio::spawn);
                }
            }
            polled
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Call>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The call, if it has to wait. Nobody wakes it before it is a task, which asks it once more.
fn at_once(mut call: Call) -> Option<Call> {
    // It is dropped in there too: one that panics ends as a task would, and its connection goes on.
    let tried = catch_unwind(AssertUnwindSafe(move || {
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        polled.is_pending().then_some(call)
    }));
    tried.unwrap_or(None)
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_need_not_wait_is_done_with_its_connection_and_the_rest_becomes_tasks() {
        let calls = Calls { at_once: Duration::MAX, ..Calls::default() };
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
                waits.execute(async { panic!("of a call") });
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
    async fn a_connection_that_is_dropped_leaves_those_that_wait_to_end_by_themselves() {
        let calls = Calls { at_once: Duration::MAX, ..Calls::default() };
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
    async fn those_that_are_left_when_the_time_is_over_become_tasks_and_are_all_done() {
        let calls = Calls { at_once: Duration::ZERO, ..Calls::default() };
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
