//! The service for one throttle and requests of one unit each: a ready service holds its charge already.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tower_service::Service;

use super::error::{BoxError, CallError};
use super::future::{InFlightCharge, ResponseFuture, Shared};
use super::reservation::undo;
use super::response::{HttpResponses, Respond};
use crate::acquire_future::AcquireFuture;
use crate::state::Entry;
use crate::throttle::{Inner, Throttle};

const UNIT: Cost = Cost::request();

/// A service behind a throttle. Created by [`ThrottleLayer`](super::ThrottleLayer).
///
/// Clones share the throttle but not readiness: each becomes ready for itself. Dropped while it is ready, it
/// refunds its reservation in full; dropped while it waits, it leaves the queue.
///
/// `call` returns refusals, `poll_ready` never does: there an error means that the service is unusable.
pub struct ThrottleService<S, C = HttpResponses> {
    inner: S,
    shared: Arc<Shared<C>>,
    readiness: Readiness,
}

impl<S, C> ThrottleService<S, C> {
    pub(super) fn new(inner: S, shared: Arc<Shared<C>>) -> Self {
        Self { inner, shared, readiness: Readiness::default() }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The throttle.
    pub fn throttle(&self) -> &Throttle {
        &self.shared.throttle
    }
}

impl<S, C, R> Service<R> for ThrottleService<S, C>
where
    S: Service<R, Error: Into<BoxError>>,
    C: Respond<S::Response, S::Error>,
{
    type Response = C::Response;
    type Error = CallError;
    type Future = ResponseFuture<S::Future, C>;

    #[inline]
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        // Our turn first, like tower's own limits: the inner service is not blocked for others while we wait.
        match ready!(self.readiness.poll(&self.shared.throttle.inner, context)) {
            Ok(()) => self.inner.poll_ready(context).map_err(CallError::of),
            // Returned by the call. If polled again before that, the throttle is tried again.
            Err(()) => Poll::Ready(Ok(())),
        }
    }

    #[inline]
    fn call(&mut self, request: R) -> ResponseFuture<S::Future, C> {
        let throttle = &self.shared.throttle.inner;
        if throttle.has_begun() || self.readiness.charge.is_none() {
            self.readiness.retry(throttle);
        }
        let Some(charge) = self.readiness.charge.take() else {
            return ResponseFuture::refused(self.readiness.refused());
        };
        // Before the call, so that the charge returns if it panics.
        let charge_in_flight = InFlightCharge::new(&self.shared, charge);
        ResponseFuture::running(self.inner.call(request), charge_in_flight)
    }
}

impl<S: Clone, C> Clone for ThrottleService<S, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared), readiness: Readiness::default() }
    }
}

impl<S, C> Drop for ThrottleService<S, C> {
    fn drop(&mut self) {
        if let Some(charge) = self.readiness.charge.take() {
            undo(&self.shared.throttle.inner, charge);
        }
    }
}

impl<S: fmt::Debug, C> fmt::Debug for ThrottleService<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleService")
            .field("inner", &self.inner)
            .field("throttle", &self.shared.throttle)
            .finish_non_exhaustive()
    }
}

type WaitFuture = Pin<Box<dyn Future<Output = Result<Charge, Refused>> + Send>>;

/// A service's readiness.
// The reservation is a separate field: in an enum variant it would be moved byte by byte on the hottest path.
#[derive(Default)]
struct Readiness {
    /// Reserved; nothing was sent.
    charge: Option<Charge>,
    wait: WaitState,
}

#[derive(Default)]
enum WaitState {
    #[default]
    Idle,
    /// Never locked: the mutex makes the service `Sync`, which the future is not.
    Queued(Mutex<WaitFuture>),
    Refused(Refused),
}

impl Readiness {
    /// Completes when it is admitted or refused.
    #[inline]
    fn poll(&mut self, throttle: &Arc<Inner>, context: &mut Context<'_>) -> Poll<Result<(), ()>> {
        if self.charge.is_none() && matches!(self.wait, WaitState::Idle) {
            // The fast path: slots and a rate are the only gates, and have capacity.
            self.charge = throttle.enter_plain(UNIT, throttle.reading());
        }
        if self.charge.is_some() { Poll::Ready(Ok(())) } else { self.poll_slowly(throttle, context) }
    }

    #[cold]
    fn poll_slowly(&mut self, throttle: &Arc<Inner>, context: &mut Context<'_>) -> Poll<Result<(), ()>> {
        if !matches!(self.wait, WaitState::Queued(_)) {
            match throttle.enter(UNIT, throttle.reading()) {
                Entry::Admitted(charge) => return self.known(Ok(charge)),
                Entry::Refused(refused) => return self.known(Err(refused)),
                Entry::Wait(_) => {
                    let throttle = Arc::clone(throttle);
                    let future: WaitFuture =
                        Box::pin(async move { AcquireFuture::new(&throttle, UNIT, None).await });
                    self.wait = WaitState::Queued(Mutex::new(future));
                }
            }
        }
        let WaitState::Queued(future) = &mut self.wait else { unreachable!("it was queued above") };
        let future = future.get_mut().unwrap_or_else(PoisonError::into_inner);
        let answer = ready!(future.as_mut().poll(context));
        self.known(answer)
    }

    fn known(&mut self, answer: Result<Charge, Refused>) -> Poll<Result<(), ()>> {
        match answer {
            Ok(charge) => {
                (self.charge, self.wait) = (Some(charge), WaitState::Idle);
                Poll::Ready(Ok(()))
            }
            Err(refused) => {
                self.wait = WaitState::Refused(refused);
                Poll::Ready(Err(()))
            }
        }
    }

    /// The service is called without being ready, or the reservation may be held back: sends now or fails. A
    /// caller that was not ready, or whose reservation is no longer valid, may still be admitted.
    #[cold]
    fn retry(&mut self, throttle: &Arc<Inner>) {
        let confirmed = match (self.charge.take(), std::mem::take(&mut self.wait)) {
            (Some(charge), _) => throttle.confirmed(charge),
            (None, WaitState::Refused(refused)) => Err(Some(refused)),
            (None, WaitState::Idle | WaitState::Queued(_)) => Err(None),
        };
        let answer = confirmed.or_else(|refused| match refused {
            Some(refused) => Err(refused),
            None => throttle.try_charge(UNIT, throttle.reading()),
        });
        let _known = self.known(answer);
    }

    /// Why it was not admitted.
    #[cold]
    fn refused(&mut self) -> Refused {
        match std::mem::take(&mut self.wait) {
            WaitState::Refused(refused) => refused,
            WaitState::Idle | WaitState::Queued(_) => unreachable!("a call without a charge was refused"),
        }
    }
}
