//! The layer: draws for each request, and answers for it where there is nothing to draw.

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

use super::codec::answer;
use super::problem::{internal, problem};
use super::who::{ByHeader, ByKey, ByToken, Key, OneRequest, Price, Units, Who};
use crate::http::{LimitField, rate_limit_fields};
use crate::limiter::{Lease, LimitError, Limiter};

/// How much is told to those who are refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tell {
    /// That it is too much, when to come back, and what is left of limits of each name: what strangers may know.
    #[default]
    Little,
    /// Every limit that was asked, whose it is and where it is written; and what is wrong in here. For programs of one's own.
    Everything,
}

/// What a request has used, by its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Used {
    /// All that was drawn.
    All,
    /// Nothing: what was drawn returns.
    Nothing,
    /// So many units of the limits named, and all that was drawn of the others.
    Units(Units),
}

type Settle = Arc<dyn Fn(StatusCode, &HeaderMap) -> Used + Send + Sync>;
type Listener = Arc<dyn Fn(&LimitError) + Send + Sync>;

/// Draws from a limiter for each request, and answers 429 where a limit is used up; see [the module](super).
pub struct LimitLayer<W, P = OneRequest> {
    terms: Arc<Terms<W, P>>,
}

/// Who draws what, and what becomes of it.
struct Terms<W, P> {
    desk: Desk,
    who: W,
    price: P,
}

/// Where it is drawn, and on what terms.
#[derive(Clone)]
struct Desk {
    limiter: Limiter,
    resource: ResourceName,
    otherwise: Option<EntityId>,
    within: Option<Duration>,
    settle: Option<Settle>,
    tell: Tell,
    on_refused: Option<Listener>,
}

impl LimitLayer<ByHeader> {
    /// Each request draws for the entity that is named in `header`. For servers behind a gateway that sets it: whoever can
    /// set it chooses who pays.
    pub fn by_header(limiter: Limiter, resource: ResourceName, header: HeaderName) -> Self {
        Self::of(Desk::new(limiter, resource), ByHeader(header), OneRequest)
    }
}

impl<G: Fn(&str) -> Option<EntityId>> LimitLayer<ByToken<G>> {
    /// Each request draws for the entity whose token it brings as `Authorization: Bearer`. `whose` knows: the token itself is
    /// never written anywhere.
    pub fn by_token(limiter: Limiter, resource: ResourceName, whose: G) -> Self {
        Self::of(Desk::new(limiter, resource), ByToken(whose), OneRequest)
    }
}

impl<G> LimitLayer<ByKey<G>> {
    /// Each request draws for the entity that `key` finds in it: a `Fn(&Request<B>)` that answers an `Option<EntityId>` or a
    /// [`Key`].
    pub fn by_key(limiter: Limiter, resource: ResourceName, key: G) -> Self {
        Self::of(Desk::new(limiter, resource), ByKey(key), OneRequest)
    }
}

impl<W, P> LimitLayer<W, P> {
    fn of(desk: Desk, who: W, price: P) -> Self {
        Self { terms: Arc::new(Terms { desk, who, price }) }
    }

    /// The same for requests that cost what `price` says: a `Fn(&Request<B>) -> Vec<(&str, u64)>`. An empty list draws nothing.
    pub fn cost<Q>(self, price: Q) -> LimitLayer<W, Q>
    where
        W: Clone,
    {
        LimitLayer::of(self.terms.desk.clone(), self.terms.who.clone(), price)
    }

