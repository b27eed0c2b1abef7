//! Listening, serving, and stopping without losing what is under way.

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

use crate::calls::Calls;
use crate::handshake::{Io, Secured};
use crate::options::Bounds;
use crate::patience::Patient;
use crate::rls::{self, EnvoyRules, Services};
use crate::routes::{app, metrics_app};
use crate::state::State;
use crate::tls::{Alpn, Tls};

/// Leases that one sweep ends at most.
const SWEEP_MAX: usize = 1_000;
/// How often what was measured is summed.
const TIDY_EVERY: Duration = Duration::from_secs(5);
/// How long nobody is accepted after the system refused to: it has no more files, and waits for some to be closed.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// The least that hyper can read heads with.
const HEAD_MIN: usize = 8_192;
/// Calls of one connection that are under way at the same time. Envoy opens another one for more.
const STREAMS_MAX: usize = 1_024;
/// How long calls of Envoy's that were sent before it heard of the stop are answered as before.
const LAST_CALLS: Duration = Duration::from_millis(500);

/// Where to listen.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    listen: SocketAddr,
    metrics: Option<SocketAddr>,
    envoy: Option<(SocketAddr, EnvoyRules)>,
    anywhere: bool,
    tls: Option<Tls>,
}

impl ServerOptions {
    /// Listens at this address of the loopback interface.
    pub const fn new(listen: SocketAddr) -> Self {
        Self { listen, metrics: None, envoy: None, anywhere: false, tls: None }
    }

    /// Answers `/metrics` and the health checks at this address too, without a token.
    #[must_use]
    pub const fn metrics(mut self, listen: SocketAddr) -> Self {
        self.metrics = Some(listen);
        self
    }

    /// Answers Envoy's rate limit service at this address too, by these rules.
    #[must_use]
    pub fn envoy(mut self, listen: SocketAddr, rules: EnvoyRules) -> Self {
        self.envoy = Some((listen, rules));
        self
    }

    /// Speaks TLS, and may listen where others can reach it. The listener of the metrics stays as it is.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Listens where others can reach it, without TLS: tokens go over the network as they are. Only behind a proxy that has
    /// TLS, or in a network that nobody else is in.
    #[must_use]
    pub const fn without_tls_anywhere(mut self) -> Self {
        self.anywhere = true;
        self
    }
}

/// Why a server does not listen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Others could reach it, and nobody said that they may.
    #[error(
        "{addr} can be reached from other machines, and there is no TLS: listen on 127.0.0.1, or say that it is wanted"
    )]
    Exposed {
        /// The address.
        addr: SocketAddr,
    },
    /// Somebody listens there already.
    #[error("{addr} is in use by another program: stop it, or listen on another port")]
    InUse {
        /// The address.
        addr: SocketAddr,
    },
    /// The system does not let us.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
}

/// Says when to stop.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<watch::Sender<u32>>);

/// Hears when to stop.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<u32>);

impl Shutdown {
    /// One who says it and one who hears it.
    pub fn new() -> (Stopper, Self) {
        let (stopper, shutdown) = watch::channel(0);
        (Stopper(Arc::new(stopper)), Self(shutdown))
    }

    /// Waits until it was said so often. Without anybody who could, it never was.
    pub(crate) async fn said(&mut self, times: u32) {
        if self.0.wait_for(|said| *said >= times).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Stopper {
    /// The first time: stop when what is under way is done. The second time: at once.
    pub fn stop(&self) {
        self.0.send_modify(|said| *said = said.saturating_add(1));
    }
}

/// How a server stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// What was under way was done.
    Drained,
    /// It took longer than it may.
    TimedOut,
    /// It was told twice.
    AtOnce,
}

/// A server that listens, and does not answer yet.
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
    /// Listens.
    ///
    /// # Errors
    /// [`ServeError`] is one sentence that says what to do.
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

    /// Where it listens.
    pub const fn local_addr(&self) -> SocketAddr {
        self.listener.addr
    }

