//! The layer for throttles by key and for requests of different costs: always ready, and waits inside the
//! call.
//!
//! The throttle and the cost of a request are unknown before there is a request, so `poll_ready` cannot
//! reserve. A call that waits for one host does not block calls to others.

use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use http_body::Body;
use tidegate_core::authority::{Authority, InvalidAuthority};
use tidegate_core::cost::Cost;
use tower_layer::Layer;
use tower_service::Service;

use super::error::{BoxError, CallError};
use super::future::{ResponseConfig, settle};
use super::reservation::Reservation;
use crate::http::{HttpClasses, LostConnection, ReadError};
use crate::keyed::Keyed;
use crate::permit::Permit;
use crate::permit_body::{Hold, OwnedCharge, PermitBody};
use crate::throttle::Throttle;

/// Selects the throttle of a request.
pub trait Choose<B> {
    /// The throttle.
    ///
    /// # Errors
    /// If the request's host cannot be determined.
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority>;
}

/// One throttle for all requests.
impl<B> Choose<B> for Throttle {
    fn choose(&self, _: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.clone())
    }
}

/// A throttle for each host, by the authority of the request's URI, or by its `Host` header without one.
#[derive(Debug, Clone)]
pub struct ByHost {
    hosts: Keyed<Authority>,
}

impl<B> Choose<B> for ByHost {
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.hosts.throttle(&authority(request)?))
    }
}

/// A throttle for each key that a function extracts from a request.
#[derive(Debug, Clone)]
pub struct ByKey<K, G> {
    keyed: Keyed<K>,
    key: G,
}

impl<K, G, B> Choose<B> for ByKey<K, G>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    G: Fn(&Request<B>) -> K,
{
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.keyed.throttle(&(self.key)(request)))
    }
}

/// The cost of a request. Implemented by any `Fn(&Request<B>) -> Cost`; [`Unit`] is the default.
pub trait Weigh<B> {
    /// The cost.
    fn weigh(&self, request: &Request<B>) -> Cost;
}

/// Every request costs one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unit;

impl<B> Weigh<B> for Unit {
    fn weigh(&self, _: &Request<B>) -> Cost {
        Cost::request()
    }
}

impl<B, F: Fn(&Request<B>) -> Cost> Weigh<B> for F {
    fn weigh(&self, request: &Request<B>) -> Cost {
        self(request)
    }
}

/// Puts a throttle for each key, or one for requests of different costs, in front of a service.
///
/// The service is always ready and waits inside the call; the inner service must be `Clone`, as clients are.
///
/// ```
/// use http::{Request, Response};
/// use http_body_util::Empty;
/// use tidegate::Keyed;
/// use tidegate::tower::WaitLayer;
/// use tower::{Layer as _, ServiceExt as _};
///
/// # type Body = Empty<&'static [u8]>;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let client = tower::service_fn(|_: Request<Body>| async {
///     Ok::<_, std::io::Error>(Response::new(Body::new()))
/// });
/// // A rate that follows each host's capacity, and a circuit for each.
/// let client = WaitLayer::by_host(Keyed::hosts().build()?).layer(client);
///
/// let response = client.oneshot(Request::get("https://example.com/").body(Body::new())?).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WaitLayer<T, W = Unit, F = LostConnection> {
    terms: Arc<Terms<T, W>>,
    config: Arc<ResponseConfig<F>>,
}

/// The throttle and the cost of a request.
#[derive(Debug)]
struct Terms<T, W> {
    choose: T,
    weigh: W,
}

impl WaitLayer<ByHost> {
    /// A throttle for each host.
    pub fn by_host(hosts: Keyed<Authority>) -> Self {
        Self::of(ByHost { hosts }, Unit, Arc::default())
    }
}

impl<K, G> WaitLayer<ByKey<K, G>> {
    /// A throttle for each key that `key` returns: a `Fn(&Request<B>) -> K`.
    pub fn by_key(keyed: Keyed<K>, key: G) -> Self {
        Self::of(ByKey { keyed, key }, Unit, Arc::default())
    }
}

impl<T, W, F> WaitLayer<T, W, F> {
    pub(super) fn of(choose: T, weigh: W, config: Arc<ResponseConfig<F>>) -> Self {
        Self { terms: Arc::new(Terms { choose, weigh }), config }
    }

