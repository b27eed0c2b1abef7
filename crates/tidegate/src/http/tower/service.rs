//! The layer for one throttle and requests of one unit each: a ready service holds its charge already.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use ::http::{Request, Response};
use http_body::Body;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tower_layer::Layer;
use tower_service::Service;

use super::error::{BoxError, CallError};
use super::future::{InFlightCharge, ResponseConfig, ResponseFuture, Shared};
use super::reservation::undo;
use super::wait::WaitLayer;
use crate::acquire_future::AcquireFuture;
use crate::http::{HttpClasses, LostConnection, ReadError};
use crate::permit_body::{Hold, PermitBody};
use crate::state::Entry;
use crate::throttle::{Inner, Throttle};

const UNIT: Cost = Cost::request();

/// Puts one throttle in front of a service, for requests of one unit each.
///
/// The charge is reserved in `poll_ready`: a ready service may call at once, and it is not ready before its
/// turn. So it works with load balancers that choose among ready services, and applies backpressure. See [the
/// module](super).
///
/// ```
/// use http::{Request, Response};
/// use http_body_util::Empty;
/// use tidegate::tower::ThrottleLayer;
/// use tidegate::{Rate, Slots, Throttle};
/// use tower::{Layer as _, Service as _, ServiceExt as _};
///
/// # type Body = Empty<&'static [u8]>;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let throttle = Throttle::builder().slots(Slots::fixed(8)).rate(Rate::per_second(50)).build()?;
/// let client = tower::service_fn(|_: Request<Body>| async {
///     Ok::<_, std::io::Error>(Response::new(Body::new()))
/// });
/// let mut client = ThrottleLayer::new(throttle).layer(client);
///
/// let response = client.ready().await?.call(Request::get("https://example.com/").body(Body::new())?).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ThrottleLayer<F = LostConnection> {
    shared: Arc<Shared<F>>,
}

impl ThrottleLayer {
    /// A layer that classifies responses by the default [`Classes`](crate::Classes), every error as a lost
    /// connection, and holds a slot until the body ends.
    pub fn new(throttle: Throttle) -> Self {
        Self::of(throttle, ResponseConfig::default())
    }
}

impl<F> ThrottleLayer<F> {
    fn of(throttle: Throttle, config: ResponseConfig<F>) -> Self {
        Self { shared: Arc::new(Shared { throttle, config: Arc::new(config) }) }
    }

    /// Replaces the classification of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> ThrottleLayer<G> {
        ThrottleLayer::of(
            self.shared.throttle.clone(),
            ResponseConfig { classes, hold: self.shared.config.hold },
        )
    }

    /// Sets how long a request holds its slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        Self::of(
            self.shared.throttle.clone(),
            ResponseConfig { classes: self.shared.config.classes.clone(), hold },
        )
    }

    /// Sets the cost of requests: the service is then always ready, and waits inside the call.
    ///
    /// `weigh` is a `Fn(&Request<B>) -> Cost`.
    pub fn cost<W>(self, weigh: W) -> WaitLayer<Throttle, W, F> {
        WaitLayer::of(self.shared.throttle.clone(), weigh, Arc::clone(&self.shared.config))
    }
}

impl<F> Clone for ThrottleLayer<F> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S, F> Layer<S> for ThrottleLayer<F> {
    type Service = ThrottleService<S, F>;

    fn layer(&self, inner: S) -> ThrottleService<S, F> {
        ThrottleService { inner, shared: Arc::clone(&self.shared), readiness: Readiness::default() }
    }
}

/// A service behind a throttle. Created by [`ThrottleLayer`].
///
/// Clones share the throttle but not readiness: each becomes ready for itself. Dropped while it is ready, it
/// refunds its reservation in full; dropped while it waits, it leaves the queue.
///
/// `call` returns refusals, `poll_ready` never does: there an error means that the service is unusable.
pub struct ThrottleService<S, F = LostConnection> {
    inner: S,
    shared: Arc<Shared<F>>,
    readiness: Readiness,
}

impl<S, F> ThrottleService<S, F> {
    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The throttle.
    pub fn throttle(&self) -> &Throttle {
        &self.shared.throttle
    }
}

impl<S, F, B, R> Service<Request<B>> for ThrottleService<S, F>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>>,
    F: ReadError<S::Error> + Send + Sync + 'static,
    R: Body,
{
    type Response = Response<PermitBody<R>>;
    type Error = CallError;
    type Future = ResponseFuture<S::Future, F>;

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
    fn call(&mut self, request: Request<B>) -> ResponseFuture<S::Future, F> {
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

impl<S: Clone, F> Clone for ThrottleService<S, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared), readiness: Readiness::default() }
    }
}

impl<S, F> Drop for ThrottleService<S, F> {
    fn drop(&mut self) {
        if let Some(charge) = self.readiness.charge.take() {
            undo(&self.shared.throttle.inner, charge);
        }
    }
}

impl<S: fmt::Debug, F> fmt::Debug for ThrottleService<S, F> {
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
