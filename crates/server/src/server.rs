//! Listens, serves and shuts down gracefully.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt as _;
use futures_util::future::{FusedFuture as _, OptionFuture};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tidegate::StoreError;
use tidegate::store::Lookup;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::handshake::{Io, TlsHandshake};
use crate::inline_executor::InlineExecutor;
use crate::io_timeout::TimeoutStream;
use crate::options::Bounds;
use crate::rls::{self, EnvoyRules, Services};
use crate::routes::{app, metrics_app};
use crate::state::State;
use crate::tls::{Alpn, Tls};

/// Maximum number of leases that one sweep ends.
const SWEEP_MAX: usize = 1_000;
/// Interval of the metrics upkeep.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a failed `accept`, usually for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// hyper's minimum buffer for request heads.
const HEAD_MIN: usize = 8_192;
/// Maximum number of concurrent streams per connection. Envoy opens another connection for more.
const STREAMS_MAX: usize = 1_024;
/// Grace period for calls that Envoy sent before it learned of the shutdown.
const STOP_GRACE: Duration = Duration::from_millis(500);

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

struct Listener {
    socket: TcpListener,
    addr: SocketAddr,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.addr)
    }
}

impl Server {
    /// Binds the listeners.
    ///
    /// # Errors
    /// [`ServeError`] if an address is in use, exposed or unavailable.
    pub async fn bind(options: &ServerOptions) -> Result<Self, ServeError> {
        let is_open = options.anywhere || options.tls.is_some();
        let listener = listen(options.listen, is_open).await?;
        let metrics = match options.metrics {
            Some(addr) => Some(listen(addr, options.anywhere).await?),
            None => None,
        };
        let envoy = match &options.envoy {
            Some((addr, rules)) => Some((listen(*addr, is_open).await?, rules.clone())),
            None => None,
        };
        Ok(Self { listener, metrics, envoy, tls: options.tls.clone() })
    }

    /// Returns the address of the API.
    pub const fn local_addr(&self) -> SocketAddr {
        self.listener.addr
    }

