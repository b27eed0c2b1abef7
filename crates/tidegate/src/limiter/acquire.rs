//! Drawing: who asks, what limits them, and what the store says.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::{InvalidName, Subject};
use tidegate_core::limit::policy::{OnUnavailable, Policy, Share, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::time::Stamp;
use tidegate_store::{Cancel, Draw, Drawn, Lookup, Moved, Readings, Reply, Settle, StoreError, Terms};

use super::error::{LimitError, Limited};
use super::events::LimitEvent;
use super::guard::Failed;
use super::lease::{Backing, Lease, Settled, State};
use super::request::Request;
use super::settler::End;
use super::{Limiter, Shared};

/// Ids that are made for one draw, should the first ones look too old.
const IDS_MAX: usize = 8;

/// Who asks, and for what: a pair of names, or a [`Subject`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SubjectRef<'a> {
    /// Who.
    pub entity: &'a str,
    /// What.
    pub resource: &'a str,
}

impl<'a> From<(&'a str, &'a str)> for SubjectRef<'a> {
    fn from((entity, resource): (&'a str, &'a str)) -> Self {
        Self { entity, resource }
    }
}

impl<'a> From<&'a Subject> for SubjectRef<'a> {
    fn from(subject: &'a Subject) -> Self {
        Self { entity: subject.entity.as_str(), resource: subject.resource.as_str() }
    }
}

impl SubjectRef<'_> {
    pub(crate) fn check(self) -> Result<Subject, InvalidName> {
        Subject::new(self.entity, self.resource)
    }

    #[inline]
    pub(super) fn is(self, subject: &Subject) -> bool {
        self.entity == subject.entity.as_str() && self.resource == subject.resource.as_str()
    }
}

impl Limiter {
    /// Draws `cost` from every limit of the subject, and of those above it that it cascades to: all or nothing, and
    /// at once. The lease is written before this returns.
    ///
    /// # Errors
    /// [`LimitError::Limited`] with every limit's balance, which are short, whose they are and when to come back;
    /// [`LimitError::TooLarge`] where no waiting would help; [`LimitError::Waiting`] while others of this process wait
    /// for the same subject; [`LimitError::NoLimits`], [`LimitError::Cost`] and [`LimitError::Name`] for what cannot be
    /// asked; [`LimitError::Unavailable`] when the store is unavailable, [`LimitError::Busy`] when too
    /// many calls of this process wait for it, and [`LimitError::Store`] where it refuses, or was closed.
    ///
    /// # Panics
    /// Where the store is not in this process: within a tokio runtime whose timer is not enabled. Outside a runtime it is
    /// fine, if the store needs none.
    ///
    /// # Cancel safety
    /// Dropping the future takes nothing: a draw that is under way is cancelled in the background.
    pub async fn acquire<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Lease, LimitError> {
        self.request(subject.into(), cost.as_ref()).acquire().await
    }

    /// The same, waiting up to `within` for what is short. Those who wait for a subject are served in the order they
    /// came; only the first asks the store. Refuses as soon as it is clear that the time will not do.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), and [`LimitError::Busy`] when as many wait as may.
    ///
    /// # Panics
    /// As [`acquire`](Self::acquire), and when it has to wait outside a tokio runtime with its timer enabled: there,
    /// [block](Self::blocking).
    ///
    /// # Cancel safety
    /// Dropping the future leaves the line and takes nothing. You lose your place.
    pub async fn acquire_within<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
        within: Duration,
    ) -> Result<Lease, LimitError> {
        self.request(subject.into(), cost.as_ref()).acquire_within(within).await
    }

    /// Draws and settles in one call: no lease is kept.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// Dropping the future may leave it spent or not.
    pub async fn spend<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<(), LimitError> {
        self.request(subject.into(), cost.as_ref()).spend().await
    }

    /// An acquire with more to say: limits of its own, a deadline of its own.
    pub fn request<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: &'a [(&'a str, u64)],
    ) -> Request<'a> {
        Request::new(&self.shared, subject.into(), cost)
    }
}

/// A draw that may be under way. Dropped before the store has answered, it is cancelled in the background.
struct Pending<'a> {
    shared: &'a Arc<Shared>,
    draw: &'a Draw,
    is_answered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            let levels = Arc::clone(&self.draw.levels);
            let cancel = Cancel { lease: self.draw.lease, step: 1, levels, is_watched: false };
            self.shared.settle_later(End::Cancel(cancel));
        }
    }
}

/// One who is asking the store.
pub(super) struct Asking<'a> {
    shared: &'a Shared,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.shared.asking.fetch_sub(1, Ordering::SeqCst);
        if self.shared.is_closed.load(Ordering::SeqCst) {
            self.shared.lease_ended.notify_waiters();
        }
    }
}

