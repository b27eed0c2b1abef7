//! A server with TLS, and clients that choose versions and protocols.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Certificate, Client, Identity};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tempfile::TempDir;
use tidegate_server::{Bounds, Server, ServerOptions, Shutdown, ShutdownOutcome, Stopper, Tls, TlsOptions};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::pki::{Authority, Pair};
use super::server::{Kit, any_port};

/// The supported TLS versions. A client with only one of them negotiates that one.
pub(crate) const VERSIONS: [&SupportedProtocolVersion; 2] =
    [&rustls::version::TLS13, &rustls::version::TLS12];

/// A server with TLS next to one without, over the same state.
pub(crate) struct Secure {
    pub(crate) kit: Kit,
    pub(crate) folder: TempDir,
    pub(crate) authority: Authority,
    pub(crate) pair: Pair,
    pub(crate) tls: Tls,
    pub(crate) addr: SocketAddr,
    pub(crate) stopper: Stopper,
    pub(crate) running: JoinHandle<ShutdownOutcome>,
}

impl Secure {
    pub(crate) async fn new() -> Self {
        Self::with(Bounds::default(), |_, options| options).await
    }

    pub(crate) async fn with(
        bounds: Bounds,
        change: impl FnOnce(&TempDir, TlsOptions) -> TlsOptions,
    ) -> Self {
        let (kit, folder) = (Kit::with(bounds).await, TempDir::new().expect("a folder"));
        let authority = Authority::new("the authority");
        let pair = authority.server();
        let (cert, key) = pair.write(folder.path(), "server");
        let clock = Arc::new(kit.clock.clone());
        let options = TlsOptions::new(cert, key).check_every(Duration::from_hours(1)).clock(clock);
        let tls = change(&folder, options).load().expect("it can be used");
        let server =
            Server::bind(&ServerOptions::new(any_port()).tls(tls.clone())).await.expect("it listens");
        let addr = server.local_addr();
        let (stopper, shutdown) = Shutdown::new();
        let running = tokio::spawn(server.run(kit.state.clone(), shutdown));
        Self { kit, folder, authority, pair, tls, addr, stopper, running }
    }

    /// A client that trusts the CA, with an optional certificate.
    pub(crate) fn client(&self, identity: Option<&Pair>) -> Client {
        let roots = Certificate::from_pem_bundle(self.authority.pem().as_bytes()).expect("PEM");
        let client = Client::builder().no_proxy().tls_certs_only(roots);
        let client = identity.into_iter().fold(client, |client, pair| {
            let identity = Identity::from_pem((pair.cert.clone() + &pair.key).as_bytes());
            client.identity(identity.expect("PEM"))
        });
        client.build().expect("a client")
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.addr)
    }

    /// Makes a request and returns the status and the body.
    pub(crate) async fn get(&self, client: &Client, path: &str) -> Result<(u16, String), reqwest::Error> {
        let response = client.get(self.url(path)).send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    }

    /// Connects as a client that trusts the CA.
    pub(crate) async fn connect(&self) -> TlsStream<TcpStream> {
        let config = config(&self.authority, None, &VERSIONS);
        connect(self.addr, &Arc::new(config)).await.expect("it is trusted")
    }

    pub(crate) async fn metric(&self, line: &str) -> u64 {
        let text = self.kit.get("/metrics").await.text;
        let found = text.lines().find_map(|at| at.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("no {line} in {text}"))
    }
}

/// A client configuration: versions, trusted CA and certificate. It keeps its sessions.
pub(crate) fn config(
    trusted: &Authority,
    pair: Option<&Pair>,
    versions: &[&'static SupportedProtocolVersion],
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.pem().as_bytes()).expect("PEM")).expect("a root");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions);
    let config = config.expect("versions").with_root_certificates(roots);
    let Some(pair) = pair else { return config.with_no_client_auth() };
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
    config.with_client_auth_cert(vec![pair.der.clone().into()], key).expect("a pair")
}

/// Like `config`, offering these protocols (ALPN).
pub(crate) fn offering(config: &ClientConfig, protocols: &[&str]) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// Opens a connection for more than one request.
pub(crate) async fn connect(
    addr: SocketAddr,
    config: &Arc<ClientConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(addr).await?;
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::clone(config)).connect(name, stream).await
}

/// Returns the certificate that the server presented.
pub(crate) fn shown(stream: &TlsStream<TcpStream>) -> Vec<u8> {
    stream.get_ref().1.peer_certificates().expect("one")[0].to_vec()
}

/// Returns the negotiated protocol (ALPN).
pub(crate) fn negotiated(stream: &TlsStream<TcpStream>) -> Option<&str> {
    stream.get_ref().1.alpn_protocol().map(|protocol| str::from_utf8(protocol).expect("a name"))
}

/// Whether the server responds on this connection.
pub(crate) async fn is_served(stream: &mut TlsStream<TcpStream>) -> bool {
    let ask = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut answer = [0; 512];
    stream.write_all(ask).await.is_ok()
        && stream.read(&mut answer).await.is_ok_and(|read| answer[..read].starts_with(b"HTTP/1.1 204"))
}

/// Makes the last request on a connection, without a token, and returns the whole response.
pub(crate) async fn last<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut TlsStream<S>,
    path: &str,
) -> io::Result<String> {
    let ask = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
