//! Waiting, but not for ever, at no cost where nothing has to be waited for.
//!
//! An alarm of the runtime takes a lock when it is set, when it is put off and when it is taken back. A call that is answered
//! at once needs none; and a connection that is read a thousand times a second needs one alarm, and not a thousand.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

/// What comes of `work`, if it takes no longer than `span`: as [`timeout`], whose alarm is set only if there is something to wait
/// for.
///
/// # Errors
/// It took longer.
///
/// # Cancel safety
/// That of `work`.
pub(crate) async fn within<T>(span: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut work = pin!(work);
    match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        // In a box, since it is rare: every call would make room for it.
        Poll::Pending => Box::pin(timeout(span, work)).await,
    }
}

/// A connection whose other side is waited for only so long: until it sends something, and until it takes something.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    stream: S,
    reading: Wait,
    writing: Wait,
}

impl<S> Patient<S> {
    /// A read that takes longer than this fails, and so does a write; `None` is for ever.
    pub(crate) const fn new(stream: S, reading: Option<Duration>, writing: Option<Duration>) -> Self {
        Self { stream, reading: Wait::new(reading), writing: Wait::new(writing) }
    }
}

/// How long one side is waited for.
#[derive(Debug)]
struct Wait {
    patience: Option<Duration>,
    /// When it has been waited for long enough, while it is waited for.
    due: Option<Instant>,
    /// Never later than that. One that was set for an earlier wait rings too early, and is put off then and not before.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Wait {
    const fn new(patience: Option<Duration>) -> Self {
        Self { patience, due: None, alarm: None }
    }

    /// What the other side did, unless it has been waited for too long.
    fn mind<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.due = None;
            return polled;
        }
        ready!(self.poll_over(cx));
        self.due = None;
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Ready when it has been waited for long enough.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(patience) = self.patience else { return Poll::Pending };
        if self.due.is_none() {
            self.due = Instant::now().checked_add(patience);
        }
        // A time that no clock can show is for ever.
        let Some(due) = self.due else { return Poll::Pending };
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(due)));
        loop {
            ready!(alarm.as_mut().poll(cx));
            if alarm.deadline() >= due {
                return Poll::Ready(());
            }
            alarm.as_mut().reset(due);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.reading.mind(read, cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.writing.mind(written, cx)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.writing.mind(flushed, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let ended = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.writing.mind(ended, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.writing.mind(written, cx)
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
    async fn what_is_there_is_taken_and_what_takes_too_long_is_not() {
        assert_eq!(within(Duration::ZERO, ready(7)).await, Ok(7));
        assert_eq!(within(SECOND, async { sleep(SECOND / 2).await }).await, Ok(()));
        let began = Instant::now();
        assert!(within(SECOND, pending::<()>()).await.is_err());
        assert_eq!(began.elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_is_waited_for_from_its_own_begin_however_many_came_before() {
        let (mut theirs, ours) = duplex(64);
        let mut ours = Patient::new(ours, Some(SECOND), None);
        let began = Instant::now();
        for _ in 0..10 {
            let (read, sent) = tokio::join!(ours.read_u8(), async {
                sleep(SECOND * 9 / 10).await;
                theirs.write_u8(1).await
            });
            assert_eq!((read.unwrap(), sent.unwrap()), (1, ()));
            // What nobody waits for may take as long as it likes.
            advance(SECOND * 5).await;
        }
        assert!(began.elapsed() >= SECOND * 59);
        let began = Instant::now();
        assert_eq!(ours.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_nobody_takes_fails_in_time_and_reads_are_waited_for_as_before() {
        let (mut theirs, ours) = duplex(4);
        let mut ours = Patient::new(ours, None, Some(SECOND));
        let began = Instant::now();
        assert_eq!(ours.write_all(&[0; 8]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), SECOND);
        let (read, sent) = tokio::join!(ours.read_u8(), async {
            sleep(SECOND * 60).await;
            theirs.write_u8(1).await
        });
        assert_eq!((read.unwrap(), sent.unwrap()), (1, ()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_that_no_clock_can_show_is_for_ever() {
        let (_theirs, ours) = duplex(4);
        let mut ours = Patient::new(ours, Some(Duration::MAX), None);
        assert!(within(SECOND * 1_000_000, ours.read_u8()).await.is_err());
    }
}