    /// Sets the cost of requests: `weigh` is a `Fn(&Request<B>) -> Cost`.
    pub fn cost<V>(self, weigh: V) -> WaitLayer<T, V, F>
    where
        T: Clone,
    {
        WaitLayer::of(self.terms.choose.clone(), weigh, self.config)
    }

    /// Replaces the classification of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> WaitLayer<T, W, G> {
        WaitLayer { terms: self.terms, config: Arc::new(ResponseConfig { classes, hold: self.config.hold }) }
    }

    /// Sets how long a request holds its slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        Self { config: Arc::new(ResponseConfig { classes: self.config.classes.clone(), hold }), ..self }
    }
}

impl<T, W, F> Clone for WaitLayer<T, W, F> {
    fn clone(&self) -> Self {
        Self { terms: Arc::clone(&self.terms), config: Arc::clone(&self.config) }
    }
}

impl<S, T, W, F> Layer<S> for WaitLayer<T, W, F> {
    type Service = WaitService<S, T, W, F>;

    fn layer(&self, inner: S) -> WaitService<S, T, W, F> {
        WaitService { inner, terms: Arc::clone(&self.terms), config: Arc::clone(&self.config) }
    }
}

/// A service that waits inside the call. Created by [`WaitLayer`]. Clones share the throttles.
///
/// Dropping a call while it waits leaves the queue; dropping it in flight returns what it holds.
pub struct WaitService<S, T, W = Unit, F = LostConnection> {
    inner: S,
    terms: Arc<Terms<T, W>>,
    config: Arc<ResponseConfig<F>>,
}

impl<S, T, W, F> WaitService<S, T, W, F> {
    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

/// The future of a call that waits, and then runs.
pub type CallFuture<B> = Pin<Box<dyn Future<Output = Result<Response<PermitBody<B>>, CallError>> + Send>>;

impl<S, T, W, F, B, R> Service<Request<B>> for WaitService<S, T, W, F>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError> + Send, Future: Send>,
    S: Clone + Send + 'static,
    T: Choose<B>,
    W: Weigh<B>,
    F: ReadError<S::Error> + Send + Sync + 'static,
    B: Send + 'static,
    R: Body + Send,
{
    type Response = Response<PermitBody<R>>;
    type Error = CallError;
    type Future = CallFuture<R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> CallFuture<R> {
        let throttle = self.terms.choose.choose(&request);
        let cost = self.terms.weigh.weigh(&request);
        // Only a polled instance of the inner service may be ready; `self.inner` never is.
        let mut inner = self.inner.clone();
        let config = Arc::clone(&self.config);
        Box::pin(async move {
            let throttle = throttle?;
            let permit = enter(&throttle, cost, &mut inner).await?;
            let result = inner.call(request).await;
            let outcome = config.outcome(&result, &throttle.inner);
            settle(|| OwnedCharge::of(permit), outcome, config.hold, result)
        })
    }
}

/// Waits for admission, then for the inner service to be ready.
///
/// In this order, so that a long wait for admission does not block the inner service for others.
async fn enter<S, B>(throttle: &Throttle, cost: Cost, inner: &mut S) -> Result<Permit<'static>, CallError>
where
    S: Service<Request<B>, Error: Into<BoxError>>,
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

impl<S: Clone, T, W, F> Clone for WaitService<S, T, W, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), terms: Arc::clone(&self.terms), config: Arc::clone(&self.config) }
    }
}

impl<S: fmt::Debug, T, W, F> fmt::Debug for WaitService<S, T, W, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The authority of a request.
fn authority<B>(request: &Request<B>) -> Result<Authority, InvalidAuthority> {
    let uri = request.uri();
    let Some(authority) = uri.authority() else {
        let host = request.headers().get(::http::header::HOST).and_then(|host| host.to_str().ok());
        return Authority::new(host.unwrap_or_default());
    };
    // With the scheme, which determines the default port.
    match uri.scheme_str() {
        Some(scheme) => Authority::new(&format!("{scheme}://{authority}")),
        None => Authority::new(authority.as_str()),
    }
}
