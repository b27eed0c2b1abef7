//! Drawing: who asks, what limits them, and what the store says.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{InvalidName, Subject};
use tidegate_core::limit::policy::{OnUnavailable, Policy, Share, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::time::Stamp;
use tidegate_store::{Cancel, Draw, Drawn, Moved, Reply, StoreError, Terms};
use tokio::time::Instant;

use super::error::{LimitError, Limited};
use super::events::LimitEvent;
use super::guard::Failed;
use super::lease::{Backing, Lease, State};
use super::request::Request;
use super::settler::End;
use super::{Limiter, Shared};

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
    pub(super) fn check(self) -> Result<Subject, InvalidName> {
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
    /// asked; [`LimitError::Unavailable`] when the store is away.
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

    /// The same for a thread without a runtime.
    ///
    /// # Errors
    /// As [`acquire_within`](Self::acquire_within).
    ///
    /// # Panics
    /// When called from within a runtime: there, await.
    pub fn acquire_blocking<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
        within: Duration,
    ) -> Result<Lease, LimitError> {
        let request = self.request(subject.into(), cost.as_ref());
        self.shared.home.block_on(request.acquire_within(within))
    }

    /// Draws and settles in one call: no lease is kept.
    ///
    /// # Errors
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
            let cancel = Cancel { lease: self.draw.lease, step: 1, levels: Arc::clone(&self.draw.levels) };
            self.shared.settle_later(End::Cancel(cancel));
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
}

impl Shared {
    /// Until when a caller that comes now waits for the store; `None` for one that answers at once.
    #[inline]
    pub(super) fn until(&self) -> Option<Instant> {
        (!self.is_immediate).then(|| self.guard.until())
    }

    /// Draws at once. When the store is away, the policy decides.
    pub(super) async fn draw(
        self: &Arc<Self>,
        levels: Arc<Levels>,
        units: Units,
        deadline: Duration,
        kind: Kind,
        until: Option<Instant>,
    ) -> Result<Lease, LimitError> {
        let terms = Terms { deadline, on_expiry: levels.on_expiry().0 };
        let draw = Draw { lease: Self::new_id(), levels, units, terms };
        let answer = match until {
            None => match kind {
                Kind::Draw => self.store.draw(&draw).await,
                Kind::Spend => self.store.spend(&draw).await,
            }
            .map_err(|error| Failed { error, may_be_done: false }),
            Some(until) => {
                let mut pending = Pending { shared: self, draw: &draw, is_answered: false };
                let reply = match kind {
                    Kind::Draw => self.store.draw(&draw),
                    Kind::Spend => self.store.spend(&draw),
                };
                let answer = self.guard.call(reply, until).await;
                pending.is_answered = answer.as_ref().err().is_none_or(|failed| !failed.may_be_done);
                answer
            }
        };
        match answer {
            Ok(Drawn::Granted(moved)) => {
                self.notice(&draw.levels, &moved);
                Ok(self.lease(draw, moved.at, moved.readings, Backing::Store))
            }
            Ok(Drawn::Refused(moved)) => {
                self.notice(&draw.levels, &moved);
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                Err(Limited::new(&draw.levels, &moved, &draw.units).into_error())
            }
            Err(failed) if failed.error.is_transient() => self.without_store(draw, kind, failed.error).await,
            Err(failed) => Err(LimitError::Store(failed.error)),
        }
    }

    /// What becomes of a draw when the store is away.
    async fn without_store(
        self: &Arc<Self>,
        draw: Draw,
        kind: Kind,
        error: StoreError,
    ) -> Result<Lease, LimitError> {
        let lease = match draw.levels.on_unavailable().0 {
            OnUnavailable::Block => return Err(self.failure(error)),
            OnUnavailable::Allow => self.lease(draw, Stamp::ZERO, Vec::new(), Backing::Nobody),
            OnUnavailable::LocalShare(share) => {
                let levels = Arc::new(draw.levels.map_rules(|rule| share_of(rule, share)));
                let draw = Draw { lease: Self::new_id(), levels, ..draw };
                let reply: Reply<'_, Drawn> = match kind {
                    Kind::Draw => tidegate_store::Buckets::draw(&self.local, &draw),
                    Kind::Spend => tidegate_store::Buckets::spend(&self.local, &draw),
                };
                match reply.await.map_err(LimitError::Store)? {
                    Drawn::Granted(moved) => self.lease(draw, moved.at, moved.readings, Backing::Local),
                    Drawn::Refused(moved) => {
                        self.counters.refused.fetch_add(1, Ordering::Relaxed);
                        return Err(Limited::new(&draw.levels, &moved, &draw.units).into_error());
                    }
                }
            }
        };
        self.counters.degraded.fetch_add(1, Ordering::Relaxed);
        self.listeners.tell(&LimitEvent::Degraded { subject: lease.subject().clone(), lease: lease.id });
        Ok(lease)
    }

    fn lease(
        self: &Arc<Self>,
        draw: Draw,
        at: Stamp,
        readings: Vec<tidegate_store::Reading>,
        backing: Backing,
    ) -> Lease {
        self.counters.granted.fetch_add(1, Ordering::SeqCst);
        let Draw { lease: id, levels, units: held, .. } = draw;
        Lease {
            shared: Arc::clone(self),
            id,
            levels,
            held,
            step: 0,
            at,
            readings,
            backing,
            state: State::Open,
        }
    }

    /// What limits a subject when the store cannot say and never has: the limiter's own defaults.
    pub(super) fn levels_by_default(&self, subject: Subject) -> Levels {
        let resolved = resolve(&subject, [None; 4], &self.defaults);
        Levels::new(Version::ZERO, vec![(subject, resolved)])
    }

    /// The levels with limits given for one call.
    pub(super) fn with_limits(levels: &Arc<Levels>, limits: &[Limit]) -> Result<Arc<Levels>, LimitError> {
        let policy = Policy::new(limits.iter().cloned())?;
        let rules = policy.rules().iter().map(|rule| Rule::clone(rule));
        Ok(Arc::new(levels.with_call_limits(rules)))
    }

    /// Sees whether the store knows newer rules than we do.
    #[inline]
    fn notice(&self, levels: &Levels, moved: &Moved) {
        let newest = moved.readings.iter().map(|reading| reading.meter.version()).max();
        if let Some(newest) = newest
            && newest > levels.version()
            && self.policies.saw(newest)
        {
            self.listeners.tell(&LimitEvent::RulesStale { subject: levels.subject().clone() });
        }
    }
}

/// This process's share of a rule.
fn share_of(rule: &Rule, part: Share) -> Rule {
    let shape = rule.shape();
    let limit = Limit::per(rule.name().as_str(), part.of(shape.amount()), shape.period());
    // A share of a valid rule is one: both numbers are at least one, and the time to refill stays the same.
    limit.burst(part.of(shape.burst())).check().unwrap_or_else(|_| rule.clone())
}

/// The lease of a spend ends as it begins.
pub(super) fn spent(mut lease: Lease) -> LeaseId {
    lease.state = State::Ended {
        how: tidegate_core::limit::lease::Ending::Settled,
        amounts: Units::default(),
        answer: super::lease::Settled::Now,
    };
    lease.id
}
