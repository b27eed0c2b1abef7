//! Options of an acquire beyond subject and cost.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::bucket::AMOUNT_MAX;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::{InvalidCost, Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, OnUnavailable};
use tidegate_core::limit::rule::Limit;
use tidegate_store::StoreError;
use tokio::time::Instant;

use super::Shared;
use super::acquire::{Kind, SubjectRef, close_spent, new_draw};
use super::builder::DEADLINES;
use super::error::LimitError;
use super::events::LimitEvent;
use super::lease::{AdjustStatus, Lease, SettleStatus};
use super::policies::LevelsResult;
use super::waiters::{Head, ReturnWatch, Ticket, TurnError};
use crate::acquire::cooperate;

/// A request for units of a shared limit.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limit, Limiter, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 60)]).build()?;
/// // This caller has its own limit for today's import, instead of the stored one.
/// let mut lease = limiter
///     .request(("acme", "import"), &[("rpm", 1)])
///     .limits([Limit::per_minute("rpm", 600)])
///     .deadline(Duration::from_secs(30))
///     .try_acquire()
///     .await?;
/// lease.settle_full().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a request does nothing until it is acquired or spent"]
pub struct Request<'a> {
    shared: &'a Arc<Shared>,
    subject: SubjectRef<'a>,
    cost: &'a [(&'a str, u64)],
    limits: Vec<Limit>,
    /// Units of limits that may not exist.
    if_limited: &'a [(&'a str, u64)],
    is_recorded: bool,
    deadline: Duration,
    on_expiry: Option<OnExpiry>,
    on_unavailable: Option<OnUnavailable>,
    id: Option<LeaseId>,
}

/// When to retry if the maximum number of callers wait, and none of them for the same subject.
const FULL_FOR: Duration = Duration::from_secs(1);
/// More than any use: the rate of a limit that only counts.
const UNLIMITED: u64 = AMOUNT_MAX;

impl Shared {
    /// Counts a caller as a waiter, unless the maximum is reached.
    pub(super) fn add_waiter(&self, subject: &Subject) -> Result<Ticket<'_>, LimitError> {
        self.waiters.enter(subject).ok_or_else(|| {
            let waiters_max = self.waiters.waiters_max();
            self.listeners.notify(&LimitEvent::QueueFull { waiters_max });
            let head = self.waiters.ahead(subject).and_then(|(_, head)| head);
            let retry_after =
                head.map_or(FULL_FOR, |head| head.ready_at.saturating_duration_since(Instant::now()));
            LimitError::Busy { waiters_max, retry_after: Some(retry_after.max(self.breaker.deadline())) }
        })
    }
}

