//! The handle that work gets for its attempt, and how the tokens it reports reach the permit.
//!
//! The work does not get the permit itself: it could settle or keep it, and no backoff may hold a permit.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;

use tidegate_core::cost::Cost;

use crate::sync::Mutex;

/// The running attempt.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// Counted from 0.
    pub number: u32,
    reported: ReportedTokens,
}

/// Tokens that an attempt reported and its permit has not got yet.
type ReportedTokens = Arc<Mutex<Option<Cost>>>;

impl Attempt {
    pub(super) fn new(number: u32) -> Self {
        Self { number, reported: Arc::default() }
    }

    /// Reports tokens as they are used, as [`Permit::spend`](crate::Permit::spend). They stay used regardless of how the
    /// attempt ends: by a result, a retry, a cancelled run or a panic. Reports after its end are ignored.
    ///
    /// They reach the permit when the work next awaits, and in `run_blocking` when the attempt ends.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Budget, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = Throttle::auto().budget(Budget::tokens(90_000, Duration::from_secs(3_600))).build()?;
    /// let streamed = throttle.run(800, |attempt| async move {
    ///     attempt.spend(100); // a part of the stream
    ///     if attempt.number == 0 { return Err("connection lost") }
    ///     attempt.spend(500); // the rest of it
    ///     Ok("text")
    /// });
    /// assert_eq!(streamed.await, Ok("text"));
    /// assert_eq!(throttle.snapshot().tokens_used, 700);
    /// # Ok(())
    /// # }
    /// ```
    pub fn spend(&self, tokens: impl Into<Cost>) {
        let tokens = tokens.into();
        let mut reported = self.reported.lock();
        *reported = Some(reported.map_or(tokens, |reported| reported.plus_tokens(tokens)));
    }

    /// Attaches the permit that the attempt runs under.
    pub(crate) fn under<P: Spend>(&self, permit: P) -> AttemptPermit<P> {
        AttemptPermit { permit: Some(permit), reported: Arc::clone(&self.reported) }
    }
}

/// A permit that takes reports.
pub(crate) trait Spend {
    fn spend(&mut self, tokens: Cost);
}

/// The permit of a running attempt. It gets the attempt's reports after each poll, and when the attempt ends or is
/// dropped.
pub(crate) struct AttemptPermit<P: Spend> {
    /// `None` once taken.
    permit: Option<P>,
    reported: ReportedTokens,
}

impl<P: Spend> AttemptPermit<P> {
    /// Runs the attempt.
    pub(crate) async fn run<W: Future>(&mut self, work: W) -> W::Output {
        let mut work = pin!(work);
        poll_fn(|context| {
            let poll = work.as_mut().poll(context);
            self.report();
            poll
        })
        .await
    }

    /// The attempt has completed.
    pub(crate) fn into_permit(mut self) -> P {
        self.report();
        self.permit.take().unwrap_or_else(|| unreachable!("only this call takes it"))
    }

    fn report(&mut self) {
        let reported = self.reported.lock().take();
        if let (Some(permit), Some(tokens)) = (&mut self.permit, reported) {
            permit.spend(tokens);
        }
    }
}

impl<P: Spend> Drop for AttemptPermit<P> {
    fn drop(&mut self) {
        self.report();
    }
}
