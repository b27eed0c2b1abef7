//! The proxy: finds the upstream of a request, and answers what is about the proxy itself.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use tidegate::RetryBudget;
use tidegate::store::{HostWall, WallClock as _};
use tidegate_core::limit::token::TokenScope;
use tidegate_core::retry::Retries;
use tidegate_core::time::nanos;
use tidegate_server::{ConnectionCounts, ConnectionMeters, PeerCertificate, Slots};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::builder::{InvalidProxy, OWN_NAME, ProxyBuilder, Upstream};
use crate::call::forward;
use crate::codec::scopes_json;
use crate::estimate::Estimates;
use crate::headers::find_key;
use crate::listener::{HttpService, ResponseBody, full};
use crate::profile::Format;
use crate::refusal::Refusal;
use crate::scope::{ScopeView, Scopes};
use crate::tenant::Tenants;
use crate::ticket::Counts;
use crate::transport::Transport;

/// The bounds of a proxy.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ProxyBounds {
    /// How long a call waits without `x-tidegate-within`. Default: 55 seconds, less than the minute after
    /// which many clients time out.
    pub within: Duration,
    /// The longest time that `x-tidegate-within` may ask for. Default: ten minutes.
    pub within_max: Duration,
    /// The largest body that is kept for a retry. Default: 1 MiB.
    pub replay_max: usize,
    /// How long an upstream may take until its response begins, and between two pieces of it. Default: ten
    /// minutes.
    pub response_time: Duration,
    /// Attempts that an upstream may get beyond one for each call, among the calls of the budget's window. Default:
    /// as many as there are calls in 10 s, and at least ten.
    pub retries: RetryBudget,
    /// How far a JSON body is read if its model is not among the first `replay_max` bytes. Default: 32 MiB.
    pub search_max: usize,
    /// Bytes of all bodies that are read before they are sent, or kept for a retry. Beyond it a body is sent
    /// once, and is refused if its model is not known. Default: 256 MiB.
    pub kept_max: usize,
    /// How long a body may take to arrive, if it is kept, and each further MiB that is read. Default: one minute.
    pub body_time: Duration,
    /// Calls at the same time, including those that wait. One tenant may hold 15 of 16 if it is alone, and leaves
    /// the others their share, up to as many as it has. Default: 4,096.
    pub calls_max: usize,
    /// How long the limits of a tenant stay drawn after a proxy was killed; while a call lives, it renews them.
    /// Default: 15 minutes.
    pub lease_time: Duration,
}

impl Default for ProxyBounds {
    fn default() -> Self {
        Self {
            within: Duration::from_secs(55),
            within_max: Duration::from_mins(10),
            replay_max: 1 << 20,
            retries: RetryBudget::new(1.0, 10, Duration::from_secs(10)),
            search_max: 32 << 20,
            kept_max: 256 << 20,
            response_time: Duration::from_mins(10),
            body_time: Duration::from_mins(1),
            calls_max: 4_096,
            lease_time: Duration::from_mins(15),
        }
    }
}

/// Forwards calls to upstreams as fast as they accept them. Clones share their state.
#[derive(Clone)]
pub struct Proxy(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) upstreams: Vec<Upstream>,
    pub(crate) tenants: Option<Tenants>,
    pub(crate) requires_token: bool,
    pub(crate) bounds: ProxyBounds,
    pub(crate) scopes: Scopes,
    pub(crate) estimates: Arc<Estimates>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) transport: Transport,
    pub(crate) calls: Arc<Slots>,
    connections: ConnectionCounts,
    started: Instant,
    /// One permit per byte of the bodies that are kept.
    pub(crate) kept: Arc<Semaphore>,
}

impl Inner {
    /// A call begins, which may be repeated later.
    pub(crate) fn begin(&self, upstream: &Upstream) {
        let now = self.now();
        upstream.retries.lock().unwrap_or_else(PoisonError::into_inner).begin(now);
    }

    /// Takes a retry from the budget of an upstream, if one is left.
    pub(crate) fn takes_retry(&self, upstream: &Upstream) -> bool {
        let (now, budget) = (self.now(), &self.bounds.retries);
        upstream.retries.lock().unwrap_or_else(PoisonError::into_inner).take(budget, now)
    }

    fn now(&self) -> tidegate_core::time::Instant {
        tidegate_core::time::Instant::from_nanos(nanos(self.started.elapsed()))
    }
}

impl Proxy {
    /// Configures a proxy.
    pub fn builder() -> ProxyBuilder {
        ProxyBuilder::new()
    }

