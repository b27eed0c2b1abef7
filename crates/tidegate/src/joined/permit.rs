//! The permit of a joined throttle: both halves, and how they are settled.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tidegate_core::cost::Cost;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::name::Subject;
use tidegate_core::outcome::{Kind, Outcome};

use super::costs::{CostUnits, Costs};
use crate::limiter::{Degraded, Finish, Lease, LimitError, SettleStatus};
use crate::permit::Permit;
use crate::run::Spend;

/// Permission to run one request: a throttle's permit and a limiter's lease in one.
///
/// Settle it with the outcome of the work. The throttle treats the outcome as a [`Permit`]'s, and the lease ends with
/// it:
///
/// | outcome | the lease is settled at |
/// |---|---|
/// | success | the cost [spent](Outcome::spent), else what [`spend`](Self::spend) reported, else what it holds |
/// | failure, overload | the cost spent, else the cost reported; with neither it is cancelled and all units return |
/// | ignored, drop, panic | the same |
///
/// Dropping it counts as ignored, and the lease ends in the background.
///
/// It borrows its throttle. To store it, or to send it to another task, convert it with
/// [`into_owned`](Self::into_owned).
#[derive(Debug)]
#[must_use = "dropping a permit gives it back at once"]
pub struct JoinedPermit<'a> {
    permit: Permit<'a>,
    shared: SharedHalf,
}

/// The shared half. On drop, reported tokens stay used and the rest returns.
#[derive(Debug)]
struct SharedHalf {
    lease: Lease,
    costs: Costs,
    cost: Cost,
    reported: Option<Cost>,
}

impl<'a> JoinedPermit<'a> {
    #[inline]
    pub(super) fn new(permit: Permit<'a>, lease: Lease, costs: Costs) -> Self {
        let cost = permit.cost();
        Self { permit, shared: SharedHalf { lease, costs, cost, reported: None } }
    }

    /// The same permit with its own handle to the throttle, so that it can be stored or sent to another task.
    pub fn into_owned(self) -> JoinedPermit<'static> {
        JoinedPermit { permit: self.permit.into_owned(), shared: self.shared }
    }

    /// Ends the request: the throttle's half during this call, the lease when the future completes.
    ///
    /// # Errors
    /// As [`Lease::settle`]: [`LimitError::Cost`] if the cost spent names an unknown limit, in which case the lease
    /// is settled at what it holds; [`LimitError::Unavailable`] if the store is unavailable and the settler is full;
    /// [`LimitError::Store`] if the store refuses. The settler then retries the same ending, as described there, and
    /// never turns it into a cancel: the work was done.
    ///
    /// # Panics
    /// If the function passed to [`Joined::costs`](super::Joined::costs) panics, in which case the request counts as
    /// ignored; and where the calls of a [`Lease`] do.
    ///
    /// # Cancel safety
    /// Dropping the future, polled or not, does not undo the settle: the settler completes it.
    #[inline]
    pub fn settle(
        self,
        outcome: Outcome,
    ) -> impl Future<Output = Result<SettleStatus, LimitError>> + Send + use<> {
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

    /// Reports the outcome of a part of the work before the end: several requests of a batch under one permit.
    ///
    /// The throttle records it like a separate request; its tokens add to the tokens reported.
    pub fn record(&mut self, outcome: Outcome) {
        if let Some(spent) = outcome.spent_cost() {
            self.shared.spend(spent);
        }
        self.permit.record(outcome);
    }

    /// Reports tokens as they are used, as [`Permit::spend`]. They stay used in both halves, regardless of how the
    /// request ends.
    pub fn spend(&mut self, tokens: impl Into<Cost>) {
        let tokens = tokens.into();
        self.permit.spend(tokens);
        self.shared.spend(tokens);
    }

    /// Tokens reported so far.
    pub fn reported(&self) -> u64 {
        self.permit.reported()
    }

    /// The cost requested.
    pub const fn cost(&self) -> Cost {
        self.shared.cost
    }

    /// Whether this request probes a half-open circuit.
    pub fn is_probe(&self) -> bool {
        self.permit.is_probe()
    }

    /// The subject that drew the lease.
    pub fn subject(&self) -> &Subject {
        self.shared.lease.subject()
    }

    /// The limits it drew from, as returned by [`Lease::balances`].
    pub fn balances(&self) -> Vec<Balance> {
        self.shared.lease.balances()
    }

    /// Whether, and why, the lease was granted without the store.
    pub const fn degraded(&self) -> Option<Degraded> {
        self.shared.lease.degraded()
    }

    /// The shared half.
    pub const fn lease(&self) -> &Lease {
        &self.shared.lease
    }
}

impl Spend for JoinedPermit<'static> {
    fn add(&mut self, tokens: Cost) -> (&Permit<'static>, Option<Cost>, Cost) {
        self.shared.spend(tokens);
        self.permit.add(tokens)
    }
}

impl SharedHalf {
    fn spend(&mut self, tokens: Cost) {
        self.reported = Some(self.reported.map_or(tokens, |reported| reported.plus_tokens(tokens)));
    }

    /// How the lease ends for an outcome (like the local half's tokens), and the error if the cost spent is invalid.
    #[inline]
    fn finish(&self, outcome: Outcome) -> (Finish, Option<LimitError>) {
        let reported = || {
            let tokens = self.reported?;
            let cost = self.cost.tokens(tokens.tokens);
            Some(cost.input_tokens(tokens.input_tokens).output_tokens(tokens.output_tokens))
        };
        // Requests were made, whatever they used.
        match outcome.spent_cost().or_else(reported).map(|used| used.counted_as(self.cost)) {
            Some(used) => match self.lease.used(&self.units(used).by_name()) {
                Ok(units) => (Finish::At(units), None),
                // The work was done: returning all units would be worse than keeping the estimate.
                Err(wrong) => (Finish::Full, Some(wrong)),
            },
            None if outcome.kind() == Kind::Success => (Finish::Full, None),
            None => (Finish::Cancel, None),
        }
    }
}

impl SharedHalf {
    /// The units of a cost spent. If it has only a total of tokens, limits of one kind keep their estimates.
    fn units(&self, used: Cost) -> CostUnits {
        let units = self.costs.of(used);
        if !used.has_only_a_total() || self.cost.input_tokens == 0 && self.cost.output_tokens == 0 {
            return units;
        }
        let total = self.cost.tokens(self.cost.total_tokens());
        let (estimates, without_kinds) =
            (self.costs.of(total), self.costs.of(total.input_tokens(0).output_tokens(0)));
        units.keep(&estimates, &without_kinds)
    }
}

impl Drop for SharedHalf {
    fn drop(&mut self) {
        if self.reported.is_some() && self.lease.is_open() {
            // The map is user code, and this thread may already be unwinding.
            let finish = catch_unwind(AssertUnwindSafe(|| self.finish(Outcome::ignored()).0));
            drop(self.lease.begin(finish.unwrap_or(Finish::Full)));
        }
    }
}
