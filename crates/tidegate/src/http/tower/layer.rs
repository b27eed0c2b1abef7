//! The layers: one throttle for requests of one unit each, and throttles by key or for different costs.

use std::sync::Arc;

use tidegate_core::authority::Authority;
use tower_layer::Layer;

use super::future::Shared;
use super::response::{HttpResponses, Results};
use super::service::ThrottleService;
use super::terms::{ByHost, ByKey, Terms, Unit};
use super::wait::WaitService;
use crate::http::HttpClasses;
use crate::keyed::Keyed;
use crate::permit_body::Hold;
use crate::throttle::Throttle;

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
///
/// Any other service is throttled with a classifier of its results:
///
/// ```
/// use tidegate::tower::ThrottleLayer;
/// use tidegate::{Class, Cost, Outcome, Throttle};
/// use tower::{Layer as _, ServiceExt as _};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// // A model: its requests are prompts, its responses the answer and the tokens that it took.
/// let model = tower::service_fn(|prompt: &'static str| async move {
///     Ok::<_, std::io::Error>((prompt.to_uppercase(), 5))
/// });
/// let layer = ThrottleLayer::new(Throttle::new())
///     .classifier(|result: &Result<(String, u64), std::io::Error>| match result {
///         Ok((_, tokens)) => Class::end(Outcome::success().spent(Cost::from(*tokens))),
///         Err(_) => Class::again(Outcome::failure()),
///     })
///     .cost(|prompt: &&'static str| Cost::from(prompt.len() as u64));
///
/// assert_eq!(layer.layer(model).oneshot("hello").await?.0, "HELLO");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ThrottleLayer<C = HttpResponses> {
    shared: Arc<Shared<C>>,
}

impl ThrottleLayer {
    /// A layer for HTTP, which classifies responses by the default [`Classes`](crate::Classes), every error
    /// as a lost connection, and holds a slot until the body ends.
    pub fn new(throttle: Throttle) -> Self {
        Self::of(throttle, HttpResponses::default())
    }
}

impl<F> ThrottleLayer<HttpResponses<F>> {
    /// Replaces the classification of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> ThrottleLayer<HttpResponses<G>> {
        let hold = self.shared.config.hold;
        ThrottleLayer::of(self.shared.throttle.clone(), HttpResponses { classes, hold })
    }

    /// Sets how long a request holds its slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        let classes = self.shared.config.classes.clone();
        Self::of(self.shared.throttle.clone(), HttpResponses { classes, hold })
    }
}

impl<C> ThrottleLayer<C> {
    fn of(throttle: Throttle, config: C) -> Self {
        Self { shared: Arc::new(Shared { throttle, config: Arc::new(config) }) }
    }

    /// A layer for services of any kind: `classifier` is a [`Classify`](crate::Classify), such as a
    /// `Fn(&Result<T, E>) -> Class`. A slot returns with the response.
    pub fn classifier<D>(self, classifier: D) -> ThrottleLayer<Results<D>> {
        ThrottleLayer::of(self.shared.throttle.clone(), Results { classifier })
    }

    /// Sets the cost of requests: the service is then always ready, and waits inside the call.
    ///
    /// `weigh` is a `Fn(&R) -> Cost`, where `R` is the request.
    pub fn cost<W>(self, weigh: W) -> WaitLayer<Throttle, W, C> {
        WaitLayer::of(self.shared.throttle.clone(), weigh, Arc::clone(&self.shared.config))
    }
}

impl<C> Clone for ThrottleLayer<C> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S, C> Layer<S> for ThrottleLayer<C> {
    type Service = ThrottleService<S, C>;

    fn layer(&self, inner: S) -> ThrottleService<S, C> {
        ThrottleService::new(inner, Arc::clone(&self.shared))
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
pub struct WaitLayer<T, W = Unit, C = HttpResponses> {
    terms: Arc<Terms<T, W>>,
    config: Arc<C>,
}

impl WaitLayer<ByHost> {
    /// A throttle for each host.
    pub fn by_host(hosts: Keyed<Authority>) -> Self {
        Self::of(ByHost { hosts }, Unit, Arc::default())
    }
}

impl<K, G> WaitLayer<ByKey<K, G>> {
    /// A throttle for each key that `key` returns: a `Fn(&R) -> K`, where `R` is the request.
    pub fn by_key(keyed: Keyed<K>, key: G) -> Self {
        Self::of(ByKey { keyed, key }, Unit, Arc::default())
    }
}

impl<T, W, F> WaitLayer<T, W, HttpResponses<F>> {
    /// Replaces the classification of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> WaitLayer<T, W, HttpResponses<G>> {
        let hold = self.config.hold;
        WaitLayer { terms: self.terms, config: Arc::new(HttpResponses { classes, hold }) }
    }

    /// Sets how long a request holds its slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        let classes = self.config.classes.clone();
        Self { config: Arc::new(HttpResponses { classes, hold }), ..self }
    }
}

impl<T, W, C> WaitLayer<T, W, C> {
    fn of(choose: T, weigh: W, config: Arc<C>) -> Self {
        Self { terms: Arc::new(Terms { choose, weigh }), config }
    }

    /// A layer for services of any kind: `classifier` is a [`Classify`](crate::Classify), such as a
    /// `Fn(&Result<T, E>) -> Class`. A slot returns with the response.
    pub fn classifier<D>(self, classifier: D) -> WaitLayer<T, W, Results<D>> {
        WaitLayer { terms: self.terms, config: Arc::new(Results { classifier }) }
    }

    /// Sets the cost of requests: `weigh` is a `Fn(&R) -> Cost`, where `R` is the request.
    pub fn cost<V>(self, weigh: V) -> WaitLayer<T, V, C>
    where
        T: Clone,
    {
        WaitLayer::of(self.terms.choose.clone(), weigh, self.config)
    }
}

impl<T, W, C> Clone for WaitLayer<T, W, C> {
    fn clone(&self) -> Self {
        Self { terms: Arc::clone(&self.terms), config: Arc::clone(&self.config) }
    }
}

impl<S, T, W, C> Layer<S> for WaitLayer<T, W, C> {
    type Service = WaitService<S, T, W, C>;

    fn layer(&self, inner: S) -> WaitService<S, T, W, C> {
        WaitService::new(inner, Arc::clone(&self.terms), Arc::clone(&self.config))
    }
}
