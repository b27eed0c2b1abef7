//! What was read, as connections are served with it: the server's own certificate, who is let in, and what rustls is told of both.

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
use crate::peer::Facts;
use crate::pem;

/// What a file holds, or why it cannot be read.
pub(super) type Read = Result<Vec<u8>, TlsError>;
/// What is remembered of a file. Nobody gets from it to a key.
pub(super) type Digest = [u8; 32];

/// What connections are served with.
pub(super) struct Loaded {
    pub(super) configs: [Arc<ServerConfig>; 2],
    pub(super) own: Own,
    pub(super) clients: Option<Clients>,
}

/// The server's own certificate.
#[derive(Clone)]
pub(super) struct Own {
    key: Arc<CertifiedKey>,
    pub(super) expires_at: Stamp,
}

/// Who is let in. It is read apart from the server's own certificate: what is withdrawn is trusted no more, even while that cannot
/// be used.
#[derive(Clone)]
pub(super) struct Clients {
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    pub(super) digest: Option<Digest>,
    /// How often the file has changed.
    pub(super) generation: u64,
}

impl Own {
    pub(super) fn read(options: &TlsOptions, [cert, key]: [&Read; 2]) -> Result<Self, TlsError> {
        let chain = pem::certificates("certificate", &options.cert, bytes(cert)?)?;
        let unusable = |what, file: &Path, why: String| TlsError::Unusable { what, file: file.into(), why };
        let no_certificate = |why: String| unusable("certificate", &options.cert, why);
        let facts = Facts::read(&chain[0]).map_err(|error| no_certificate(error.to_string()))?;
        let (file, expires_at, now) = (options.cert.clone(), facts.expires_at, options.clock.now());
        if expires_at <= now {
            return Err(TlsError::Expired { file, at: expires_at, now });
        }
        if facts.begins_at > now {
            return Err(TlsError::Early { file, at: facts.begins_at, now });
        }
        let key = pem::key("key", &options.key, bytes(key)?)?;
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|error| match error {
            rustls::Error::InvalidCertificate(_) => no_certificate(error.to_string()),
            rustls::Error::InconsistentKeys(_) => {
                let why = format!("it is not that of the certificate `{}`", options.cert.display());
                unusable("key", &options.key, why)
            }
            error => unusable("key", &options.key, error.to_string()),
        })?;
        Ok(Self { key: Arc::new(key), expires_at })
    }
}

impl Clients {
    pub(super) fn read(file: &Path, read: &Read, generation: u64) -> Result<Self, TlsError> {
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

impl Loaded {
    pub(super) fn new(options: &TlsOptions, own: Own, clients: Option<Clients>) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let clock = Arc::new(Clock(options.clock.clone()));
        let builder = ServerConfig::builder_with_details(provider, clock)
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Unusable {
                what: "certificate",
                file: options.cert.clone(),
                why: error.to_string(),
            })?;
        let builder = match &clients {
            Some(clients) => builder.with_client_cert_verifier(Arc::clone(&clients.verifier)),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(OneKey(Arc::clone(&own.key))));
        if clients.is_some() {
            // A session that is taken up again brings no certificate: each connection is checked anew.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        let configs = [b"http/1.1".as_slice(), b"h2"].map(|protocol| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        });
        Ok(Self { configs, own, clients })
    }

    pub(super) fn generation(&self) -> u64 {
        self.clients.as_ref().map_or(0, |clients| clients.generation)
    }
}

/// The same certificate for everybody.
#[derive(Debug)]
struct OneKey(Arc<CertifiedKey>);

impl ResolvesServerCert for OneKey {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn bytes(read: &Read) -> Result<&[u8], TlsError> {
    match read {
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.again()),
    }
}

/// What tells whether a file has changed: all of it, since its time and its length may stay the same.
pub(super) fn digest(read: &Read) -> Option<Digest> {
    read.as_ref().ok().map(|bytes| Sha256::digest(bytes).into())
}

/// A wall clock as rustls asks one.
#[derive(Debug)]
pub(super) struct Clock(pub(super) Arc<dyn WallClock>);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.0.now().since(Stamp::ZERO)))
    }
}
