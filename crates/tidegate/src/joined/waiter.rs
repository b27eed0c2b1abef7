//! A waiter at the store gate: its place, and what can wake it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use tidegate_core::limit::name::Subject;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, timeout_at};

use super::Joined;
use super::queues::Place;
use crate::limiter::waiters::{ReturnWatch, Ticket};

/// A place at the store gate.
pub(super) struct GateWaiter<'a> {
    pub(super) place: Place<'a>,
    /// Counts it as a waiter of the limiter.
    pub(super) ticket: Ticket<'a>,
    /// The subject whose buckets were short at the last draw, and the count of returns before that draw.
    pub(super) short: Option<(Subject, u64)>,
    pub(super) watch: Option<ReturnWatch<'a>>,
}

/// Why a waiter at the gate woke up.
pub(super) enum WakeReason {
    Notified,
    Returned,
    Timeout,
}

impl<'a> GateWaiter<'a> {
    /// Starts watching for returns to the short buckets. Returns whether one happened before the watch began.
    pub(super) fn missed_return(&mut self, joined: &'a Joined) -> bool {
        let Some((short_subject, returns)) = &self.short else { return false };
        if self.watch.is_some() {
            // The watch already covers every return since it began.
            return false;
        }
        let waiters = joined.limiter.waiters();
        self.watch = Some(waiters.watch(short_subject));
        // Read after subscribing: later returns wake the waiter, and earlier ones change this count.
        waiters.returns() != *returns
    }

    pub(super) async fn wait(
        &mut self,
        mut state_changed: Pin<&mut Notified<'_>>,
        is_first: bool,
        until: Option<Instant>,
    ) -> WakeReason {
        let mut notified = pin!(self.place.notified());
        let watch = self.watch.as_mut().filter(|_| is_first);
        let mut returned = pin!(watch.map(ReturnWatch::returned));
        let woken = poll_fn(|context| {
            if let Some(returned) = returned.as_mut().as_pin_mut()
                && returned.poll(context).is_ready()
            {
                return Poll::Ready(WakeReason::Returned);
            }
            if notified.as_mut().poll(context).is_ready() || state_changed.as_mut().poll(context).is_ready() {
                return Poll::Ready(WakeReason::Notified);
            }
            Poll::Pending
        });
        match until {
            Some(until) => timeout_at(until, woken).await.unwrap_or(WakeReason::Timeout),
            None => woken.await,
        }
    }
}
