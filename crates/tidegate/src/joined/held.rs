//! A local charge whose request has not gone out: dropped, it returns whole.

use std::sync::Arc;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tidegate_core::verdict::Verdict;

use crate::permit::Permit;
use crate::state::Effects;
use crate::throttle::Inner;

/// What the gates took for a request that waits for the store's answer.
#[derive(Debug)]
pub(super) struct Held<'a> {
    inner: &'a Arc<Inner>,
    charge: Option<Charge>,
}

impl<'a> Held<'a> {
    #[inline]
    pub(super) const fn new(inner: &'a Arc<Inner>, charge: Charge) -> Self {
        Self { inner, charge: Some(charge) }
    }

    /// The charge of a permit that nobody has seen.
    pub(super) fn of(inner: &'a Arc<Inner>, mut permit: Permit<'_>) -> Self {
        Self { inner, charge: permit.charge.take() }
    }

    /// The request goes out.
    #[inline]
    pub(super) fn into_permit(mut self) -> Permit<'a> {
        let charge = self.charge.take().unwrap_or_else(|| unreachable!("a charge is taken once"));
        // The time that the store took is not the upstream's.
        Permit::new(self.inner, self.inner.goes_out(charge))
    }

    /// Whether the request may still go out, after it had to wait for the store.
    pub(super) fn confirm(&self) -> Verdict {
        let Some(charge) = &self.charge else { unreachable!("a charge is taken once") };
        let (state, now) = self.inner.lock_timed(self.inner.reading());
        state.gates.confirm(&state.plan, charge, now)
    }
}

impl Drop for Held<'_> {
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
    /// Why a request would be turned away at once, however long it were ready to wait.
    pub(super) fn refuses(&self, cost: Cost) -> Option<Refused> {
        let (state, now) = self.lock_timed(self.reading());
        state.gates.refuses(&state.plan, cost, now.max(state.gates.latest()))
    }
}
