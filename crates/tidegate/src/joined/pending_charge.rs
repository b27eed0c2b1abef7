//! A local charge of a request that has not been sent. Dropping it refunds the charge in full.

use std::sync::Arc;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tidegate_core::verdict::Verdict;

use crate::permit::Permit;
use crate::state::Effects;
use crate::throttle::Inner;

/// The gates' charge for a request that waits for the store.
#[derive(Debug)]
pub(super) struct PendingCharge<'a> {
    inner: &'a Arc<Inner>,
    charge: Option<Charge>,
}

impl<'a> PendingCharge<'a> {
    #[inline]
    pub(super) const fn new(inner: &'a Arc<Inner>, charge: Charge) -> Self {
        Self { inner, charge: Some(charge) }
    }

    /// Takes the charge of a permit that was never handed out.
    pub(super) fn of(inner: &'a Arc<Inner>, mut permit: Permit<'_>) -> Self {
        Self { inner, charge: permit.charge.take() }
    }

    /// The request is sent.
    #[inline]
    pub(super) fn into_permit(mut self) -> Permit<'a> {
        let charge = self.charge.take().unwrap_or_else(|| unreachable!("a charge is taken once"));
        // Restart the clock here: time spent in the store is not upstream latency.
        Permit::new(self.inner, self.inner.mark_sent(charge))
    }

    /// Whether the request may still be sent after the wait for the store.
    pub(super) fn confirm(&self) -> Verdict {
        let Some(charge) = &self.charge else { unreachable!("a charge is taken once") };
        let (state, now) = self.inner.lock_timed(self.inner.reading());
        state.gates.confirm(&state.plan, charge, now)
    }
}

impl Drop for PendingCharge<'_> {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            let mut effects = Effects::default();
            let (mut state, now) = self.inner.lock_timed(self.inner.reading());
            state.undo(charge, now, &mut effects);
            self.inner.release(state, effects);
        }
    }
}

impl Inner {
    /// Why a request would be refused at once, regardless of how long it could wait.
    pub(super) fn refuses(&self, cost: Cost) -> Option<Refused> {
        let (state, now) = self.lock_timed(self.reading());
        state.gates.refuses(&state.plan, cost, now)
    }
}
