//! What a joined throttle calls on its limiter: resolve before a local charge is taken, draw while it is held,
//! and end a lease without waiting.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::name::Subject;
use tidegate_store::StoreError;
use tokio::time::Instant;

use super::acquire::{Kind, SubjectRef, new_draw};
use super::error::LimitError;
use super::lease::{Lease, SettleStatus, State};
use super::remote::is_above;
use super::request::refuse_disabled;
use super::waiters::{Ticket, Waiters};
use super::{Limiter, Shared};
use crate::joined::Queues;

/// A subject's levels, and the units requested of each limit.
#[derive(Debug)]
pub(crate) struct ResolvedRequest {
    levels: Arc<Levels>,
    units: Units,
    /// The store's error, if it could not be called.
    unavailable: Option<StoreError>,
}

impl ResolvedRequest {
    /// The caller has waited since: whether the store is unavailable must be checked again.
    pub(crate) fn recheck_store(&mut self) {
        self.unavailable = None;
    }
}

/// How a lease ends.
#[derive(Debug)]
pub(crate) enum Finish {
    /// At the units used.
    At(Units),
    /// At the held units.
    Full,
    /// With all units returned.
    Cancel,
}

impl Limiter {
    /// Whether the store replies immediately.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        self.shared.is_immediate
    }

    pub(crate) fn queues(&self) -> &Queues {
        &self.shared.queues
    }

    pub(crate) fn waiters(&self) -> &Waiters {
        &self.shared.waiters
    }

    pub(crate) fn check_open(&self) -> Result<(), LimitError> {
        self.shared.check_open()
    }

    /// When policy changes by other processes are noticed at the latest.
    pub(crate) fn noticed_at(&self) -> Instant {
        Instant::now() + self.shared.policies.ttl().max(Duration::from_secs(1))
    }

    /// Counts a caller as a waiter.
    pub(crate) fn add_waiter(&self, subject: &Subject) -> Result<Ticket<'_>, LimitError> {
        self.shared.add_waiter(subject)
    }

    /// Draws if that needs no waiting; `None` says nothing about the request.
    #[inline]
    pub(crate) fn draw_fast(
        &self,
        subject: SubjectRef<'_>,
        cost: &[(&str, u64)],
    ) -> Option<Result<Lease, LimitError>> {
        if let Err(closed) = self.shared.check_open() {
            return Some(Err(closed));
        }
        self.request(subject, cost).draw_fast(Kind::Draw)
    }

    /// Resolves a subject's levels and the units requested; fails for invalid requests and those that can
    /// never be granted.
    pub(crate) async fn resolve(
        &self,
        subject: SubjectRef<'_>,
        cost: &[(&str, u64)],
    ) -> Result<ResolvedRequest, LimitError> {
        self.shared.check_open()?;
        let _call = self.shared.count_call();
        let (levels, unavailable) = self.request(subject, cost).levels().await?;
        refuse_disabled(&levels)?;
        let units = levels.units(cost)?;
        match Shared::never_granted(&levels, &units) {
            Some(never) => Err(never.into_error()),
            None => Ok(ResolvedRequest { levels, units, unavailable }),
        }
    }

    /// Draws a resolved request, with one call to the store.
    pub(crate) async fn draw(&self, resolved: ResolvedRequest) -> Result<Lease, LimitError> {
        self.shared.check_open()?;
        let _call = self.shared.count_call();
        let ResolvedRequest { levels, units, unavailable } = resolved;
        let deadline = self.shared.lease_deadline;
        match unavailable {
            Some(error) => {
                let draw = new_draw(Shared::new_id(), levels, units, deadline);
                self.shared.without_store(draw, Kind::Draw, error).await
            }
            None => self.shared.draw(levels, units, deadline, Kind::Draw).await,
        }
    }
}

impl Lease {
    /// The units used of each limit. A held limit that is not named was not used.
    pub(crate) fn used(&self, named: &[(&str, u64)]) -> Result<Units, LimitError> {
        let mut units = self.now.levels.amounts(named)?;
        for (used, held) in units.iter_mut().zip(&self.now.actual) {
            *used = used.or(held.map(|_| 0));
        }
        Ok(units)
    }

    /// Whether no ending has begun.
    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Begins an ending. If dropped from here on, the lease ends this way in the background, whatever the
    /// store responds. Returns a result if the store replies immediately; otherwise call
    /// [`finish`](Self::finish).
    #[inline]
    pub(crate) fn begin(&mut self, finish: Finish) -> Option<Result<SettleStatus, LimitError>> {
        let (how, gives_back) = match finish {
            Finish::At(units) => {
                let gives_back = units.iter().zip(&self.now.actual).any(|(used, held)| used < held);
                // The readings show whether a debt reaches its bound.
                self.now.is_watched |= is_above(&units, &self.now.actual);
                self.now.actual = units;
                (Ending::Settled, gives_back)
            }
            Finish::Full => (Ending::Settled, false),
            Finish::Cancel => (Ending::Cancelled, true),
        };
        self.next_step();
        self.state = State::Ending(how);
        if !self.is_local() {
            return None;
        }
        let answer = match how {
            Ending::Settled => {
                let answer = self.store().settle(&self.now).now();
                answer.map(|answer| answer.map(|moved| self.shared.settled(&self.now, &moved)))
            }
            Ending::Cancelled | Ending::Expired => {
                self.store().cancel(&self.cancellation()).now().map(|answer| answer.map(drop))
            }
        };
        answer.map(|answer| self.finish_ending(answer, how, gives_back))
    }

    /// Completes the ending that was begun.
    pub(crate) async fn finish(&mut self) -> Result<SettleStatus, LimitError> {
        match self.state {
            State::Ending(how) | State::Refused(how) => self.end(how, true).await,
            State::Open => unreachable!("an ending is begun before it is finished"),
            State::Ended { answer, .. } => Ok(answer),
        }
    }
}
