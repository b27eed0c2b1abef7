//! The draw path of the limiter: subjects, draws, and mapping the store's response to a lease or an error.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::{InvalidName, Subject};
use tidegate_core::limit::policy::{OnUnavailable, Share, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Cancel, Draw, DrawResult, Lookup, Movement, Readings, Reply, Settle, StoreError, Terms,
};

use super::breaker::CallFailure;
use super::error::{LimitError, Limited};
use super::events::LimitEvent;
use super::lease::{Backing, Lease, SettleStatus, State};
use super::request::Request;
use super::settler::End;
use super::{Limiter, Shared};

/// Retries of a draw with a fresh id, if the store considers the previous one too old.
const IDS_MAX: usize = 8;

/// The subject of a request, borrowed: a pair of names, or a [`Subject`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SubjectRef<'a> {
    /// The entity that draws.
    pub entity: &'a str,
    /// The resource it draws.
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
    /// Draws `cost` from every limit of the subject, and of its ancestors where limits cascade: all or
    /// nothing, without waiting. The lease is recorded before this returns.
    ///
    /// It consumes one unit of tokio's [cooperative budget](tokio::task::coop), as [`acquire_within`](Self::acquire_within)
    /// and [`spend`](Self::spend) do: with none left, it yields to the runtime first, so a loop of draws that an in-memory
    /// store grants at once does not starve other tasks.
    ///
    /// # Errors
    /// [`LimitError::Limited`] with every limit's balance, the short ones and when to retry;
    /// [`LimitError::TooLarge`] if no waiting would help; [`LimitError::Waiting`] while other callers of this
    /// process wait for the same subject; [`LimitError::NoLimits`], [`LimitError::Cost`] and
    /// [`LimitError::Name`] for invalid requests; [`LimitError::Unavailable`] if the store is unavailable,
    /// [`LimitError::Busy`] if too many calls of this process wait for it, and [`LimitError::Store`] if it
    /// refuses or was closed.
    ///
    /// # Panics
    /// If the store is outside this process, within a tokio runtime whose timer is not enabled. Outside a
    /// runtime it works, if the store needs none.
    ///
    /// # Cancel safety
    /// Dropping the future takes nothing: a draw in flight is cancelled in the background.
    pub async fn try_acquire<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Lease, LimitError> {
        self.request(subject.into(), cost.as_ref()).try_acquire().await
    }

    /// [`try_acquire`](Self::try_acquire), waiting up to `within` for short limits. Waiters of a subject are served
    /// in FIFO order; only the head calls the store. It fails as soon as the timeout is known to be too
    /// short.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire), and [`LimitError::Busy`] when the maximum number of waiters is reached.
    ///
    /// # Panics
    /// As [`try_acquire`](Self::try_acquire), and if it has to wait outside a tokio runtime with its timer enabled:
    /// there, use [`blocking`](Self::blocking).
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue and takes nothing. You lose your place.
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
    /// As [`try_acquire`](Self::try_acquire).
    ///
    /// # Panics
    /// As [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the units spent.
    pub async fn spend<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<(), LimitError> {
        self.request(subject.into(), cost.as_ref()).spend().await
    }

    /// Builds an acquire with further options, such as its own limits or deadline.
    pub fn request<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: &'a [(&'a str, u64)],
    ) -> Request<'a> {
        Request::new(&self.shared, subject.into(), cost)
    }
}

/// A draw that may be in flight. If it is dropped before the store has responded, it is cancelled in the
/// background.
struct Pending<'a> {
    shared: &'a Arc<Shared>,
    draw: &'a Draw,
    has_response: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if !self.has_response {
            let levels = Arc::clone(&self.draw.levels);
            let cancel = Cancel { lease: self.draw.lease, step: 1, levels, is_watched: false };
            self.shared.settle_later(End::Cancel(cancel));
        }
    }
}

/// Counts a caller that is calling the store.
pub(super) struct CallGuard<'a> {
    shared: &'a Shared,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.shared.calls_in_flight.fetch_sub(1, Ordering::SeqCst);
        if self.shared.is_closed.load(Ordering::SeqCst) {
            self.shared.lease_ended.notify_waiters();
        }
    }
}

