//! The limiter's side of a joined throttle: to resolve before anything local is taken, to draw while it is held, and
//! to end a lease without waiting.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::name::Subject;
use tidegate_store::StoreError;
use tokio::time::Instant;

use super::acquire::{Kind, SubjectRef, new_draw};
use super::error::LimitError;
use super::events::LimitEvent;
use super::lease::{Lease, Settled, State};
use super::turns::{Ticket, Turns};
use super::{Limiter, Shared};
use crate::joined::Lines;

/// What limits a subject, and what a request asks of each limit.
#[derive(Debug)]
pub(crate) struct Resolved {
    levels: Arc<Levels>,
    units: Units,
    /// What is wrong with the store, if it could not be asked.
    away: Option<StoreError>,
}

impl Resolved {
    /// It was some time ago: whether the store is away is asked anew.
    pub(crate) fn waited(&mut self) {
        self.away = None;
    }
}

/// How a lease ends.
#[derive(Debug)]
pub(crate) enum Finish {
    /// At what was used of each limit.
    At(Units),
    /// At what is held.
    AsHeld,
    /// With everything returned.
    Cancel,
}

impl Limiter {
    /// Whether the store answers at once.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        self.shared.is_immediate
    }

    pub(crate) fn lines(&self) -> &Lines {
        &self.shared.lines
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.shared.turns
    }

    pub(crate) fn check_open(&self) -> Result<(), LimitError> {
        self.shared.check_open()
    }

    /// When others' changes of policies are noticed at the latest.
    pub(crate) fn noticed_at(&self) -> Instant {
        Instant::now() + self.shared.policies.ttl().max(Duration::from_secs(1))
    }

    /// A place among those who wait.
    pub(crate) fn count_in(&self, subject: &Subject) -> Result<Ticket<'_>, LimitError> {
        self.shared.turns.enter(subject).ok_or_else(|| {
            let waiters_max = self.shared.turns.waiters_max();
            self.shared.listeners.tell(&LimitEvent::QueueFull { waiters_max });
            LimitError::Busy { waiters_max, retry_after: None }
        })
    }

    /// Draws if nothing has to be waited for; `None` says nothing.
    #[inline]
    pub(crate) fn draw_at_once(
        &self,
        subject: SubjectRef<'_>,
        cost: &[(&str, u64)],
    ) -> Option<Result<Lease, LimitError>> {
        if let Err(closed) = self.shared.check_open() {
            return Some(Err(closed));
        }
        self.request(subject, cost).draw_at_once(Kind::Draw)
    }

    /// What limits a subject and what is asked of it; refuses what can never be had, or asked.
    pub(crate) async fn resolve(
        &self,
        subject: SubjectRef<'_>,
        cost: &[(&str, u64)],
    ) -> Result<Resolved, LimitError> {
        self.shared.check_open()?;
        let _asking = self.shared.asking();
        let (levels, away) = self.request(subject, cost).levels().await?;
        let units = levels.units(cost)?;
        match Shared::never(&levels, &units) {
            Some(never) => Err(never.into_error()),
            None => Ok(Resolved { levels, units, away }),
        }
    }

    /// Draws what was resolved, in one call of the store.
    pub(crate) async fn draw(&self, resolved: Resolved) -> Result<Lease, LimitError> {
        self.shared.check_open()?;
        let _asking = self.shared.asking();
        let Resolved { levels, units, away } = resolved;
        let deadline = self.shared.lease_deadline;
        match away {
            Some(error) => {
                let draw = new_draw(Shared::new_id(), levels, units, deadline);
                self.shared.without_store(draw, Kind::Draw, error).await
            }
            None => self.shared.draw(levels, units, deadline, Kind::Draw).await,
        }
    }
}

impl Lease {
    /// What was used of each limit by what is `said`. What is held and not named was not used.
    pub(crate) fn used(&self, said: &[(&str, u64)]) -> Result<Units, LimitError> {
        let mut units = self.now.levels.amounts(said)?;
        for (used, held) in units.iter_mut().zip(&self.now.actual) {
            *used = used.or(held.map(|_| 0));
        }
        Ok(units)
    }

    /// Whether it has not ended, and no end has begun.
    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Begins the end. Dropped from here on, the lease ends like this in the background, whatever the store has answered.
    /// Answers at once where the store does; else it is to be [finished](Self::finish).
    #[inline]
    pub(crate) fn begin(&mut self, finish: Finish) -> Option<Result<Settled, LimitError>> {
        let (how, gives_back) = match finish {
            Finish::At(units) => {
                let gives_back = units.iter().zip(&self.now.actual).any(|(used, held)| used < held);
                self.now.actual = units;
                (Ending::Settled, gives_back)
            }
            Finish::AsHeld => (Ending::Settled, false),
            Finish::Cancel => (Ending::Cancelled, true),
        };
        self.next_step();
        self.state = State::Ending(how);
        if !self.is_here() {
            return None;
        }
        let answer = match how {
            Ending::Settled => self.store().settle(&self.now).now(),
            Ending::Cancelled | Ending::Expired => self.store().cancel(&self.cancellation()).now(),
        };
        answer.map(|answer| self.ended(answer.map(drop), how, gives_back))
    }

    /// Finishes what was begun.
    pub(crate) async fn finish(&mut self) -> Result<Settled, LimitError> {
        match self.state {
            State::Ending(how) | State::Refused(how) => self.end(how, true).await,
            State::Open => unreachable!("an end is begun before it is finished"),
            State::Ended { answer, .. } => Ok(answer),
        }
    }
}