    /// Returns the address of the metrics listener, if any.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|listener| listener.addr)
    }

    /// Returns the address of the Envoy listener, if any.
    pub fn envoy_addr(&self) -> Option<SocketAddr> {
        self.envoy.as_ref().map(|(listener, _)| listener.addr)
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
        let connections = || Arc::new(Semaphore::new(bounds.connections_max.min(Semaphore::MAX_PERMITS)));
        tasks.spawn(sweep_periodically(state.clone()));
        tasks.spawn(upkeep(state.clone()));
        if let Some(tls) = &self.tls {
            state.secured_by(tls.clone());
            tasks.spawn(tls.clone().watch_files());
        }
        let mut health_checks = JoinSet::new();
        if let Some(metrics) = self.metrics {
            let endpoint = Endpoint {
                listener: metrics,
                protocol: Protocol::Http(metrics_app(state.clone())),
                bounds,
                connections: Arc::new(Semaphore::new(64)),
                tls_handshake: None,
            };
            tasks.spawn(endpoint.serve(Arc::new(GracefulShutdown::new()), shutdown.clone()));
        }
        let tls_handshake = |alpn| self.tls.clone().map(|tls| TlsHandshake::new(tls, alpn));
        let endpoint = Endpoint {
            listener: self.listener,
            protocol: Protocol::Http(app(state.clone())),
            bounds,
            connections: connections(),
            tls_handshake: tls_handshake(Alpn::Http1),
        };
        let (draining, drained_signal) = oneshot::channel::<()>();
        let proxies = Arc::new(GracefulShutdown::new());
        let envoy = self.envoy.map(|(listener, rules)| {
            let (services, health) = rls::services(state.clone(), rules, shutdown.clone());
            health_checks.spawn(health.until_stopped(shutdown.clone(), drained_signal.map(drop)));
            let (protocol, tls_handshake) = (Protocol::Envoy(services), tls_handshake(Alpn::Http2));
            let endpoint = Endpoint { listener, protocol, bounds, connections: connections(), tls_handshake };
            endpoint.serve(Arc::clone(&proxies), shutdown.clone())
        });
        let mut at_once = shutdown.clone();
        let ends = async {
            // The connections live as long as this value.
            let endpoint = endpoint.serve(Arc::clone(&graceful), shutdown.clone());
            let _connections = tokio::join!(endpoint, OptionFuture::from(envoy));
            shutdown.signaled(1).await;
            let mut proxies = Box::pin(drain_connections(proxies).fuse());
            // Envoy treats errors as an allow by default, so calls already on their way still get a verdict.
            let _ = timeout(STOP_GRACE.min(bounds.drain_time), &mut proxies).await;
            drop(draining);
            state.limiter().close();
            state.upstreams().close();
            state.events().close();
            let drained = async {
                drain_connections(graceful).await;
                if !proxies.is_terminated() {
                    proxies.await;
                }
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

/// Waits until all connections have finished their requests. No new ones are accepted.
async fn drain_connections(connections: Arc<GracefulShutdown>) {
    if let Some(connections) = Arc::into_inner(connections) {
        connections.shutdown().await;
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
        if expired > 0 {
            tracing::debug!(expired, "permits expired before they were settled");
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

/// The protocol and service of an endpoint.
#[derive(Debug, Clone)]
enum Protocol {
    /// The API, over HTTP/1.
    Http(Router),
    /// Envoy's service, over HTTP/2 with prior knowledge, as gRPC requires.
    Envoy(Services),
}

/// A listener and its service.
struct Endpoint {
    listener: Listener,
    protocol: Protocol,
    bounds: Bounds,
    connections: Arc<Semaphore>,
    tls_handshake: Option<TlsHandshake>,
}

impl Endpoint {
    /// Accepts connections until shutdown, and returns the open ones.
    async fn serve(self, graceful: Arc<GracefulShutdown>, mut shutdown: Shutdown) -> JoinSet<()> {
        let mut open = JoinSet::new();
        loop {
            // Removes finished connections.
            while open.try_join_next().is_some() {}
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                () = shutdown.signaled(1) => return open,
            };
            match accepted {
                Some((stream, slot)) => {
                    let _ = stream.set_nodelay(true);
                    open.spawn(self.connection(stream, slot, &graceful, shutdown.clone()));
                }
                None => sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    }

    /// Accepts the next connection once a slot is free.
    async fn accept(&self) -> Option<(TcpStream, OwnedSemaphorePermit)> {
        let slot = Arc::clone(&self.connections).acquire_owned().await.ok()?;
        match self.listener.socket.accept().await {
            Ok((stream, _)) => Some((stream, slot)),
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                None
            }
        }
    }

    fn connection(
        &self,
        stream: TcpStream,
        slot: OwnedSemaphorePermit,
        graceful: &GracefulShutdown,
        mut shutdown: Shutdown,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (bounds, protocol) = (self.bounds, self.protocol.clone());
        let (tls_handshake, watcher) = (self.tls_handshake.clone(), graceful.watcher());
        async move {
            let (stream, peer) = match tls_handshake {
                None => (Io::Plain(stream), None),
                // A handshake in progress is aborted on shutdown.
                Some(tls_handshake) => tokio::select! {
                    accepted = tls_handshake.accept(stream, bounds.head_time) => match accepted {
                        Some(accepted) => accepted,
                        None => return,
                    },
                    () = shutdown.signaled(1) => return,
                },
            };
            let with_peer = move |mut request: Request<Incoming>| {
                if let Some(peer) = &peer {
                    request.extensions_mut().insert(peer.clone());
                }
                request
            };
            // hyper has no timeout for clients that never read their responses.
            let write_timeout = Some(bounds.body_time);
            let ended = match protocol {
                Protocol::Http(router) => {
                    let router = TowerToHyperService::new(router);
                    let connection = http1::Builder::new()
                        .timer(TokioTimer::new())
                        .header_read_timeout(bounds.head_time)
                        .max_buf_size(bounds.head_max.max(HEAD_MIN))
                        .max_headers(bounds.headers_max)
                        .serve_connection(
                            TokioIo::new(TimeoutStream::new(stream, None, write_timeout)),
                            service_fn(move |request| router.call(with_peer(request))),
                        );
                    watcher.watch(connection).await
                }
                Protocol::Envoy(services) => {
                    // Idle connections are pinged. A connection that never sends anything is closed.
                    let read_timeout = Some(bounds.head_time.saturating_mul(2));
                    let streams_max = bounds.requests_max.clamp(1, STREAMS_MAX);
                    let executor = InlineExecutor::default();
                    let connection = http2::Builder::new(executor.clone())
                        .timer(TokioTimer::new())
                        .keep_alive_interval(bounds.head_time)
                        .keep_alive_timeout(bounds.head_time)
                        .max_header_list_size(u32::try_from(bounds.head_max).unwrap_or(u32::MAX))
                        .max_concurrent_streams(u32::try_from(streams_max).unwrap_or(u32::MAX))
                        .serve_connection(
                            TokioIo::new(TimeoutStream::new(stream, read_timeout, write_timeout)),
                            service_fn(move |request| {
                                // Boxed because it is large and moved several times.
                                services
                                    .clone()
                                    .respond(Box::new(with_peer(request)))
                                    .map(Ok::<_, Infallible>)
                            }),
                        );
                    executor.run(watcher.watch(connection)).await
                }
            };
            // Slow, disconnected or non-HTTP clients are routine: log at debug level.
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(slot);
        }
    }
}

async fn listen(addr: SocketAddr, anywhere: bool) -> Result<Listener, ServeError> {
    if !anywhere && !addr.ip().is_loopback() {
        return Err(ServeError::Exposed { addr });
    }
    let refused = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ServeError::InUse { addr },
        _ => ServeError::Listen { addr, source },
    };
    let socket = TcpListener::bind(addr).await.map_err(refused)?;
    let addr = socket.local_addr().map_err(refused)?;
    Ok(Listener { socket, addr })
}
