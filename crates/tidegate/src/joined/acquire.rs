//! The way in: the store gate, the throttle's queue, the draw; and around again where a limit is short.

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

use super::costs::Asked;
use super::held::Held;
use super::lines::{Ahead, Key, Look};
use super::spot::{Spot, Woken};
use super::{Joined, JoinedError, JoinedPermit};
use crate::limiter::turns::Head;
use crate::limiter::{Lease, LimitError, Limited, Resolved, SubjectRef};
use crate::state::Entry;
use crate::waiting::Waiting;

/// What is left to do where a request cannot be answered at once.
#[derive(Default)]
pub(super) struct Rest<'a> {
    /// The throttle has admitted it.
    held: Option<Held<'a>>,
    /// And a limit is short.
    limited: Option<Box<Limited>>,
}

impl Joined {
    /// What a request asks of each limit. Said once, and before anything is taken: it may be the caller's code.
    #[inline]
    pub(super) fn asked(&self, cost: Cost) -> Asked {
        self.costs.of(cost)
    }

    /// Answers a request for which nothing has to be waited for.
    #[inline]
    pub(super) fn acquire_at_once<'a>(
        &'a self,
        subject: SubjectRef<'_>,
        cost: Cost,
        asked: &Asked,
    ) -> Result<Result<JoinedPermit<'a>, JoinedError>, Rest<'a>> {
        if !self.limiter.is_immediate() || self.has_line(subject) {
            return Err(Rest::default());
        }
        let inner = &self.throttle.inner;
        let reading = inner.reading();
        let charge = match inner.enter_plain(cost, reading) {
            Some(charge) => charge,
            None => match inner.enter(cost, reading) {
                Entry::Admitted(charge) => charge,
                Entry::Refused(refused) => return Ok(Err(refused.into())),
                Entry::Wait(_) => return Err(Rest::default()),
            },
        };
        let held = Held::new(inner, charge);
        match self.limiter.draw_at_once(subject, &asked.said()) {
            Some(Ok(lease)) => Ok(Ok(self.permit(held, lease))),
            None => Err(Rest { held: Some(held), limited: None }),
            Some(Err(LimitError::Limited(limited))) => Err(Rest { held: Some(held), limited: Some(limited) }),
            Some(Err(error)) => Ok(Err(error.into())),
        }
    }

    /// Whether others of the subject wait at the gate. A name that cannot be is found later.
    #[inline]
    fn has_line(&self, subject: SubjectRef<'_>) -> bool {
        let lines = self.limiter.lines();
        !lines.are_empty() && self.key(subject).is_ok_and(|key| lines.ahead(&key).is_some())
    }

    fn key(&self, subject: SubjectRef<'_>) -> Result<Key, InvalidName> {
        let throttle = Arc::as_ptr(&self.throttle.inner).addr();
        Ok(Key { throttle, subject: subject.check()? })
    }

    #[inline]
    fn permit<'a>(&'a self, held: Held<'a>, lease: Lease) -> JoinedPermit<'a> {
        JoinedPermit::new(held.into_permit(), lease, self.costs.clone())
    }
}

/// A caller on its way in.
pub(super) struct Asking<'a> {
    joined: &'a Joined,
    subject: SubjectRef<'a>,
    cost: Cost,
    asked: Asked,
    deadline: Option<Deadline>,
    /// When it came, among those of its subject.
    number: u64,
    /// When it came, among those who queue at the throttle.
    arrival: Option<u64>,
    /// Its place at the store gate, from the first refusal on, or from when it found others there.
    spot: Option<Spot<'a>>,
}

/// The same moment on the throttle's clock and on the limiter's.
#[derive(Clone, Copy)]
struct Deadline {
    local: LocalInstant,
    shared: Option<Instant>,
}

/// A draw's answer.
enum Drawn {
    Granted(Lease),
    /// Not now; with the returns that had been told of before it asked.
    Refused(Box<Limited>, u64),
}

impl<'a> Asking<'a> {
    pub(super) fn new(
        joined: &'a Joined,
        subject: SubjectRef<'a>,
        cost: Cost,
        within: Option<Duration>,
        asked: Asked,
    ) -> Self {
        let deadline = within.map(|span| Deadline {
            local: joined.throttle.inner.clock().now() + span,
            shared: Instant::now().checked_add(span),
        });
        let number = joined.limiter.lines().number();
        Self { joined, subject, cost, asked, deadline, number, arrival: None, spot: None }
    }

