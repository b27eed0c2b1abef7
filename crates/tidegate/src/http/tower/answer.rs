//! A call under way, and what its answer means to the throttle.

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
use crate::held::{HeldBody, Hold, Taken, Way};
use crate::http::{HttpClasses, Lost, ReadError};
use crate::run::Classify;
use crate::throttle::{Inner, Throttle};

/// How answers are read, and how long they hold a slot.
#[derive(Debug)]
pub(super) struct Reads<F = Lost> {
    pub(super) classes: HttpClasses<F>,
    pub(super) hold: Hold,
}

impl Default for Reads {
    fn default() -> Self {
        Self { classes: HttpClasses::default(), hold: Hold::default() }
    }
}

impl<F> Reads<F> {
    /// How a call went.
    #[inline]
    pub(super) fn outcome<B, E>(&self, result: &Result<Response<B>, E>, throttle: &Inner) -> Outcome
    where
        F: ReadError<E>,
    {
        // Where nothing learns and nothing was said, it does not matter how it went.
        if !throttle.settles_timed() && matches!(result, Ok(response) if response.headers().is_empty()) {
            return Outcome::success();
        }
        self.read(result)
    }

    // Not part of the caller: it is long, and where nothing is said it is not needed.
    #[inline(never)]
    fn read<B, E>(&self, result: &Result<Response<B>, E>) -> Outcome
    where
        F: ReadError<E>,
    {
        self.classes.classify(result).outcome()
    }
}

/// Ends a call that went like this: an error now, a response when its body ends. What was `taken` is asked for where it goes.
#[inline]
pub(super) fn settle<B: Body, E: Into<BoxError>>(
    taken: impl FnOnce() -> Taken,
    outcome: Outcome,
    hold: Hold,
    result: Result<Response<B>, E>,
) -> Result<Response<HeldBody<B>>, CallError> {
    match result {
        Ok(response) => Ok(response.map(|body| HeldBody::new(taken(), outcome, hold, body))),
        Err(error) => {
            taken().settle(outcome);
            Err(CallError::of(error))
        }
    }
}

/// What all clones of a service share.
#[derive(Debug)]
pub(super) struct Shared<F> {
    pub(super) throttle: Throttle,
    pub(super) reads: Arc<Reads<F>>,
}

impl<F: Send + Sync> Way for Shared<F> {
    #[inline]
    fn throttle(&self) -> &Inner {
        &self.throttle.inner
    }
}

/// A request that has gone out: dropped, it gives back what it holds, and nothing is learned.
pub(super) struct Gone<F> {
    /// Taken when it is answered.
    held: Option<(Arc<Shared<F>>, Charge)>,
}

impl<F> Gone<F> {
    #[inline]
    pub(super) fn new(shared: &Arc<Shared<F>>, charge: Charge) -> Self {
        Self { held: Some((Arc::clone(shared), shared.throttle.inner.goes_out(charge))) }
    }
}

impl<F: Send + Sync + 'static> Gone<F> {
    #[inline]
    fn settle<B: Body, E: Into<BoxError>>(
        &mut self,
        result: Result<Response<B>, E>,
    ) -> Result<Response<HeldBody<B>>, CallError>
    where
        F: ReadError<E>,
    {
        let Some((shared, _)) = &self.held else { panic!("polled after it was done") };
        let outcome = shared.reads.outcome(&result, &shared.throttle.inner);
        let hold = shared.reads.hold;
        settle(|| self.taken(), outcome, hold, result)
    }

    #[inline]
    fn taken(&mut self) -> Taken {
        let (shared, charge) = self.held.take().unwrap_or_else(|| unreachable!("it was looked at above"));
        Taken { way: shared, charge }
    }
}

impl<F> Drop for Gone<F> {
    fn drop(&mut self) {
        if let Some((shared, charge)) = self.held.take() {
            shared.throttle.inner.settle(charge, None, Outcome::ignored());
        }
    }
}

pin_project! {
    /// A call under way. Dropped, it gives back what it holds, and nothing is learned.
    // Not one of two variants: those would be moved byte by byte on the hottest path.
    pub struct Answering<Fut, F = Lost> {
        #[pin]
        future: Option<Fut>,
        gone: Gone<F>,
        refused: Option<Box<Refused>>,
    }
}

impl<Fut, F> Answering<Fut, F> {
    #[cold]
    pub(super) fn refused(refused: Refused) -> Self {
        Self { future: None, gone: Gone { held: None }, refused: Some(Box::new(refused)) }
    }

    #[inline]
    pub(super) const fn running(future: Fut, gone: Gone<F>) -> Self {
        Self { future: Some(future), gone, refused: None }
    }
}

impl<Fut, F, B, E> Future for Answering<Fut, F>
where
    Fut: Future<Output = Result<Response<B>, E>>,
    F: ReadError<E> + Send + Sync + 'static,
    B: Body,
    E: Into<BoxError>,
{
    type Output = Result<Response<HeldBody<B>>, CallError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(future) = this.future.as_pin_mut() else {
            let refused = this.refused.take().unwrap_or_else(|| panic!("polled after it was done"));
            return Poll::Ready(Err(CallError::Refused(*refused)));
        };
        let result = ready!(future.poll(context));
        Poll::Ready(this.gone.settle(result))
    }
}

impl<Fut, F> fmt::Debug for Answering<Fut, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answering").field("refused", &self.refused).finish_non_exhaustive()
    }
}
