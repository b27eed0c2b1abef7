//! Listens, serves and shuts down gracefully.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{FusedFuture as _, OptionFuture};
use hyper_util::server::graceful::GracefulShutdown;
use thiserror::Error;
use tidegate::StoreError;
use tidegate::store::Lookup;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::connections::Connections;
use crate::endpoint::{Endpoint, Protocol};
use crate::handshake::TlsHandshake;
use crate::listener::Listener;
use crate::rls::{self, EnvoyRules};
use crate::routes::{app, metrics_app};
use crate::state::State;
use crate::tls::{Alpn, Tls};

/// Maximum number of leases that one sweep ends.
const SWEEP_MAX: usize = 1_000;
/// Interval of the metrics upkeep.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of connections to the metrics listener.
const METRICS_CONNECTIONS_MAX: usize = 64;
/// Grace period for calls that Envoy sent before it learned of the shutdown.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// Maximum wait for the store to record Envoy's reports, before the limiter is closed.
const REPORTS_GRACE: Duration = Duration::from_secs(5);

/// The listeners of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    listen: SocketAddr,
    metrics: Option<SocketAddr>,
    envoy: Option<(SocketAddr, EnvoyRules)>,
    anywhere: bool,
    tls: Option<Tls>,
}

impl ServerOptions {
    /// Listens at this address, which must be a loopback address unless TLS or
    /// [`without_tls_anywhere`](Self::without_tls_anywhere) is set.
    pub const fn new(listen: SocketAddr) -> Self {
        Self { listen, metrics: None, envoy: None, anywhere: false, tls: None }
    }

    /// Also serves `/metrics` and the health checks at this address, without a token.
    #[must_use]
    pub const fn metrics(mut self, listen: SocketAddr) -> Self {
        self.metrics = Some(listen);
        self
    }

    /// Also serves Envoy's rate limit service at this address, by these rules.
    #[must_use]
    pub fn envoy(mut self, listen: SocketAddr, rules: EnvoyRules) -> Self {
        self.envoy = Some((listen, rules));
        self
    }

    /// Enables TLS, and allows other than loopback addresses. The metrics listener stays without TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Allows other than loopback addresses without TLS. Tokens then travel in plaintext: use it only behind
    /// a TLS proxy or in a private network.
    #[must_use]
    pub const fn without_tls_anywhere(mut self) -> Self {
        self.anywhere = true;
        self
    }
}

/// Why a server could not listen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address is reachable from other machines, which was not allowed.
    #[error(
        "{addr} can be reached from other machines without TLS: listen on 127.0.0.1, or allow it explicitly"
    )]
    Exposed {
        /// The address.
        addr: SocketAddr,
    },
    /// Another program listens at this address.
    #[error("{addr} is in use by another program: stop it, or listen on another port")]
    InUse {
        /// The address.
        addr: SocketAddr,
    },
    /// The system refused.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Triggers the shutdown of a server.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<watch::Sender<u32>>);

/// Receives the shutdown signal.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<u32>);

impl Shutdown {
    /// Creates a connected pair.
    pub fn new() -> (Stopper, Self) {
        let (stopper, shutdown) = watch::channel(0);
        (Stopper(Arc::new(stopper)), Self(shutdown))
    }

    /// Waits until `stop` was called `times` times. If the stopper is dropped before, waits forever.
    pub(crate) async fn signaled(&mut self, times: u32) {
        if self.0.wait_for(|signaled| *signaled >= times).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Stopper {
    /// Stops the server: the first call finishes requests in flight, the second one stops at once.
    pub fn stop(&self) {
        self.0.send_modify(|signaled| *signaled = signaled.saturating_add(1));
    }
}

/// How a server shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShutdownOutcome {
    /// All requests in flight were finished.
    Drained,
    /// The drain timed out.
    TimedOut,
    /// It was stopped twice.
    AtOnce,
}

/// A bound server that is not serving yet.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    metrics: Option<Listener>,
    envoy: Option<(Listener, EnvoyRules)>,
    tls: Option<Tls>,
}

impl Server {
    /// Binds the listeners.
    ///
    /// # Errors
    /// [`ServeError`] if an address is in use, exposed or unavailable.
    #[expect(clippy::unused_async, reason = "sockets belong to the runtime that binds them")]
    pub async fn bind(options: &ServerOptions) -> Result<Self, ServeError> {
        let is_open = options.anywhere || options.tls.is_some();
        let listener = Listener::bind(options.listen, is_open)?;
        let metrics = match options.metrics {
            Some(addr) => Some(Listener::bind(addr, options.anywhere)?),
            None => None,
        };
        let envoy = match &options.envoy {
            Some((addr, rules)) => Some((Listener::bind(*addr, is_open)?, rules.clone())),
            None => None,
        };
        Ok(Self { listener, metrics, envoy, tls: options.tls.clone() })
    }

