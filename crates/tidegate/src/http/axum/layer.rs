//! The layer: draws for each request, and rejects it if the draw is refused.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use tidegate_client::Problem;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tower_layer::Layer;
use tower_service::Service;

use super::codec::response_of;
use super::key::{ByHeader, ByKey, ByToken, Key, KeyExtractor, OneRequest, Price, Units};
use super::problem::{internal, problem};
use crate::http::{LimitField, rate_limit_fields};
use crate::limiter::{Lease, LimitError, Limiter};

/// How much detail a rejected caller gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorDetail {
    /// The fact, when to retry, and the remaining units per limit name: suitable for untrusted callers.
    #[default]
    Minimal,
    /// Every limit drawn from, its subject and its source, and internal errors. For trusted callers.
    Full,
}

/// The units a request has used, decided by its response.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnitsUsed {
    /// All units drawn.
    All,
    /// None: the units drawn return.
    Nothing,
    /// The given units of the named limits, and all units drawn of the others.
    Units(Units),
}

type Settle = Arc<dyn Fn(StatusCode, &HeaderMap) -> UnitsUsed + Send + Sync>;
type Listener = Arc<dyn Fn(&LimitError) + Send + Sync>;

/// Draws from a limiter for each request, and answers 429 if a limit is exceeded; see [the module](super).
pub struct LimitLayer<W, P = OneRequest> {
    terms: Arc<Terms<W, P>>,
}

/// Extracts key and cost, and draws.
struct Terms<W, P> {
    config: DrawConfig,
    extractor: W,
    price: P,
}

/// The limiter and the options of a draw.
#[derive(Clone)]
struct DrawConfig {
    limiter: Limiter,
    resource: ResourceName,
    fallback: Option<EntityId>,
    within: Option<Duration>,
    settle: Option<Settle>,
    error_detail: ErrorDetail,
    on_refused: Option<Listener>,
}

impl LimitLayer<ByHeader> {
    /// Each request draws for the entity named in `header`. For servers behind a gateway that sets the
    /// header: a client that can set it chooses who is charged.
    pub fn by_header(limiter: Limiter, resource: ResourceName, header: HeaderName) -> Self {
        Self::of(DrawConfig::new(limiter, resource), ByHeader(header), OneRequest)
    }
}

impl<G: Fn(&str) -> Option<EntityId>> LimitLayer<ByToken<G>> {
    /// Each request draws for the entity of its `Authorization: Bearer` token, which `whose` looks up. The
    /// token itself is never stored or logged.
    pub fn by_token(limiter: Limiter, resource: ResourceName, whose: G) -> Self {
        Self::of(DrawConfig::new(limiter, resource), ByToken(whose), OneRequest)
    }
}

impl<G> LimitLayer<ByKey<G>> {
    /// Each request draws for the entity that `key` extracts: a `Fn(&Request<B>)` that returns an
    /// `Option<EntityId>` or a [`Key`].
    pub fn by_key(limiter: Limiter, resource: ResourceName, key: G) -> Self {
        Self::of(DrawConfig::new(limiter, resource), ByKey(key), OneRequest)
    }
}

impl<W, P> LimitLayer<W, P> {
    fn of(config: DrawConfig, extractor: W, price: P) -> Self {
        Self { terms: Arc::new(Terms { config, extractor, price }) }
    }

    /// Sets the cost of requests: `price` is a `Fn(&Request<B>) -> Vec<(&str, u64)>`. An empty list draws
    /// nothing.
    pub fn cost<Q>(self, price: Q) -> LimitLayer<W, Q>
    where
        W: Clone,
    {
        LimitLayer::of(self.terms.config.clone(), self.terms.extractor.clone(), price)
    }

