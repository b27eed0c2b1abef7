//! The response future of a throttled call, and how its response is settled.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::http::Response;
use http_body::Body;
use pin_project_lite::pin_project;
use tidegate_core::cost::Charge;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;

use super::error::{BoxError, CallError};
use crate::http::{HttpClasses, LostConnection, ReadError};
use crate::permit_body::{Hold, OwnedCharge, PermitBody, ThrottleHandle};
use crate::run::Classify;
use crate::throttle::{Inner, Throttle};

/// How responses are classified, and how long they hold a slot.
#[derive(Debug)]
pub(super) struct ResponseConfig<F = LostConnection> {
    pub(super) classes: HttpClasses<F>,
    pub(super) hold: Hold,
}

impl Default for ResponseConfig {
    fn default() -> Self {
        Self { classes: HttpClasses::default(), hold: Hold::default() }
    }
}

impl<F> ResponseConfig<F> {
    /// The outcome of a call.
    #[inline]
    pub(super) fn outcome<B, E>(&self, result: &Result<Response<B>, E>, throttle: &Inner) -> Outcome
    where
        F: ReadError<E>,
    {
        // If nothing learns and there are no headers, the outcome does not matter.
        if !throttle.settles_timed() && matches!(result, Ok(response) if response.headers().is_empty()) {
            return Outcome::success();
        }
        self.read(result)
    }

    // Not inlined: it is long, and not needed for responses without headers.
    #[inline(never)]
    fn read<B, E>(&self, result: &Result<Response<B>, E>) -> Outcome
    where
        F: ReadError<E>,
    {
        self.classes.classify(result).outcome()
    }
}

/// Settles a call: an error now, a response when its body ends. `taken` is called where the charge is needed.
#[inline]
pub(super) fn settle<B: Body, E: Into<BoxError>>(
    taken: impl FnOnce() -> OwnedCharge,
    outcome: Outcome,
    hold: Hold,
    result: Result<Response<B>, E>,
) -> Result<Response<PermitBody<B>>, CallError> {
    match result {
        Ok(response) => Ok(response.map(|body| PermitBody::new(taken(), outcome, hold, body))),
        Err(error) => {
            taken().settle(outcome);
            Err(CallError::of(error))
        }
    }
}

/// The state shared by all clones of a service.
#[derive(Debug)]
pub(super) struct Shared<F> {
    pub(super) throttle: Throttle,
    pub(super) config: Arc<ResponseConfig<F>>,
}

impl<F: Send + Sync> ThrottleHandle for Shared<F> {
    #[inline]
    fn throttle(&self) -> &Inner {
        &self.throttle.inner
    }
}

/// The charge of a request in flight. Dropping it returns what it holds, and nothing is learned.
pub(super) struct InFlightCharge<F> {
    /// `None` once settled.
    held: Option<(Arc<Shared<F>>, Charge)>,
}

impl<F> InFlightCharge<F> {
    #[inline]
    pub(super) fn new(shared: &Arc<Shared<F>>, charge: Charge) -> Self {
        Self { held: Some((Arc::clone(shared), shared.throttle.inner.mark_sent(charge))) }
    }
}

impl<F: Send + Sync + 'static> InFlightCharge<F> {
    #[inline]
    fn settle<B: Body, E: Into<BoxError>>(
        &mut self,
        result: Result<Response<B>, E>,
    ) -> Result<Response<PermitBody<B>>, CallError>
    where
        F: ReadError<E>,
    {
        let Some((shared, _)) = &self.held else { panic!("polled after completion") };
        let outcome = shared.config.outcome(&result, &shared.throttle.inner);
        let hold = shared.config.hold;
        settle(|| self.taken(), outcome, hold, result)
    }

    #[inline]
    fn taken(&mut self) -> OwnedCharge {
        let (shared, charge) = self.held.take().unwrap_or_else(|| unreachable!("checked above"));
        OwnedCharge { handle: shared, charge }
    }
}

impl<F> Drop for InFlightCharge<F> {
    fn drop(&mut self) {
        if let Some((shared, charge)) = self.held.take() {
            shared.throttle.inner.settle(charge, None, Outcome::ignored());
        }
    }
}

pin_project! {
    /// The response future of a throttled call. Dropping it returns what it holds, and nothing is learned.
    // Not an enum: its variants would be moved byte by byte on the hottest path.
    pub struct ResponseFuture<Fut, F = LostConnection> {
        #[pin]
        future: Option<Fut>,
        charge_in_flight: InFlightCharge<F>,
        refused: Option<Box<Refused>>,
    }
}

impl<Fut, F> ResponseFuture<Fut, F> {
    #[cold]
    pub(super) fn refused(refused: Refused) -> Self {
        Self {
            future: None,
            charge_in_flight: InFlightCharge { held: None },
            refused: Some(Box::new(refused)),
        }
    }

    #[inline]
    pub(super) const fn running(future: Fut, charge_in_flight: InFlightCharge<F>) -> Self {
        Self { future: Some(future), charge_in_flight, refused: None }
    }
}

impl<Fut, F, B, E> Future for ResponseFuture<Fut, F>
where
    Fut: Future<Output = Result<Response<B>, E>>,
    F: ReadError<E> + Send + Sync + 'static,
    B: Body,
    E: Into<BoxError>,
{
    type Output = Result<Response<PermitBody<B>>, CallError>;

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

impl<Fut, F> fmt::Debug for ResponseFuture<Fut, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("refused", &self.refused).finish_non_exhaustive()
    }
}