    /// Where it answers `/metrics` without a token, if it does.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|listener| listener.addr)
    }

    /// Where it answers Envoy, if it does.
    pub fn envoy_addr(&self) -> Option<SocketAddr> {
        self.envoy.as_ref().map(|(listener, _)| listener.addr)
    }

    /// Serves until it is told to stop: then nobody new enters, those who wait for a limit are refused, what is under way is
    /// answered, and every ending reaches the store.
    ///
    /// # Cancel safety
    /// Dropping the future ends all connections at once. What was drawn ends by its deadline.
    pub async fn run(self, state: State, mut shutdown: Shutdown) -> Stopped {
        let bounds = *state.bounds();
        let mut tasks = JoinSet::new();
        let graceful = Arc::new(GracefulShutdown::new());
        let connections = || Arc::new(Semaphore::new(bounds.connections_max.min(Semaphore::MAX_PERMITS)));
        tasks.spawn(look_after(state.clone()));
        tasks.spawn(tidy_up(state.clone()));
        if let Some(tls) = &self.tls {
            state.secured_by(tls.clone());
            tasks.spawn(tls.clone().look_after());
        }
        let mut health_checks = JoinSet::new();
        if let Some(metrics) = self.metrics {
            let door = Door {
                listener: metrics,
                answers: Answers::Http(metrics_app(state.clone())),
                bounds,
                connections: Arc::new(Semaphore::new(64)),
                secured: None,
            };
            tasks.spawn(door.serve(Arc::new(GracefulShutdown::new()), shutdown.clone()));
        }
        let secured = |alpn| self.tls.clone().map(|tls| Secured::new(tls, alpn));
        let door = Door {
            listener: self.listener,
            answers: Answers::Http(app(state.clone())),
            bounds,
            connections: connections(),
            secured: secured(Alpn::Http1),
        };
        let (answering, answered) = oneshot::channel::<()>();
        let proxies = Arc::new(GracefulShutdown::new());
        let envoy = self.envoy.map(|(listener, rules)| {
            let (services, health) = rls::services(state.clone(), rules, shutdown.clone());
            health_checks.spawn(health.until_stopped(shutdown.clone(), answered.map(drop)));
            let (answers, secured) = (Answers::Envoy(services), secured(Alpn::Http2));
            let door = Door { listener, answers, bounds, connections: connections(), secured };
            door.serve(Arc::clone(&proxies), shutdown.clone())
        });
        let mut at_once = shutdown.clone();
        let ends = async {
            // Their connections live as long as this does.
            let door = door.serve(Arc::clone(&graceful), shutdown.clone());
            let _connections = tokio::join!(door, OptionFuture::from(envoy));
            shutdown.said(1).await;
            let mut proxies = Box::pin(answered_all(proxies).fuse());
            // An error would let through whatever is on its way.
            let _ = timeout(LAST_CALLS.min(bounds.drain_time), &mut proxies).await;
            drop(answering);
            state.limiter().close();
            state.hub().close();
            let drained = async {
                answered_all(graceful).await;
                if !proxies.is_terminated() {
                    proxies.await;
                }
                state.limiter().drain().await;
                while health_checks.join_next().await.is_some() {}
            };
            match timeout(bounds.drain_time, drained).await {
                Ok(()) => Stopped::Drained,
                Err(_) => Stopped::TimedOut,
            }
        };
        tokio::select! {
            stopped = ends => stopped,
            () = at_once.said(2) => Stopped::AtOnce,
        }
    }
}

/// Has connections end when what is under way on them is answered. Nobody accepts others any more.
async fn answered_all(connections: Arc<GracefulShutdown>) {
    if let Some(connections) = Arc::into_inner(connections) {
        connections.shutdown().await;
    }
}