    /// The same where requests of which nobody can tell whose they are draw for `entity`, instead of being refused.
    #[must_use]
    pub fn otherwise(self, entity: EntityId) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|desk| desk.otherwise = Some(entity))
    }

    /// The same where requests wait up to `span` for what is short, in the order of asking.
    #[must_use]
    pub fn within(self, span: Duration) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|desk| desk.within = Some(span))
    }

    /// The same where the answer says what was used: `settle` is told its status and headers.
    ///
    /// Without this what was drawn is spent, whatever the answer. With it a request has a lease while it is served, and it is
    /// settled when the answer's headers are known. A request whose caller goes away before that has used all it drew.
    #[must_use]
    pub fn settle(self, settle: impl Fn(StatusCode, &HeaderMap) -> Used + Send + Sync + 'static) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|desk| desk.settle = Some(Arc::new(settle)))
    }

    /// The same with more told, or less.
    #[must_use]
    pub fn tell(self, tell: Tell) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|desk| desk.tell = tell)
    }

    /// The same where `listener` hears of everything that keeps a request out: limits that are used up, and what is wrong in
    /// here. It runs on the task that serves the request.
    #[must_use]
    pub fn on_refused(self, listener: impl Fn(&LimitError) + Send + Sync + 'static) -> Self
    where
        W: Clone,
        P: Clone,
    {
        self.with(|desk| desk.on_refused = Some(Arc::new(listener)))
    }

    fn with(self, change: impl FnOnce(&mut Desk)) -> Self
    where
        W: Clone,
        P: Clone,
    {
        let Terms { desk, who, price } = &*self.terms;
        let (mut desk, who, price) = (desk.clone(), who.clone(), price.clone());
        change(&mut desk);
        Self::of(desk, who, price)
    }
}

impl<W, P> Clone for LimitLayer<W, P> {
    fn clone(&self) -> Self {
        Self { terms: Arc::clone(&self.terms) }
    }
}

impl<S, W, P> Layer<S> for LimitLayer<W, P> {
    type Service = Limits<S, W, P>;

    fn layer(&self, inner: S) -> Limits<S, W, P> {
        Limits { inner, terms: Arc::clone(&self.terms) }
    }
}

/// A service that draws for each request; made by [`LimitLayer`].
pub struct Limits<S, W, P = OneRequest> {
    inner: S,
    terms: Arc<Terms<W, P>>,
}

/// A request being served.
pub type Serving<R, E> = Pin<Box<dyn Future<Output = Result<Response<R>, E>> + Send>>;

impl<S, W, P, B, R> Service<Request<B>> for Limits<S, W, P>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send, Error: Send> + Clone + Send + 'static,
    W: Who<B>,
    P: Price<B>,
    B: Send + 'static,
    R: From<String> + Send,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Serving<R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Serving<R, S::Error> {
        // The one that was asked whether it is ready serves; a clone stays behind.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let (key, price) = (self.terms.who.who(&request), self.terms.price.price(&request));
        if price.is_empty() {
            return Box::pin(inner.call(request));
        }
        let desk = self.terms.desk.clone();
        Box::pin(async move {
            let drawn = match desk.draw(key, &price).await {
                Ok(drawn) => drawn,
                Err(refusal) => return Ok(desk.refuse(&refusal)),
            };
            let answered = inner.call(request).await;
            let head = answered.as_ref().ok().map(|response| (response.status(), response.headers()));
            let limits = drawn.settle(head).await;
            answered.map(|mut response| {
                rate_limit_fields(response.headers_mut(), &limits);
                response
            })
        })
    }
}

/// Why a request is not served.
enum Refusal {
    Limiter(LimitError),
    Key(Problem),
}

impl Desk {
    const fn new(limiter: Limiter, resource: ResourceName) -> Self {
        Self {
            limiter,
            resource,
            otherwise: None,
            within: None,
            settle: None,
            tell: Tell::Little,
            on_refused: None,
        }
    }

