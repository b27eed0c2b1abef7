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
use std::task::{Context, Poll, Waker};

use hyper::rt::Executor;

/// So many are tried at a time; others become tasks at once, so that no connection keeps a thread for long.
const AT_ONCE_MAX: usize = 128;

/// What a connection has to do for its calls. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<Call>>>);

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// It is given calls by its connection alone, while that is [run](Calls::run).
impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        self.lock().push(Box::pin(call));
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
            for (place, call) in calls.drain(..).enumerate() {
                // An answer wakes the connection, which then sends all of them.
                if let Some(waiting) = if place < AT_ONCE_MAX { at_once(call) } else { Some(call) } {
                    tokio::spawn(waiting);
                }
            }
            polled
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Call>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The call, if it has to wait. Nobody wakes it before it is a task, which asks it once more.
fn at_once(mut call: Call) -> Option<Call> {
    let polled =
        catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(&mut Context::from_waker(Waker::noop()))));
    match polled {
        Ok(Poll::Pending) => Some(call),
        // One that panics ends as a task would, and its connection goes on.
        Ok(Poll::Ready(())) | Err(_) => None,
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_need_not_wait_is_done_with_its_connection_and_the_rest_becomes_tasks() {
        let (calls, done) = (Calls::default(), Arc::new(AtomicUsize::new(0)));
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
    async fn of_very_many_some_are_done_at_once_and_all_in_the_end() {
        let (calls, done) = (Calls::default(), Arc::new(AtomicUsize::new(0)));
        let (given, count) = (calls.clone(), Arc::clone(&done));
        calls
            .run(async move {
                for _ in 0..AT_ONCE_MAX + 5 {
                    let count = Arc::clone(&count);
                    given.execute(async move {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            })
            .await;
        assert_eq!(done.load(Ordering::Relaxed), AT_ONCE_MAX);
        while done.load(Ordering::Relaxed) < AT_ONCE_MAX + 5 {
            tokio::task::yield_now().await;
        }
    }
}
