//! Loaded certificates: the server's own, the client CAs, and the rustls configurations built from them.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest as _, Sha256};
use tidegate::Stamp;
use tidegate::store::WallClock;

use super::options::{TlsError, TlsOptions};
use crate::peer::CertificateInfo;
use crate::pem;

/// The contents of a file, or why it cannot be read.
pub(super) type FileContents = Result<Vec<u8>, TlsError>;
/// A hash of a file, which reveals nothing about a key.
pub(super) type Digest = [u8; 32];

/// The TLS configuration of new connections.
pub(super) struct LoadedTls {
    pub(super) configs: [Arc<ServerConfig>; 2],
    pub(super) server: ServerCertificate,
    pub(super) client_verifier: Option<ClientVerifier>,
}

/// The server's certificate and key.
#[derive(Clone)]
pub(super) struct ServerCertificate {
    key: Arc<CertifiedKey>,
    pub(super) expires_at: Stamp,
}

/// Verifies client certificates. It is reloaded independently of the server certificate: a removed CA loses
/// trust even while the server certificate is invalid.
#[derive(Clone)]
pub(super) struct ClientVerifier {
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    pub(super) digest: Option<Digest>,
    /// The number of changes of the file.
    pub(super) generation: u64,
}

impl ServerCertificate {
    pub(super) fn read(options: &TlsOptions, [cert, key]: [&FileContents; 2]) -> Result<Self, TlsError> {
        let chain = pem::certificates("certificate", &options.cert, bytes(cert)?)?;
        let unusable = |what, file: &Path, why: String| TlsError::Unusable { what, file: file.into(), why };
        let no_certificate = |why: String| unusable("certificate", &options.cert, why);
        let info = CertificateInfo::read(&chain[0]).map_err(|error| no_certificate(error.to_string()))?;
        let (file, expires_at, now) = (options.cert.clone(), info.expires_at, options.clock.now());
        if expires_at <= now {
            return Err(TlsError::Expired { file, at: expires_at, now });
        }
        if info.begins_at > now {
            return Err(TlsError::Early { file, at: info.begins_at, now });
        }
        let key = pem::key("key", &options.key, bytes(key)?)?;
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|error| match error {
            rustls::Error::InvalidCertificate(_) => no_certificate(error.to_string()),
            rustls::Error::InconsistentKeys(_) => {
                let why = format!("it does not match the certificate `{}`", options.cert.display());
                unusable("key", &options.key, why)
            }
            error => unusable("key", &options.key, error.to_string()),
        })?;
        Ok(Self { key: Arc::new(key), expires_at })
    }
}

impl ClientVerifier {
    pub(super) fn read(file: &Path, read: &FileContents, generation: u64) -> Result<Self, TlsError> {
        let unusable = |why: &dyn fmt::Display| TlsError::Unusable {
            what: "client CA",
            file: file.into(),
            why: why.to_string(),
        };
        let mut roots = RootCertStore::empty();
        for root in pem::certificates("client CA", file, bytes(read)?)? {
            roots.add(root).map_err(|error| unusable(&error))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self { verifier: verifier.map_err(|error| unusable(&error))?, digest: digest(read), generation })
    }
}

impl LoadedTls {
    pub(super) fn new(
        options: &TlsOptions,
        server: ServerCertificate,
        client_verifier: Option<ClientVerifier>,
    ) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let clock = Arc::new(Clock(options.clock.clone()));
        let builder = ServerConfig::builder_with_details(provider, clock)
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Unusable {
                what: "certificate",
                file: options.cert.clone(),
                why: error.to_string(),
            })?;
        let builder = match &client_verifier {
            Some(client_verifier) => builder.with_client_cert_verifier(Arc::clone(&client_verifier.verifier)),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertificate(Arc::clone(&server.key))));
        if client_verifier.is_some() {
            // A resumed session would skip certificate verification.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        let configs = [b"http/1.1".as_slice(), b"h2"].map(|protocol| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        });
        Ok(Self { configs, server, client_verifier })
    }

    pub(super) fn generation(&self) -> u64 {
        self.client_verifier.as_ref().map_or(0, |client_verifier| client_verifier.generation)
    }
}

/// Serves one certificate to all clients.
#[derive(Debug)]
struct SingleCertificate(Arc<CertifiedKey>);

impl ResolvesServerCert for SingleCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn bytes(read: &FileContents) -> Result<&[u8], TlsError> {
    match read {
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.duplicate()),
    }
}

/// Hashes a file to detect changes. Modification time and length may stay the same.
pub(super) fn digest(read: &FileContents) -> Option<Digest> {
    read.as_ref().ok().map(|bytes| Sha256::digest(bytes).into())
}

/// Adapts a wall clock for rustls.
#[derive(Debug)]
pub(super) struct Clock(pub(super) Arc<dyn WallClock>);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.0.now().since(Stamp::ZERO)))
    }
}
