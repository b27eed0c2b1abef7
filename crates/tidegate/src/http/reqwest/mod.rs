//! A middleware for reqwest: throttles each host to the rate it accepts, and retries where that is safe.
//!
//! Adding it to a client takes three lines, two of which create the limits:
//!
//! ```
//! use tidegate::Keyed;
//! use tidegate::reqwest::Throttling;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hosts = Keyed::hosts().build()?;
//! let client = Throttling::by_host(hosts).client(reqwest::Client::builder())?;
//! # let _ = || async {
//! let page = client.get("https://example.com/").send().await?.text().await?;
//! # Ok::<_, Box<dyn std::error::Error>>(page) };
//! # Ok(())
//! # }
//! ```
//!
//! Every attempt is admitted by its host's throttle, and holds its slot until the response's body ends.
//! Responses are classified by status and headers according to [`Classes`]: a retry time pauses the host for
//! all requests.
//!
//! - **Retries.** According to the [`Retry`] of the throttle's limits, or that of [`Throttling::retry`], with
//!   its budget. Only requests whose body can be cloned are retried, not those with a stream. [`Replay`]
//!   selects the methods: a `POST` is retried only if it was certainly not carried out. When all attempts are
//!   used, the last response is the result, whatever its status.
//! - **Usage.** [`Throttling::used`] reads what a response says was used, such as the tokens of an LLM.
//! - **Redirects.** [`Throttling::client`] follows up to ten redirects itself, so that each hop is admitted
//!   by, and counts for, the host it goes to. Credentials are not sent to another origin. If the client
//!   follows redirects by itself instead, the hops are not admitted; a response from another origin then
//!   counts as a success of the requested host, and its status and headers count for the host it comes from.
//! - **Errors.** The client's errors are returned unchanged. The middleware's own errors are a
//!   [`ThrottleError`]: [`ThrottleError::of`] finds it.

mod error;
mod redirect;
mod rejection;
mod send;
mod usage;

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use ::http::{Extensions, HeaderMap};
use ::reqwest::redirect::Policy;
use ::reqwest::{ClientBuilder, Request, Response, Url};
use async_trait::async_trait;
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use tidegate_core::authority::{Authority, InvalidAuthority};
use tidegate_core::classes::Classes;
use tidegate_core::cost::Cost;
use tidegate_core::outcome::Outcome;
use tidegate_core::retry::Retry;

pub use error::ThrottleError;
pub use send::Tries;
use usage::ReadUsage;

use crate::http::HttpClasses;
use crate::keyed::Keyed;
pub use crate::permit_body::Hold;
use crate::throttle::Throttle;

/// Redirects that [`Throttling::client`] follows, like reqwest's default.
const REDIRECTS: u32 = 10;

/// Which requests may be retried, if their body can be cloned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Replay {
    /// Those with an idempotent method, as defined by HTTP, or with an `Idempotency-Key`. Any other, such as
    /// a `POST`, only if it was certainly not carried out: there was no connection, or the upstream reported
    /// an overload. A 503 counts as one if it has a retry time.
    #[default]
    Careful,
    /// All of them.
    Always,
}

/// Throttles the requests of a reqwest client; see [the module](self).
#[derive(Clone)]
pub struct Throttling {
    pick: Pick,
    weigh: Option<Weigh>,
    classes: Arc<HttpClasses>,
    retry: Option<Retry>,
    replay: Replay,
    hold: Hold,
    used: Option<ReadUsage>,
    /// `None` leaves redirects to the client.
    redirects: Option<u32>,
}

type Weigh = Arc<dyn Fn(&Request) -> Cost + Send + Sync>;

/// Selects the throttle of a request.
#[derive(Clone)]
enum Pick {
    Host(Keyed<Authority>),
    Key(Arc<dyn Fn(&Request) -> Throttle + Send + Sync>),
}

impl Throttling {
    /// A throttle for each host.
    pub fn by_host(hosts: Keyed<Authority>) -> Self {
        Self::new(Pick::Host(hosts))
    }

    /// A throttle for each key that `key` extracts from a request: an account, a model, a part of the path.
    pub fn by_key<K>(keyed: Keyed<K>, key: impl Fn(&Request) -> K + Send + Sync + 'static) -> Self
    where
        K: Hash + Eq + Clone + Send + Sync + 'static,
    {
        Self::new(Pick::Key(Arc::new(move |request| keyed.throttle(&key(request)))))
    }

    /// One throttle for all requests.
    pub fn one(throttle: Throttle) -> Self {
        Self::new(Pick::Key(Arc::new(move |_| throttle.clone())))
    }

    fn new(pick: Pick) -> Self {
        Self {
            pick,
            weigh: None,
            classes: Arc::default(),
            retry: None,
            replay: Replay::default(),
            hold: Hold::default(),
            used: None,
            redirects: None,
        }
    }

    /// Sets the cost of requests.
    #[must_use]
    pub fn cost(mut self, weigh: impl Fn(&Request) -> Cost + Send + Sync + 'static) -> Self {
        self.weigh = Some(Arc::new(weigh));
        self
    }

    /// Replaces the table of classes.
    #[must_use]
    pub fn classes(mut self, classes: Classes) -> Self {
        self.classes = Arc::new(HttpClasses::new(classes));
        self
    }

    /// Replaces the retry rule of the throttles' limits.
    #[must_use]
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = Some(retry);
        self
    }