    /// Requests without a key draw for `entity` instead of being rejected.
    #[must_use]
    pub fn fallback(self, entity: EntityId) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|config| config.fallback = Some(entity))
    }

    /// Requests wait up to `span` for short limits, in FIFO order.
    #[must_use]
    pub fn within(self, span: Duration) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|config| config.within = Some(span))
    }

    /// Settles by the response: `settle` gets its status and headers, and returns the units used.
    ///
    /// Without it the units drawn are spent, whatever the response. With it a request holds a lease while it
    /// is served, which is settled when the response's headers are known. If the client disconnects before
    /// that, all units drawn are used.
    #[must_use]
    pub fn settle(self, settle: impl Fn(StatusCode, &HeaderMap) -> UnitsUsed + Send + Sync + 'static) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|config| config.settle = Some(Arc::new(settle)))
    }

    /// Sets how much detail a rejected caller gets.
    #[must_use]
    pub fn error_detail(self, detail: ErrorDetail) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|config| config.error_detail = detail)
    }

    /// Registers a listener for every error that rejects a request: exceeded limits and internal errors. It
    /// runs on the task that serves the request.
    #[must_use]
    pub fn on_refused(self, listener: impl Fn(&LimitError) + Send + Sync + 'static) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|config| config.on_refused = Some(Arc::new(listener)))
    }

    fn with(self, change: impl FnOnce(&mut DrawConfig)) -> Self
    where
        W: Clone,
        P: Clone,
    {
        let Terms { config, extractor, price } = &*self.terms;
        let (mut config, extractor, price) = (config.clone(), extractor.clone(), price.clone());
        change(&mut config);
        Self::of(config, extractor, price)
    }
}

impl<W, P> Clone for LimitLayer<W, P> {
    fn clone(&self) -> Self {
        Self { terms: Arc::clone(&self.terms) }
    }
}

impl<S, W, P> Layer<S> for LimitLayer<W, P> {
    type Service = LimitService<S, W, P>;

    fn layer(&self, inner: S) -> LimitService<S, W, P> {
        LimitService { inner, terms: Arc::clone(&self.terms) }
    }
}

/// A service that draws for each request. Created by [`LimitLayer`].
pub struct LimitService<S, W, P = OneRequest> {
    inner: S,
    terms: Arc<Terms<W, P>>,
}

/// The future of a request being served.
pub type ServeFuture<R, E> = Pin<Box<dyn Future<Output = Result<Response<R>, E>> + Send>>;

impl<S, W, P, B, R> Service<Request<B>> for LimitService<S, W, P>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send, Error: Send> + Clone + Send + 'static,
    W: KeyExtractor<B>,
    P: Price<B>,
    B: Send + 'static,
    R: From<String> + Send,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = ServeFuture<R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> ServeFuture<R, S::Error> {
        // The polled instance serves the request; the clone takes its place.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let (key, price) = (self.terms.extractor.extract(&request), self.terms.price.price(&request));
        if price.is_empty() {
            return Box::pin(inner.call(request));
        }
        let config = self.terms.config.clone();
        Box::pin(async move {
            let drawn = match config.draw(key, &price).await {
                Ok(drawn) => drawn,
                Err(refusal) => return Ok(config.refuse(&refusal)),
            };
            let response = inner.call(request).await;
            let head = response.as_ref().ok().map(|response| (response.status(), response.headers()));
            let limits = drawn.settle(head).await;
            response.map(|mut response| {
                rate_limit_fields(response.headers_mut(), &limits);
                response
            })
        })
    }
}

/// Why a request is rejected.
enum Refusal {
    Limiter(LimitError),
    Key(Problem),
}

impl DrawConfig {
    const fn new(limiter: Limiter, resource: ResourceName) -> Self {
        Self {
            limiter,
            resource,
            fallback: None,
            within: None,
            settle: None,
            error_detail: ErrorDetail::Minimal,
            on_refused: None,
        }
    }

