//! An acquire with more to say than who and how much.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::OnUnavailable;
use tidegate_core::limit::rule::Limit;
use tidegate_store::StoreError;
use tokio::time::Instant;

use super::Shared;
use super::acquire::{Kind, SubjectRef, new_draw, spent};
use super::builder::DEADLINES;
use super::error::LimitError;
use super::events::LimitEvent;
use super::lease::Lease;
use super::policies::Known;
use super::turns::{Head, NoTurn, Ticket, Watch};

/// A request for units of a shared limit.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limit, Limiter, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 60)]).build()?;
/// // This caller has a limit of its own for today's import, in the place of the stored one.
/// let mut lease = limiter
///     .request(("acme", "import"), &[("rpm", 1)])
///     .limits([Limit::per_minute("rpm", 600)])
///     .deadline(Duration::from_secs(30))
///     .acquire()
///     .await?;
/// lease.settle_as_held().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a request does nothing until it is acquired or spent"]
pub struct Request<'a> {
    shared: &'a Arc<Shared>,
    subject: SubjectRef<'a>,
    cost: &'a [(&'a str, u64)],
    limits: Vec<Limit>,
    deadline: Duration,
    id: Option<LeaseId>,
}

impl<'a> Request<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, subject: SubjectRef<'a>, cost: &'a [(&'a str, u64)]) -> Self {
        let deadline = shared.lease_deadline;
        Self { shared, subject, cost, limits: Vec::new(), deadline, id: None }
    }

    /// Limits for this call, in the place of the subject's own of the same names. Each has a bucket of its own per
    /// subject, name and shape. Those above the subject keep theirs.
    pub fn limits(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        self.limits.extend(limits);
        self
    }

    /// How long after the draw the lease expires by itself, if it is never ended.
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// An id chosen for this request, so that the same again with it is answered with the same lease, and is never charged
    /// twice: while the lease is open, and for ten minutes after its end. 127 bits of the number count; it stands for this
    /// subject, and whoever can guess it can have the lease.
    ///
    /// Whoever gives up while it is drawing asks again: nothing is cancelled in the background, and if nobody asks, the lease
    /// ends by its deadline. What was refused was not done, and can be asked again. A request with the id of another one is
    /// [refused](LimitError::Reused), as far as it can be told: once the lease went on, its first amounts are not known any
    /// more. A draw whose lease has ended is answered with [`StoreError::Ended`](crate::StoreError::Ended).
    ///
    /// A store in memory remembers fewer ended leases when very many end.
    pub const fn id(mut self, number: u128) -> Self {
        self.id = Some(LeaseId::chosen(number));
        self
    }

    /// Draws at once, or says why not.
    ///
    /// # Errors
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Panics
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    pub async fn acquire(self) -> Result<Lease, LimitError> {
        self.draw(Kind::Draw).await
    }

    /// Draws and settles at once.
    ///
    /// # Errors
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Panics
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::spend`](super::Limiter::spend).
    pub async fn spend(self) -> Result<(), LimitError> {
        self.draw(Kind::Spend).await.map(spent)
    }

    /// Draws and settles at once, and tells what is left of the limits it drew from; nothing where the store is away.
    ///
    /// # Errors
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Panics
    /// As [`Limiter::acquire`](super::Limiter::acquire).
    ///
    /// # Cancel safety
    /// As [`Limiter::spend`](super::Limiter::spend).
    pub async fn spend_and_tell(self) -> Result<Vec<Balance>, LimitError> {
        let lease = self.draw(Kind::Tell).await?;
        let balances = lease.balances_told();
        spent(lease);
        Ok(balances)
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
        let shared = self.shared;
        self.check()?;
        let deadline = Instant::now().checked_add(within);
        let subject = self.subject.check()?;
        let Some(ticket) = shared.turns.enter(&subject) else {
            let waiters_max = shared.turns.waiters_max();
            shared.listeners.tell(&LimitEvent::QueueFull { waiters_max });
            return Err(LimitError::Busy { waiters_max, retry_after: None });
        };
        if ticket.ahead() > 0 {
            if let Some(lease) = self.drawn_before().await? {
                return Ok(lease);
            }
            self.check_possible().await?;
        }
        if let Some(head) = ticket.head()
            && deadline.is_some_and(|deadline| head.ready_at > deadline)
        {
            // The first of the line cannot be served in time, so nobody behind it can.
            return Err(self.behind(&ticket));
        }
        let turn = match ticket.turn(deadline).await {
            Ok(turn) => turn,
            Err(NoTurn::Closed) => return Err(LimitError::Closed),
            Err(NoTurn::TimedOut) => return Err(self.behind(&ticket)),
        };
        let lease = self.draw_in_turn(&ticket, deadline).await;
        drop(turn);
        lease
    }

    /// Draws again and again, until it is granted or the time will not do.
    async fn draw_in_turn(
        &self,
        ticket: &Ticket<'_>,
        deadline: Option<Instant>,
    ) -> Result<Lease, LimitError> {
        let mut watch: Option<Watch<'_>> = None;
        loop {
            self.shared.check_open()?;
            let returns = self.shared.turns.returns();
            let limited = match self.resolve_and_draw(Kind::Draw).await {
                Err(LimitError::Limited(limited)) => limited,
                answer => return answer,
            };
            let primary =
                limited.primary().map(|line| (line.balance.subject.clone(), line.balance.retry_after));
            let Some((stuck_at, Some(retry_after))) = primary else {
                return Err(LimitError::Limited(limited));
            };
            // A wait is never zero: the store's clock has microseconds.
            let ready_at = Instant::now() + retry_after.max(Duration::from_micros(1));
            if deadline.is_some_and(|deadline| ready_at > deadline) {
                return Err(LimitError::Limited(limited));
            }
            ticket.tell(Head { ready_at });
            // Kept while it is stuck at the same: it has heard of what returned while it asked.
            watch.take_if(|watch| !watch.is_of(&stuck_at));
            let was_watching = watch.is_some();
            let watched = watch.get_or_insert_with(|| self.shared.turns.watch(&stuck_at));
            // Asked after the line above: what returns from now on wakes us, and what returned before is asked for.
            if was_watching || self.shared.turns.returns() == returns {
                // Others' changes of policies are noticed within the time that they are remembered for.
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

    /// Draws unless others are waiting.
    async fn draw(&self, kind: Kind) -> Result<Lease, LimitError> {
        self.check()?;
        if self.shared.turns.waiting() > 0
            && let Some((ahead, head)) = self.shared.turns.ahead(&self.subject.check()?)
        {
            match kind {
                Kind::Draw => {
                    if let Some(lease) = self.drawn_before().await? {
                        return Ok(lease);
                    }
                }
                // What was spent is not asked for anew: the store tells so, whoever waits.
                Kind::Spend | Kind::Tell if self.is_known().await? => {
                    return self.resolve_and_draw(kind).await;
                }
                Kind::Spend | Kind::Tell => {}
            }
            let retry_after = head.map(|head| head.ready_at.saturating_duration_since(Instant::now()));
            return Err(LimitError::Waiting { subject: self.subject.check()?, ahead, retry_after });
        }
        match self.draw_at_once(kind) {
            Some(answer) => answer,
            None => self.resolve_and_draw(kind).await,
        }
    }

    /// Draws if nothing has to be waited for: what limits the subject is known, and the store answers at once.
    #[inline]
    pub(super) fn draw_at_once(&self, kind: Kind) -> Option<Result<Lease, LimitError>> {
        if !self.shared.is_immediate || !self.limits.is_empty() || self.id.is_some() {
            return None;
        }
        let levels = self.shared.levels_now(self.subject)?;
        if levels.is_empty() {
            return Some(Err(LimitError::NoLimits { subject: levels.subject().clone() }));
        }
        match levels.units(self.cost) {
            Ok(units) => self.shared.draw_now(levels, units, self.deadline, kind),
            Err(invalid) => Some(Err(invalid.into())),
        }
    }

    /// Reads what limits the subject, from the cache or from the store, and draws.
    async fn resolve_and_draw(&self, kind: Kind) -> Result<Lease, LimitError> {
        let _asking = self.shared.asking();
        let (levels, away) = self.levels().await?;
        let units = levels.units(self.cost)?;
        if let Some(id) = self.id {
            return self.shared.draw_chosen(new_draw(id, levels, units, self.deadline), kind, away).await;
        }
        match away {
            Some(error) => {
                let draw = new_draw(Shared::new_id(), levels, units, self.deadline);
                self.shared.without_store(draw, kind, error).await
            }
            None => self.shared.draw(levels, units, self.deadline, kind).await,
        }
    }

    /// Whether the store has heard of the chosen id.
    async fn is_known(&self) -> Result<bool, LimitError> {
        let Some(id) = self.id else { return Ok(false) };
        match self.shared.standing(id).await {
            Ok(_) => Ok(true),
            Err(LimitError::Store(StoreError::NoLease { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The lease that was drawn before with the chosen id, if there is one: its holder does not stand in line for it.
    async fn drawn_before(&self) -> Result<Option<Lease>, LimitError> {
        let Some(id) = self.id else { return Ok(None) };
        let (levels, _) = self.levels().await?;
        let units = levels.units(self.cost)?;
        self.shared.drawn_before(&new_draw(id, levels, units, self.deadline)).await
    }

    /// What limits the subject, with the limits of this call, and what is wrong with the store if it is away.
    pub(super) async fn levels(&self) -> Result<Known, LimitError> {
        let (levels, away) = match self.shared.levels(self.subject).await {
            // It has never been known what limits this subject: the limiter's own defaults say what to do.
            Err(LimitError::Unavailable { source, retry_after }) => {
                let levels = self.shared.levels_by_default(self.subject.check()?);
                if levels.on_unavailable().0 == OnUnavailable::Block || levels.is_empty() {
                    return Err(LimitError::Unavailable { source, retry_after });
                }
                (Arc::new(levels), Some(source))
            }
            known => known?,
        };
        let levels =
            if self.limits.is_empty() { levels } else { Shared::with_limits(&levels, &self.limits)? };
        if levels.is_empty() {
            return Err(LimitError::NoLimits { subject: self.subject.check()? });
        }
        Ok((levels, away))
    }

    /// Refuses what could never be had, or asked, before anything else is said.
    async fn check_possible(&self) -> Result<(), LimitError> {
        let (levels, _) = self.levels().await?;
        let units = levels.units(self.cost)?;
        Shared::never(&levels, &units).map_or(Ok(()), |never| Err(never.into_error()))
    }

    /// The time will not do, because of those ahead.
    fn behind(&self, ticket: &Ticket<'_>) -> LimitError {
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

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("subject", &self.subject)
            .field("cost", &self.cost)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
