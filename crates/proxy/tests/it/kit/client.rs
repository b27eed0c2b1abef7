//! Starts a service on a free port, and sends requests to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{HeaderMap, Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tidegate_proxy::{
    HttpService, ListenBounds, Mock, MockOptions, Profiles, Proxy, Tenants, Upstream, serve,
};
use tidegate_server::Listener;

use super::codec::{self, Value};

/// A complete response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        codec::parse(&self.text)
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// Listens at a free port.
pub(crate) fn listen() -> Listener {
    Listener::bind(([127, 0, 0, 1], 0).into(), false).expect("a port")
}

/// Serves on a free port for the rest of the test.
pub(crate) async fn start(service: impl HttpService) -> SocketAddr {
    let listener = listen();
    let addr = listener.local_addr();
    tokio::spawn(serve(listener, service, None, ListenBounds::default(), std::future::pending()));
    addr
}

/// A mock of a provider with these limits.
pub(crate) async fn mock(profile: &str, change: impl FnOnce(&mut MockOptions)) -> SocketAddr {
    let mut options = MockOptions::default();
    change(&mut options);
    let profiles = Profiles::built_in();
    let profile = Arc::clone(profiles.get(profile).expect("a profile"));
    start(Mock::new(profile, options).expect("valid options")).await
}

/// A client with its own connections.
#[derive(Clone)]
pub(crate) struct Caller {
    client: Client<HttpConnector, Full<Bytes>>,
    addr: SocketAddr,
    headers: Vec<(String, String)>,
}

impl Caller {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), addr, headers: Vec::new() }
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sends a request, and returns the response before its body.
    pub(crate) async fn begin(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        self.client.request(request).await.expect("a response")
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Reply {
        read(self.begin("POST", path, body.to_string()).await).await
    }

    /// Whether there is a response.
    pub(crate) async fn try_post(&self, path: &str, body: &'static str) -> bool {
        let request = Request::post(format!("http://{}{path}", self.addr)).body(Full::from(body));
        self.client.request(request.expect("a request")).await.is_ok()
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        read(self.begin("GET", path, "").await).await
    }
}

/// Reads a response to its end; a body that breaks off ends with `<broken>`.
pub(crate) async fn read(response: Response<Incoming>) -> Reply {
    let (head, mut body) = response.into_parts();
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            bytes.extend_from_slice(b"<broken>");
            break;
        };
        bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
    }
    let text = String::from_utf8(bytes).expect("text");
    Reply { status: head.status.as_u16(), headers: head.headers, text }
}

/// A proxy before upstreams such as `openai=http://…`, with these tenants.
pub(crate) fn proxy(upstreams: &[Upstream], tenants: Option<Tenants>) -> Proxy {
    let mut builder = Proxy::builder();
    for upstream in upstreams {
        builder = builder.upstream(upstream.clone()).expect("a new name");
    }
    if let Some(tenants) = tenants {
        builder = builder.tenants(tenants);
    }
    builder.build().expect("a valid proxy")
}

/// An upstream at this address.
pub(crate) fn upstream(name: &str, addr: SocketAddr) -> Upstream {
    Upstream::parse(&format!("{name}=http://{addr}"), &Profiles::built_in()).expect("an upstream")
}

/// Polls until `is_done`; a bound catches a hang.
pub(crate) async fn eventually(what: &str, mut is_done: impl AsyncFnMut() -> bool) {
    for _ in 0..6_000 {
        if is_done().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} does not happen");
}
