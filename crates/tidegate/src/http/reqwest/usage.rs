//! Settles a request with what its response says was used: LLM APIs report the tokens in the body, at its
//! end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::http::HeaderMap;
use ::reqwest::Body;
use http_body::{Body as _, Frame, SizeHint};
use tidegate_core::cause::Cause;
use tidegate_core::cost::Cost;
use tidegate_core::outcome::Outcome;

use crate::permit::Permit;

/// Only the end of a longer body is read for its usage.
pub(super) const BODY_MAX: usize = 1 << 20;
/// As much of it.
pub(super) const TAIL: usize = 64 << 10;

/// Reads the usage from a response's headers and its body, or the end of a long one.
pub(super) type ReadUsage = Arc<dyn Fn(&HeaderMap, &[u8]) -> Option<Cost> + Send + Sync>;

/// The body of a successful response, which is copied as it passes. Its permit is settled when it ends.
pub(super) struct UsageBody {
    body: Body,
    headers: HeaderMap,
    /// What has passed, or the end of it.
    seen: Vec<u8>,
    /// Whether more than [`BODY_MAX`] has passed.
    is_cut: bool,
    read: ReadUsage,
    /// `None` once settled.
    permit: Option<Permit<'static>>,
}

impl UsageBody {
    /// The throttle learns from the outcome at once: only the usage comes later.
    pub(super) fn new(
        mut permit: Permit<'static>,
        outcome: Outcome,
        headers: HeaderMap,
        body: Body,
        read: ReadUsage,
    ) -> Self {
        permit.record(outcome);
        let mut body = Self { body, headers, seen: Vec::new(), is_cut: false, read, permit: Some(permit) };
        if body.body.is_end_stream() {
            body.end();
        }
        body
    }

    /// The body is complete.
    fn end(&mut self) {
        if self.permit.is_some() {
            if self.is_cut {
                self.keep_tail();
            }
            let used = (self.read)(&self.headers, &self.seen);
            self.settle(used);
        }
    }

    fn see(&mut self, data: &[u8]) {
        self.seen.extend_from_slice(data);
        if self.seen.len() > BODY_MAX {
            self.is_cut = true;
            self.keep_tail();
        }
    }

    fn keep_tail(&mut self) {
        self.seen.drain(..self.seen.len().saturating_sub(TAIL));
    }

    /// Without a known usage, the estimate stays used.
    fn settle(&mut self, used: Option<Cost>) {
        if let Some(permit) = self.permit.take() {
            let used = used.unwrap_or(permit.cost());
            permit.settle(Outcome::ignored().spent(used));
        }
    }
}

impl http_body::Body for UsageBody {
    type Data = <Body as http_body::Body>::Data;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = &mut *self;
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.see(data);
                }
                if this.body.is_end_stream() {
                    this.end();
                }
            }
            Some(Err(_)) => {
                if let Some(permit) = &mut this.permit {
                    // It was already counted as completed.
                    permit.record(Outcome::failure().because(Cause::Network).retried());
                }
                this.settle(None);
            }
            None => this.end(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for UsageBody {
    fn drop(&mut self) {
        self.settle(None);
    }
}
