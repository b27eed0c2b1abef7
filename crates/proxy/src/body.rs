//! The body of a response on its way to the caller: its usage is read, and the call settled when it ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tidegate_server::Slot;

use crate::listener::BodyError;
use crate::ticket::{Ending, Ticket};
use crate::transport::Prefixed;
use crate::usage::UsageReader;

/// A response body that settles its call.
#[derive(Debug)]
pub(crate) struct MeteredBody {
    inner: Prefixed,
    reader: UsageReader,
    ticket: Option<Ticket>,
    /// The place of the call among those of its tenant.
    _slot: Slot,
    /// Why the body broke off, if the caller does not know yet.
    broken: Option<BodyError>,
}

impl MeteredBody {
    pub(crate) const fn new(inner: Prefixed, reader: UsageReader, ticket: Ticket, slot: Slot) -> Self {
        Self { inner, reader, ticket: Some(ticket), _slot: slot, broken: None }
    }

    fn end(&mut self, is_complete: bool) {
        if let Some(ticket) = self.ticket.take() {
            ticket.end(Ending::Response { usage: self.reader.finish(), is_complete });
        }
    }
}

impl Body for MeteredBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if let Some(error) = this.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        loop {
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let frame = match frame.into_data() {
                        Ok(data) => {
                            let passed = this.reader.push(data);
                            if passed.is_empty() {
                                continue;
                            }
                            Frame::data(passed)
                        }
                        Err(trailers) => trailers,
                    };
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => {
                    this.end(false);
                    // Earlier bytes are flushed only while the body is pending.
                    this.broken = Some(error);
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                None => {
                    let rest = this.reader.rest();
                    this.end(true);
                    let last = (!rest.is_empty()).then(|| Ok(Frame::data(rest)));
                    return Poll::Ready(last);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        !self.reader.edits() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.reader.edits() { SizeHint::new() } else { self.inner.size_hint() }
    }
}

impl Drop for MeteredBody {
    /// A body whose length is known is dropped after its last byte, without being polled to its end.
    fn drop(&mut self) {
        let is_complete = self.inner.is_end_stream();
        self.end(is_complete);
    }
}
