//! One who waits at the store gate: its place there, and what may wake it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use tidegate_core::limit::name::Subject;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, timeout_at};

use super::Joined;
use super::lines::Place;
use crate::limiter::turns::{Ticket, Watch};

/// A place at the store gate.
pub(super) struct Spot<'a> {
    pub(super) place: Place<'a>,
    /// Counts it among those who wait for the limiter.
    pub(super) ticket: Ticket<'a>,
    /// Whose buckets were short when it last asked, and how many returns had been told of by then.
    pub(super) stuck: Option<(Subject, u64)>,
    pub(super) watch: Option<Watch<'a>>,
}

/// Why somebody at the gate looks around.
pub(super) enum Woken {
    Told,
    Returned,
    TimeOver,
}

impl<'a> Spot<'a> {
    /// Begins to watch for returns to what it waits for. Answers whether it was to ask again, and did not hear it.
    pub(super) fn missed_a_call(&mut self, joined: &'a Joined) -> bool {
        let Some((stuck_at, returns)) = &self.stuck else { return false };
        if self.watch.is_some() {
            // It has heard of what returned meanwhile.
            return false;
        }
        let turns = joined.limiter.turns();
        self.watch = Some(turns.watch(stuck_at));
        // Asked after the line above: what returns from now on wakes us, and what returned before is asked for.
        turns.returns() != *returns
    }

    pub(super) async fn wait(
        &mut self,
        mut turned: Pin<&mut Notified<'_>>,
        is_first: bool,
        until: Option<Instant>,
    ) -> Woken {
        let mut told = pin!(self.place.woken());
        let watch = self.watch.as_mut().filter(|_| is_first);
        let mut returned = pin!(watch.map(Watch::returned));
        let woken = poll_fn(|context| {
            if let Some(returned) = returned.as_mut().as_pin_mut()
                && returned.poll(context).is_ready()
            {
                return Poll::Ready(Woken::Returned);
            }
            if told.as_mut().poll(context).is_ready() || turned.as_mut().poll(context).is_ready() {
                return Poll::Ready(Woken::Told);
            }
            Poll::Pending
        });
        match until {
            Some(until) => timeout_at(until, woken).await.unwrap_or(Woken::TimeOver),
            None => woken.await,
        }
    }
}