    /// Sets which requests may be retried.
    #[must_use]
    pub const fn replay(mut self, replay: Replay) -> Self {
        self.replay = replay;
        self
    }

    /// Settles successful requests with what their responses say was used.
    ///
    /// `used` reads it from the headers and the decoded body, which passes to the caller unchanged. It gets the whole
    /// body, or of one longer than 1 MiB the last 64 KiB: a stream of events names its usage in the last ones.
    /// `None`, and a body that is dropped or breaks off, settle with the cost of the request. The slot is held until
    /// the body ends, also with [`Hold::Headers`].
    ///
    /// ```
    /// use serde_json::Value;
    /// use tidegate::reqwest::Throttling;
    /// use tidegate::{Cost, Throttle};
    ///
    /// let throttling = Throttling::one(Throttle::new()).cost(|_| Cost::from(2_000)).used(|_, body| {
    ///     let body: Value = serde_json::from_slice(body).ok()?;
    ///     Some(Cost::from(body["usage"]["total_tokens"].as_u64()?))
    /// });
    /// # drop(throttling);
    /// ```
    #[must_use]
    pub fn used(mut self, used: impl Fn(&HeaderMap, &[u8]) -> Option<Cost> + Send + Sync + 'static) -> Self {
        self.used = Some(Arc::new(used));
        self
    }

    /// Sets how long a request holds its slot.
    #[must_use]
    pub const fn hold(mut self, hold: Hold) -> Self {
        self.hold = hold;
        self
    }

    /// Follows up to `redirects_max` redirects, each hop under the throttle of its host.
    ///
    /// The client must not follow redirects itself: `redirect(Policy::none())`. [`client`](Self::client)
    /// configures both.
    #[must_use]
    pub const fn redirects(mut self, redirects_max: u32) -> Self {
        self.redirects = Some(redirects_max);
        self
    }

    /// A client with this middleware, which handles redirects and retries: ten redirects, unless
    /// [`redirects`](Self::redirects) is set.
    ///
    /// # Errors
    /// As [`ClientBuilder::build`].
    pub fn client(self, builder: ClientBuilder) -> ::reqwest::Result<ClientWithMiddleware> {
        let client = builder.redirect(Policy::none()).retry(::reqwest::retry::never()).build()?;
        let throttling = Self { redirects: self.redirects.or(Some(REDIRECTS)), ..self };
        Ok(reqwest_middleware::ClientBuilder::new(client).with(throttling).build())
    }

    /// The throttle of a request.
    fn throttle(&self, request: &Request) -> Result<Throttle, InvalidAuthority> {
        match &self.pick {
            Pick::Host(hosts) => Ok(hosts.throttle(&authority(request.url())?)),
            Pick::Key(throttle) => Ok(throttle(request)),
        }
    }

    /// Records a response from another origin than the requested one for the host it comes from, if that has
    /// a throttle.
    fn record(&self, url: &Url, outcome: Outcome) {
        if let (Pick::Host(hosts), Ok(other)) = (&self.pick, authority(url)) {
            hosts.record(&other, outcome);
        }
    }

    fn weigh(&self, request: &Request) -> Cost {
        self.weigh.as_ref().map_or(Cost::request(), |weigh| weigh(request))
    }
}

#[async_trait]
impl Middleware for Throttling {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        match self.redirects {
            Some(redirects_max) => self.follow(request, extensions, next, redirects_max).await,
            None => self.send(request, extensions, &next).await,
        }
    }
}

impl fmt::Debug for Throttling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttling")
            .field("classes", &self.classes)
            .field("retry", &self.retry)
            .field("replay", &self.replay)
            .field("hold", &self.hold)
            .field("redirects", &self.redirects)
            .finish_non_exhaustive()
    }
}

/// The authority of an address.
fn authority(url: &Url) -> Result<Authority, InvalidAuthority> {
    match url.scheme() {
        "http" | "https" => Authority::new(&url.origin().ascii_serialization()),
        _ => Authority::new(url.host_str().unwrap_or_default()),
    }
}
