//! The answer of a store: there already, or on its way.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::error::StoreError;
use crate::wrap::measured::Watch;

/// What a store answers with. It is a future; a store that need not wait answers without an allocation.
///
/// A store may act when it is called or when the reply is first polled, and what has begun is not undone by dropping it:
/// the call may have been made. Whoever drops one says what is to become of it by another call.
#[must_use = "a reply does nothing unless it is awaited"]
pub struct Reply<'a, T>(Inner<'a, T>);

enum Inner<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Waiting(Waiting<'a, T>),
    /// One whose end is told.
    Watched(Waiting<'a, T>, Watch<'a>),
}

type Waiting<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

impl<'a, T> Reply<'a, T> {
    /// An answer that is there.
    pub const fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Inner::Ready(Some(answer)))
    }

    /// The answer, if it is there; `None` where it takes time.
    #[inline]
    pub fn now(self) -> Option<Result<T, StoreError>> {
        match self.0 {
            Inner::Ready(answer) => answer,
            Inner::Waiting(_) | Inner::Watched(..) => None,
        }
    }

    /// The same, whose end is told; also if it is dropped before.
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

    /// The answer of a future that calls engines. With `is_immediate` none of them waits: the future is run at once.
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

    /// The same answer as another type.
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

    /// An answer that takes time.
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
