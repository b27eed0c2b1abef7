//! A body that holds a guard until it has been sent or dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};

/// A body and its guard.
#[derive(Debug)]
pub struct GuardedBody<B, G> {
    body: B,
    /// Dropped with the last frame.
    guard: Option<G>,
}

impl<B, G> GuardedBody<B, G> {
    /// Holds the guard until the body was sent.
    pub const fn new(body: B, guard: G) -> Self {
        Self { body, guard: Some(guard) }
    }
}

/// It ends where the inner body ends: a response without a body has to end with its head.
impl<B: Body + Unpin, G: Unpin> Body for GuardedBody<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) {
            this.guard = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