/// How a draw is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A lease is kept.
    Draw,
    /// It is settled at once.
    Spend,
    /// The same, and whoever spends is told what is left.
    Tell,
}

impl Shared {
    /// Draws at once. When the store is away, the policy decides.
    pub(super) async fn draw(
        self: &Arc<Self>,
        levels: Arc<Levels>,
        units: Units,
        deadline: Duration,
        kind: Kind,
    ) -> Result<Lease, LimitError> {
        if self.is_immediate
            && let Some(answer) = self.draw_now(Arc::clone(&levels), units.clone(), deadline, kind)
        {
            return answer;
        }
        let mut draw = new_draw(Self::new_id(), levels, units, deadline);
        let mut answer = self.ask_to_draw(&draw, kind).await;
        for _ in 0..IDS_MAX {
            if !matches!(&answer, Err(failed) if matches!(failed.error, StoreError::Ended { .. })) {
                break;
            }
            // The id is new, and looks so old that the store may have forgotten it.
            draw.lease = Self::new_id();
            answer = self.ask_to_draw(&draw, kind).await;
        }
        match answer {
            Ok(drawn) => self.answered(draw, drawn, kind),
            Err(failed) if failed.error.is_unavailable() => {
                self.without_store(draw, kind, failed.error).await
            }
            Err(failed) => Err(self.failure(failed.error)),
        }
    }

    /// Asks a store that may be away. Given up, by us or by the caller, the draw is cancelled in the background.
    async fn ask_to_draw(self: &Arc<Self>, draw: &Draw, kind: Kind) -> Result<Drawn, Failed> {
        let mut pending = Pending { shared: self, draw, is_answered: false };
        let answer = match kind {
            Kind::Draw => self.guard.call(self.store.draw(draw)).await,
            Kind::Spend | Kind::Tell => match self.guard.call(self.store.spend(draw)).await {
                // It cannot be cancelled if it was done: asked again, the store answers as the first time.
                Err(Failed { error: StoreError::Unavailable { .. }, may_be_done: true }) => {
                    self.guard.call(self.store.spend(draw)).await
                }
                answer => answer,
            },
        };
        pending.is_answered = answer.as_ref().err().is_none_or(|failed| !failed.may_be_done);
        answer
    }

    /// Draws from a store that answers at once: no future is made, and nothing is moved through one.
    #[inline]
    pub(super) fn draw_now(
        self: &Arc<Self>,
        levels: Arc<Levels>,
        units: Units,
        deadline: Duration,
        kind: Kind,
    ) -> Option<Result<Lease, LimitError>> {
        // Whoever holds a lease can ask such a store for its balances at any time.
        let is_watched = kind == Kind::Tell;
        let mut draw = Draw { is_watched, ..new_draw(self.new_id_at(), levels, units, deadline) };
        let ask = |draw: &Draw| match kind {
            Kind::Draw => self.store.draw(draw).now(),
            Kind::Spend | Kind::Tell => self.store.spend(draw).now(),
        };
        let mut answer = ask(&draw)?;
        for _ in 0..IDS_MAX {
            if !matches!(answer, Err(StoreError::Ended { .. })) {
                break;
            }
            // The id is new, and looks so old that the store may have forgotten it: once more, by the store's clock.
            let seen = self.store.balances(&Lookup::Subjects(Vec::new())).now()?;
            self.told.fetch_max(seen.map_or(0, |seen| seen.at.as_micros() / 1_000), Ordering::Relaxed);
            draw.lease = self.new_id_at();
            answer = ask(&draw)?;
        }
        Some(answer.map_err(LimitError::Store).and_then(|drawn| self.answered(draw, drawn, kind)))
    }

    /// What the store's answer is to the caller.
    pub(super) fn answered(
        self: &Arc<Self>,
        draw: Draw,
        drawn: Drawn,
        kind: Kind,
    ) -> Result<Lease, LimitError> {
        match drawn {
            Drawn::Granted(moved) => {
                self.notice(&draw.levels, &moved);
                self.told.store(moved.at.as_micros() / 1_000, Ordering::Relaxed);
                self.lease(draw, moved.at, moved.readings, (Backing::Store, kind))
            }
            Drawn::Refused(moved) => {
                self.notice(&draw.levels, &moved);
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                Err(Limited::new(&draw.levels, &moved, &draw.units).into_error())
            }
        }
    }

