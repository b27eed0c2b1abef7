//! The reply of a store: ready, or a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::error::StoreError;
use crate::wrap::measured::Watch;

/// The reply of a store: a future that needs no allocation if the result is ready.
///
/// A store may act when it is called or when the reply is first polled. Dropping the reply undoes nothing:
/// the call may have been applied. To find out or to undo it, make another call.
#[must_use = "a reply does nothing unless it is awaited"]
pub struct Reply<'a, T>(Inner<'a, T>);

enum Inner<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Waiting(Waiting<'a, T>),
    /// A pending reply whose completion is reported.
    Watched(Waiting<'a, T>, Watch<'a>),
}

type Waiting<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

impl<'a, T> Reply<'a, T> {
    /// A reply that is ready.
    pub const fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Inner::Ready(Some(answer)))
    }

    /// The result, if it is ready; `None` if it is pending.
    #[inline]
    pub fn now(self) -> Option<Result<T, StoreError>> {
        match self.0 {
            Inner::Ready(answer) => answer,
            Inner::Waiting(_) | Inner::Watched(..) => None,
        }
    }

    /// Reports the completion of the reply, or that it was dropped before.
    #[inline]
    pub(crate) fn watched(self, mut watch: Watch<'a>) -> Self
    where
        T: Unpin + Send + 'a,
    {
        match self.0 {
            Inner::Ready(answer) => {
                if let Some(answer) = &answer {
                    watch.end(answer);
                }
                Self(Inner::Ready(answer))
            }
            Inner::Waiting(future) => Self(Inner::Watched(future, watch)),
            watched @ Inner::Watched(..) => Self(Inner::Watched(Box::pin(Self(watched)), watch)),
        }
    }

    /// The reply of a future that calls an engine. With `is_immediate` the engine never waits, so the future
    /// is polled at once.
    pub(crate) fn after(
        is_immediate: bool,
        answer: impl Future<Output = Result<T, StoreError>> + Send + 'a,
    ) -> Self {
        let mut answer: Waiting<'a, T> = Box::pin(answer);
        if is_immediate
            && let Poll::Ready(answer) = answer.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            return Self::ready(answer);
        }
        Self(Inner::Waiting(answer))
    }

    /// Maps the result.
    #[inline]
    pub(crate) fn map<U>(self, map: impl FnOnce(T) -> U + Send + 'a) -> Reply<'a, U>
    where
        T: Unpin + Send + 'a,
        U: 'a,
    {
        match self.0 {
            Inner::Ready(answer) => Reply(Inner::Ready(answer.map(|answer| answer.map(map)))),
            waiting => Reply::later(async move { Reply(waiting).await.map(map) }),
        }
    }

    /// A reply that is pending.
    pub fn later(answer: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(Inner::Waiting(Box::pin(answer)))
    }
}

impl<T: Unpin> Future for Reply<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().0 {
            Inner::Ready(answer) => Poll::Ready(answer.take().expect("a reply is polled until it is ready")),
            Inner::Waiting(future) => future.as_mut().poll(context),
            Inner::Watched(future, watch) => {
                let answer = future.as_mut().poll(context);
                if let Poll::Ready(answer) = &answer {
                    watch.end(answer);
                }
                answer
            }
        }
    }
}

impl<T> fmt::Debug for Reply<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Inner::Ready(_) => "Reply(ready)",
            Inner::Waiting(_) | Inner::Watched(..) => "Reply(waiting)",
        })
    }
}
