//! Accepts connections and serves them over HTTP/1, with TLS or without, until it is stopped.

use std::convert::Infallible;
use std::error::Error;
use std::io;
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
use tidegate_server::{PeerCertificate, TimeoutStream, Tls};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Pause after a failed `accept`, usually for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

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
}

/// The bounds of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenBounds {
    /// Open connections; further ones wait to be accepted.
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
    listener: TcpListener,
    service: S,
    tls: Option<Tls>,
    bounds: ListenBounds,
    stopped: impl Future<Output = ()>,
) -> bool {
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(bounds.connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    let mut connections = JoinSet::new();
    let mut stopped = std::pin::pin!(stopped.fuse());
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &slots) => accepted,
            () = &mut stopped => break,
        };
        let Some((stream, slot)) = accepted else {
            sleep(ACCEPT_RETRY_DELAY).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (service, tls, watcher) = (service.clone(), tls.clone(), graceful.watcher());
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            match tls {
                None => serve_connection(stream, None, service, bounds, watcher).await,
                Some(tls) => {
                    if let Some((stream, peer)) = tls.accept(stream, HANDSHAKE_TIME).await {
                        serve_connection(stream, peer, service, bounds, watcher).await;
                    }
                }
            }
            drop(slot);
        });
    }
    drop(listener);
    let is_drained = timeout(bounds.drain_time, graceful.shutdown()).await.is_ok();
    // Calls are settled as they are dropped.
    connections.shutdown().await;
    is_drained
}

async fn serve_connection<S: HttpService>(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Option<PeerCertificate>,
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
                let service = service.clone();
                if let Some(peer) = &peer {
                    request.extensions_mut().insert(peer.clone());
                }
                async move { Ok::<_, Infallible>(service.respond(request).await) }
            }),
        );
    // Slow, disconnected or non-HTTP clients are routine.
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    let accepted: io::Result<_> = listener.accept().await;
    match accepted {
        Ok((stream, _)) => Some((stream, slot)),
        Err(error) => {
            tracing::warn!(%error, "failed to accept a connection");
            None
        }
    }
}

/// A body that is complete.
pub(crate) fn full(bytes: impl Into<Bytes>) -> ResponseBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}