    /// What becomes of a draw when the store is away.
    pub(super) async fn without_store(
        self: &Arc<Self>,
        draw: Draw,
        kind: Kind,
        error: StoreError,
    ) -> Result<Lease, LimitError> {
        let lease = match draw.levels.on_unavailable().0 {
            OnUnavailable::Block => return Err(self.failure(error)),
            OnUnavailable::Allow => {
                self.lease(draw, Stamp::ZERO, Readings::new(), (Backing::Nobody, kind))?
            }
            OnUnavailable::LocalShare(share) => {
                let levels = Arc::new(draw.levels.map_rules(|rule| share_of(rule, share)));
                // The store may have heard of the id; one that was chosen finds the same lease here again.
                let lease = if draw.lease.is_chosen() { draw.lease } else { Self::new_id() };
                let draw = Draw { lease, levels, ..draw };
                let reply: Reply<'_, Drawn> = match kind {
                    Kind::Draw => tidegate_store::Buckets::draw(&self.local, &draw),
                    Kind::Spend | Kind::Tell => tidegate_store::Buckets::spend(&self.local, &draw),
                };
                match reply.await.map_err(LimitError::Store)? {
                    Drawn::Granted(moved) => {
                        self.lease(draw, moved.at, moved.readings, (Backing::Local, kind))?
                    }
                    Drawn::Refused(moved) => {
                        self.counters.refused.fetch_add(1, Ordering::Relaxed);
                        let limited = Limited::new(&draw.levels, &moved, &draw.units);
                        // More than our share may be had again when the store is back.
                        return Err(if limited.is_never() {
                            self.failure(error)
                        } else {
                            limited.into_error()
                        });
                    }
                }
            }
        };
        self.counters.degraded.fetch_add(1, Ordering::Relaxed);
        self.listeners.tell(&LimitEvent::Degraded { subject: lease.subject().clone(), lease: lease.id() });
        Ok(lease)
    }

    pub(super) fn lease(
        self: &Arc<Self>,
        draw: Draw,
        at: Stamp,
        readings: Readings,
        (backing, kind): (Backing, Kind),
    ) -> Result<Lease, LimitError> {
        self.counters.granted.fetch_add(1, Ordering::SeqCst);
        let Draw { lease, levels, units, .. } = draw;
        let now = Settle { lease, step: 0, levels, actual: units, is_watched: false };
        let (shared, state) = (Arc::clone(self), State::Open);
        let lease = Lease { shared, now, at, readings, backing, state, left: None };
        // Counted before it is asked: either we see that it was closed, or whoever drains sees the lease.
        if kind == Kind::Draw && self.is_closed.load(Ordering::SeqCst) {
            if lease.id().is_chosen() {
                // Whoever has chosen it asks again, perhaps another process.
                lease.detach();
            }
            return Err(LimitError::Closed);
        }
        Ok(lease)
    }

    /// Somebody is asking the store: a drain waits for the answer.
    pub(super) fn asking(&self) -> Asking<'_> {
        self.asking.fetch_add(1, Ordering::SeqCst);
        Asking { shared: self }
    }

    /// What limits a subject when the store cannot say and never has: the limiter's own defaults.
    pub(super) fn levels_by_default(&self, subject: Subject) -> Levels {
        let resolved = resolve(&subject, [None; 4], &self.defaults);
        Levels::new(Version::ZERO, vec![(subject, resolved)])
    }

    /// The levels with limits given for one call.
    pub(super) fn with_limits(levels: &Arc<Levels>, limits: &[Limit]) -> Result<Arc<Levels>, LimitError> {
        let policy = Policy::new(limits.iter().cloned())?;
        let rules = policy.rules().iter().map(|rule| (**rule).clone());
        Ok(Arc::new(levels.with_call_limits(rules)))
    }

    /// Sees whether the store knows newer rules than we do.
    #[inline]
    fn notice(&self, levels: &Levels, moved: &Moved) {
        let newest = moved.readings.iter().map(tidegate_store::Reading::version).max();
        if let Some(newest) = newest
            && newest > levels.version()
            && self.policies.saw(newest)
        {
            self.listeners.tell(&LimitEvent::RulesStale { subject: levels.subject().clone() });
        }
    }
}

/// A draw that tells its readings.
pub(super) fn new_draw(lease: LeaseId, levels: Arc<Levels>, units: Units, deadline: Duration) -> Draw {
    let terms = Terms { deadline, on_expiry: levels.on_expiry().0 };
    Draw { lease, levels, units, terms, is_watched: true }
}

/// This process's share of a rule.
fn share_of(rule: &Rule, part: Share) -> Rule {
    let shape = rule.shape();
    let limit = Limit::per(rule.name().as_str(), part.of(shape.amount()), shape.period());
    // A share of a valid rule is one: both numbers are at least one, and the time to refill stays the same.
    let shared = limit.burst(part.of(shape.burst())).check().unwrap_or_else(|_| rule.clone());
    // What was given with a call keeps a bucket of its own.
    if rule.is_of_call() { shared.of_call() } else { shared }
}

/// The lease of a spend ends as it begins.
pub(super) fn spent(mut lease: Lease) {
    lease.close(Ending::Settled, Settled::Now);
}