    /// Returns the address of the API.
    pub const fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Returns the address of the metrics listener, if any.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Listener::local_addr)
    }

    /// Returns the address of the Envoy listener, if any.
    pub fn envoy_addr(&self) -> Option<SocketAddr> {
        self.envoy.as_ref().map(|(listener, _)| listener.local_addr())
    }

    /// Serves until it is stopped. Then it accepts no new connections, refuses requests waiting for a limit,
    /// finishes requests in flight, and sends pending lease endings to the store.
    ///
    /// # Cancel safety
    /// Dropping the future closes all connections at once. Open leases end at their deadlines.
    pub async fn run(self, state: State, mut shutdown: Shutdown) -> ShutdownOutcome {
        let bounds = *state.bounds();
        let mut tasks = JoinSet::new();
        let graceful = Arc::new(GracefulShutdown::new());
        let open = |max, listener| Connections::new(max, state.meters().connections(listener));
        tasks.spawn(sweep_periodically(state.clone()));
        tasks.spawn(upkeep(state.clone()));
        if let Some(tls) = &self.tls {
            state.secured_by(tls.clone());
            tasks.spawn(tls.clone().watch_files());
        }
        let mut health_checks = JoinSet::new();
        if let Some(metrics) = self.metrics {
            let protocol = Protocol::Http(metrics_app(state.clone()));
            let connections = open(METRICS_CONNECTIONS_MAX, "metrics");
            let endpoint = Endpoint { listener: metrics, protocol, bounds, connections, tls_handshake: None };
            tasks.spawn(endpoint.serve(Arc::new(GracefulShutdown::new()), shutdown.clone()));
        }
        let tls_handshake = |alpn| self.tls.clone().map(|tls| TlsHandshake::new(tls, alpn));
        let (http, grpc) = (open(bounds.connections_max, "api"), open(bounds.connections_max, "envoy"));
        let endpoint = Endpoint {
            listener: self.listener,
            protocol: Protocol::Http(app(state.clone())),
            bounds,
            connections: Arc::clone(&http),
            tls_handshake: tls_handshake(Alpn::Http1),
        };
        let (draining, drained_signal) = oneshot::channel::<()>();
        let proxies = Arc::new(GracefulShutdown::new());
        let mut reports = None;
        let envoy = self.envoy.map(|(listener, rules)| {
            let (services, health) = rls::services(state.clone(), rules, shutdown.clone());
            health_checks.spawn(health.until_stopped(shutdown.clone(), drained_signal.map(drop)));
            // A call is decided within the first half.
            tasks.spawn(Arc::clone(&grpc).close_stalled(bounds.body_time.saturating_mul(2)));
            reports = Some(services.clone());
            let (protocol, tls_handshake) = (Protocol::Envoy(services), tls_handshake(Alpn::Http2));
            let connections = Arc::clone(&grpc);
            let endpoint = Endpoint { listener, protocol, bounds, connections, tls_handshake };
            endpoint.serve(Arc::clone(&proxies), shutdown.clone())
        });
        let mut at_once = shutdown.clone();
        let ends = async {
            // The connections live as long as this value.
            let endpoint = endpoint.serve(Arc::clone(&graceful), shutdown.clone());
            let _connections = tokio::join!(endpoint, OptionFuture::from(envoy));
            shutdown.signaled(1).await;
            let mut proxies = Box::pin(drain_connections(proxies, grpc).fuse());
            // Envoy treats errors as an allow by default, so calls already on their way still get a verdict.
            let _ = timeout(STOP_GRACE.min(bounds.drain_time), &mut proxies).await;
            drop(draining);
            record_reports(reports, bounds.drain_time).await;
            state.close();
            let drained = async {
                drain_connections(graceful, http).await;
                if !proxies.is_terminated() {
                    proxies.await;
                }
                // Nothing can settle them any more.
                state.upstreams().detach_all();
                state.limiter().drain().await;
                while health_checks.join_next().await.is_some() {}
            };
            match timeout(bounds.drain_time, drained).await {
                Ok(()) => ShutdownOutcome::Drained,
                Err(_) => ShutdownOutcome::TimedOut,
            }
        };
        tokio::select! {
            stopped = ends => stopped,
            () = at_once.signaled(2) => ShutdownOutcome::AtOnce,
        }
    }
}

/// Waits for the store to record Envoy's reports, which are refused once the limiter is closed.
async fn record_reports(services: Option<rls::Services>, drain_time: Duration) {
    if let Some(services) = services {
        let _ = timeout(REPORTS_GRACE.min(drain_time), services.reports_recorded()).await;
    }
}

/// Waits until all connections have finished their requests. No new ones are accepted, and those of silent
/// peers are closed.
async fn drain_connections(graceful: Arc<GracefulShutdown>, connections: Arc<Connections>) {
    if let Some(graceful) = Arc::into_inner(graceful) {
        tokio::select! {
            () = graceful.shutdown() => {}
            () = connections.close_idle() => {}
        }
    }
}

/// Sweeps expired leases periodically. If the store does not respond, the next tick tries again.
async fn sweep_periodically(state: State) -> JoinSet<()> {
    let mut ticks = interval(state.bounds().sweep_every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let timeout_span = state.bounds().report_time;
    let millis = u64::try_from(timeout_span.as_millis()).unwrap_or(u64::MAX);
    loop {
        ticks.tick().await;
        let expired = state.upstreams().expire();
        for upstream in &expired {
            state.meters().call_expired(upstream.as_str());
        }
        if !expired.is_empty() {
            tracing::debug!(expired = expired.len(), "permits expired before they were settled");
        }
        let clock = Lookup::Subjects(Vec::new());
        if let Ok(Ok(seen)) = timeout(timeout_span, state.store().balances(&clock)).await {
            state.meters().clock_offset(seen.clock_offset);
        }
        loop {
            let swept = timeout(timeout_span, state.store().sweep(SWEEP_MAX)).await;
            match swept.unwrap_or(Err(StoreError::TimedOut { millis })) {
                Ok(swept) => {
                    state.meters().swept(swept);
                    state.events().swept(swept);
                    if swept.settled + swept.returned < SWEEP_MAX as u64 {
                        break;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to sweep expired leases");
                    break;
                }
            }
        }
    }
}

/// Folds metric samples periodically. It runs independently of the store and of options, because samples
/// occupy memory until then.
async fn upkeep(state: State) -> JoinSet<()> {
    let mut ticks = interval(UPKEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        state.meters().upkeep();
    }
}
