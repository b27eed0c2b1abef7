//! The service for throttles by key and for requests of different costs: always ready, it waits inside the
//! call.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tidegate_core::cost::Cost;
use tower_service::Service;

use super::error::{BoxError, CallError};
use super::future::settle;
use super::reservation::Reservation;
use super::response::{HttpResponses, Respond};
use super::terms::{Choose, Terms, Unit, Weigh};
use crate::permit::Permit;
use crate::permit_body::OwnedCharge;
use crate::throttle::Throttle;

/// A service that waits inside the call. Created by [`WaitLayer`](super::WaitLayer). Clones share the throttles.
///
/// Dropping a call while it waits leaves the queue; dropping it in flight returns what it holds.
pub struct WaitService<S, T, W = Unit, C = HttpResponses> {
    inner: S,
    terms: Arc<Terms<T, W>>,
    config: Arc<C>,
}

impl<S, T, W, C> WaitService<S, T, W, C> {
    pub(super) const fn new(inner: S, terms: Arc<Terms<T, W>>, config: Arc<C>) -> Self {
        Self { inner, terms, config }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

/// The future of a call that waits, and then runs.
pub type CallFuture<T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send>>;

impl<S, T, W, C, R> Service<R> for WaitService<S, T, W, C>
where
    S: Service<R, Response: Send, Error: Into<BoxError> + Send, Future: Send>,
    S: Clone + Send + 'static,
    T: Choose<R>,
    W: Weigh<R>,
    C: Respond<S::Response, S::Error>,
    R: Send + 'static,
{
    type Response = C::Response;
    type Error = CallError;
    type Future = CallFuture<C::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> CallFuture<C::Response> {
        let throttle = self.terms.choose.choose(&request);
        let cost = self.terms.weigh.weigh(&request);
        // Only a polled instance of the inner service may be ready; `self.inner` never is.
        let mut inner = self.inner.clone();
        let config = Arc::clone(&self.config);
        Box::pin(async move {
            let throttle = throttle?;
            let permit = enter(&throttle, cost, &mut inner).await?;
            let result = inner.call(request).await;
            let outcome = config.outcome(&result, throttle.inner.settles_timed());
            settle::<C, _, _>(|| OwnedCharge::of(permit), outcome, config.hold(), result)
        })
    }
}

/// Waits for admission, then for the inner service to be ready.
///
/// In this order, so that a long wait for admission does not block the inner service for others.
async fn enter<S, R>(throttle: &Throttle, cost: Cost, inner: &mut S) -> Result<Permit<'static>, CallError>
where
    S: Service<R, Error: Into<BoxError>>,
{
    loop {
        let permit = throttle.acquire(cost).await?;
        let reserved = Reservation::of(permit.into_owned());
        let mut is_late = false;
        let ready = poll_fn(|context| {
            let ready = inner.poll_ready(context);
            is_late |= ready.is_pending();
            ready
        });
        ready.await.map_err(CallError::of)?;
        if !is_late {
            return Ok(reserved.into_permit());
        }
        match reserved.confirmed() {
            Ok(mut permit) => {
                let charge = permit.charge.take();
                permit.charge = charge.map(|charge| throttle.inner.mark_sent(charge));
                return Ok(permit);
            }
            Err(Some(refused)) => return Err(refused.into()),
            // A pause has begun while the inner service was not ready.
            Err(None) => {}
        }
    }
}

impl<S: Clone, T, W, C> Clone for WaitService<S, T, W, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), terms: Arc::clone(&self.terms), config: Arc::clone(&self.config) }
    }
}

impl<S: fmt::Debug, T, W, C> fmt::Debug for WaitService<S, T, W, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitService").field("inner", &self.inner).finish_non_exhaustive()
    }
}