    pub(crate) fn of(builder: ProxyBuilder) -> Result<Self, InvalidProxy> {
        let ProxyBuilder { mut upstreams, tenants, requires_token, bounds } = builder;
        for upstream in &mut upstreams {
            upstream.retries = Arc::new(Mutex::new(Retries::new(&bounds.retries)));
        }
        let has_tls = upstreams.iter().any(|upstream| upstream.scheme == http::uri::Scheme::HTTPS);
        Ok(Self(Arc::new(Inner {
            upstreams,
            tenants,
            requires_token,
            bounds,
            scopes: Scopes::new()?,
            estimates: Arc::default(),
            counts: Arc::default(),
            transport: Transport::new(has_tls).map_err(InvalidProxy)?,
            calls: Slots::new(bounds.calls_max.max(1)),
            connections: ConnectionCounts::default(),
            started: Instant::now(),
            kept: Arc::new(Semaphore::new(bounds.kept_max.min(Semaphore::MAX_PERMITS))),
        })))
    }

    /// The state of the throttles, the busiest first.
    pub fn scopes(&self) -> Vec<ScopeView> {
        self.0.scopes.views()
    }

    /// Refuses calls that wait and further ones; those in flight go on.
    pub fn close(&self) {
        self.0.scopes.close();
    }
}

impl HttpService for Proxy {
    fn connection_meters(&self) -> ConnectionMeters {
        self.0.connections.meters("proxy")
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let path = request.uri().path();
        let name = path.strip_prefix('/').and_then(|path| path.split('/').next()).unwrap_or_default();
        // A connection may outlive the validity of its certificate.
        let peer = request.extensions().get::<PeerCertificate>();
        if let Some(why) = peer.and_then(|peer| peer.rejection(HostWall.now())) {
            return Refusal::unauthorized(why).into_response(Format::OpenAi);
        }
        if name == OWN_NAME {
            return self.own(request).await.unwrap_or_else(|refusal| refusal.into_response(Format::OpenAi));
        }
        let Some(upstream) = self.0.upstreams.iter().find(|upstream| *upstream.name == *name) else {
            let names: Vec<&str> = self.0.upstreams.iter().map(Upstream::name).collect();
            let message = format!("the path must begin with the name of an upstream: {}", names.join(", "));
            return Refusal::not_found(message).into_response(Format::OpenAi);
        };
        let format = upstream.profile.format;
        forward(&self.0, upstream, request).await.unwrap_or_else(|refusal| refusal.into_response(format))
    }
}

impl Proxy {
    /// What is about the proxy itself: its health, its throttles and its counts.
    async fn own(&self, request: Request<Incoming>) -> Result<Response<ResponseBody>, Refusal> {
        let path = request.uri().path();
        let is_get = request.method() == Method::GET;
        if is_get && path == "/tidegate/health" {
            return Ok(respond("text/plain", "ok\n".to_owned()));
        }
        if self.0.requires_token {
            let upstream = self.0.upstreams.first();
            let key =
                upstream.and_then(|upstream| find_key(&upstream.profile, request.headers(), request.uri()));
            let peer = request.extensions().get::<PeerCertificate>();
            match &self.0.tenants {
                Some(tenants) => drop(tenants.identify(key.as_ref(), peer, TokenScope::Read).await?),
                None => return Err(Refusal::unauthorized("this needs a token of tidegate")),
            }
        }
        match path {
            "/tidegate/scopes" if is_get => Ok(respond("application/json", scopes_json(&self.scopes()))),
            "/tidegate/metrics" if is_get => Ok(respond("text/plain; version=0.0.4", self.metrics())),
            _ => Err(Refusal::not_found("unknown path; there are /tidegate/health, scopes and metrics")),
        }
    }

    /// The counts in Prometheus' text format.
    fn metrics(&self) -> String {
        let counts = &*self.0.counts;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let connections = &self.0.connections;
        let counters = [
            ("calls", read(&counts.calls)),
            ("refused_by_limits", read(&counts.refused_by_limits)),
            ("refused_by_store", read(&counts.refused_by_store)),
            ("refused_by_upstream", read(&counts.refused_by_upstream)),
            ("retries", read(&counts.retries)),
            ("rejected", read(&counts.rejected)),
            ("estimated", read(&counts.estimated)),
            ("failed", read(&counts.failed)),
            ("input_tokens", read(&counts.input_tokens)),
            ("output_tokens", read(&counts.output_tokens)),
            ("connections_evicted", connections.evicted()),
            ("connections_refused", connections.refused()),
        ];
        let open = connections.open();
        let gauge =
            format!("# TYPE tidegate_proxy_connections_open gauge\ntidegate_proxy_connections_open {open}\n");
        let line = |(name, value): (&str, u64)| {
            format!("# TYPE tidegate_proxy_{name}_total counter\ntidegate_proxy_{name}_total {value}\n")
        };
        counters.map(line).concat() + &gauge
    }
}

fn respond(kind: &'static str, text: String) -> Response<ResponseBody> {
    let mut response = Response::new(full(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("upstreams", &self.0.upstreams).finish_non_exhaustive()
    }
}