    /// Waits until it has both halves.
    pub(super) async fn acquire(mut self, rest: Rest<'a>) -> Result<JoinedPermit<'a>, JoinedError> {
        if let Some(held) = rest.held {
            self.arrival = Some(self.joined.throttle.inner.lock().arrived());
            // A limit that was short is asked once more, by one who hears of what is given back meanwhile.
            let resolved = self.resolve().await?;
            if let Some(permit) = self.ask(held, resolved).await? {
                return Ok(permit);
            }
        }
        loop {
            let mut resolved = self.resolve().await?;
            if self.pass_gate().await? {
                resolved = self.resolve().await?;
            }
            let (held, has_waited) = self.enter().await?;
            if has_waited {
                resolved.waited();
            }
            if self.spot.is_none() && self.ahead()?.is_some() {
                // Others have come to wait since it passed there.
                self.take_place(None)?;
                if !self.is_let_go() {
                    continue;
                }
            }
            if let Some(permit) = self.ask(held, resolved).await? {
                return Ok(permit);
            }
        }
    }

    /// Enters now or not at all.
    pub(super) async fn try_acquire(self, rest: Rest<'a>) -> Result<JoinedPermit<'a>, JoinedError> {
        if let Some(limited) = rest.limited {
            return Err(LimitError::Limited(limited).into());
        }
        drop(rest.held);
        if let Some(ahead) = self.ahead()? {
            return Err(self.waiting(ahead)?.into());
        }
        let resolved = self.resolve().await?;
        let inner = &self.joined.throttle.inner;
        let held = Held::of(inner, self.joined.throttle.try_acquire(self.cost)?);
        let lease = self.joined.limiter.draw(resolved).await?;
        match held.confirm() {
            Verdict::Admit => Ok(self.joined.permit(held, lease)),
            Verdict::Refuse(refused) => Err(refused.into()),
            Verdict::Wait(wait) => {
                let now = inner.clock().now();
                let retry_after = wait.until.map(|until| until.since(now));
                Err(Refused::Limited { by: wait.by, retry_after }.into())
            }
        }
    }

    /// What limits it, before anything is taken: what can never be had is refused here.
    async fn resolve(&self) -> Result<Resolved, LimitError> {
        self.joined.limiter.resolve(self.subject, &self.asked.said()).await
    }

    /// The throttle's queue, in the place it had there before. Answers whether it had to wait.
    async fn enter(&mut self) -> Result<(Held<'a>, bool), Refused> {
        let inner = &self.joined.throttle.inner;
        let deadline = self.deadline.map(|deadline| deadline.local);
        let mut waiting = Waiting::new(inner, self.cost, deadline);
        waiting.arrival = self.arrival;
        let mut polls = 0;
        let charge = poll_fn(|context| {
            polls += 1;
            Pin::new(&mut waiting).poll(context)
        })
        .await?;
        self.arrival = waiting.arrival;
        Ok((Held::new(inner, charge), polls > 1))
    }

    /// Asks the store with the local charge in hand. `None`: it has to go round again, and holds nothing.
    async fn ask(
        &mut self,
        held: Held<'a>,
        resolved: Resolved,
    ) -> Result<Option<JoinedPermit<'a>>, JoinedError> {
        let lease = match self.draw(resolved).await? {
            Drawn::Granted(lease) => lease,
            Drawn::Refused(limited, returns) => {
                // First, so that whoever waits at the throttle is let in before this one waits.
                drop(held);
                self.refused(limited, returns)?;
                return Ok(None);
            }
        };
        match held.confirm() {
            Verdict::Admit => {}
            Verdict::Refuse(refused) => return Err(refused.into()),
            // A pause has begun. Nobody waits for its end holding anything.
            Verdict::Wait(_) => return Ok(None),
        }
        if let Some(spot) = self.spot.take() {
            spot.place.granted();
        }
        Ok(Some(self.joined.permit(held, lease)))
    }

    async fn draw(&self, resolved: Resolved) -> Result<Drawn, LimitError> {
        let turns = self.joined.limiter.turns();
        let _listening = turns.listen();
        let returns = turns.returns();
        match self.joined.limiter.draw(resolved).await {
            Ok(lease) => Ok(Drawn::Granted(lease)),
            Err(LimitError::Limited(limited)) => Ok(Drawn::Refused(limited, returns)),
            Err(error) => Err(error),
        }
    }

    /// A limit is short: it takes its place at the gate, unless its time will not do.
    fn refused(&mut self, limited: Box<Limited>, returns: u64) -> Result<(), JoinedError> {
        let primary = limited.primary().map(|line| (line.balance.subject.clone(), line.balance.retry_after));
        let Some((stuck_at, Some(retry_after))) = primary else {
            return Err(LimitError::Limited(limited).into());
        };
        // A wait is never zero: the store's clock has microseconds.
        let ready_at = Instant::now() + retry_after.max(Duration::from_micros(1));
        if self.end().is_some_and(|end| ready_at > end) {
            return Err(LimitError::Limited(limited).into());
        }
        match &mut self.spot {
            Some(spot) => spot.place.refused(ready_at),
            None => self.take_place(Some(ready_at))?,
        }
        let Some(spot) = &mut self.spot else { unreachable!("it has just taken a place") };
        spot.watch.take_if(|watch| !watch.is_of(&stuck_at));
        spot.stuck = Some((stuck_at, returns));
        Ok(())
    }

    fn take_place(&mut self, ready_at: Option<Instant>) -> Result<(), JoinedError> {
        let limiter = &self.joined.limiter;
        let key = self.joined.key(self.subject)?;
        let ticket = limiter.count_in(&key.subject)?;
        let place = limiter.lines().enter(key, self.number, ready_at, self.end());
        self.spot = Some(Spot { place, ticket, stuck: None, watch: None });
        Ok(())
    }

    fn is_let_go(&mut self) -> bool {
        self.spot.as_mut().is_none_or(|spot| spot.place.look() == Look::Going)
    }

    /// Waits at the store gate while others of its subject do. Answers whether it had to.
    async fn pass_gate(&mut self) -> Result<bool, JoinedError> {
        if self.spot.is_none() {
            if self.ahead()?.is_none() {
                return Ok(false);
            }
            self.take_place(None)?;
        }
        let mut has_waited = false;
        loop {
            let mut turned = pin!(self.joined.throttle.inner.drained().notified());
            // Enabled before looking: a close or an open circuit in between is not missed.
            turned.as_mut().enable();
            self.joined.limiter.check_open()?;
            if let Some(refused) = self.joined.throttle.inner.refuses(self.cost) {
                return Err(refused.into());
            }
            let end = self.end();
            let Some(spot) = &mut self.spot else { unreachable!("it has a place until it is granted") };
            let Look::Waiting { ahead, head_ready_at } = spot.place.look() else { return Ok(has_waited) };
            has_waited = true;
            if end.zip(head_ready_at).is_some_and(|(end, ready_at)| ready_at > end) {
                return Err(self.waiting(Ahead { ahead, ready_at: head_ready_at })?.into());
            }
            // Only the first keeps the time and hears of returns.
            let ready_at = head_ready_at.filter(|_| ahead == 0);
            if let Some(ready_at) = ready_at {
                // For those who ask the limiter by itself: they do not overtake.
                spot.ticket.tell(Head { ready_at });
            }
            if ready_at.is_some() && spot.missed_a_call(self.joined) {
                spot.place.is_due();
                continue;
            }
            let noticed_at = ready_at.map(|ready_at| ready_at.min(self.joined.limiter.noticed_at()));
            let until = [noticed_at, end].into_iter().flatten().min();
            let woken = spot.wait(turned, ready_at.is_some(), until).await;
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            match woken {
                Woken::Returned => spot.place.is_due(),
                Woken::TimeOver if ready_at.is_some() => spot.place.is_due(),
                Woken::TimeOver if is_over => {
                    return Err(self.waiting(Ahead { ahead, ready_at: head_ready_at })?.into());
                }
                Woken::TimeOver | Woken::Told => {}
            }
        }
    }

    /// Who waits at the gate, if anybody does.
    fn ahead(&self) -> Result<Option<Ahead>, InvalidName> {
        let lines = self.joined.limiter.lines();
        if lines.are_empty() { Ok(None) } else { Ok(lines.ahead(&self.joined.key(self.subject)?)) }
    }

    /// Its deadline on the limiter's clock.
    fn end(&self) -> Option<Instant> {
        self.deadline.and_then(|deadline| deadline.shared)
    }

    /// The time will not do, because of those ahead.
    fn waiting(&self, Ahead { ahead, ready_at }: Ahead) -> Result<LimitError, InvalidName> {
        let retry_after = ready_at.map(|at| at.saturating_duration_since(Instant::now()));
        Ok(LimitError::Waiting { subject: self.subject.check()?, ahead, retry_after })
    }
}
