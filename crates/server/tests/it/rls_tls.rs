//! Tests of Envoy's service behind TLS, where client certificates map to tokens too.

use std::fs;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code as Answered;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, HandshakeKind, SupportedProtocolVersion};
use tempfile::TempDir;
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::{Bounds, Server, ServerOptions, Shutdown, Stopper, Tls, TlsOptions};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::kit::codec::json;
use crate::kit::pki::{Authority, Pair};
use crate::kit::tls::{VERSIONS, config, connect, last, negotiated, offering};
use crate::kit::{Kit, any_port, make_token, soon};
use crate::rls_kit::{request, rules};

/// Connects to one address, with TLS.
#[derive(Clone)]
struct TlsConnector(SocketAddr, Arc<ClientConfig>);

impl TlsConnector {
    /// Makes a call on a new connection.
    async fn ask(self, token: Option<&str>) -> Result<RateLimitResponse, Status> {
        call(self.channel().await?, token).await
    }

    async fn channel(self) -> Result<Channel, Status> {
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(self).await;
        channel.map_err(|error| Status::unavailable(error.to_string()))
    }
}

/// Makes a call. Without a token, only the client certificate identifies the caller.
async fn call(channel: Channel, token: Option<&str>) -> Result<RateLimitResponse, Status> {
    let mut asked = Request::new(request(&[&[("user", "acme")]]));
    if let Some(token) = token {
        let value = format!("Bearer {token}").parse().expect("a value");
        asked.metadata_mut().insert("authorization", value);
    }
    RateLimitServiceClient::new(channel).should_rate_limit(asked).await.map(tonic::Response::into_inner)
}

impl Service<Uri> for TlsConnector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self(addr, config) = self.clone();
        Box::pin(async move { Ok(TokioIo::new(connect(addr, &config).await?)) })
    }
}

/// A server with Envoy's service behind TLS.
struct RlsTlsServer {
    kit: Kit,
    folder: TempDir,
    authority: Authority,
    tls: Tls,
    http: SocketAddr,
    envoy: SocketAddr,
    _stopper: Stopper,
}

impl RlsTlsServer {
    /// `clients` are the client CAs, if any. A client named `urn:gate` may draw.
    async fn new(clients: &[&Authority]) -> Self {
        let (kit, folder) = (Kit::with(Bounds::default()).await, TempDir::new().expect("a folder"));
        let authority = Authority::new("ours");
        let (cert, key) = authority.server().write(folder.path(), "server");
        let mut options = TlsOptions::new(cert, key).clock(Arc::new(kit.clock.clone()));
        if !clients.is_empty() {
            let gate = TokenId::new("gate").expect("an id");
            options = options.client_ca(trust(&folder, clients)).client("urn:gate", gate);
        }
        let tls = options.load().expect("it can be used");
        make_token(kit.limiter.store(), "gate", TokenScopes::new([TokenScope::Acquire]), "default").await;
        let rules = rules(
            json!({"rules": [{"match": [{"key": "user"}], "entity": "{user}", "resource": "shop", "cost": {"rpm": 1}}]}),
        );
        let options = ServerOptions::new(any_port()).tls(tls.clone()).envoy(any_port(), rules);
        let server = Server::bind(&options).await.expect("it listens");
        let (http, envoy) = (server.local_addr(), server.envoy_addr().expect("it answers Envoy"));
        let (stopper, shutdown) = Shutdown::new();
        tokio::spawn(server.run(kit.state.clone(), shutdown));
        Self { kit, folder, authority, tls, http, envoy, _stopper: stopper }
    }

