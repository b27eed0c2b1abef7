//! The acquire path: store gate, throttle queue, draw; repeated while a limit is short.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::cost::Cost;
use tidegate_core::limit::name::InvalidName;
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant as LocalInstant;
use tidegate_core::verdict::Verdict;
use tokio::time::Instant;

use super::costs::CostUnits;
use super::pending_charge::PendingCharge;
use super::queues::{PlaceStatus, QueueKey, WaitersAhead};
use super::waiter::{GateWaiter, WakeReason};
use super::{Joined, JoinedError, JoinedPermit};
use crate::acquire_future::AcquireFuture;
use crate::limiter::waiters::Head;
use crate::limiter::{Lease, LimitError, Limited, ResolvedRequest, SubjectRef};
use crate::state::Entry;

/// The state left by a fast path that could not complete.
#[derive(Default)]
pub(super) struct PartialAcquire<'a> {
    /// The throttle's charge, if it admitted the request.
    pending: Option<PendingCharge<'a>>,
    /// The limiter's refusal, if a limit is short.
    limited: Option<Box<Limited>>,
}

impl Joined {
    /// The units a request draws from each limit. Computed once and before anything is charged: the map is user code.
    #[inline]
    pub(super) fn units(&self, cost: Cost) -> CostUnits {
        self.costs.of(cost)
    }

    /// Fast path: completes a request that does not have to wait.
    #[inline]
    pub(super) fn acquire_fast<'a>(
        &'a self,
        subject: SubjectRef<'_>,
        cost: Cost,
        units: &CostUnits,
    ) -> Result<Result<JoinedPermit<'a>, JoinedError>, PartialAcquire<'a>> {
        if !self.limiter.is_immediate() || self.has_waiters(subject) {
            return Err(PartialAcquire::default());
        }
        let inner = &self.throttle.inner;
        let reading = inner.reading();
        let charge = match inner.enter_plain(cost, reading) {
            Some(charge) => charge,
            None => match inner.enter(cost, reading) {
                Entry::Admitted(charge) => charge,
                Entry::Refused(refused) => return Ok(Err(refused.into())),
                Entry::Wait(_) => return Err(PartialAcquire::default()),
            },
        };
        let pending = PendingCharge::new(inner, charge);
        match self.limiter.draw_fast(subject, &units.by_name()) {
            Some(Ok(lease)) => Ok(Ok(self.permit(pending, lease))),
            None => Err(PartialAcquire { pending: Some(pending), limited: None }),
            Some(Err(LimitError::Limited(limited))) => {
                Err(PartialAcquire { pending: Some(pending), limited: Some(limited) })
            }
            Some(Err(error)) => Ok(Err(error.into())),
        }
    }

    /// Whether callers of the same subject wait at the gate. An invalid name is reported later.
    #[inline]
    fn has_waiters(&self, subject: SubjectRef<'_>) -> bool {
        let queues = self.limiter.queues();
        !queues.are_empty() && self.key(subject).is_ok_and(|key| queues.ahead(&key).is_some())
    }

    fn key(&self, subject: SubjectRef<'_>) -> Result<QueueKey, InvalidName> {
        let throttle = Arc::as_ptr(&self.throttle.inner).addr();
        Ok(QueueKey { throttle, subject: subject.check()? })
    }

    #[inline]
    fn permit<'a>(&'a self, pending: PendingCharge<'a>, lease: Lease) -> JoinedPermit<'a> {
        JoinedPermit::new(pending.into_permit(), lease, self.costs.clone())
    }
}

/// An acquire on the slow path.
pub(super) struct SlowAcquire<'a> {
    joined: &'a Joined,
    subject: SubjectRef<'a>,
    cost: Cost,
    units: CostUnits,
    deadline: Option<Deadline>,
    /// Arrival number among callers of its subject.
    number: u64,
    /// Arrival number in the throttle's queue.
    arrival: Option<u64>,
    /// Its place at the store gate, from the first refusal on, or from when it found waiters there.
    waiter: Option<GateWaiter<'a>>,
}

/// The same moment on the throttle's clock and on the limiter's.
#[derive(Clone, Copy)]
struct Deadline {
    local: LocalInstant,
    shared: Option<Instant>,
}

/// The result of a draw.
enum DrawResult {
    Granted(Lease),
    /// Refused for now, with the count of returns before the draw.
    Refused(Box<Limited>, u64),
}

impl<'a> SlowAcquire<'a> {
    pub(super) fn new(
        joined: &'a Joined,
        subject: SubjectRef<'a>,
        cost: Cost,
        within: Option<Duration>,
        units: CostUnits,
    ) -> Self {
        let deadline = within.map(|span| Deadline {
            local: joined.throttle.inner.clock().now() + span,
            shared: Instant::now().checked_add(span),
        });
        let number = joined.limiter.queues().number();
        Self { joined, subject, cost, units, deadline, number, arrival: None, waiter: None }
    }

