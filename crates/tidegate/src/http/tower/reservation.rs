//! The charge of a request that has not been sent. Dropping it refunds it in full, including pace and rate.

use std::sync::Arc;

use tidegate_core::cost::Charge;
use tidegate_core::refused::Refused;

use crate::permit::Permit;
use crate::state::Effects;
use crate::throttle::Inner;

/// A charge of a request that has not been sent.
pub(super) struct Reservation {
    /// `None` once sent.
    held: Option<(Arc<Inner>, Charge)>,
}

impl Reservation {
    /// Takes the charge of an unused permit.
    pub(super) fn of(mut permit: Permit<'static>) -> Self {
        let charge = permit.charge.take();
        Self { held: charge.map(|charge| (Arc::clone(permit.inner()), charge)) }
    }

    /// The request is sent.
    pub(super) fn into_permit(mut self) -> Permit<'static> {
        let (inner, charge) = self.take();
        Permit::owned(inner, charge)
    }

    /// The request is sent, unless it is held back: then the charge is refunded, and the caller may try again
    /// if there is no refusal.
    pub(super) fn confirmed(mut self) -> Result<Permit<'static>, Option<Refused>> {
        let (inner, charge) = self.take();
        let charge = inner.confirmed(charge)?;
        Ok(Permit::owned(inner, charge))
    }

    fn take(&mut self) -> (Arc<Inner>, Charge) {
        self.held.take().unwrap_or_else(|| unreachable!("it is sent once"))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some((inner, charge)) = self.held.take() {
            undo(&inner, charge);
        }
    }
}

/// Undoes an admission whose request was never sent, and serves the waiters that this admits.
#[cold]
pub(super) fn undo(inner: &Inner, charge: Charge) {
    let mut effects = Effects::default();
    let (mut state, now) = inner.lock_timed(inner.reading());
    state.undo(charge, now, &mut effects);
    inner.release(state, effects);
}
