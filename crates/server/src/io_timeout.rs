//! Timeouts for futures and I/O that cost nothing on the fast path.
//!
//! Setting, resetting and cancelling a runtime timer each takes a lock. A future that is immediately ready
//! needs no timer, and a connection reuses one timer for all its reads.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

/// Like [`timeout`], but sets the timer only if `work` is pending at the first poll.
///
/// # Errors
/// `work` took longer than `span`.
///
/// # Cancel safety
/// That of `work`.
pub(crate) async fn within<T>(span: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut work = pin!(work);
    match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        // Boxed because it is rare: every call would reserve space for it.
        Poll::Pending => Box::pin(timeout(span, work)).await,
    }
}

/// A stream with timeouts for reads and writes.
#[derive(Debug)]
pub struct TimeoutStream<S> {
    stream: S,
    read_timer: IoTimer,
    write_timer: IoTimer,
}

impl<S> TimeoutStream<S> {
    /// Sets the timeouts of reads and writes; `None` waits forever.
    pub const fn new(stream: S, read: Option<Duration>, write: Option<Duration>) -> Self {
        Self { stream, read_timer: IoTimer::new(read), write_timer: IoTimer::new(write) }
    }
}

/// The timer of one direction.
#[derive(Debug)]
struct IoTimer {
    timeout: Option<Duration>,
    /// When the pending operation times out.
    deadline: Option<Instant>,
    /// Fires at the deadline or earlier. A timer left from an earlier operation is reset only when it fires.
    timer: Option<Pin<Box<Sleep>>>,
}

impl IoTimer {
    const fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, deadline: None, timer: None }
    }

    /// Returns the result of an operation, or an error if it timed out.
    fn check<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.deadline = None;
            return polled;
        }
        ready!(self.poll_elapsed(cx));
        self.deadline = None;
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Ready once the pending operation has timed out.
    fn poll_elapsed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(span) = self.timeout else { return Poll::Pending };
        if self.deadline.is_none() {
            self.deadline = Instant::now().checked_add(span);
        }
        // A deadline that overflows the clock never comes.
        let Some(deadline) = self.deadline else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimeoutStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.read_timer.check(read, cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimeoutStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.write_timer.check(written, cx)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.write_timer.check(flushed, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let ended = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.write_timer.check(ended, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.write_timer.check(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::{advance, sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn within_returns_ready_output_or_times_out() {
        assert_eq!(within(Duration::ZERO, ready(7)).await, Ok(7));
        assert_eq!(within(SECOND, async { sleep(SECOND / 2).await }).await, Ok(()));
        let began = Instant::now();
        assert!(within(SECOND, pending::<()>()).await.is_err());
        assert_eq!(began.elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn read_timeout_restarts_with_each_read() {
        let (mut remote, local) = duplex(64);
        let mut local = TimeoutStream::new(local, Some(SECOND), None);
        let began = Instant::now();
        for _ in 0..10 {
            let (read, sent) = tokio::join!(local.read_u8(), async {
                sleep(SECOND * 9 / 10).await;
                remote.write_u8(1).await
            });
            assert_eq!((read.unwrap(), sent.unwrap()), (1, ()));
            // Time between reads does not count.
            advance(SECOND * 5).await;
        }
        assert!(began.elapsed() >= SECOND * 59);
        let began = Instant::now();
        assert_eq!(local.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn write_timeout_does_not_affect_reads() {
        let (mut remote, local) = duplex(4);
        let mut local = TimeoutStream::new(local, None, Some(SECOND));
        let began = Instant::now();
        assert_eq!(local.write_all(&[0; 8]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), SECOND);
        let (read, sent) = tokio::join!(local.read_u8(), async {
            sleep(SECOND * 60).await;
            remote.write_u8(1).await
        });
        assert_eq!((read.unwrap(), sent.unwrap()), (1, ()));
    }

    #[tokio::test(start_paused = true)]
    async fn overflowing_timeout_never_fires() {
        let (_theirs, local) = duplex(4);
        let mut local = TimeoutStream::new(local, Some(Duration::MAX), None);
        assert!(within(SECOND * 1_000_000, local.read_u8()).await.is_err());
    }
}
