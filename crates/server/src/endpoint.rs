//! A listener, and how its connections are served.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use futures_util::FutureExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::connections::{Connection, Connections};
use crate::frame_budget::BudgetedStream;
use crate::guarded_body::GuardedBody;
use crate::handshake::{Io, TlsHandshake};
use crate::inline_executor::InlineExecutor;
use crate::io_timeout::TimeoutStream;
use crate::listener::Listener;
use crate::options::Bounds;
use crate::rls::Services;
use crate::server::Shutdown;

/// hyper's minimum buffer for request heads.
const HEAD_MIN: usize = 8_192;
/// Maximum number of concurrent streams per connection. Envoy opens another connection for more.
const STREAMS_MAX: usize = 1_024;

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
                accepted = self.listener.accept(&self.connections) => accepted,
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