    /// Waits for both halves.
    pub(super) async fn acquire(
        mut self,
        partial: PartialAcquire<'a>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        if let Some(pending) = partial.pending {
            self.arrival = Some(self.joined.throttle.inner.lock().arrived());
            // The fast path did not count returns. Draw once more, now counting those that happen during the draw.
            let resolved = self.resolve().await?;
            if let Some(permit) = self.draw_and_confirm(pending, resolved).await? {
                return Ok(permit);
            }
        }
        loop {
            let mut resolved = self.resolve().await?;
            if self.pass_gate().await? {
                resolved = self.resolve().await?;
            }
            let (pending, has_waited) = self.enter().await?;
            if has_waited {
                resolved.recheck_store();
            }
            if self.waiter.is_none() && self.ahead()?.is_some() {
                // Waiters have queued at the gate since it passed.
                self.take_place(None)?;
                if !self.is_released() {
                    continue;
                }
            }
            if let Some(permit) = self.draw_and_confirm(pending, resolved).await? {
                return Ok(permit);
            }
        }
    }

    /// Acquires without waiting for a gate or a limit.
    pub(super) async fn try_acquire(
        self,
        partial: PartialAcquire<'a>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        if let Some(limited) = partial.limited {
            return Err(LimitError::Limited(limited).into());
        }
        drop(partial.pending);
        if let Some(ahead) = self.ahead()? {
            return Err(self.waiting_error(ahead)?.into());
        }
        let resolved = self.resolve().await?;
        let inner = &self.joined.throttle.inner;
        let pending = PendingCharge::of(inner, self.joined.throttle.try_acquire(self.cost)?);
        let lease = self.joined.limiter.draw(resolved).await?;
        match pending.confirm() {
            Verdict::Admit => Ok(self.joined.permit(pending, lease)),
            Verdict::Refuse(refused) => Err(refused.into()),
            Verdict::Wait(wait) => {
                let now = inner.clock().now();
                let retry_after = wait.until.map(|until| until.since(now));
                Err(Refused::Limited { by: wait.by, retry_after }.into())
            }
        }
    }

    /// Resolves the subject's limits before anything is charged: a cost that can never be granted fails here.
    async fn resolve(&self) -> Result<ResolvedRequest, LimitError> {
        self.joined.limiter.resolve(self.subject, &self.units.by_name()).await
    }

    /// Waits in the throttle's queue, at its former position if it had one. Returns whether it had to wait.
    async fn enter(&mut self) -> Result<(PendingCharge<'a>, bool), Refused> {
        let inner = &self.joined.throttle.inner;
        let deadline = self.deadline.map(|deadline| deadline.local);
        let mut future = AcquireFuture::new(inner, self.cost, deadline);
        future.arrival = self.arrival;
        let mut polls = 0;
        let charge = poll_fn(|context| {
            polls += 1;
            Pin::new(&mut future).poll(context)
        })
        .await?;
        self.arrival = future.arrival;
        Ok((PendingCharge::new(inner, charge), polls > 1))
    }

    /// Draws while holding the local charge. `None` means that it must start over and holds nothing.
    async fn draw_and_confirm(
        &mut self,
        pending: PendingCharge<'a>,
        resolved: ResolvedRequest,
    ) -> Result<Option<JoinedPermit<'a>>, JoinedError> {
        let lease = match self.draw(resolved).await? {
            DrawResult::Granted(lease) => lease,
            DrawResult::Refused(limited, returns) => {
                // Dropped first, so that a waiter of the throttle is admitted before this caller waits.
                drop(pending);
                self.refused(limited, returns)?;
                return Ok(None);
            }
        };
        match pending.confirm() {
            Verdict::Admit => {}
            Verdict::Refuse(refused) => return Err(refused.into()),
            // A pause has begun. Release everything rather than hold it until the pause ends.
            Verdict::Wait(_) => return Ok(None),
        }
        if let Some(waiter) = self.waiter.take() {
            waiter.place.granted();
        }
        Ok(Some(self.joined.permit(pending, lease)))
    }

    async fn draw(&self, resolved: ResolvedRequest) -> Result<DrawResult, LimitError> {
        let waiters = self.joined.limiter.waiters();
        let _counting = waiters.count_returns();
        let returns = waiters.returns();
        match self.joined.limiter.draw(resolved).await {
            Ok(lease) => Ok(DrawResult::Granted(lease)),
            Err(LimitError::Limited(limited)) => Ok(DrawResult::Refused(limited, returns)),
            Err(error) => Err(error),
        }
    }

    /// A limit is short: queues at the gate, unless the deadline is too early.
    fn refused(&mut self, limited: Box<Limited>, returns: u64) -> Result<(), JoinedError> {
        let primary = limited.primary().map(|line| (line.balance.subject.clone(), line.balance.retry_after));
        let Some((short_subject, Some(retry_after))) = primary else {
            return Err(LimitError::Limited(limited).into());
        };
        // A wait is never zero: the store's clock has microseconds.
        let ready_at = Instant::now() + retry_after.max(Duration::from_micros(1));
        if self.shared_deadline().is_some_and(|end| ready_at > end) {
            return Err(LimitError::Limited(limited).into());
        }
        match &mut self.waiter {
            Some(waiter) => waiter.place.refused(ready_at),
            None => self.take_place(Some(ready_at))?,
        }
        let Some(waiter) = &mut self.waiter else { unreachable!("it has just taken a place") };
        waiter.watch.take_if(|watch| !watch.watches(&short_subject));
        waiter.short = Some((short_subject, returns));
        Ok(())
    }

    fn take_place(&mut self, ready_at: Option<Instant>) -> Result<(), JoinedError> {
        let limiter = &self.joined.limiter;
        let key = self.joined.key(self.subject)?;
        let ticket = limiter.add_waiter(&key.subject)?;
        let place = limiter.queues().enter(key, self.number, ready_at, self.shared_deadline());
        self.waiter = Some(GateWaiter { place, ticket, short: None, watch: None });
        Ok(())
    }

    fn is_released(&mut self) -> bool {
        self.waiter.as_mut().is_none_or(|waiter| waiter.place.status() == PlaceStatus::Released)
    }

    /// Waits at the store gate while callers of its subject are ahead. Returns whether it had to wait.
    async fn pass_gate(&mut self) -> Result<bool, JoinedError> {
        if self.waiter.is_none() {
            if self.ahead()?.is_none() {
                return Ok(false);
            }
            self.take_place(None)?;
        }
        let mut has_waited = false;
        loop {
            let mut state_changed = pin!(self.joined.throttle.inner.drained().notified());
            // Enabled before the checks, so that a close or an opening circuit in between is not missed.
            state_changed.as_mut().enable();
            self.joined.limiter.check_open()?;
            if let Some(refused) = self.joined.throttle.inner.refuses(self.cost) {
                return Err(refused.into());
            }
            let end = self.shared_deadline();
            let Some(waiter) = &mut self.waiter else { unreachable!("it has a place until it is granted") };
            let PlaceStatus::Queued { is_head, head_ready_at } = waiter.place.status() else {
                return Ok(has_waited);
            };
            has_waited = true;
            if end.zip(head_ready_at).is_some_and(|(end, ready_at)| ready_at > end) {
                let ahead = waiter.place.ahead();
                return Err(self.waiting_error(WaitersAhead { ahead, ready_at: head_ready_at })?.into());
            }
            // Only the head keeps the timer and watches for returns.
            let ready_at = head_ready_at.filter(|_| is_head);
            if let Some(ready_at) = ready_at {
                // Published for callers of the bare limiter, which must not overtake.
                waiter.ticket.publish(Head { ready_at });
            }
            if ready_at.is_some() && waiter.missed_return(self.joined) {
                waiter.place.make_due();
                continue;
            }
            let noticed_at = ready_at.map(|ready_at| ready_at.min(self.joined.limiter.noticed_at()));
            let until = [noticed_at, end].into_iter().flatten().min();
            let woken = waiter.wait(state_changed, ready_at.is_some(), until).await;
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            match woken {
                WakeReason::Returned => waiter.place.make_due(),
                WakeReason::Timeout if ready_at.is_some() => waiter.place.make_due(),
                WakeReason::Timeout if is_over => {
                    let ahead = waiter.place.ahead();
                    return Err(self.waiting_error(WaitersAhead { ahead, ready_at: head_ready_at })?.into());
                }
                WakeReason::Timeout | WakeReason::Notified => {}
            }
        }
    }

    /// The waiters at the gate; `None` if there are none.
    fn ahead(&self) -> Result<Option<WaitersAhead>, InvalidName> {
        let queues = self.joined.limiter.queues();
        if queues.are_empty() { Ok(None) } else { Ok(queues.ahead(&self.joined.key(self.subject)?)) }
    }

    /// The deadline on the limiter's clock.
    fn shared_deadline(&self) -> Option<Instant> {
        self.deadline.and_then(|deadline| deadline.shared)
    }

    /// The error for a deadline that the waiters ahead make impossible to meet.
    fn waiting_error(
        &self,
        WaitersAhead { ahead, ready_at }: WaitersAhead,
    ) -> Result<LimitError, InvalidName> {
        let retry_after = ready_at.map(|at| at.saturating_duration_since(Instant::now()));
        Ok(LimitError::Waiting { subject: self.subject.check()?, ahead, retry_after })
    }
}
