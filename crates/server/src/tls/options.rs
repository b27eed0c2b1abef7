//! TLS options and their errors.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tidegate::Stamp;
use tidegate::store::{HostWall, WallClock};
use tidegate_core::limit::token::TokenId;

use super::Tls;
use super::certificates::{ClientVerifier, FileContents, LoadedTls, ServerCertificate, digest};
use crate::pem;

/// The default interval of checks for changed files.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The certificate and key files of a server, and how clients authenticate.
///
/// ```
/// use tidegate_server::TlsOptions;
///
/// let options = TlsOptions::new("server.pem", "server.key").client_ca("clients.pem");
/// let error = options.load().unwrap_err();
/// assert!(error.to_string().starts_with("the certificate `server.pem` cannot be read: "));
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until they are loaded"]
pub struct TlsOptions {
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
    pub(super) client_ca: Option<PathBuf>,
    pub(super) clients: Vec<(String, TokenId)>,
    pub(super) check_every: Duration,
    pub(super) clock: Arc<dyn WallClock>,
}

impl TlsOptions {
    /// Sets the certificate chain and its key, both PEM files.
    pub fn new(cert: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self {
            cert: cert.into(),
            key: key.into(),
            client_ca: None,
            clients: Vec::new(),
            check_every: CHECK_INTERVAL,
            clock: Arc::new(HostWall),
        }
    }

    /// Requires client certificates signed by one of the CAs in this PEM file.
    pub fn client_ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.client_ca = Some(file.into());
        self
    }

    /// Maps client certificates with this name to a token, for requests without a token of their own. A name
    /// with `:` matches a URI of the certificate. Any other name matches a DNS name or, if there is neither,
    /// the only common name of the subject. The first matching mapping wins.
    pub fn client(mut self, name: impl Into<String>, token: TokenId) -> Self {
        self.clients.push((name.into(), token));
        self
    }

    /// Sets the interval of checks for changed files. Defaults to 10 seconds.
    pub const fn check_every(mut self, span: Duration) -> Self {
        self.check_every = span;
        self
    }

    /// Sets the clock that certificates expire by. Defaults to the machine's clock.
    pub fn clock(mut self, clock: Arc<dyn WallClock>) -> Self {
        self.clock = clock;
        self
    }

    /// Loads the files.
    ///
    /// # Errors
    /// [`TlsError`] names the file and what is wrong with it.
    pub fn load(self) -> Result<Tls, TlsError> {
        for (at, (name, token)) in self.clients.iter().enumerate() {
            let why = match name.as_str() {
                "" => "the name is empty",
                _ if self.client_ca.is_none() => "client names require a client CA",
                _ if token.is_reserved() => "the token is reserved",
                name if self.clients[..at].iter().any(|(other, _)| other == name) => {
                    "the name is already mapped"
                }
                _ => continue,
            };
            return Err(TlsError::Client { name: name.clone(), token: token.clone(), why });
        }
        let (cert, key, ca) = self.read();
        let server = ServerCertificate::read(&self, [&cert, &key])?;
        let client_verifier = match (&self.client_ca, &ca) {
            (Some(file), Some(ca)) => Some(ClientVerifier::read(file, ca, 0)?),
            _ => None,
        };
        let loaded = LoadedTls::new(&self, server, client_verifier)?;
        Ok(Tls::new(self, loaded, [&cert, &key].map(digest)))
    }

    /// Reads the files.
    pub(super) fn read(&self) -> (FileContents, FileContents, Option<FileContents>) {
        let ca = self.client_ca.as_ref().map(|file| pem::read("client CA", file));
        (pem::read("certificate", &self.cert), pem::read_key(&self.key), ca)
    }
}

/// An error of the TLS files. Each names the file and what is wrong with it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("the {what} `{}` cannot be read: {source}", .file.display())]
    Unreadable {
        /// The expected content.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file does not contain what it should.
    #[error("the {what} `{}` cannot be used: {why}", .file.display())]
    Unusable {
        /// The expected content.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The certificate has expired.
    #[error("the certificate `{}` expired at {at}; it is now {now}", .file.display())]
    Expired {
        /// The file.
        file: PathBuf,
        /// When it expired.
        at: Stamp,
        /// The current time.
        now: Stamp,
    },
    /// The certificate is not valid yet.
    #[error("the certificate `{}` is valid from {at}; it is now {now}", .file.display())]
    Early {
        /// The file.
        file: PathBuf,
        /// When its validity begins.
        at: Stamp,
        /// The current time.
        now: Stamp,
    },
    /// A client name cannot be mapped to a token.
    #[error("cannot map the client `{name}` to the token `{token}`: {why}")]
    Client {
        /// The name.
        name: String,
        /// The token.
        token: TokenId,
        /// Why not.
        why: &'static str,
    },
}

impl TlsError {
    /// Clones the error.
    pub(super) fn duplicate(&self) -> Self {
        match self {
            Self::Unreadable { what, file, source } => {
                let source =
                    source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
                Self::Unreadable { what, file: file.clone(), source }
            }
            Self::Unusable { what, file, why } => {
                Self::Unusable { what, file: file.clone(), why: why.clone() }
            }
            Self::Expired { file, at, now } => Self::Expired { file: file.clone(), at: *at, now: *now },
            Self::Early { file, at, now } => Self::Early { file: file.clone(), at: *at, now: *now },
            Self::Client { name, token, why } => {
                Self::Client { name: name.clone(), token: token.clone(), why }
            }
        }
    }

    /// A text that stays the same while the same problem persists.
    pub(super) fn fingerprint(&self) -> String {
        match self {
            Self::Expired { file, at, .. } | Self::Early { file, at, .. } => {
                format!("{} {at}", file.display())
            }
            error => error.to_string(),
        }
    }
}
