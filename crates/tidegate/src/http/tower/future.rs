//! The response future of a throttled call, and how its response is settled.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tidegate_core::cost::Charge;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;

use super::error::{BoxError, CallError};
use super::response::{HttpResponses, Respond};
use crate::permit_body::{OwnedCharge, ThrottleHandle};
use crate::throttle::{Inner, Throttle};

/// Settles a call: an error now, a response as `C` does. `taken` is called where the charge is needed.
#[inline]
pub(super) fn settle<C: Respond<T, E>, T, E: Into<BoxError>>(
    taken: impl FnOnce() -> OwnedCharge,
    outcome: Outcome,
    hold: C::Hold,
    result: Result<T, E>,
) -> Result<C::Response, CallError> {
    match result {
        Ok(response) => Ok(C::respond(hold, taken, outcome, response)),
        Err(error) => {
            taken().settle(outcome);
            Err(CallError::of(error))
        }
    }
}

/// The state shared by all clones of a service.
#[derive(Debug)]
pub(super) struct Shared<C> {
    pub(super) throttle: Throttle,
    pub(super) config: Arc<C>,
}

impl<C: Send + Sync> ThrottleHandle for Shared<C> {
    #[inline]
    fn throttle(&self) -> &Inner {
        &self.throttle.inner
    }
}

/// The charge of a request in flight. Dropping it returns what it holds, and nothing is learned.
pub(super) struct InFlightCharge<C> {
    /// `None` once settled.
    held: Option<(Arc<Shared<C>>, Charge)>,
}

impl<C> InFlightCharge<C> {
    #[inline]
    pub(super) fn new(shared: &Arc<Shared<C>>, charge: Charge) -> Self {
        Self { held: Some((Arc::clone(shared), shared.throttle.inner.mark_sent(charge))) }
    }
}

impl<C: Send + Sync + 'static> InFlightCharge<C> {
    #[inline]
    fn settle<T, E: Into<BoxError>>(&mut self, result: Result<T, E>) -> Result<C::Response, CallError>
    where
        C: Respond<T, E>,
    {
        let Some((shared, _)) = &self.held else { panic!("polled after completion") };
        let outcome = shared.config.outcome(&result, shared.throttle.inner.settles_timed());
        let hold = shared.config.hold();
        settle::<C, T, E>(|| self.taken(), outcome, hold, result)
    }

    #[inline]
    fn taken(&mut self) -> OwnedCharge {
        let (shared, charge) = self.held.take().unwrap_or_else(|| unreachable!("checked above"));
        OwnedCharge { handle: shared, charge }
    }
}

impl<C> Drop for InFlightCharge<C> {
    fn drop(&mut self) {
        if let Some((shared, charge)) = self.held.take() {
            shared.throttle.inner.settle_apart(charge, None, &Outcome::ignored());
        }
    }
}

pin_project! {
    /// The response future of a throttled call. Dropping it returns what it holds, and nothing is learned.
    // Not an enum: its variants would be moved byte by byte on the hottest path.
    pub struct ResponseFuture<Fut, C = HttpResponses> {
        #[pin]
        future: Option<Fut>,
        charge_in_flight: InFlightCharge<C>,
        refused: Option<Box<Refused>>,
    }
}

impl<Fut, C> ResponseFuture<Fut, C> {
    #[cold]
    pub(super) fn refused(refused: Refused) -> Self {
        Self {
            future: None,
            charge_in_flight: InFlightCharge { held: None },
            refused: Some(Box::new(refused)),
        }
    }

    #[inline]
    pub(super) const fn running(future: Fut, charge_in_flight: InFlightCharge<C>) -> Self {
        Self { future: Some(future), charge_in_flight, refused: None }
    }
}

impl<Fut, C, T, E> Future for ResponseFuture<Fut, C>
where
    Fut: Future<Output = Result<T, E>>,
    C: Respond<T, E>,
    E: Into<BoxError>,
{
    type Output = Result<C::Response, CallError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(future) = this.future.as_pin_mut() else {
            let refused = this.refused.take().unwrap_or_else(|| panic!("polled after completion"));
            return Poll::Ready(Err(CallError::Refused(*refused)));
        };
        let result = ready!(future.poll(context));
        Poll::Ready(this.charge_in_flight.settle(result))
    }
}

impl<Fut, C> fmt::Debug for ResponseFuture<Fut, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("refused", &self.refused).finish_non_exhaustive()
    }
}
