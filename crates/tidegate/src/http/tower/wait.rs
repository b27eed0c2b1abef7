//! The layer for throttles by key and for requests of different costs: always ready, and waiting inside the call.
//!
//! Which throttle a request needs, and how much of it, is not known before there is a request, so `poll_ready` has nothing to
//! reserve. A host that has to wait keeps nobody else from being called.

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

use super::answer::{Reads, settle};
use super::error::{BoxError, CallError};
use super::reserved::Reserved;
use crate::held::{HeldBody, Hold, Taken};
use crate::http::{HttpClasses, Lost, ReadError};
use crate::keyed::Keyed;
use crate::permit::Permit;
use crate::throttle::Throttle;

/// Chooses the throttle of a request.
pub trait Choose<B> {
    /// The throttle.
    ///
    /// # Errors
    /// Where the request goes to no host that can be told.
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority>;
}

/// One throttle for all.
impl<B> Choose<B> for Throttle {
    fn choose(&self, _: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.clone())
    }
}

/// A throttle for each host that requests go to, by the authority of their URI, or by their `Host` where it has none.
#[derive(Debug, Clone)]
pub struct ByHost {
    hosts: Keyed<Authority>,
}

impl<B> Choose<B> for ByHost {
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.hosts.throttle(&authority(request)?))
    }
}

/// A throttle for each key that a function finds in a request.
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

/// Says what a request costs. Any `Fn(&Request<B>) -> Cost` does; [`Unit`] is the default.
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
/// Its services are always ready and wait inside the call; the service behind them must be `Clone`, as clients are.
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
/// // A rate that follows what each host bears, and a circuit for each.
/// let client = WaitLayer::by_host(Keyed::hosts().build()?).layer(client);
///
/// let response = client.oneshot(Request::get("https://example.com/").body(Body::new())?).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WaitLayer<T, W = Unit, F = Lost> {
    terms: Arc<Terms<T, W>>,
    reads: Arc<Reads<F>>,
}

/// Which throttle, and how much of it.
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
    /// A throttle for each key, which is what `key` answers: a `Fn(&Request<B>) -> K`.
    pub fn by_key(keyed: Keyed<K>, key: G) -> Self {
        Self::of(ByKey { keyed, key }, Unit, Arc::default())
    }
}

impl<T, W, F> WaitLayer<T, W, F> {
    pub(super) fn of(choose: T, weigh: W, reads: Arc<Reads<F>>) -> Self {
        Self { terms: Arc::new(Terms { choose, weigh }), reads }
    }

    /// The same for requests that cost what `weigh` says: a `Fn(&Request<B>) -> Cost`.
    pub fn cost<V>(self, weigh: V) -> WaitLayer<T, V, F>
    where
        T: Clone,
    {
        WaitLayer::of(self.terms.choose.clone(), weigh, self.reads)
    }

    /// The same with another reading of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> WaitLayer<T, W, G> {
        WaitLayer { terms: self.terms, reads: Arc::new(Reads { classes, hold: self.reads.hold }) }
    }

    /// The same with another end of the slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        Self { reads: Arc::new(Reads { classes: self.reads.classes.clone(), hold }), ..self }
    }
}

impl<T, W, F> Clone for WaitLayer<T, W, F> {
    fn clone(&self) -> Self {
        Self { terms: Arc::clone(&self.terms), reads: Arc::clone(&self.reads) }
    }
}

impl<S, T, W, F> Layer<S> for WaitLayer<T, W, F> {
    type Service = Waits<S, T, W, F>;

    fn layer(&self, inner: S) -> Waits<S, T, W, F> {
        Waits { inner, terms: Arc::clone(&self.terms), reads: Arc::clone(&self.reads) }
    }
}

/// A service that waits inside the call; made by [`WaitLayer`]. Clones share the throttles.
///
/// A call that is dropped while it waits leaves the line; dropped while it runs, it gives back what it holds.
pub struct Waits<S, T, W = Unit, F = Lost> {
    inner: S,
    terms: Arc<Terms<T, W>>,
    reads: Arc<Reads<F>>,
}

impl<S, T, W, F> Waits<S, T, W, F> {
    /// The service behind it.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

/// A call that waits, and then runs.
pub type Calling<B> = Pin<Box<dyn Future<Output = Result<Response<HeldBody<B>>, CallError>> + Send>>;

impl<S, T, W, F, B, R> Service<Request<B>> for Waits<S, T, W, F>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError> + Send, Future: Send>,
    S: Clone + Send + 'static,
    T: Choose<B>,
    W: Weigh<B>,
    F: ReadError<S::Error> + Send + Sync + 'static,
    B: Send + 'static,
    R: Body + Send,
{
    type Response = Response<HeldBody<R>>;
    type Error = CallError;
    type Future = Calling<R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Calling<R> {
        let throttle = self.terms.choose.choose(&request);
        let cost = self.terms.weigh.weigh(&request);
        // Of a service only a clone is ready when it has been asked; this one never was.
        let mut inner = self.inner.clone();
        let reads = Arc::clone(&self.reads);
        Box::pin(async move {
            let throttle = throttle?;
            let permit = enter(&throttle, cost, &mut inner).await?;
            let result = inner.call(request).await;
            let outcome = reads.outcome(&result, &throttle.inner);
            settle(|| Taken::of(permit), outcome, reads.hold, result)
        })
    }
}

/// Waits for the turn of a request, and then for the service behind to be ready.
///
/// In this order: whoever waits for its turn for minutes keeps nothing from others.
async fn enter<S, B>(throttle: &Throttle, cost: Cost, inner: &mut S) -> Result<Permit<'static>, CallError>
where
    S: Service<Request<B>, Error: Into<BoxError>>,
{
    loop {
        let permit = throttle.acquire(cost).await?;
        let reserved = Reserved::of(permit.into_owned());
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
                permit.charge = charge.map(|charge| throttle.inner.goes_out(charge));
                return Ok(permit);
            }
            Err(Some(refused)) => return Err(refused.into()),
            // A pause has begun while the service behind was not ready.
            Err(None) => {}
        }
    }
}

impl<S: Clone, T, W, F> Clone for Waits<S, T, W, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), terms: Arc::clone(&self.terms), reads: Arc::clone(&self.reads) }
    }
}

impl<S: fmt::Debug, T, W, F> fmt::Debug for Waits<S, T, W, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waits").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The far side of a request.
fn authority<B>(request: &Request<B>) -> Result<Authority, InvalidAuthority> {
    let uri = request.uri();
    let Some(authority) = uri.authority() else {
        let host = request.headers().get(::http::header::HOST).and_then(|host| host.to_str().ok());
        return Authority::new(host.unwrap_or_default());
    };
    // With its scheme: which port is the usual one depends on it.
    match uri.scheme_str() {
        Some(scheme) => Authority::new(&format!("{scheme}://{authority}")),
        None => Authority::new(authority.as_str()),
    }
}
