//! Bounds the control frames of an HTTP/2 connection by a token bucket.
//!
//! PING, SETTINGS, PRIORITY and other frames that carry no call cost the peer nothing and the server CPU time.
//! Each call pays for the control frames that belong to it; a connection that sends many more is closed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// The connection preface of a client.
const PREFACE_LEN: usize = 24;
/// Length of a frame head: length, type, flags and stream.
const HEAD_LEN: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// Control frames that a new connection may send.
const BURST: u32 = 10_000;
/// Control frames per second beyond those of calls.
const PER_SECOND: u32 = 1_000;
/// Control frames that belong to one call.
const PER_CALL: u32 = 16;

/// The budget of one connection.
#[derive(Debug)]
struct FrameBudget {
    /// Bytes of the preface or of a payload that come before the next frame head.
    skip: usize,
    head: [u8; HEAD_LEN],
    head_len: usize,
    available: u32,
    refilled_at: Instant,
}

/// The connection sent more control frames than its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flood;

impl FrameBudget {
    fn new() -> Self {
        let refilled_at = Instant::now();
        Self { skip: PREFACE_LEN, head: [0; HEAD_LEN], head_len: 0, available: BURST, refilled_at }
    }

    /// Counts the frames that begin in these bytes.
    fn count(&mut self, mut bytes: &[u8]) -> Result<(), Flood> {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let read = (HEAD_LEN - self.head_len).min(bytes.len());
            if read == 0 {
                return Ok(());
            }
            self.head[self.head_len..self.head_len + read].copy_from_slice(&bytes[..read]);
            self.head_len += read;
            bytes = &bytes[read..];
            if self.head_len == HEAD_LEN {
                self.head_len = 0;
                let [high, middle, low, kind, ..] = self.head;
                self.skip = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                self.pay(kind)?;
            }
        }
    }

    fn pay(&mut self, kind: u8) -> Result<(), Flood> {
        match kind {
            HEADERS => self.available = (self.available + PER_CALL).min(BURST),
            // Messages have bounds of their own.
            DATA if self.skip > 0 => {}
            _ => {
                if self.available == 0 {
                    self.refill();
                }
                self.available = self.available.checked_sub(1).ok_or(Flood)?;
            }
        }
        Ok(())
    }

    /// Adds what the time since the last refill is worth. The clock is read only if the budget is spent.
    fn refill(&mut self) {
        let (now, millis_max) = (Instant::now(), u64::from(BURST) * 1_000 / u64::from(PER_SECOND));
        let elapsed = u64::try_from(now.duration_since(self.refilled_at).as_millis());
        let millis = elapsed.unwrap_or(u64::MAX).min(millis_max);
        let earned = u32::try_from(millis * u64::from(PER_SECOND) / 1_000).unwrap_or(BURST);
        if earned > 0 {
            // Time beyond the burst is not kept for later.
            let is_full = millis == millis_max;
            self.refilled_at = if is_full { now } else { self.refilled_at + Duration::from_millis(millis) };
            self.available = earned.min(BURST);
        }
    }
}

/// A stream that fails when its peer floods it with control frames.
#[derive(Debug)]
pub(crate) struct BudgetedStream<S> {
    stream: S,
    budget: FrameBudget,
    floods: Counter,
}

impl<S> BudgetedStream<S> {
    pub(crate) fn new(stream: S, floods: Counter) -> Self {
        Self { stream, budget: FrameBudget::new(), floods }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BudgetedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        if this.budget.count(&buf.filled()[before..]).is_err() {
            this.floods.increment(1);
            return Poll::Ready(Err(io::Error::other("too many HTTP/2 control frames")));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BudgetedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const PING: u8 = 6;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).expect("short").to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 0];
        bytes.resize(HEAD_LEN + payload, 0);
        bytes
    }

    /// A connection after its preface.
    fn opened() -> FrameBudget {
        let mut budget = FrameBudget::new();
        assert_eq!(budget.count(&[b'x'; PREFACE_LEN]), Ok(()));
        budget
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_are_counted_in_any_pieces() {
        for piece in [1, 7, 100_000] {
            let mut budget = opened();
            let pings = frame(PING, 8).repeat(BURST as usize);
            assert!(pings.chunks(piece).all(|bytes| budget.count(bytes).is_ok()), "in pieces of {piece}");
            assert_eq!(budget.count(&frame(PING, 8)), Err(Flood));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_pay_for_their_control_frames() {
        let mut budget = opened();
        let call = [frame(HEADERS, 50), frame(DATA, 30), frame(8, 4).repeat(PER_CALL as usize)].concat();
        assert!((0..10_000).all(|_| budget.count(&call).is_ok()));
        let mut budget = opened();
        assert!((0..=BURST).any(|_| budget.count(&frame(DATA, 0)).is_err()), "empty frames are no calls");
        assert!((0..=BURST).all(|_| opened().count(&frame(DATA, 1)).is_ok()));
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_are_earned_by_time() {
        let mut budget = opened();
        assert_eq!(budget.count(&frame(PING, 8).repeat(BURST as usize)), Ok(()));
        advance(Duration::from_millis(500)).await;
        assert_eq!(budget.count(&frame(PING, 8).repeat(500)), Ok(()));
        assert_eq!(budget.count(&frame(PING, 8)), Err(Flood));
    }

    /// Each refill took ten seconds of the connection's age: one that was an hour old could send 3.6 million.
    #[tokio::test(start_paused = true)]
    async fn old_connection_earns_no_more_than_burst() {
        let mut budget = opened();
        advance(Duration::from_hours(1)).await;
        // The first burst is available from the beginning; the second is the most that time is worth.
        assert_eq!(budget.count(&frame(PING, 8).repeat(2 * BURST as usize)), Ok(()));
        assert_eq!(budget.count(&frame(PING, 8)), Err(Flood));
    }
}
