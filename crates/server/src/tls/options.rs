//! Which files there are, whose clients are let in, and what may be wrong with them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tidegate::Stamp;
use tidegate::store::{HostWall, WallClock};
use tidegate_core::limit::token::TokenId;

use super::Tls;
use super::loaded::{Clients, Loaded, Own, Read, digest};
use crate::pem;

/// How often files are looked at unless said otherwise.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Where a certificate and its key are, and whose clients are let in.
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
    pub(super) look_every: Duration,
    pub(super) clock: Arc<dyn WallClock>,
}

impl TlsOptions {
    /// The certificate with those that it is signed by, and its key: files in PEM.
    pub fn new(cert: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self {
            cert: cert.into(),
            key: key.into(),
            client_ca: None,
            clients: Vec::new(),
            look_every: LOOK_EVERY,
            clock: Arc::new(HostWall),
        }
    }

    /// Lets in only clients with a certificate that was signed by one of those in this file, in PEM.
    pub fn client_ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.client_ca = Some(file.into());
        self
    }

    /// Lets a client's certificate with this name stand for a token, where a request brings none itself. A name with `:` is a
    /// URI of the certificate. Any other one is a DNS name of it or, where it has neither, the subject's only common name. Of
    /// several the first counts.
    pub fn client(mut self, name: impl Into<String>, token: TokenId) -> Self {
        self.clients.push((name.into(), token));
        self
    }

    /// How often to look whether the files have changed. By default every 10 seconds.
    pub const fn look_every(mut self, span: Duration) -> Self {
        self.look_every = span;
        self
    }

    /// The clock that certificates expire by. By default the machine's.
    pub fn clock(mut self, clock: Arc<dyn WallClock>) -> Self {
        self.clock = clock;
        self
    }

    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`] names the file and what is wrong with it.
    pub fn load(self) -> Result<Tls, TlsError> {
        for (at, (name, token)) in self.clients.iter().enumerate() {
            let why = match name.as_str() {
                "" => "the name is empty",
                _ if self.client_ca.is_none() => "without a client CA no client has a name",
                _ if token.is_reserved() => "nobody may hold that one",
                name if self.clients[..at].iter().any(|(other, _)| other == name) => {
                    "it stands for one already"
                }
                _ => continue,
            };
            return Err(TlsError::Client { name: name.clone(), token: token.clone(), why });
        }
        let (cert, key, ca) = self.read();
        let own = Own::read(&self, [&cert, &key])?;
        let clients = match (&self.client_ca, &ca) {
            (Some(file), Some(ca)) => Some(Clients::read(file, ca, 0)?),
            _ => None,
        };
        let loaded = Loaded::new(&self, own, clients)?;
        Ok(Tls::new(self, loaded, [&cert, &key].map(digest)))
    }

    /// What is in the files now.
    pub(super) fn read(&self) -> (Read, Read, Option<Read>) {
        let ca = self.client_ca.as_ref().map(|file| pem::read("client CA", file));
        (pem::read("certificate", &self.cert), pem::read("key", &self.key), ca)
    }
}

/// Why there is no TLS. Each names the file, and what is wrong with it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("the {what} `{}` cannot be read: {source}", .file.display())]
    Unreadable {
        /// What it should hold.
        what: &'static str,
        /// Where.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("the {what} `{}` cannot be used: {why}", .file.display())]
    Unusable {
        /// What it should hold.
        what: &'static str,
        /// Where.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The certificate is good no more.
    #[error("the certificate `{}` expired at {at}, and now is {now}", .file.display())]
    Expired {
        /// Where.
        file: PathBuf,
        /// When it expired.
        at: Stamp,
        /// What the clock says.
        now: Stamp,
    },
    /// The certificate is not good yet.
    #[error("the certificate `{}` is good from {at} on, and now is {now}", .file.display())]
    Early {
        /// Where.
        file: PathBuf,
        /// From when on it is good.
        at: Stamp,
        /// What the clock says.
        now: Stamp,
    },
    /// A client's name cannot stand for a token.
    #[error("the client `{name}` cannot stand for the token `{token}`: {why}")]
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
    /// The same error of a file once more.
    pub(super) fn again(&self) -> Self {
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

    /// What does not change while the same thing is wrong.
    pub(super) fn lasting(&self) -> String {
        match self {
            Self::Expired { file, at, .. } | Self::Early { file, at, .. } => {
                format!("{} {at}", file.display())
            }
            error => error.to_string(),
        }
    }
}
