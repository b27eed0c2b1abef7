//! One permit over a throttle's gates and a shared limit.
//!
//! `acquire → gates → store.draw → JoinedPermit → settle`. The local charge is taken first and held during the draw.
//! If the draw is refused, the charge is refunded in full and the caller waits outside the throttle's queue, where it
//! blocks no other caller.

mod acquire;
mod costs;
mod error;
mod pending_charge;
mod permit;
mod queues;
mod run;
mod waiter;

use std::borrow::Cow;
use std::time::Duration;

use tidegate_core::cost::Cost;

use crate::acquire::cooperate;
use crate::limiter::{Limiter, SubjectRef};
use crate::throttle::Throttle;

pub use error::JoinedError;
pub use permit::JoinedPermit;

pub(crate) use queues::Queues;

use acquire::SlowAcquire;
use costs::Costs;

/// A throttle and a limiter as one: a request is sent when the upstream has capacity and the tenant has budget.
///
/// Created by [`Throttle::limited_by`]. It has no state besides the throttle's and the limiter's, so clones, and
/// others created from the same two, are equivalent.
///
/// ```
/// use tidegate::{Cost, Limit, Limiter, Memory, Outcome, Slots, Throttle};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let throttle = Throttle::builder().slots(Slots::fixed(8)).build()?;
/// let limits = [Limit::per_minute("rpm", 60), Limit::per_minute("tpm", 10_000)];
/// let limiter = Limiter::builder(Memory::new()).defaults(limits).build()?;
/// let joined = throttle.limited_by(&limiter);
///
/// let permit = joined.acquire(("acme", "gpt-4"), Cost::request().tokens(800)).await?;
/// let used = 640; // the call, and its reported usage
/// permit.settle(Outcome::success().spent(Cost::request().tokens(used))).await?;
///
/// let left = limiter.balances(("acme", "gpt-4")).await?;
/// assert_eq!((left[0].balance.available, left[1].balance.available), (59, 9_360));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Joined {
    throttle: Throttle,
    limiter: Limiter,
    costs: Costs,
}

impl Throttle {
    /// Combines this throttle with a shared limit that must also grant each request.
    ///
    /// A cost draws one `rpm` per request, and one `tpm` per token of any kind; change this with
    /// [`Joined::costs`].
    pub fn limited_by(&self, limiter: &Limiter) -> Joined {
        Joined { throttle: self.clone(), limiter: limiter.clone(), costs: Costs::default() }
    }
}

impl Joined {
    /// Sets how a request's cost maps to units of the shared limits, for both the draw and the settle. A limit that
    /// was drawn but is missing from the settled units counts as unused.
    ///
    /// The function runs once per acquire, before anything is charged, and once more for the cost spent. A name that
    /// the subject has no limit for is an error that lists the existing limits.
    ///
    /// ```
    /// # use tidegate::{Cost, Limit, Limiter, Memory, Outcome, Throttle};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("cents", 500)]).build()?;
    /// let joined = Throttle::new().limited_by(&limiter).costs(|cost| [("cents", cost.total_tokens().div_ceil(100))]);
    ///
    /// let permit = joined.acquire(("acme", "gpt-4"), Cost::request().tokens(1_000)).await?;
    /// assert_eq!(permit.lease().held("cents"), Some(10));
    /// permit.settle(Outcome::success().spent(Cost::request().tokens(640))).await?;
    /// assert_eq!(limiter.balances(("acme", "gpt-4")).await?[0].balance.available, 493);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn costs<I, N>(mut self, map: impl Fn(Cost) -> I + Send + Sync + 'static) -> Self
    where
        I: IntoIterator<Item = (N, u64)>,
        N: Into<Cow<'static, str>>,
    {
        self.costs = Costs::map(map);
        self
    }

    /// The throttle.
    pub const fn throttle(&self) -> &Throttle {
        &self.throttle
    }

    /// The limiter.
    pub const fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// Waits until every gate admits `cost` and the subject's limits grant it.
    ///
    /// The caller first waits in the throttle's FIFO queue, then draws from the store while holding its place in the
    /// throttle. If a limit is short, the throttle's charge is refunded in full, and the caller waits in FIFO order
    /// with the other callers of its subject, without blocking other subjects. When its turn comes it resumes its
    /// former position in the throttle's queue.
    ///
    /// # Errors
    /// [`JoinedError::Refused`] as [`Throttle::acquire`]; [`JoinedError::Limit`] as [`Limiter::try_acquire`], except that
    /// it waits for limits that time replenishes, and returns [`LimitError::Busy`](crate::LimitError::Busy) when the
    /// maximum number of waiters is reached. Nothing is held.
    ///
    /// # Panics
    /// As [`Throttle::acquire`] and [`Limiter::try_acquire`], when it has to wait for a limit outside a tokio runtime
    /// with its timer enabled, and if the function passed to [`costs`](Self::costs) panics.
    ///
    /// # Cancel safety
    /// Dropping the future takes nothing: the throttle's charge is refunded in full, a draw in flight is cancelled in
    /// the background, and later waiters move up. You lose your place.
    ///
    /// A future that is kept but not polled keeps what it holds: its place in the throttle during a draw and, once
    /// released from the gate, its subject's turn.
    pub async fn acquire<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        let (subject, cost) = (subject.into(), cost.into());
        cooperate().await;
        let units = self.units(cost);
        match self.acquire_fast(subject, cost, &units) {
            Ok(answer) => answer,
            Err(partial) => SlowAcquire::new(self, subject, cost, None, units).acquire(partial).await,
        }
    }

    /// [`acquire`](Self::acquire) with a timeout of `span`. It fails as soon as the timeout is known to be too short.
    ///
    /// # Errors
    /// As `acquire`, and [`Refused::Limited`](crate::Refused::Limited),
    /// [`LimitError::Limited`](crate::LimitError::Limited) or [`LimitError::Waiting`](crate::LimitError::Waiting)
    /// when `span` has elapsed or cannot be met.
    ///
    /// # Panics
    /// As `acquire`.
    ///
    /// # Cancel safety
    /// As `acquire`.
    pub async fn acquire_within<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
        span: Duration,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        let (subject, cost) = (subject.into(), cost.into());
        cooperate().await;
        let units = self.units(cost);
        match self.acquire_fast(subject, cost, &units) {
            Ok(answer) => answer,
            Err(partial) => SlowAcquire::new(self, subject, cost, Some(span), units).acquire(partial).await,
        }
    }

    /// Acquires now or fails: it waits for the store's response, but neither for a gate nor for a limit. It does not
    /// overtake waiters.
    ///
    /// # Errors
    /// [`JoinedError`], with a retry time if time decides. Nothing is held.
    ///
    /// # Panics
    /// As [`Limiter::try_acquire`], and if the function passed to [`costs`](Self::costs) panics. It needs no runtime if
    /// the store needs none.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        let (subject, cost) = (subject.into(), cost.into());
        cooperate().await;
        let units = self.units(cost);
        match self.acquire_fast(subject, cost, &units) {
            Ok(answer) => answer,
            Err(partial) => SlowAcquire::new(self, subject, cost, None, units).try_acquire(partial).await,
        }
    }
}
