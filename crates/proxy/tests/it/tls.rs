//! TLS: a client certificate stands for the token that it maps to.

use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tidegate_core::limit::token::{TokenId, TokenScope};
use tidegate_proxy::{ListenBounds, serve};
use tidegate_server::TlsOptions;

use crate::kit::client::{eventually, listen, mock, proxy, upstream};
use crate::kit::pki::{Authority, Pair};
use crate::kit::tenants::Store;

const BODY: &str = "{\"model\":\"gpt-4\",\"input\":\"hello\"}";

/// The status of a call with this certificate and key; `None` if there is no connection.
async fn call(
    authority: &Authority,
    addr: SocketAddr,
    pair: Option<&Pair>,
    key: Option<&str>,
) -> Option<u16> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate"))
        .expect("a root");
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config =
        config.with_safe_default_protocol_versions().expect("versions").with_root_certificates(roots);
    let config = match pair {
        None => config.with_no_client_auth(),
        Some(pair) => {
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("a key");
            config.with_client_auth_cert(vec![pair.der.clone().into()], key).expect("a pair")
        }
    };
    let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1().build();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let mut request = Request::post(format!("https://{addr}/openai/v1/responses"));
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let response = client.request(request.body(Full::from(BODY)).expect("a request")).await;
    response.ok().map(|response| response.status().as_u16())
}

#[tokio::test]
async fn client_certificate_stands_for_its_token() {
    let authority = Authority::new("ours");
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = authority.server().write(folder.path(), "server");
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, authority.pem()).unwrap();
    let options = TlsOptions::new(cert, key).client_ca(ca);
    let tls = options.client("spiffe://prod/gate", TokenId::new("gate").unwrap()).load().unwrap();

    let store = Store::new(&["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    store.token("gate", TokenScope::Acquire).await;
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let service = proxy(&[upstream], Some(store.tenants()));
    let listener = listen();
    let addr = listener.local_addr();
    tokio::spawn(serve(listener, service, Some(tls), ListenBounds::default(), std::future::pending()));

    let gate = authority.client("spiffe://prod/gate", "gate", 2090);
    let other = authority.client("spiffe://prod/other", "other", 2090);
    assert_eq!(call(&authority, addr, Some(&gate), None).await, Some(200));
    let used = async |entity: &str| store.used(entity, "gpt-4", "requests").await;
    eventually("the call is booked", async || used("gate").await == 1).await;
    assert_eq!(
        call(&authority, addr, Some(&gate), Some(&token)).await,
        Some(200),
        "a token takes precedence"
    );
    eventually("the call is booked", async || used("acme").await == 1).await;
    assert_eq!(call(&authority, addr, Some(&gate), Some("sk-own")).await, Some(200), "and so does a key");
    assert_eq!(call(&authority, addr, Some(&other), None).await, Some(200), "it maps to no token");
    assert_eq!(used("gate").await, 1);
    assert_eq!(call(&authority, addr, None, Some(&token)).await, None, "a certificate is required");
}