    /// A gRPC client with these TLS versions. Clones share its sessions.
    fn client(&self, pair: Option<&Pair>, versions: &[&'static SupportedProtocolVersion]) -> TlsConnector {
        TlsConnector(self.envoy, offering(&config(&self.authority, pair, versions), &["h2"]))
    }

    /// Whether exactly one handshake failed.
    async fn has_refused_one(&self) -> bool {
        let text = self.kit.get("/metrics").await.text;
        text.contains("\ntidegate_tls_handshakes_failed_total{kind=\"broken\"} 1\n")
    }
}

/// Writes the client CAs to a file.
fn trust(folder: &TempDir, clients: &[&Authority]) -> PathBuf {
    let file = folder.path().join("ca.pem");
    fs::write(&file, clients.iter().map(|authority| authority.pem()).collect::<String>()).expect("written");
    file
}

#[tokio::test]
async fn mapped_client_certificate_authorizes_rls_call() {
    let clients = Authority::new("of clients");
    let secured = RlsTlsServer::new(&[&clients]).await;
    let ask = |pair: Option<&Pair>| secured.client(pair, &VERSIONS).ask(None);
    let known = clients.client("urn:gate", "x", 2090);
    let answer = ask(Some(&known)).await.unwrap();
    assert_eq!(answer.overall_code(), Answered::Ok);
    let other = clients.client("urn:other", "x", 2090);
    assert_eq!(ask(Some(&other)).await.unwrap_err().code(), Code::Unauthenticated);
    assert!(ask(None).await.is_err(), "a certificate is required");
}

#[tokio::test]
async fn revoked_rls_client_cannot_resume_session() {
    for version in VERSIONS {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let secured = RlsTlsServer::new(&[&ours, &theirs]).await;
        let [our, their] =
            [&ours, &theirs].map(|of| secured.client(Some(&of.client("urn:gate", "x", 2090)), &[version]));
        for client in [&our, &their] {
            for _ in 0..2 {
                let answer = client.clone().ask(None).await.unwrap();
                assert_eq!(answer.overall_code(), Answered::Ok, "{version:?}");
            }
        }
        let open = their.clone().channel().await.unwrap();
        assert!(call(open.clone(), None).await.is_ok(), "{version:?}");
        trust(&secured.folder, &[&ours]);
        secured.tls.reload().await.unwrap();
        for token in [None, Some(secured.kit.token.as_str())] {
            let refused = call(open.clone(), token).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated, "on an open connection: {version:?}");
        }
        assert!(their.ask(None).await.is_err(), "{version:?}");
        soon("a handshake that is refused", async { while !secured.has_refused_one().await {} }).await;
        assert_eq!(our.ask(None).await.unwrap().overall_code(), Answered::Ok, "{version:?}");
    }
}

#[tokio::test]
async fn envoy_port_negotiates_only_http_2() {
    let secured = RlsTlsServer::new(&[]).await;
    let token = Some(secured.kit.token.as_str());
    for version in VERSIONS {
        let client = config(&secured.authority, None, &[version]);
        for offer in [&["http/1.1"][..], &["http/1.0", "grpc-exp"]] {
            let error = connect(secured.envoy, &offering(&client, offer)).await.unwrap_err();
            assert!(error.to_string().contains("NoApplicationProtocol"), "{version:?} {offer:?}: {error}");
        }
        for (offer, agreed) in [(&["h2"][..], Some("h2")), (&["http/1.1", "h2"], Some("h2")), (&[], None)] {
            let config = offering(&client, offer);
            let stream = connect(secured.envoy, &config).await.unwrap();
            assert_eq!(negotiated(&stream), agreed, "{version:?} {offer:?}");
            // A client without ALPN is assumed to know the protocol.
            let answer = TlsConnector(secured.envoy, config).ask(token).await.unwrap();
            assert_eq!(answer.overall_code(), Answered::Ok, "{version:?} {offer:?}");
        }
    }
}

#[tokio::test]
async fn session_resumed_on_other_port_carries_no_token() {
    let secured = RlsTlsServer::new(&[]).await;
    for version in VERSIONS {
        let client = config(&secured.authority, None, &[version]);
        let mut first = connect(secured.http, &offering(&client, &["http/1.1"])).await.unwrap();
        assert!(last(&mut first, "/health/live").await.unwrap().starts_with("HTTP/1.1 204"), "{version:?}");
        let config = offering(&client, &["h2"]);
        let second = connect(secured.envoy, &config).await.unwrap();
        assert_eq!(second.get_ref().1.handshake_kind(), Some(HandshakeKind::Resumed), "{version:?}");
        assert_eq!(negotiated(&second), Some("h2"), "{version:?}");
        let third = TlsConnector(secured.envoy, config);
        let anonymous = third.clone().ask(None).await.unwrap_err();
        assert_eq!(anonymous.code(), Code::Unauthenticated, "{version:?}");
        assert!(third.ask(Some(&secured.kit.token)).await.is_ok(), "{version:?}");
    }
}
