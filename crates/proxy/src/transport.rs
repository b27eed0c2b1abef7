//! Sends requests to upstreams, over pooled HTTP/1 connections.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::{Request, Response};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::{ClientConfig, RootCertStore};

use crate::listener::{BodyError, ResponseBody, full};

/// Timeout for connecting to an upstream.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Idle connections are closed after this; most servers close them later.
const IDLE_TIME: Duration = Duration::from_secs(50);
/// Idle connections to one upstream.
const IDLE_MAX: usize = 1_024;
/// Bytes of a response's line and headers.
const HEAD_MAX: usize = 256 * 1_024;
/// Headers of a response.
const HEADERS_MAX: usize = 256;

/// Sends requests to upstreams. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Transport(Client<HttpsConnector<HttpConnector>, ResponseBody>);

impl Transport {
    /// `has_tls` if an upstream needs it: only then the system's root certificates are loaded.
    pub(crate) fn new(has_tls: bool) -> Result<Self, String> {
        let provider = Arc::new(default_provider());
        let builder = HttpsConnectorBuilder::new();
        let builder = if has_tls {
            builder
                .with_provider_and_native_roots(Arc::unwrap_or_clone(provider))
                .map_err(|error| format!("the system's root certificates cannot be loaded: {error}"))?
        } else {
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?;
            builder
                .with_tls_config(config.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
        };
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_TIME));
        let connector = builder.https_or_http().enable_http1().wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIME)
            .pool_max_idle_per_host(IDLE_MAX)
            .http1_max_buf_size(HEAD_MAX)
            .http1_max_headers(HEADERS_MAX)
            .build(connector);
        Ok(Self(client))
    }

    /// Sends a request. Dropping the future closes its connection, which cancels the call at the upstream.
    pub(crate) async fn send(&self, request: Request<ResponseBody>) -> Result<Response<Incoming>, Error> {
        self.0.request(request).await
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transport")
    }
}

/// A body of which the beginning was read.
#[derive(Debug)]
pub(crate) struct Prefixed {
    prefix: Option<Bytes>,
    rest: Option<Incoming>,
}

/// The beginning of a body, and whether that is all of it.
pub(crate) struct Beginning {
    pub(crate) bytes: Bytes,
    pub(crate) rest: Option<Incoming>,
}

impl Beginning {
    /// Reads pieces as long as `wants_more` says so of each.
    pub(crate) async fn read(
        mut body: Incoming,
        mut wants_more: impl FnMut(&[u8]) -> bool,
    ) -> Result<Self, hyper::Error> {
        let (mut first, mut more) = (Bytes::new(), Vec::new());
        loop {
            if body.is_end_stream() {
                break;
            }
            let Some(frame) = body.frame().await else { break };
            let Ok(data) = frame?.into_data() else { continue };
            let is_last = !wants_more(&data) && !body.is_end_stream();
            // One piece is the rule, and needs no copy.
            if first.is_empty() {
                first = data;
            } else {
                if more.is_empty() {
                    more.extend_from_slice(&first);
                }
                more.extend_from_slice(&data);
            }
            if is_last {
                let bytes = if more.is_empty() { first } else { more.into() };
                return Ok(Self { bytes, rest: Some(body) });
            }
        }
        Ok(Self { bytes: if more.is_empty() { first } else { more.into() }, rest: None })
    }

    /// The body again.
    pub(crate) fn into_body(self) -> Prefixed {
        Prefixed { prefix: Some(self.bytes), rest: self.rest }
    }
}

impl Prefixed {
    /// A body of which nothing was read.
    pub(crate) const fn of(body: Incoming) -> Self {
        Self { prefix: None, rest: Some(body) }
    }

    pub(crate) fn boxed(self) -> ResponseBody {
        match self {
            Self { prefix, rest: None } => full(prefix.unwrap_or_default()),
            body => body.boxed_unsync(),
        }
    }
}

impl Body for Prefixed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if let Some(prefix) = this.prefix.take().filter(|prefix| !prefix.is_empty()) {
            return Poll::Ready(Some(Ok(Frame::data(prefix))));
        }
        match &mut this.rest {
            Some(rest) => Pin::new(rest).poll_frame(cx).map_err(Into::into),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.prefix.as_ref().is_none_or(Bytes::is_empty) && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let prefix = self.prefix.as_ref().map_or(0, |prefix| prefix.len() as u64);
        let rest = self.rest.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(prefix.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(prefix.saturating_add(upper));
        }
        hint
    }
}
