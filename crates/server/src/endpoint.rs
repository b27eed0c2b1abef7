//! A listener and the connections that it serves.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::connections::{Admission, Connection, Connections};
use crate::frame_budget::BudgetedStream;
use crate::guarded_body::GuardedBody;
use crate::handshake::{Io, TlsHandshake};
use crate::inline_executor::InlineExecutor;
use crate::io_timeout::TimeoutStream;
use crate::log_throttle::LogThrottle;
use crate::options::Bounds;
use crate::rls::Services;
use crate::server::{ServeError, Shutdown};

/// Connections that the system accepts while the server is busy. The system may have a smaller bound.
const BACKLOG: u32 = 4_096;
/// Pause after a failed `accept`, usually for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// hyper's minimum buffer for request heads.
const HEAD_MIN: usize = 8_192;
/// Maximum number of concurrent streams per connection. Envoy opens another connection for more.
const STREAMS_MAX: usize = 1_024;

static ACCEPT_FAILURES: LogThrottle = LogThrottle::new();

/// A bound socket.
pub(crate) struct Listener {
    socket: TcpListener,
    pub(crate) addr: SocketAddr,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.addr)
    }
}

impl Listener {
    /// Listens at an address, which must be a loopback address unless others are allowed.
    pub(crate) fn bind(addr: SocketAddr, anywhere: bool) -> Result<Self, ServeError> {
        if !anywhere && !addr.ip().is_loopback() {
            return Err(ServeError::Exposed { addr });
        }
        let bind = || {
            let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // A restarted server does not wait for the connections of its predecessor to time out.
            socket.set_reuseaddr(true)?;
            socket.bind(addr)?;
            let socket = socket.listen(BACKLOG)?;
            let addr = socket.local_addr()?;
            Ok(Self { socket, addr })
        };
        bind().map_err(|source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { addr },
            _ => ServeError::Listen { addr, source },
        })
    }
}

/// The protocol and service of an endpoint.
#[derive(Debug, Clone)]
pub(crate) enum Protocol {
    /// The API, over HTTP/1.
    Http(Router),
    /// Envoy's service, over HTTP/2 with prior knowledge, as gRPC requires.
    Envoy(Services),
}

/// A listener and its service.
pub(crate) struct Endpoint {
    pub(crate) listener: Listener,
    pub(crate) protocol: Protocol,
    pub(crate) bounds: Bounds,
    pub(crate) connections: Arc<Connections>,
    pub(crate) tls_handshake: Option<TlsHandshake>,
}

impl Endpoint {
    /// Accepts connections until shutdown, and returns the open ones.
    pub(crate) async fn serve(self, graceful: Arc<GracefulShutdown>, mut shutdown: Shutdown) -> JoinSet<()> {
        let mut open = JoinSet::new();
        loop {
            // Removes finished connections.
            while open.try_join_next().is_some() {}
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                () = shutdown.signaled(1) => return open,
            };
            if let Some((stream, connection)) = accepted {
                let _ = stream.set_nodelay(true);
                let id = connection.id();
                let task = open.spawn(self.connection(stream, connection, &graceful, shutdown.clone()));
                self.connections.started(id, task);
            }
        }
    }

    /// Accepts the next connection, and waits if all are in use.
    async fn accept(&self) -> Option<(TcpStream, Connection)> {
        let (stream, peer) = match self.listener.socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(left_out) = ACCEPT_FAILURES.allow() {
                    tracing::warn!(%error, left_out, "failed to accept a connection");
                }
                sleep(ACCEPT_RETRY_DELAY).await;
                return None;
            }
        };
        loop {
            match self.connections.open(peer.ip()) {
                Admission::Admitted(connection) => return Some((stream, connection)),
                Admission::Refused => return None,
                Admission::Full => self.connections.freed().await,
            }
        }
    }

    fn connection(
        &self,
        stream: TcpStream,
        connection: Connection,
        graceful: &GracefulShutdown,
        mut shutdown: Shutdown,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (bounds, protocol) = (self.bounds, self.protocol.clone());
        let (tls_handshake, watcher) = (self.tls_handshake.clone(), graceful.watcher());
        let floods = self.connections.floods();
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
            let activity = Arc::clone(connection.activity());
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
                            service_fn(move |request| {
                                let call = activity.begin();
                                let response = router.call(with_peer(request));
                                response.map(|response| {
                                    response.map(|response| response.map(|body| GuardedBody::new(body, call)))
                                })
                            }),
                        );
                    watcher.watch(connection).await
                }
                Protocol::Envoy(services) => {
                    // Idle connections are pinged. A connection that never sends anything is closed.
                    let read_timeout = Some(bounds.head_time.saturating_mul(2));
                    let streams_max = bounds.requests_max.clamp(1, STREAMS_MAX);
                    let stream = BudgetedStream::new(stream, floods);
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
                                    .respond(Box::new(with_peer(request)), Arc::clone(&activity))
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
            drop(connection);
        }
    }
}