/// Ends leases whose deadline has passed, now and then. A store that does not answer is asked again the next time.
async fn look_after(state: State) -> JoinSet<()> {
    let mut ticks = interval(state.bounds().sweep_every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let patience = state.bounds().report_time;
    let millis = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    loop {
        ticks.tick().await;
        let clock = Lookup::Subjects(Vec::new());
        if let Ok(Ok(seen)) = timeout(patience, state.store().balances(&clock)).await {
            state.meters().clock_offset(seen.clock_offset);
        }
        loop {
            let swept = timeout(patience, state.store().sweep(SWEEP_MAX)).await;
            match swept.unwrap_or(Err(StoreError::TimedOut { millis })) {
                Ok(swept) => {
                    state.meters().swept(swept);
                    state.hub().swept(swept);
                    if swept.settled + swept.returned < SWEEP_MAX as u64 {
                        break;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "leases past their deadline could not be ended");
                    break;
                }
            }
        }
    }
}

/// Sums what was measured. It waits for nobody, and no option makes it rarer: until then every measurement takes room.
async fn tidy_up(state: State) -> JoinSet<()> {
    let mut ticks = interval(TIDY_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        state.meters().tidy_up();
    }
}

/// What answers, and how it is spoken to.
#[derive(Debug, Clone)]
enum Answers {
    /// By HTTP/1.
    Http(Router),
    /// By HTTP/2, as gRPC does, without a word of HTTP/1 before it.
    Envoy(Services),
}

/// One listener and what answers there.
struct Door {
    listener: Listener,
    answers: Answers,
    bounds: Bounds,
    connections: Arc<Semaphore>,
    secured: Option<Secured>,
}

impl Door {
    /// Accepts until it is told to stop, and answers the connections that are open then.
    async fn serve(self, graceful: Arc<GracefulShutdown>, mut shutdown: Shutdown) -> JoinSet<()> {
        let mut open = JoinSet::new();
        loop {
            // Those that have ended are forgotten.
            while open.try_join_next().is_some() {}
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                () = shutdown.said(1) => return open,
            };
            match accepted {
                Some((stream, place)) => {
                    let _ = stream.set_nodelay(true);
                    open.spawn(self.connection(stream, place, &graceful, shutdown.clone()));
                }
                None => sleep(ACCEPT_AGAIN).await,
            }
        }
    }

    /// The next connection, when there is room for one.
    async fn accept(&self) -> Option<(TcpStream, OwnedSemaphorePermit)> {
        let place = Arc::clone(&self.connections).acquire_owned().await.ok()?;
        match self.listener.socket.accept().await {
            Ok((stream, _)) => Some((stream, place)),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                None
            }
        }
    }

    fn connection(
        &self,
        stream: TcpStream,
        place: OwnedSemaphorePermit,
        graceful: &GracefulShutdown,
        mut shutdown: Shutdown,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (bounds, answers) = (self.bounds, self.answers.clone());
        let (secured, watcher) = (self.secured.clone(), graceful.watcher());
        async move {
            let (stream, peer) = match secured {
                None => (Io::Plain(stream), None),
                // Who has not asked for anything when the server stops is not waited for.
                Some(secured) => tokio::select! {
                    accepted = secured.accept(stream, bounds.head_time) => match accepted {
                        Some(accepted) => accepted,
                        None => return,
                    },
                    () = shutdown.said(1) => return,
                },
            };
            let known = move |mut request: Request<Incoming>| {
                if let Some(peer) = &peer {
                    request.extensions_mut().insert(peer.clone());
                }
                request
            };
            // hyper has no bound for those who never read what they asked for.
            let writing = Some(bounds.body_time);
            let ended = match answers {
                Answers::Http(router) => {
                    let router = TowerToHyperService::new(router);
                    let connection = http1::Builder::new()
                        .timer(TokioTimer::new())
                        .header_read_timeout(bounds.head_time)
                        .max_buf_size(bounds.head_max.max(HEAD_MIN))
                        .max_headers(bounds.headers_max)
                        .serve_connection(
                            TokioIo::new(Patient::new(stream, None, writing)),
                            service_fn(move |request| router.call(known(request))),
                        );
                    watcher.watch(connection).await
                }
                Answers::Envoy(services) => {
                    // An idle one is asked whether it is there. Whoever says nothing at all, from the beginning or then, leaves.
                    let reading = Some(bounds.head_time.saturating_mul(2));
                    let streams_max = bounds.requests_max.clamp(1, STREAMS_MAX);
                    let calls = Calls::default();
                    let connection = http2::Builder::new(calls.clone())
                        .timer(TokioTimer::new())
                        .keep_alive_interval(bounds.head_time)
                        .keep_alive_timeout(bounds.head_time)
                        .max_header_list_size(u32::try_from(bounds.head_max).unwrap_or(u32::MAX))
                        .max_concurrent_streams(u32::try_from(streams_max).unwrap_or(u32::MAX))
                        .serve_connection(
                            TokioIo::new(Patient::new(stream, reading, writing)),
                            service_fn(move |request| {
                                // In a box: it is handed on a few times, and is as large as all the rest.
                                services.clone().answer(Box::new(known(request))).map(Ok::<_, Infallible>)
                            }),
                        );
                    calls.run(watcher.watch(connection)).await
                }
            };
            // A client that is slow, gone or speaks no HTTP is no news.
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(place);
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