impl<'a> Request<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, subject: SubjectRef<'a>, cost: &'a [(&'a str, u64)]) -> Self {
        let deadline = shared.lease_deadline;
        Self {
            shared,
            subject,
            cost,
            limits: Vec::new(),
            if_limited: &[],
            is_recorded: false,
            deadline,
            on_expiry: None,
            on_unavailable: None,
            id: None,
        }
    }

    /// Sets limits for this call, which replace the subject's own of the same names. Each has its own bucket
    /// per subject, name and shape. The limits of its ancestors stay.
    pub fn limits(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        self.limits.extend(limits);
        self
    }

    /// Also draws these units, from the limits of these names that exist.
    pub const fn if_limited(mut self, cost: &'a [(&'a str, u64)]) -> Self {
        self.if_limited = cost;
        self
    }

    /// Units of names that nothing limits are granted, and recorded as usage. Without this they are an error.
    ///
    /// ```
    /// use tidegate::{Limit, Limiter, Memory};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 60)]).build()?;
    /// let cost = [("rpm", 1), ("tokens", 500)];
    /// let mut lease = limiter.request(("acme", "gpt-4"), &cost).recorded().try_acquire().await?;
    /// lease.settle([("tokens", 420)]).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub const fn recorded(mut self) -> Self {
        self.is_recorded = true;
        self
    }

    /// How long after the draw the lease expires if it is never ended.
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// What happens when the lease expires, instead of what the policy says.
    pub const fn on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.on_expiry = Some(behaviour);
        self
    }

    /// What happens while the store is unavailable, instead of what the policy says.
    pub const fn on_unavailable(mut self, behaviour: OnUnavailable) -> Self {
        self.on_unavailable = Some(behaviour);
        self
    }

    /// Sets an idempotency key: a retry with the same id returns the same lease and is never charged twice,
    /// while the lease is open and for ten minutes after its end. 127 bits of the number count; it belongs to
    /// this subject, and a caller that can guess it can obtain the lease.
    ///
    /// A caller that abandons a draw retries it: nothing is cancelled in the background, and without a retry
    /// the lease ends by its deadline. A refused draw was not done and can be retried. A request with the id
    /// of a different one is [refused](LimitError::Reused), as far as that can be detected: once the lease
    /// was extended or adjusted, its first amounts are unknown. A draw whose lease has ended fails with
    /// [`StoreError::Ended`](crate::StoreError::Ended).
    ///
    /// An in-memory store remembers fewer ended leases when very many end.
    pub const fn id(mut self, number: u128) -> Self {
        self.id = Some(LeaseId::chosen(number));
        self
    }

    /// Draws without waiting for limits.
    ///
    /// # Errors
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    pub async fn try_acquire(self) -> Result<Lease, LimitError> {
        cooperate().await;
        self.draw(Kind::Draw).await
    }

    /// Draws and settles at once.
    ///
    /// # Errors
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::spend`](super::Limiter::spend).
    pub async fn spend(self) -> Result<(), LimitError> {
        cooperate().await;
        self.draw(Kind::Spend).await.map(close_spent)
    }

    /// Draws and settles at once, and returns the balances of the limits it drew from; empty if the store is
    /// unavailable.
    ///
    /// # Errors
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::spend`](super::Limiter::spend).
    pub async fn spend_with_balances(self) -> Result<Vec<Balance>, LimitError> {
        cooperate().await;
        let lease = self.draw(Kind::SpendWithBalances).await?;
        let balances = lease.balances_at_draw();
        close_spent(lease);
        Ok(balances)
    }

    /// Draws units that were used already: missing units become debt, and no limit refuses. It neither waits
    /// nor queues. Units that the store has not recorded are sent with the settle, as the status says.
    ///
    /// # Errors
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire), without the refusals.
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Cancel safety
    /// Dropping the future returns what it drew, in the background.
    pub async fn overdraw(self) -> Result<(Lease, AdjustStatus), LimitError> {
        let mut lease = self.draw_nothing().await?;
        let change = |(name, units): &(&'a str, u64)| (*name, i64::try_from(*units).unwrap_or(i64::MAX));
        let recorded = lease.adjust(self.cost.iter().map(change).collect::<Vec<_>>()).await?;
        Ok((lease, recorded))
    }

    /// Records units that were used already: [`overdraw`](Self::overdraw), settled at once.
    ///
    /// # Errors
    /// As [`overdraw`](Self::overdraw).
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`](super::Limiter::try_acquire).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the units recorded.
    pub async fn debit(self) -> Result<SettleStatus, LimitError> {
        self.draw_nothing().await?.settle(self.cost).await
    }

    /// Draws, waiting up to `within`.
    ///
    /// # Errors
    /// As [`Limiter::acquire_within`](super::Limiter::acquire_within).
    ///
    /// # Panics
    /// As [`Limiter::acquire_within`](super::Limiter::acquire_within).
    ///
    /// # Cancel safety
    /// As [`Limiter::acquire_within`](super::Limiter::acquire_within).
    pub async fn acquire_within(self, within: Duration) -> Result<Lease, LimitError> {
        cooperate().await;
        let shared = self.shared;
        self.check()?;
        // No waiter is overtaken, and a store in this process is asked again at no cost.
        if shared.is_immediate && shared.waiters.waiting() == 0 {
            match self.resolve_and_draw(Kind::Draw).await {
                Err(LimitError::Limited(_)) => {}
                answer => return answer,
            }
        }
        let deadline = Instant::now().checked_add(within);
        let subject = self.subject.check()?;
        let ticket = shared.add_waiter(&subject)?;
        if ticket.ahead() > 0 {
            if let Some(lease) = self.drawn_before().await? {
                return Ok(lease);
            }
            self.check_possible().await?;
        }
        if let Some(head) = ticket.head()
            && deadline.is_some_and(|deadline| head.ready_at > deadline)
        {
            // The head cannot be served in time, so no waiter behind it can.
            return Err(self.behind_error(&ticket));
        }
        let turn = match ticket.turn(deadline).await {
            Ok(turn) => turn,
            Err(TurnError::Closed) => return Err(LimitError::Closed),
            Err(TurnError::TimedOut) => return Err(self.behind_error(&ticket)),
        };
        let lease = self.draw_in_turn(&ticket, deadline).await;
        drop(turn);
        lease
    }

    /// Draws repeatedly, until granted or until the deadline is known to be too early.
    async fn draw_in_turn(
        &self,
        ticket: &Ticket<'_>,
        deadline: Option<Instant>,
    ) -> Result<Lease, LimitError> {
        let mut watch: Option<ReturnWatch<'_>> = None;
        loop {
            self.shared.check_open()?;
            let returns = self.shared.waiters.returns();
            let limited = match self.resolve_and_draw(Kind::Draw).await {
                Err(LimitError::Limited(limited)) => limited,
                answer => return answer,
            };
            let primary =
                limited.primary().map(|line| (line.balance.subject.clone(), line.balance.retry_after));
            let Some((short_subject, Some(retry_after))) = primary else {
                return Err(LimitError::Limited(limited));
            };
            // A wait is never zero: the store's clock has microseconds.
            let ready_at = Instant::now() + retry_after.max(Duration::from_micros(1));
            if deadline.is_some_and(|deadline| ready_at > deadline) {
                return Err(LimitError::Limited(limited));
            }
            ticket.publish(Head { ready_at });
            // Kept while the same buckets are short: it has recorded returns during the draw.
            watch.take_if(|watch| !watch.watches(&short_subject));
            let was_watching = watch.is_some();
            let watched = watch.get_or_insert_with(|| self.shared.waiters.watch(&short_subject));
            // Read after subscribing: later returns wake this caller, and earlier ones change the count.
            if was_watching || self.shared.waiters.returns() == returns {
                // Policy changes by other processes are noticed within the cache TTL.
                let noticed_at = Instant::now() + self.shared.policies.ttl().max(Duration::from_secs(1));
                watched.wait(ready_at.min(noticed_at)).await;
            }
        }
    }

    #[inline]
    fn check(&self) -> Result<(), LimitError> {
        self.shared.check_open()?;
        let (min, max) = DEADLINES;
        if self.deadline < min || self.deadline > max {
            return Err(LimitError::Deadline { deadline: self.deadline });
        }
        Ok(())
    }

    /// Draws unless other callers wait.
    async fn draw(&self, kind: Kind) -> Result<Lease, LimitError> {
        self.check()?;
        if self.shared.waiters.waiting() > 0
            && let Some((ahead, head)) = self.shared.waiters.ahead(&self.subject.check()?)
        {
            match kind {
                Kind::Draw => {
                    if let Some(lease) = self.drawn_before().await? {
                        return Ok(lease);
                    }
                }
                // A repeated spend needs no units: the store returns the first result despite the waiters.
                Kind::Spend | Kind::SpendWithBalances if self.is_known_id().await? => {
                    return self.resolve_and_draw(kind).await;
                }
                Kind::Spend | Kind::SpendWithBalances => {}
            }
            let retry_after = head.map(|head| head.ready_at.saturating_duration_since(Instant::now()));
            return Err(LimitError::Waiting { subject: self.subject.check()?, ahead, retry_after });
        }
        match self.draw_fast(kind) {
            Some(answer) => answer,
            None => self.resolve_and_draw(kind).await,
        }
    }

    /// Draws if that needs no waiting: the levels are cached, and the store replies immediately.
    #[inline]
    pub(super) fn draw_fast(&self, kind: Kind) -> Option<Result<Lease, LimitError>> {
        let is_plain = self.limits.is_empty() && self.if_limited.is_empty() && !self.is_recorded;
        if !self.shared.is_immediate || !is_plain || self.id.is_some() || self.on_expiry.is_some() {
            return None;
        }
        let levels = self.shared.levels_now(self.subject)?;
        if levels.disabled().is_some() {
            return Some(Err(refuse_disabled(&levels).err()?));
        }
        if levels.is_empty() {
            return Some(Err(LimitError::NoLimits { subject: levels.subject().clone() }));
        }
        match levels.units(self.cost) {
            Ok(units) => self.shared.draw_now(levels, units, self.deadline, kind),
            Err(invalid) => Some(Err(invalid.into())),
        }
    }

    /// Resolves the subject's levels, from the cache or the store, and draws.
    async fn resolve_and_draw(&self, kind: Kind) -> Result<Lease, LimitError> {
        let _call = self.shared.count_call();
        let (levels, unavailable) = self.levels().await?;
        refuse_disabled(&levels)?;
        let units = self.units(&levels)?;
        self.draw_units(kind, levels, units, unavailable).await
    }

    /// Opens a lease that holds nothing, for a valid cost.
    async fn draw_nothing(&self) -> Result<Lease, LimitError> {
        self.check()?;
        let _call = self.shared.count_call();
        let (levels, unavailable) = self.levels().await?;
        self.units(&levels)?;
        let nothing = levels.amounts(&[])?;
        self.draw_units(Kind::Draw, levels, nothing, unavailable).await
    }

    async fn draw_units(
        &self,
        kind: Kind,
        levels: Arc<Levels>,
        units: Units,
        unavailable: Option<StoreError>,
    ) -> Result<Lease, LimitError> {
        if let Some(id) = self.id {
            return self
                .shared
                .draw_idempotent(new_draw(id, levels, units, self.deadline), kind, unavailable)
                .await;
        }
        match unavailable {
            Some(error) => {
                let draw = new_draw(Shared::new_id(), levels, units, self.deadline);
                self.shared.without_store(draw, kind, error).await
            }
            None => self.shared.draw(levels, units, self.deadline, kind).await,
        }
    }

    /// Whether the store knows the caller-chosen id.
    async fn is_known_id(&self) -> Result<bool, LimitError> {
        let Some(id) = self.id else { return Ok(false) };
        match self.shared.standing(id).await {
            Ok(_) => Ok(true),
            Err(LimitError::Store(StoreError::NoLease { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The lease drawn before with the caller-chosen id, if any: its holder does not queue for it.
    async fn drawn_before(&self) -> Result<Option<Lease>, LimitError> {
        let Some(id) = self.id else { return Ok(None) };
        let (levels, _) = self.levels().await?;
        let units = self.units(&levels)?;
        self.shared.drawn_before(&new_draw(id, levels, units, self.deadline)).await
    }

    /// The subject's levels with the limits of this call, and the store's error if it is unavailable.
    pub(super) async fn levels(&self) -> Result<LevelsResult, LimitError> {
        let (levels, unavailable) = match self.shared.levels(self.subject).await {
            // This subject's levels were never read: the limiter's defaults decide.
            Err(LimitError::Unavailable { source, retry_after }) => {
                let levels = self.shared.levels_by_default(self.subject.check()?);
                let behaviour = self.on_unavailable.unwrap_or(levels.on_unavailable().0);
                if behaviour == OnUnavailable::Block || levels.is_empty() {
                    return Err(LimitError::Unavailable { source, retry_after });
                }
                (Arc::new(levels), Some(source))
            }
            known => known?,
        };
        let mut limits = self.limits.clone();
        if self.is_recorded {
            let is_known = |name: &str| {
                levels.position(name).is_ok() || self.limits.iter().any(|limit| limit.name() == name)
            };
            let unknown = self.cost.iter().filter(|(name, _)| !is_known(name));
            limits.extend(unknown.map(|(name, _)| Limit::per_second(*name, UNLIMITED)));
        }
        let levels =
            if limits.is_empty() { levels } else { self.shared.call_levels.extended(&levels, &limits)? };
        let levels = match self.on_expiry {
            Some(behaviour) if behaviour != levels.on_expiry().0 => {
                Arc::new(Levels::clone(&levels).with_on_expiry(behaviour))
            }
            _ => levels,
        };
        let levels = match self.on_unavailable {
            Some(behaviour) if behaviour != levels.on_unavailable().0 => {
                Arc::new(Levels::clone(&levels).with_on_unavailable(behaviour))
            }
            _ => levels,
        };
        if levels.is_empty() {
            return Err(LimitError::NoLimits { subject: self.subject.check()? });
        }
        Ok((levels, unavailable))
    }

    /// The units of the cost, with those of limits that exist.
    fn units(&self, levels: &Levels) -> Result<Units, InvalidCost> {
        if self.if_limited.is_empty() {
            return levels.units(self.cost);
        }
        let known = self.if_limited.iter().filter(|(name, _)| levels.position(name).is_ok());
        levels.units(&self.cost.iter().chain(known).copied().collect::<Vec<_>>())
    }

    /// Refuses what is invalid or can never be granted, before any other error.
    async fn check_possible(&self) -> Result<(), LimitError> {
        let (levels, _) = self.levels().await?;
        refuse_disabled(&levels)?;
        let units = self.units(&levels)?;
        Shared::never_granted(&levels, &units).map_or(Ok(()), |never| Err(never.into_error()))
    }

    /// The error for a deadline that the waiters ahead make impossible to meet.
    fn behind_error(&self, ticket: &Ticket<'_>) -> LimitError {
        let retry_after = ticket.head().map(|head| head.ready_at.saturating_duration_since(Instant::now()));
        match self.subject.check() {
            Ok(subject) => LimitError::Waiting { subject, ahead: ticket.ahead(), retry_after },
            Err(name) => LimitError::Name(name),
        }
    }

    pub(super) const fn cost(&self) -> &[(&'a str, u64)] {
        self.cost
    }

    pub(super) fn shared(&self) -> &Shared {
        self.shared
    }
}

/// Refuses to draw for a disabled entity. Units that were used already can still be reported.
pub(super) fn refuse_disabled(levels: &Levels) -> Result<(), LimitError> {
    match levels.disabled() {
        None => Ok(()),
        Some(entity) => {
            Err(LimitError::Disabled { subject: levels.subject().clone(), entity: entity.clone() })
        }
    }
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("subject", &self.subject)
            .field("cost", &self.cost)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
