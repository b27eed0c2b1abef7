//! Envoy's service behind TLS: a client's certificate stands for a token there too.

mod kit;
#[path = "kit/pki.rs"]
mod pki;
mod rls_kit;

use std::fs;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code as Answered;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use hyper_util::rt::TokioIo;
use kit::codec::json;
use kit::{Kit, any_port, make_token};
use pki::{Authority, Pair};
use rls_kit::{request, rules};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::{Bounds, Server, ServerOptions, Shutdown, TlsOptions};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};

/// Connects to one address, with TLS.
#[derive(Clone)]
struct Connects(SocketAddr, Arc<ClientConfig>);

impl Connects {
    fn new(addr: SocketAddr, trusted: &Authority, pair: Option<&Pair>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.pem().as_bytes()).expect("PEM")).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("versions").with_root_certificates(roots);
        let mut config = match pair {
            None => config.with_no_client_auth(),
            Some(pair) => {
                let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
                config.with_client_auth_cert(vec![pair.der.clone().into()], key).expect("a pair")
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(addr, Arc::new(config))
    }

    async fn ask(self) -> Result<RateLimitResponse, Status> {
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = endpoint.connect_with_connector(self).await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        let asked = Request::new(request(&[&[("user", "acme")]]));
        RateLimitServiceClient::new(channel).should_rate_limit(asked).await.map(tonic::Response::into_inner)
    }
}

impl Service<Uri> for Connects {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self(addr, config) = self.clone();
        Box::pin(async move {
            let stream = TcpStream::connect(addr).await?;
            let name = ServerName::try_from("localhost").expect("a name");
            Ok(TokioIo::new(TlsConnector::from(config).connect(name, stream).await?))
        })
    }
}

#[tokio::test]
async fn a_call_with_a_certificate_that_stands_for_a_token_is_answered_and_no_other() {
    let (kit, folder) = (Kit::with(Bounds::default()).await, TempDir::new().unwrap());
    let authority = Authority::new("ours");
    let (cert, key) = authority.server().write(folder.path(), "server");
    let ca = folder.path().join("ca.pem");
    fs::write(&ca, authority.pem()).unwrap();
    let options = TlsOptions::new(cert, key).client_ca(ca).clock(Arc::new(kit.clock.clone()));
    let tls = options.client("urn:gate", TokenId::new("gate").unwrap()).load().unwrap();
    make_token(kit.limiter.store(), "gate", TokenScopes::new([TokenScope::Acquire]), "default").await;
    let envoy = rules(
        json!({"rules": [{"match": [{"key": "user"}], "entity": "{user}", "resource": "shop", "cost": {"rpm": 1}}]}),
    );
    let server =
        Server::bind(&ServerOptions::new(any_port()).tls(tls).envoy(any_port(), envoy)).await.unwrap();
    let addr = server.envoy_addr().unwrap();
    let (_stopper, shutdown) = Shutdown::new();
    let running = tokio::spawn(server.run(kit.state.clone(), shutdown));

    let ask = |pair: Option<&Pair>| Connects::new(addr, &authority, pair).ask();
    let known = authority.client("urn:gate", "x", 2090);
    let answer = ask(Some(&known)).await.unwrap();
    assert_eq!(answer.overall_code(), Answered::Ok);
    let other = authority.client("urn:other", "x", 2090);
    assert_eq!(ask(Some(&other)).await.unwrap_err().code(), Code::Unauthenticated);
    assert!(ask(None).await.is_err(), "nobody without one");
    running.abort();
}
