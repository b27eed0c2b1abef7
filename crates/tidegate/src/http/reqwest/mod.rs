//! A middleware for reqwest: each host at the rate it bears, tried again where that may help, and never before it said so.
//!
//! It is put under a client by three lines, two of which make the limits:
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
//! Every attempt is admitted anew by its host's throttle, and holds its slot until the body of its answer ends. Responses are
//! read by status and headers, as [`Classes`] has it: what says when to come back pauses the host for everybody.
//!
//! - **Trying again.** As the [`Retry`] of the throttle's limits says, or that of [`Throttling::retry`], with its
//!   budget. Only requests whose body can be sent twice are: not those with a stream. And [`Replay`] says which methods: a `POST`
//!   is sent again where it surely was not carried out. When all attempts are spent, the last answer is the answer, whatever
//!   its status.
//! - **Redirects.** [`Throttling::client`] follows them itself, up to ten, so that each hop is the request of the host it goes to,
//!   admitted and learned from there. Credentials do not go along to another origin. In a client that was built otherwise, and
//!   follows redirects by itself, the hops are not admitted by anybody: there an answer that comes from another origin counts as
//!   a success of the host that was asked, whatever it says, and what it says counts for the host it comes from.
//! - **Errors.** What the client says comes back as it is. What we say is a [`ThrottleError`]: [`ThrottleError::of`] finds it.

mod error;
mod redirect;
mod send;

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use ::http::Extensions;
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

pub use crate::held::Hold;
use crate::http::HttpClasses;
use crate::keyed::Keyed;
use crate::throttle::Throttle;

/// Redirects that [`Throttling::client`] follows, as reqwest does by itself.
const REDIRECTS: u32 = 10;

/// Which requests may be sent twice, where their body can be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Replay {
    /// Those with a method that means the same once or twice, as HTTP has it, or with an `Idempotency-Key`. Any other, such as a
    /// `POST`, only where it surely was not carried out: there was no connection, or the far side said that it is too much. A 503 says so
    /// where it says when to come back.
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
    /// `None` leaves redirects to whoever sent the request.
    redirects: Option<u32>,
}

type Weigh = Arc<dyn Fn(&Request) -> Cost + Send + Sync>;

/// Which throttle a request goes under.
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

    /// A throttle for each key that `key` finds in a request: an account, a model, a part of the path.
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
            redirects: None,
        }
    }

    /// The same for requests that cost what `weigh` says.
    #[must_use]
    pub fn cost(mut self, weigh: impl Fn(&Request) -> Cost + Send + Sync + 'static) -> Self {
        self.weigh = Some(Arc::new(weigh));
        self
    }

    /// The same with another table of what statuses mean.
    #[must_use]
    pub fn classes(mut self, classes: Classes) -> Self {
        self.classes = Arc::new(HttpClasses::new(classes));
        self
    }

    /// The same with another rule for trying again than that of the throttles' limits.
    #[must_use]
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = Some(retry);
        self
    }

    /// The same with another choice of requests that may be sent twice.
    #[must_use]
    pub const fn replay(mut self, replay: Replay) -> Self {
        self.replay = replay;
        self
    }

    /// The same with another end of the slot.
    #[must_use]
    pub const fn hold(mut self, hold: Hold) -> Self {
        self.hold = hold;
        self
    }

    /// The same following up to `redirects_max` redirects, each hop under the throttle of where it goes.
    ///
    /// For a client that does not follow them by itself: `redirect(Policy::none())`. [`client`](Self::client) sees to both.
    #[must_use]
    pub const fn redirects(mut self, redirects_max: u32) -> Self {
        self.redirects = Some(redirects_max);
        self
    }

    /// A client with this under it, which leaves redirects and trying again to this: ten redirects, unless
    /// [`redirects`](Self::redirects) says otherwise.
    ///
    /// # Errors
    /// As [`ClientBuilder::build`].
    pub fn client(self, builder: ClientBuilder) -> ::reqwest::Result<ClientWithMiddleware> {
        let client = builder.redirect(Policy::none()).retry(::reqwest::retry::never()).build()?;
        let throttling = Self { redirects: self.redirects.or(Some(REDIRECTS)), ..self };
        Ok(reqwest_middleware::ClientBuilder::new(client).with(throttling).build())
    }

    /// The throttle that a request goes under.
    fn throttle(&self, request: &Request) -> Result<Throttle, InvalidAuthority> {
        match &self.pick {
            Pick::Host(hosts) => Ok(hosts.throttle(&authority(request.url())?)),
            Pick::Key(throttle) => Ok(throttle(request)),
        }
    }

    /// What an answer says that came from another origin than was asked: it counts where it comes from, if that has a throttle.
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

/// The far side at an address.
fn authority(url: &Url) -> Result<Authority, InvalidAuthority> {
    match url.scheme() {
        "http" | "https" => Authority::new(&url.origin().ascii_serialization()),
        _ => Authority::new(url.host_str().unwrap_or_default()),
    }
}
