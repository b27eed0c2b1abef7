//! The right to run one request, of both halves, and the way back.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tidegate_core::cost::Cost;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::name::Subject;
use tidegate_core::outcome::{Kind, Outcome};

use super::costs::Costs;
use crate::limiter::{Degraded, Finish, Lease, LimitError, Settled};
use crate::permit::Permit;

/// The right to run one request: a throttle's permit and a limiter's lease in one.
///
/// Settle it with how the work went. The throttle hears of it as from a [`Permit`], and the lease ends with it:
///
/// | outcome | the lease is settled at |
/// |---|---|
/// | success | what was [spent](Outcome::spent), else what [`spend`](Self::spend) reported, else what it holds |
/// | failure, overload | what was spent, else what was reported; with neither it is cancelled, and all returns |
/// | ignored, drop, panic | the same |
///
/// Dropped, it counts as ignored, and the lease ends in the background.
///
/// It borrows its throttle. To store it, or to send it to another task, make it [owned](Self::into_owned).
#[derive(Debug)]
#[must_use = "dropping a permit gives it back at once"]
pub struct JoinedPermit<'a> {
    permit: Permit<'a>,
    shared: Half,
}

/// The shared half. Dropped, what was reported stays used and the rest returns.
#[derive(Debug)]
struct Half {
    lease: Lease,
    costs: Costs,
    cost: Cost,
    reported: Option<u64>,
}

impl<'a> JoinedPermit<'a> {
    #[inline]
    pub(super) fn new(permit: Permit<'a>, lease: Lease, costs: Costs) -> Self {
        let cost = permit.cost();
        Self { permit, shared: Half { lease, costs, cost, reported: None } }
    }

    /// The same permit with a handle of its own on the throttle, to be stored or sent elsewhere.
    pub fn into_owned(self) -> JoinedPermit<'static> {
        JoinedPermit { permit: self.permit.into_owned(), shared: self.shared }
    }

    /// Ends the request: the throttle's half as this is called, the lease when the future has completed.
    ///
    /// # Errors
    /// As [`Lease::settle`]: [`LimitError::Cost`] where what was spent names a limit that is not known, and then the
    /// lease is settled at what it holds; [`LimitError::Unavailable`] when the store is away and the settler is full;
    /// [`LimitError::Store`] where it refuses. The settler then goes on with the same ending, as the table there says, and
    /// never makes a cancel of it: the work was done.
    ///
    /// # Panics
    /// Where the function given to [`Joined::costs`](super::Joined::costs) does. The request then counts as ignored. And
    /// where the calls of a [`Lease`] do.
    ///
    /// # Cancel safety
    /// Dropping the future, polled or not, does not undo it: the settler goes on.
    #[inline]
    pub fn settle(
        self,
        outcome: Outcome,
    ) -> impl Future<Output = Result<Settled, LimitError>> + Send + use<> {
        let Self { permit, mut shared } = self;
        let (finish, wrong) = shared.finish(outcome);
        permit.settle(outcome);
        let answer = shared.lease.begin(finish);
        async move {
            let answer = match answer {
                Some(answer) => answer,
                None => shared.lease.finish().await,
            };
            wrong.map_or(answer, Err)
        }
    }

    /// Reports how a part of the work went, before the end: several requests of a batch under one permit.
    ///
    /// The throttle learns as from a request of its own; tokens it names add to what was reported.
    pub fn record(&mut self, outcome: Outcome) {
        if let Some(spent) = outcome.spent_cost() {
            self.shared.spend(spent.tokens);
        }
        self.permit.record(outcome);
    }

    /// Reports tokens as they are used. They stay used however the request ends, in both halves.
    pub fn spend(&mut self, tokens: u64) {
        self.permit.spend(tokens);
        self.shared.spend(tokens);
    }

    /// Tokens reported so far.
    pub fn reported(&self) -> u64 {
        self.permit.reported()
    }

    /// What was asked for.
    pub const fn cost(&self) -> Cost {
        self.shared.cost
    }

    /// Whether this request probes a half-open circuit.
    pub fn is_probe(&self) -> bool {
        self.permit.is_probe()
    }

    /// Who drew it, and of what.
    pub fn subject(&self) -> &Subject {
        self.shared.lease.subject()
    }

    /// The limits it drew from, as [`Lease::balances`] tells them.
    pub fn balances(&self) -> Vec<Balance> {
        self.shared.lease.balances()
    }

    /// Whether, and why, the lease was given without the store.
    pub const fn degraded(&self) -> Option<Degraded> {
        self.shared.lease.degraded()
    }

    /// The shared half.
    pub const fn lease(&self) -> &Lease {
        &self.shared.lease
    }
}

impl Half {
    fn spend(&mut self, tokens: u64) {
        self.reported = Some(self.reported.unwrap_or(0).saturating_add(tokens));
    }

    /// How the lease ends by an outcome: as the local half's tokens do. And what is wrong with what was said, if anything is.
    #[inline]
    fn finish(&self, outcome: Outcome) -> (Finish, Option<LimitError>) {
        let reported = || self.reported.map(|tokens| self.cost.tokens(tokens));
        match outcome.spent_cost().or_else(reported) {
            Some(used) => match self.lease.used(&self.costs.of(used).said()) {
                Ok(units) => (Finish::At(units), None),
                // The work was done: to return all of it would be worse than to keep the estimate.
                Err(wrong) => (Finish::AsHeld, Some(wrong)),
            },
            None if outcome.kind() == Kind::Success => (Finish::AsHeld, None),
            None => (Finish::Cancel, None),
        }
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        if self.reported.is_some() && self.lease.is_open() {
            // The map is the caller's code, and this may be an unwinding already.
            let finish = catch_unwind(AssertUnwindSafe(|| self.finish(Outcome::ignored()).0));
            drop(self.lease.begin(finish.unwrap_or(Finish::AsHeld)));
        }
    }
}
