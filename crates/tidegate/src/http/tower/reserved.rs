//! What was taken for a request that has not gone out: dropped, it returns whole, its entry in pace and rate included.

use std::sync::Arc;

use tidegate_core::cost::Charge;
use tidegate_core::refused::Refused;

use crate::permit::Permit;
use crate::state::Effects;
use crate::throttle::Inner;

/// A charge of which nothing has gone out.
pub(super) struct Reserved {
    /// Taken when it goes out.
    held: Option<(Arc<Inner>, Charge)>,
}

impl Reserved {
    /// What a permit took that nobody has used.
    pub(super) fn of(mut permit: Permit<'static>) -> Self {
        Self { held: permit.charge.take().map(|charge| (Arc::clone(&permit.inner), charge)) }
    }

    /// The request goes out.
    pub(super) fn into_permit(mut self) -> Permit<'static> {
        let (inner, charge) = self.take();
        Permit::owned(inner, charge)
    }

    /// The request goes out, unless something has begun that keeps it: then what it took has returned, and it may ask anew
    /// where there is no refusal.
    pub(super) fn confirmed(mut self) -> Result<Permit<'static>, Option<Refused>> {
        let (inner, charge) = self.take();
        let charge = inner.confirmed(charge)?;
        Ok(Permit::owned(inner, charge))
    }

    fn take(&mut self) -> (Arc<Inner>, Charge) {
        self.held.take().unwrap_or_else(|| unreachable!("it goes out once"))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some((inner, charge)) = self.held.take() {
            undo(&inner, charge);
        }
    }
}

/// Takes back an admission that never went out, and lets in whoever that lets in.
#[cold]
pub(super) fn undo(inner: &Inner, charge: Charge) {
    let mut effects = Effects::default();
    let (mut state, now) = inner.lock_timed(inner.reading());
    state.undo(charge, now, &mut effects);
    inner.release(state, effects);
}
