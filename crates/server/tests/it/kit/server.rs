//! A server on its own port, and a client for it.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder};
use tidegate::store::{ManualWall, Tokens};
use tidegate::{Limit, Limiter, Limits, Memory, Policy, ResourceName, Scope, Stamp, Store};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, TokenId, TokenScope, TokenScopes};
use tidegate_server::{
    Bounds, LeaseKey, Secret, Server, ServerOptions, Shutdown, ShutdownOutcome, State, StateOptions, Stopper,
    StoreTokenCache,
};
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;

use super::codec::{self, Value};

/// The time of the store and the tokens when a test begins. Only the test advances it.
pub(crate) const NOW: Stamp = Stamp::from_secs(1_800_000_000);

pub(crate) struct Kit {
    pub(crate) state: State,
    pub(crate) limiter: Limiter,
    pub(crate) addr: SocketAddr,
    /// The address of Envoy's service, if it has one.
    pub(crate) envoy: Option<SocketAddr>,
    pub(crate) stopper: Stopper,
    pub(crate) clock: ManualWall,
    /// Two tokens with every scope, to test access to each other's leases.
    pub(crate) token: String,
    pub(crate) other: String,
    client: Client,
    running: JoinHandle<ShutdownOutcome>,
}

/// A response of the API.
pub(crate) struct ApiResponse {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
    pub(crate) body: Value,
}

impl Kit {
    /// Starts a server over an in-memory store, with 10 requests and 1,000 tokens a minute for each entity.
    pub(crate) async fn new() -> Self {
        Self::with(Bounds::default()).await
    }

    pub(crate) async fn with(bounds: Bounds) -> Self {
        let clock = ManualWall::new(NOW);
        Self::over(Limiter::new(Memory::with_clock(clock.clone())), clock, bounds).await
    }

    /// Like `new`, at this address.
    pub(crate) async fn at(addr: SocketAddr) -> Self {
        let clock = ManualWall::new(NOW);
        let limiter = Limiter::new(Memory::with_clock(clock.clone()));
        let tokens = prepare(&limiter).await;
        let state = Self::state(limiter, &clock, Bounds::default()).await;
        Self::serving_at(&ServerOptions::new(addr), state, tokens).await.with_clock(clock)
    }

    /// Like `new`, over another limiter, whose tokens expire by this clock.
    pub(crate) async fn over(limiter: Limiter, clock: ManualWall, bounds: Bounds) -> Self {
        let tokens = prepare(&limiter).await;
        Self::start(limiter, clock, bounds, tokens).await
    }

    /// Starts another server, with the tokens of this one.
    pub(crate) async fn second_server(&self, limiter: Limiter) -> Self {
        Self::start(
            limiter,
            self.clock.clone(),
            *self.state.bounds(),
            (self.token.clone(), self.other.clone()),
        )
        .await
    }

    async fn start(limiter: Limiter, clock: ManualWall, bounds: Bounds, tokens: (String, String)) -> Self {
        let state = Self::state(limiter, &clock, bounds).await;
        Self::serving(state, tokens).await.with_clock(clock)
    }

    /// Like `new`, with these upstreams only.
    pub(crate) async fn with_upstreams(upstreams: BTreeMap<ResourceName, Limits>) -> Self {
        let clock = ManualWall::new(NOW);
        let limiter = Limiter::new(Memory::with_clock(clock.clone()));
        let tokens = prepare(&limiter).await;
        let options = Self::options(&limiter, &clock, Bounds::default()).await;
        let state = State::with(limiter, StateOptions { upstreams: Some(upstreams), ..options });
        Self::serving(state, tokens).await.with_clock(clock)
    }

    pub(crate) async fn state(limiter: Limiter, clock: &ManualWall, bounds: Bounds) -> State {
        let options = Self::options(&limiter, clock, bounds).await;
        State::with(limiter, options)
    }

    async fn options(limiter: &Limiter, clock: &ManualWall, bounds: Bounds) -> StateOptions {
        let namespace = Namespace::new("default").expect("a name");
        StateOptions {
            // Tokens are cached for the whole test, so that only the test's requests reach the store.
            token_cache: Arc::new(StoreTokenCache::with(limiter.clone(), Duration::new(3_600, 0), 8_192)),
            lease_key: LeaseKey::of_store(limiter.store(), &namespace).await.expect("a key"),
            namespace,
            bounds,
            clock: Arc::new(clock.clone()),
            upstreams: None,
        }
    }

    /// Starts a server with this state.
    pub(crate) async fn serving(state: State, tokens: (String, String)) -> Self {
        Self::serving_at(&ServerOptions::new(any_port()), state, tokens).await
    }

