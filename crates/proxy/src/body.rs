//! The body of a response on its way to the caller: its usage is read, and the call settled when it ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tidegate_server::Slot;
use tokio::time::{Instant, Sleep, sleep};

use crate::listener::BodyError;
use crate::ticket::{Ending, Ticket};
use crate::transport::Prefixed;
use crate::usage::UsageReader;

/// A response body that settles its call.
#[derive(Debug)]
pub(crate) struct MeteredBody {
    inner: Prefixed,
    /// `None` if the upstream answered with an error: it did nothing that would be paid for.
    reader: Option<UsageReader>,
    ticket: Option<Ticket>,
    /// The place of the call among those of its tenant.
    _slot: Slot,
    /// Why the body broke off, if the caller does not know yet.
    broken: Option<BodyError>,
    /// How long the upstream may pause.
    pause_max: Duration,
    /// The time left of its current pause.
    timer: Option<Pin<Box<Sleep>>>,
    is_paused: bool,
}

impl MeteredBody {
    pub(crate) fn new(
        inner: Prefixed,
        reader: Option<UsageReader>,
        (ticket, slot): (Ticket, Slot),
        pause_max: Duration,
    ) -> Self {
        let ticket = Some(ticket);
        Self { inner, reader, ticket, _slot: slot, broken: None, pause_max, timer: None, is_paused: false }
    }

    fn end(&mut self, is_complete: bool) {
        if let Some(ticket) = self.ticket.take() {
            ticket.end(match &mut self.reader {
                Some(reader) => Ending::Response { usage: reader.finish(), is_complete },
                None => Ending::NotDone,
            });
        }
    }

    /// The next frame of the upstream, or an error if it pauses for too long.
    fn poll_upstream(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            self.is_paused = false;
            return Poll::Ready(frame);
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.pause_max)));
        if !self.is_paused {
            self.is_paused = true;
            timer.as_mut().reset(Instant::now() + self.pause_max);
        }
        timer.as_mut().poll(cx).map(|()| Some(Err("the upstream stopped sending".into())))
    }

    fn edits(&self) -> bool {
        self.reader.as_ref().is_some_and(UsageReader::edits)
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
            match ready!(this.poll_upstream(cx)) {
                Some(Ok(frame)) => {
                    let frame = match frame.into_data() {
                        Ok(data) => {
                            let passed = match &mut this.reader {
                                Some(reader) => reader.push(data),
                                None => data,
                            };
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
                    let rest = this.reader.as_mut().map_or_else(Bytes::new, UsageReader::rest);
                    this.end(true);
                    let last = (!rest.is_empty()).then(|| Ok(Frame::data(rest)));
                    return Poll::Ready(last);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        !self.edits() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.edits() { SizeHint::new() } else { self.inner.size_hint() }
    }
}

impl Drop for MeteredBody {
    /// A body whose length is known is dropped after its last byte, without being polled to its end.
    fn drop(&mut self) {
        let is_complete = self.inner.is_end_stream();
        self.end(is_complete);
    }
}
