//! Accepts connections and serves them over HTTP/1, with TLS or without, until it is stopped.

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tidegate_server::{
    Activity, ConnectionCounts, ConnectionMeters, Connections, GuardedBody, Listener, PeerCertificate,
    TimeoutStream, Tls,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Timeout for the TLS handshake of a connection.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Why a body broke off.
pub(crate) type BodyError = Box<dyn Error + Send + Sync>;
/// The body of a response.
pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, BodyError>;

/// Responds to requests. Clones share their state.
pub trait HttpService: Clone + Send + Sync + 'static {
    /// Responds to one request. The future is dropped when the client disconnects.
    fn respond(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<UnsyncBoxBody<Bytes, Box<dyn Error + Send + Sync>>>> + Send;

    /// What counts the connections of its listener. Default: nothing that can be read.
    fn connection_meters(&self) -> ConnectionMeters {
        ConnectionCounts::default().meters("http")
    }
}

/// The bounds of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenBounds {
    /// Open connections. One address may have as many as are free, and more as long as the others can double
    /// theirs; at a bound, the connection that is idle longest is closed.
    pub connections_max: usize,
    /// Bytes of a request's line and headers.
    pub head_max: usize,
    /// Headers of a request.
    pub headers_max: usize,
    /// Timeout for receiving a request head, and for an idle connection.
    pub head_time: Duration,
    /// Timeout for a client that does not read its response.
    pub write_time: Duration,
    /// Time that a stopping listener waits for requests in flight.
    pub drain_time: Duration,
}

impl Default for ListenBounds {
    fn default() -> Self {
        Self {
            connections_max: 8_192,
            head_max: 64 * 1_024,
            headers_max: 128,
            head_time: Duration::from_mins(1),
            write_time: Duration::from_mins(1),
            drain_time: Duration::from_secs(30),
        }
    }
}

/// Serves connections until `stopped`, then finishes requests in flight. Returns whether all were finished
/// within the drain time; those that were not are aborted.
///
/// With TLS, a verified client certificate is in the extensions of each request.
///
/// # Cancel safety
/// Dropping the future aborts all connections.
pub async fn serve<S: HttpService>(
    listener: Listener,
    service: S,
    tls: Option<Tls>,
    bounds: ListenBounds,
    stopped: impl Future<Output = ()>,
) -> bool {
    let graceful = GracefulShutdown::new();
    let connections = Connections::new(bounds.connections_max.max(1), service.connection_meters());
    let mut open = JoinSet::new();
    let mut stopped = std::pin::pin!(stopped.fuse());
    loop {
        while open.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = listener.accept(&connections) => accepted,
            () = &mut stopped => break,
        };
        let Some((stream, connection)) = accepted else { continue };
        let _ = stream.set_nodelay(true);
        let (service, tls, watcher) = (service.clone(), tls.clone(), graceful.watcher());
        let (id, activity) = (connection.id(), Arc::clone(connection.activity()));
        let task = open.spawn(async move {
            match tls {
                None => serve_connection(stream, (None, activity), service, bounds, watcher).await,
                Some(tls) => {
                    if let Some((stream, peer)) = tls.accept(stream, HANDSHAKE_TIME).await {
                        serve_connection(stream, (peer, activity), service, bounds, watcher).await;
                    }
                }
            }
            drop(connection);
        });
        connections.started(id, task);
    }
    drop(listener);
    let drained = async {
        tokio::select! {
            () = graceful.shutdown() => {}
            () = connections.close_idle() => {}
        }
    };
    let is_drained = timeout(bounds.drain_time, drained).await.is_ok();
    // Calls are settled as they are dropped.
    open.shutdown().await;
    is_drained
}

async fn serve_connection<S: HttpService>(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    (peer, activity): (Option<PeerCertificate>, Arc<Activity>),
    service: S,
    bounds: ListenBounds,
    watcher: Watcher,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_time)
        .max_buf_size(bounds.head_max.max(8_192))
        .max_headers(bounds.headers_max)
        .serve_connection(
            TokioIo::new(TimeoutStream::new(stream, None, Some(bounds.write_time))),
            service_fn(move |mut request| {
                let (service, call) = (service.clone(), activity.begin());
                if let Some(peer) = &peer {
                    request.extensions_mut().insert(peer.clone());
                }
                async move {
                    let response = service.respond(request).await;
                    Ok::<_, Infallible>(response.map(|body| GuardedBody::new(body, call)))
                }
            }),
        );
    // Slow, disconnected or non-HTTP clients are routine.
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A body that is complete.
pub(crate) fn full(bytes: impl Into<Bytes>) -> ResponseBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}