    async fn draw(&self, key: Key, price: &[(&'static str, u64)]) -> Result<Drawn, Refusal> {
        let entity = match (key, &self.otherwise) {
            (Key::Of(entity), _) => entity,
            (Key::Nobody | Key::NoToken, Some(entity)) => entity.clone(),
            (Key::Nobody, None) => {
                let detail = "the request does not say whose it is";
                return Err(Refusal::Key(Problem::new(400, "no-key", "No key", detail)));
            }
            (Key::NoToken, None) => {
                let detail = "a request needs a token that is known, as `Authorization: Bearer`";
                return Err(Refusal::Key(Problem::new(401, "no-token", "No valid token", detail)));
            }
            (Key::Invalid(what), _) => {
                return Err(Refusal::Key(Problem::new(400, "invalid-key", "No key", what)));
            }
        };
        let request = self.limiter.request((entity.as_str(), self.resource.as_str()), price);
        let drawn = match (self.within, &self.settle) {
            (None, None) => {
                return request.spend_and_tell().await.map(Drawn::Spent).map_err(Refusal::Limiter);
            }
            (Some(within), _) => request.acquire_within(within).await,
            (None, Some(_)) => request.acquire().await,
        };
        let lease = drawn.map_err(Refusal::Limiter)?;
        let balances = lease.balances();
        Ok(Drawn::Leased(Leased { lease: Some(lease), balances, settle: self.settle.clone() }))
    }

    fn refuse<R: From<String>>(&self, refusal: &Refusal) -> Response<R> {
        let error = match refusal {
            Refusal::Key(problem) => return answer(problem, &[]),
            Refusal::Limiter(error) => error,
        };
        if let Some(listener) = &self.on_refused {
            listener(error);
        }
        let lines = error.limited().map(|limited| &limited.lines[..]).unwrap_or_default();
        let limits: Vec<LimitField<'_>> = lines.iter().map(|line| (&line.balance).into()).collect();
        let whole = problem(error);
        let problem = match self.tell {
            Tell::Everything => whole,
            Tell::Little => little(error, whole),
        };
        answer(&problem, &limits)
    }
}

/// What strangers are told of an error: nothing of whose limits they are, and nothing of what is wrong in here.
fn little(error: &LimitError, whole: Problem) -> Problem {
    let detail = match error {
        LimitError::Limited(_) | LimitError::Waiting { .. } => "too many requests for now",
        LimitError::TooLarge(_) => "the request asks for more than is ever allowed at once",
        LimitError::Busy { .. } | LimitError::Closed | LimitError::Unavailable { .. } => {
            "the service cannot take the request now"
        }
        // Whoever asked has neither chosen the limits nor what it costs.
        _ => return internal(),
    };
    Problem { detail: detail.to_owned(), limits: Vec::new(), ..whole }
}

/// What was drawn for a request.
enum Drawn {
    /// Spent already.
    Spent(Vec<Balance>),
    Leased(Leased),
}

impl Drawn {
    /// Ends it by the answer, and says what was left when it was drawn. An error of the service is none.
    async fn settle(self, head: Option<(StatusCode, &HeaderMap)>) -> Vec<Balance> {
        match self {
            Self::Spent(balances) => balances,
            Self::Leased(leased) => leased.settle(head).await,
        }
    }
}

/// Units that are held while a request is served.
struct Leased {
    lease: Option<Lease>,
    balances: Vec<Balance>,
    settle: Option<Settle>,
}

impl Leased {
    async fn settle(mut self, head: Option<(StatusCode, &HeaderMap)>) -> Vec<Balance> {
        let used = match (&self.settle, head) {
            (Some(settle), Some((status, headers))) => settle(status, headers),
            _ => Used::All,
        };
        // What a store that is away does not hear now it hears in the background; and the answer does not wait for more.
        if let Some(mut lease) = self.lease.take() {
            let settled = match &used {
                Used::All => lease.settle_as_held().await,
                Used::Nothing => lease.cancel().await,
                Used::Units(units) => lease.settle(units).await,
            };
            if settled.is_err() && matches!(used, Used::Units(_)) {
                // It named a limit that is not there. Nothing was said, and what was drawn is what was used.
                drop(lease.settle_as_held().await);
            }
        }
        std::mem::take(&mut self.balances)
    }
}

impl Drop for Leased {
    /// The caller has gone away while it was served: it does not pay less for that.
    fn drop(&mut self) {
        if let (Some(mut lease), Ok(runtime)) = (self.lease.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { drop(lease.settle_as_held().await) });
        }
    }
}

impl<S: Clone, W, P> Clone for Limits<S, W, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), terms: Arc::clone(&self.terms) }
    }
}

impl<W, P> fmt::Debug for LimitLayer<W, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer").field("resource", &self.terms.desk.resource).finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, W, P> fmt::Debug for Limits<S, W, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits")
            .field("inner", &self.inner)
            .field("resource", &self.terms.desk.resource)
            .finish_non_exhaustive()
    }
}