    pub(crate) async fn serving_at(
        options: &ServerOptions,
        state: State,
        (token, other): (String, String),
    ) -> Self {
        let server = Server::bind(options).await.expect("it listens");
        let envoy = server.envoy_addr();
        let (addr, limiter) = (server.local_addr(), state.limiter().clone());
        let (stopper, shutdown) = Shutdown::new();
        let running = tokio::spawn(server.run(state.clone(), shutdown));
        // A server may close an idle connection at the moment a request is sent on it.
        let client = Client::builder().no_proxy().pool_max_idle_per_host(0).build().expect("a client");
        let clock = ManualWall::new(NOW);
        Self { state, limiter, addr, envoy, stopper, clock, token, other, client, running }
    }

    /// Replaces the clock.
    pub(crate) fn with_clock(self, clock: ManualWall) -> Self {
        Self { clock, ..self }
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> RequestBuilder {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        self.client.request(method, format!("http://{}{path}", self.addr))
    }

    /// Makes a request with the token that has every scope.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Option<Value>) -> ApiResponse {
        self.ask_as(&self.token, method, path, body).await
    }

    pub(crate) async fn ask_as(
        &self,
        token: &str,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> ApiResponse {
        let request = self.request(method, path).bearer_auth(token);
        send(match body {
            Some(body) => request.header("content-type", "application/json").body(body.to_string()),
            None => request,
        })
        .await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> ApiResponse {
        self.ask("POST", path, Some(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> ApiResponse {
        self.ask("GET", path, None).await
    }

    /// Waits until the server has stopped.
    pub(crate) async fn stopped(self) -> ShutdownOutcome {
        // Closes the client's connections.
        drop(self.client);
        self.running.await.expect("the server does not panic")
    }
}

/// Writes the limits and creates two tokens.
async fn prepare(limiter: &Limiter) -> (String, String) {
    let limits = [Limit::per_minute("rpm", 10), Limit::per_minute("tpm", 1_000)];
    let policy = Policy::new(limits).expect("a policy");
    limiter.admin("test").set_policy(Scope::System, policy).await.expect("written");
    let token = make_token(limiter.store(), "all", TokenScopes::new(TokenScope::ALL), "default").await;
    let other = make_token(limiter.store(), "other", TokenScopes::new(TokenScope::ALL), "default").await;
    (token, other)
}

/// The default bounds with this change.
pub(crate) fn bounds(change: impl FnOnce(&mut Bounds)) -> Bounds {
    let mut bounds = Bounds::default();
    change(&mut bounds);
    bounds
}

pub(crate) fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Reserves a port while the socket exists. Servers may listen on it, one after the other.
pub(crate) fn reserved_port() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    // A listener may share the port while this socket does not listen.
    socket.set_reuseaddr(true).expect("it is set");
    socket.bind(any_port()).expect("it is bound");
    let addr = socket.local_addr().expect("an address");
    (socket, addr)
}

pub(crate) async fn send(request: RequestBuilder) -> ApiResponse {
    let response = request.send().await.expect("an answer");
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    // An event stream has no end.
    let is_stream = headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
    let text = if is_stream { String::new() } else { response.text().await.expect("a body") };
    let body = codec::from_str(&text).unwrap_or(Value::Null);
    ApiResponse { status, headers, text, body }
}

/// Creates a token that is valid until the year 2096.
pub(crate) async fn make_token(store: &dyn Store, id: &str, scopes: TokenScopes, namespace: &str) -> String {
    let id = TokenId::new(id).expect("an id");
    let secret = Secret::generate(&id);
    let token = NewToken {
        name: id.to_string(),
        id,
        namespace: Namespace::new(namespace).expect("a name"),
        scopes,
        entity: None,
        expires_at: Some(Stamp::from_secs(4_000_000_000)),
    };
    Tokens::create_token(store, &token, secret.hash(), "test").await.expect("made");
    secret.reveal().to_owned()
}

impl ApiResponse {
    /// Returns the kind of the problem.
    pub(crate) fn kind(&self) -> &str {
        self.body["type"].as_str().and_then(|kind| kind.strip_prefix("/problems/")).unwrap_or("none")
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Asserts that it is a problem with this status, kind and field.
    pub(crate) fn is_problem(&self, status: u16, kind: &str, field: &str) {
        assert_eq!((self.status, self.kind()), (status, kind), "{}", self.text);
        assert_eq!(self.header("content-type"), "application/problem+json", "{}", self.text);
        assert_eq!(self.body["status"], status);
        assert_eq!(self.body["field"].as_str().unwrap_or_default(), field, "{}", self.text);
        assert!(self.body["detail"].as_str().is_some_and(|detail| !detail.is_empty()));
    }
}

/// Returns the result of `work`, or panics after a minute.
pub(crate) async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::new(60, 0), work).await.unwrap_or_else(|_| panic!("{what} does not end"))
}