/// The kind of a draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Keeps a lease.
    Draw,
    /// Settles at once.
    Spend,
    /// Settles at once, and returns the balances.
    SpendWithBalances,
}

impl Shared {
    /// Draws without waiting for limits. If the store is unavailable, the policy decides.
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
        let mut answer = self.call_draw(&draw, kind).await;
        for _ in 0..IDS_MAX {
            if !matches!(&answer, Err(failed) if matches!(failed.error, StoreError::Ended { .. })) {
                break;
            }
            // The id is fresh but looks too old: the store may have forgotten an ended lease with it.
            draw.lease = Self::new_id();
            answer = self.call_draw(&draw, kind).await;
        }
        match answer {
            Ok(drawn) => self.finish_draw(draw, drawn, kind),
            Err(failed) if failed.error.is_unavailable() => {
                self.without_store(draw, kind, failed.error).await
            }
            Err(failed) => Err(self.failure(failed.error)),
        }
    }

    /// Calls a store that may be unavailable. If the call is abandoned, by a timeout or by the caller, the
    /// draw is cancelled in the background.
    async fn call_draw(self: &Arc<Self>, draw: &Draw, kind: Kind) -> Result<DrawResult, CallFailure> {
        let mut pending = Pending { shared: self, draw, has_response: false };
        let answer = match kind {
            Kind::Draw => self.breaker.call(self.store.draw(draw)).await,
            Kind::Spend | Kind::SpendWithBalances => match self.breaker.call(self.store.spend(draw)).await {
                // A spend cannot be cancelled once done; the store answers a repeat with the first result.
                Err(CallFailure { error: StoreError::Unavailable { .. }, may_be_done: true }) => {
                    self.breaker.call(self.store.spend(draw)).await
                }
                answer => answer,
            },
        };
        pending.has_response = answer.as_ref().err().is_none_or(|failed| !failed.may_be_done);
        answer
    }

    /// Draws from a store that replies immediately: no future is created or moved.
    #[inline]
    pub(super) fn draw_now(
        self: &Arc<Self>,
        levels: Arc<Levels>,
        units: Units,
        deadline: Duration,
        kind: Kind,
    ) -> Option<Result<Lease, LimitError>> {
        // The lease's holder can read balances from such a store at any time.
        let is_watched = kind == Kind::SpendWithBalances;
        let mut draw = Draw { is_watched, ..new_draw(self.new_id_at(), levels, units, deadline) };
        let call = |draw: &Draw| match kind {
            Kind::Draw => self.store.draw(draw).now(),
            Kind::Spend | Kind::SpendWithBalances => self.store.spend(draw).now(),
        };
        let mut answer = call(&draw)?;
        for _ in 0..IDS_MAX {
            if !matches!(answer, Err(StoreError::Ended { .. })) {
                break;
            }
            // The id is fresh but looks too old for the store: retry with the store's clock.
            let seen = self.store.balances(&Lookup::Subjects(Vec::new())).now()?;
            self.store_time_ms
                .fetch_max(seen.map_or(0, |seen| seen.at.as_micros() / 1_000), Ordering::Relaxed);
            draw.lease = self.new_id_at();
            answer = call(&draw)?;
        }
        Some(answer.map_err(LimitError::Store).and_then(|drawn| self.finish_draw(draw, drawn, kind)))
    }

    /// Maps the store's response to the caller's result.
    pub(super) fn finish_draw(
        self: &Arc<Self>,
        draw: Draw,
        drawn: DrawResult,
        kind: Kind,
    ) -> Result<Lease, LimitError> {
        match drawn {
            DrawResult::Granted(moved) => {
                self.note_version(&draw.levels, &moved);
                self.store_time_ms.store(moved.at.as_micros() / 1_000, Ordering::Relaxed);
                self.lease(draw, moved.at, moved.readings, (Backing::Store, kind))
            }
            DrawResult::Refused(moved) => {
                self.note_version(&draw.levels, &moved);
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                Err(Limited::new(&draw.levels, &moved, &draw.units).into_error())
            }
        }
    }

    /// Handles a draw while the store is unavailable, according to the policy.
    pub(super) async fn without_store(
        self: &Arc<Self>,
        draw: Draw,
        kind: Kind,
        error: StoreError,
    ) -> Result<Lease, LimitError> {
        let lease = match draw.levels.on_unavailable().0 {
            OnUnavailable::Block => return Err(self.failure(error)),
            OnUnavailable::Allow => {
                self.lease(draw, Stamp::ZERO, Readings::new(), (Backing::Unbacked, kind))?
            }
            OnUnavailable::LocalShare(share) => {
                let levels = Arc::new(draw.levels.map_rules(|rule| share_of(rule, share)));
                // The store may have received the id. An idempotency key must find the same lease again, so
                // it is kept.
                let lease = if draw.lease.is_chosen() { draw.lease } else { Self::new_id() };
                let draw = Draw { lease, levels, ..draw };
                let reply: Reply<'_, DrawResult> = match kind {
                    Kind::Draw => tidegate_store::Buckets::draw(&self.local, &draw),
                    Kind::Spend | Kind::SpendWithBalances => {
                        tidegate_store::Buckets::spend(&self.local, &draw)
                    }
                };
                match reply.await.map_err(LimitError::Store)? {
                    DrawResult::Granted(moved) => {
                        self.lease(draw, moved.at, moved.readings, (Backing::Local, kind))?
                    }
                    DrawResult::Refused(moved) => {
                        self.counters.refused.fetch_add(1, Ordering::Relaxed);
                        let limited = Limited::new(&draw.levels, &moved, &draw.units);
                        // The amount may be available again when the store is: it exceeds only this process's
                        // share.
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
        self.listeners.notify(&LimitEvent::Degraded { subject: lease.subject().clone(), lease: lease.id() });
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
        let lease = Lease { shared, now, at, readings, backing, state, time_left: None };
        // Counted before the check: either this sees the close, or the drain sees the lease.
        if kind == Kind::Draw && self.is_closed.load(Ordering::SeqCst) {
            if lease.id().is_chosen() {
                // The holder of an idempotency key will retry, perhaps in another process.
                lease.detach();
            }
            return Err(LimitError::Closed);
        }
        Ok(lease)
    }

    /// Counts a call to the store until the guard is dropped: a drain waits for it.
    pub(super) fn count_call(&self) -> CallGuard<'_> {
        self.calls_in_flight.fetch_add(1, Ordering::SeqCst);
        CallGuard { shared: self }
    }

    /// The limits of a subject that were never read, while the store is unavailable: the limiter's defaults.
    pub(super) fn levels_by_default(&self, subject: Subject) -> Levels {
        let resolved = resolve(&subject, [None; 4], &self.defaults);
        Levels::new(Version::ZERO, vec![(subject, resolved)])
    }

    /// Records whether the store has newer rules than the cache.
    #[inline]
    fn note_version(&self, levels: &Levels, moved: &Movement) {
        let newest = moved.readings.iter().map(tidegate_store::Reading::version).max();
        if let Some(newest) = newest
            && newest > levels.version()
            && self.policies.record_seen(newest)
        {
            self.listeners.notify(&LimitEvent::RulesStale { subject: levels.subject().clone() });
        }
    }
}

/// A draw whose response includes readings.
pub(super) fn new_draw(lease: LeaseId, levels: Arc<Levels>, units: Units, deadline: Duration) -> Draw {
    let terms = Terms { deadline, on_expiry: levels.on_expiry().0 };
    Draw { lease, levels, units, terms, is_watched: true }
}

/// This process's share of a rule.
fn share_of(rule: &Rule, part: Share) -> Rule {
    // A share of a valid rule is valid: both numbers are at least one, and the refill time stays the same.
    let shared = rule.map_units(|units| part.of(units)).unwrap_or_else(|_| rule.clone());
    // A limit given with a call keeps its own bucket.
    if rule.is_of_call() { shared.of_call() } else { shared }
}

/// Ends the lease of a spend, which the store has settled with the draw.
pub(super) fn close_spent(mut lease: Lease) {
    lease.close(Ending::Settled, SettleStatus::Now);
}
