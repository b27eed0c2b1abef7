//! One permit over a throttle's gates and a shared limit.
//!
//! `acquire → gates → store.draw → JoinedPermit → settle`. The local charge is taken first and held while the store is
//! asked; refused, it returns whole, and the caller waits outside the throttle's queue, where it is in nobody's way.

mod acquire;
mod costs;
mod error;
mod held;
mod lines;
mod permit;
mod spot;

use std::borrow::Cow;
use std::time::Duration;

use tidegate_core::cost::Cost;

use crate::limiter::{Limiter, SubjectRef};
use crate::throttle::Throttle;

pub use error::JoinedError;
pub use permit::JoinedPermit;

pub(crate) use lines::Lines;

use acquire::Asking;
use costs::Costs;

/// A throttle and a limiter as one: a request goes out when the callee can take it and its tenant may have it.
///
/// Made by [`Throttle::limited_by`]. Clones, and others made of the same two, are the same: there is nothing to be kept
/// but what the throttle and the limiter keep.
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
/// let used = 640; // the call, and what it said it used
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
    /// The same throttle for requests that a shared limit has to grant as well.
    ///
    /// A request costs one `rpm`, and a `tpm` for each of its tokens; [`Joined::costs`] says otherwise.
    pub fn limited_by(&self, limiter: &Limiter) -> Joined {
        Joined { throttle: self.clone(), limiter: limiter.clone(), costs: Costs::default() }
    }
}

impl Joined {
    /// Another way to make units of the shared limits from a request's cost, used for what is asked and for what was
    /// spent. A limit that was drawn and is not named in what was spent was not used.
    ///
    /// It runs once for an acquire, before anything is taken, and once more for what was spent. A name that the subject has no limit of is an error that lists those it has.
    ///
    /// ```
    /// # use tidegate::{Cost, Limit, Limiter, Memory, Outcome, Throttle};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("cents", 500)]).build()?;
    /// let joined = Throttle::new().limited_by(&limiter).costs(|cost| [("cents", cost.tokens.div_ceil(100))]);
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
    /// The throttle's queue comes first, in the order of asking; then the store is asked, with the place in the throttle
    /// held. If a limit is short, all that the throttle took returns, and the caller waits with the others of its subject,
    /// in the order they came and in nobody else's way. When its time has come it takes its old place in the throttle's
    /// queue.
    ///
    /// # Errors
    /// [`JoinedError::Refused`] as [`Throttle::acquire`]; [`JoinedError::Limit`] as [`Limiter::acquire`], but what time
    /// will bring is waited for, and [`LimitError::Busy`](crate::LimitError::Busy) when as many wait as may. Nothing is
    /// held.
    ///
    /// # Panics
    /// As [`Throttle::acquire`] and [`Limiter::acquire`], when it has to wait for a limit outside a tokio runtime with its
    /// timer enabled, and where the function given to [`costs`](Self::costs) does.
    ///
    /// # Cancel safety
    /// Dropping the future takes nothing: what the throttle took returns whole, a draw that is under way is cancelled in the
    /// background, and those behind move up. You lose your place.
    ///
    /// A future that is kept and not polled keeps what it has by then: its place at the throttle while the store is asked,
    /// and, let go to ask again, the turn of its subject.
    pub async fn acquire<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        let (subject, cost) = (subject.into(), cost.into());
        let asked = self.asked(cost);
        match self.acquire_at_once(subject, cost, &asked) {
            Ok(answer) => answer,
            Err(rest) => Asking::new(self, subject, cost, None, asked).acquire(rest).await,
        }
    }

    /// [`acquire`](Self::acquire), but no longer than `span`. It is refused as soon as it is clear that the time will not
    /// do.
    ///
    /// # Errors
    /// As `acquire`, and [`Refused::Limited`](crate::Refused::Limited),
    /// [`LimitError::Limited`](crate::LimitError::Limited) or [`LimitError::Waiting`](crate::LimitError::Waiting) when
    /// `span` is over or cannot be met.
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
        let asked = self.asked(cost);
        match self.acquire_at_once(subject, cost, &asked) {
            Ok(answer) => answer,
            Err(rest) => Asking::new(self, subject, cost, Some(span), asked).acquire(rest).await,
        }
    }

    /// Enters now or not at all: it waits for the store's answer, and neither for a gate nor for a limit. It does not
    /// overtake those who wait.
    ///
    /// # Errors
    /// [`JoinedError`], which says when to come back where time decides. Nothing is held.
    ///
    /// # Panics
    /// As [`Limiter::acquire`], and where the function given to [`costs`](Self::costs) does. It needs no runtime where the
    /// store needs none.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl Into<Cost>,
    ) -> Result<JoinedPermit<'a>, JoinedError> {
        let (subject, cost) = (subject.into(), cost.into());
        let asked = self.asked(cost);
        match self.acquire_at_once(subject, cost, &asked) {
            Ok(answer) => answer,
            Err(rest) => Asking::new(self, subject, cost, None, asked).try_acquire(rest).await,
        }
    }
}