    async fn draw(&self, key: Key, price: &[(&'static str, u64)]) -> Result<RequestDraw, Refusal> {
        let entity = match (key, &self.fallback) {
            (Key::Of(entity), _) => entity,
            (Key::Missing | Key::NoToken, Some(entity)) => entity.clone(),
            (Key::Missing, None) => {
                let detail = "the request does not identify an entity";
                return Err(Refusal::Key(Problem::new(400, "no-key", "No key", detail)));
            }
            (Key::NoToken, None) => {
                let detail = "the request needs a valid token, as `Authorization: Bearer`";
                return Err(Refusal::Key(Problem::new(401, "no-token", "No valid token", detail)));
            }
            (Key::Invalid(what), _) => {
                return Err(Refusal::Key(Problem::new(400, "invalid-key", "No key", what)));
            }
        };
        let request = self.limiter.request((entity.as_str(), self.resource.as_str()), price);
        let drawn = match (self.within, &self.settle) {
            (None, None) => {
                return request.spend_with_balances().await.map(RequestDraw::Spent).map_err(Refusal::Limiter);
            }
            (Some(within), _) => request.acquire_within(within).await,
            (None, Some(_)) => request.try_acquire().await,
        };
        let lease = drawn.map_err(Refusal::Limiter)?;
        let balances = lease.balances();
        Ok(RequestDraw::Leased(ServedLease { lease: Some(lease), balances, settle: self.settle.clone() }))
    }

    fn refuse<R: From<String>>(&self, refusal: &Refusal) -> Response<R> {
        let error = match refusal {
            Refusal::Key(problem) => return response_of(problem, &[]),
            Refusal::Limiter(error) => error,
        };
        if let Some(listener) = &self.on_refused {
            listener(error);
        }
        let lines = error.limited().map(|limited| &limited.lines[..]).unwrap_or_default();
        let limits: Vec<LimitField<'_>> = lines.iter().map(|line| (&line.balance).into()).collect();
        let whole = problem(error);
        let problem = match self.error_detail {
            ErrorDetail::Full => whole,
            ErrorDetail::Minimal => minimal(error, whole),
        };
        response_of(&problem, &limits)
    }
}

/// The problem for untrusted callers, without subjects and internal errors.
fn minimal(error: &LimitError, whole: Problem) -> Problem {
    let detail = match error {
        LimitError::Limited(_) | LimitError::Waiting { .. } => "too many requests for now",
        LimitError::TooLarge(_) => "the request exceeds the maximum that can be granted at once",
        LimitError::Busy { .. } | LimitError::Closed | LimitError::Unavailable { .. } => {
            "the service cannot handle the request now"
        }
        LimitError::Disabled { .. } => "requests of this caller are refused",
        // The caller has chosen neither the limits nor the cost.
        _ => return internal(),
    };
    Problem { detail: detail.to_owned(), limits: Vec::new(), ..whole }
}

/// The result of a request's draw.
enum RequestDraw {
    /// Already settled.
    Spent(Vec<Balance>),
    Leased(ServedLease),
}

impl RequestDraw {
    /// Settles by the response, and returns the balances as of the draw. `None` is an error of the service.
    async fn settle(self, head: Option<(StatusCode, &HeaderMap)>) -> Vec<Balance> {
        match self {
            Self::Spent(balances) => balances,
            Self::Leased(leased) => leased.settle(head).await,
        }
    }
}

/// Units held while a request is served.
struct ServedLease {
    lease: Option<Lease>,
    balances: Vec<Balance>,
    settle: Option<Settle>,
}

impl ServedLease {
    async fn settle(mut self, head: Option<(StatusCode, &HeaderMap)>) -> Vec<Balance> {
        let used = match (&self.settle, head) {
            (Some(settle), Some((status, headers))) => settle(status, headers),
            _ => UnitsUsed::All,
        };
        // If the store is unavailable, the settler sends the ending later; the response does not wait for
        // that.
        if let Some(mut lease) = self.lease.take() {
            let settled = match &used {
                UnitsUsed::All => lease.settle_full().await,
                UnitsUsed::Nothing => lease.cancel().await,
                UnitsUsed::Units(units) => lease.settle(units).await,
            };
            if settled.is_err() && matches!(used, UnitsUsed::Units(_)) {
                // It named an unknown limit. Nothing was sent, so the units drawn count as used.
                drop(lease.settle_full().await);
            }
        }
        std::mem::take(&mut self.balances)
    }
}

impl Drop for ServedLease {
    /// The client disconnected while the request was served: it pays in full.
    fn drop(&mut self) {
        if let (Some(mut lease), Ok(runtime)) = (self.lease.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { drop(lease.settle_full().await) });
        }
    }
}

impl<S: Clone, W, P> Clone for LimitService<S, W, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), terms: Arc::clone(&self.terms) }
    }
}

impl<W, P> fmt::Debug for LimitLayer<W, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer").field("resource", &self.terms.config.resource).finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, W, P> fmt::Debug for LimitService<S, W, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitService")
            .field("inner", &self.inner)
            .field("resource", &self.terms.config.resource)
            .finish_non_exhaustive()
    }
}
