//! TLS: a certificate, whose clients are let in, and new files without a restart.
//!
//! The files are read when a server starts, when somebody asks for it, and when they have changed. What cannot be used leaves
//! what was there before: a server never loses its certificate because somebody wrote half a file. Connections that are
//! open go on with the certificate that they began with.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use tidegate::Stamp;
use tidegate::store::{HostWall, WallClock};
use tidegate_core::limit::token::TokenId;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::peer::{Facts, Origin, PeerCertificate};
use crate::pem;

/// How often files are looked at unless said otherwise.
const LOOK_EVERY: Duration = Duration::from_secs(10);

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
    fn again(&self) -> Self {
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
    fn lasting(&self) -> String {
        match self {
            Self::Expired { file, at, .. } | Self::Early { file, at, .. } => {
                format!("{} {at}", file.display())
            }
            error => error.to_string(),
        }
    }
}

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
    cert: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    clients: Vec<(String, TokenId)>,
    look_every: Duration,
    clock: Arc<dyn WallClock>,
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
        let seen = Seen { digests: [&cert, &key].map(digest), trouble: None };
        let loaded = Loaded::new(&self, own, clients)?;
        Ok(Tls(Arc::new(Shared {
            options: self,
            current: Mutex::new(Arc::new(loaded)),
            seen: Mutex::new(seen),
            reloads: Default::default(),
            failures: Default::default(),
        })))
    }

    /// What is in the files now.
    fn read(&self) -> (Read, Read, Option<Read>) {
        let ca = self.client_ca.as_ref().map(|file| pem::read("client CA", file));
        (pem::read("certificate", &self.cert), pem::read("key", &self.key), ca)
    }
}

/// What a file holds, or why it cannot be read.
type Read = Result<Vec<u8>, TlsError>;
/// What is remembered of a file. Nobody gets from it to a key.
type Digest = [u8; 32];

/// A certificate in use, and those that will be. Clones are the same.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    options: TlsOptions,
    current: Mutex<Arc<Loaded>>,
    /// What was last read. Whoever reads the files holds it.
    seen: Mutex<Seen>,
    reloads: [AtomicU64; 2],
    failures: [AtomicU64; 3],
}

struct Seen {
    /// Of the certificate and the key in use.
    digests: [Option<Digest>; 2],
    /// What was told to be wrong, and still is. It is tried again at each look, and told once.
    trouble: Option<String>,
}

/// What is spoken behind TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Alpn {
    /// `http/1.1`
    Http1,
    /// `h2`
    Http2,
}

/// How a handshake fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// One of the sides did not like what the other one said.
    Broken,
    /// It took too long.
    TimedOut,
    /// The client speaks no TLS.
    Plain,
}

/// What is counted of TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TlsStats {
    pub(crate) expires_at: Stamp,
    /// Those that went well, and those that did not.
    pub(crate) reloads: [u64; 2],
    /// By [`Failed`].
    pub(crate) failures: [u64; 3],
}

struct Loaded {
    configs: [Arc<ServerConfig>; 2],
    own: Own,
    clients: Option<Clients>,
}

/// The server's own certificate.
#[derive(Clone)]
struct Own {
    key: Arc<CertifiedKey>,
    expires_at: Stamp,
}

/// Who is let in. It is read apart from the server's own certificate: what is withdrawn is trusted no more, even while that cannot
/// be used.
#[derive(Clone)]
struct Clients {
    verifier: Arc<dyn ClientCertVerifier>,
    digest: Option<Digest>,
    /// How often the file has changed.
    generation: u64,
}

impl Tls {
    /// Reads the files again. Connections from now on have what is in them. What cannot be used is told here, in the log and in
    /// the metrics, and what was there before stays.
    ///
    /// # Errors
    /// [`TlsError`] names the file and what is wrong with it.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop the reading.
    pub async fn reload(&self) -> Result<(), TlsError> {
        let this = self.clone();
        let reading = spawn_blocking(move || this.renew(true));
        reading.await.unwrap_or_else(|error| {
            let file = self.0.options.cert.clone();
            Err(TlsError::Unreadable { what: "certificate", file, source: error.into() })
        })
    }

    /// Until when the certificate in use is good.
    pub fn expires_at(&self) -> Stamp {
        self.current().own.expires_at
    }

    /// Whether clients need a certificate.
    pub fn is_mutual(&self) -> bool {
        self.0.options.client_ca.is_some()
    }

    /// Reads the files whenever they have changed.
    pub(crate) async fn look_after(self) -> JoinSet<()> {
        let every = self.0.options.look_every.max(Duration::from_millis(1));
        // They were read a moment ago.
        let mut ticks = interval_at(Instant::now() + every, every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let this = self.clone();
            // What goes wrong was told.
            let _ = spawn_blocking(move || this.renew(false)).await;
        }
    }

    /// Reads the files, and takes what has changed and can be used. What cannot be is told whenever it `is_asked` for, and
    /// otherwise once.
    fn renew(&self, is_asked: bool) -> Result<(), TlsError> {
        let (options, mut seen) = (&self.0.options, lock(&self.0.seen));
        let (cert, key, ca) = options.read();
        let current = self.current();
        let digests = [&cert, &key].map(digest);
        let has_new_pair = is_asked || digests != seen.digests || digests.contains(&None);
        let own = has_new_pair.then(|| Own::read(options, [&cert, &key])).transpose();
        let clients = match (&options.client_ca, &ca, &current.clients) {
            (Some(file), Some(ca), Some(old)) => {
                let is_same = digest(ca).is_some_and(|digest| Some(digest) == old.digest);
                (!is_same).then(|| Clients::read(file, ca, old.generation + 1)).transpose()
            }
            _ => Ok(None),
        };
        let has_news = matches!(own, Ok(Some(_))) || matches!(clients, Ok(Some(_)));
        let (own, wrong) = own.map_or_else(|error| (None, Some(error)), |own| (own, None));
        let (clients, other) = clients.map_or_else(|error| (None, Some(error)), |clients| (clients, None));
        let mut wrong = wrong.or(other);
        if has_news {
            if own.is_some() {
                seen.digests = digests;
            }
            let own = own.unwrap_or_else(|| current.own.clone());
            match Loaded::new(options, own, clients.or_else(|| current.clients.clone())) {
                Ok(loaded) => *lock(&self.0.current) = Arc::new(loaded),
                Err(error) => wrong = Some(error),
            }
        }
        let [done, failed] = &self.0.reloads;
        let Some(error) = wrong else {
            seen.trouble = None;
            if has_news {
                done.fetch_add(1, Ordering::Relaxed);
                tracing::info!(expires_at = %self.expires_at(), "the certificate was read again");
            }
            return Ok(());
        };
        let trouble = Some(error.lasting());
        if is_asked || seen.trouble != trouble {
            failed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "the certificate in use stays");
        }
        seen.trouble = trouble;
        Err(error)
    }

    fn current(&self) -> Arc<Loaded> {
        Arc::clone(&lock(&self.0.current))
    }

    /// What the next connection is served with, and the generation of those who are let in.
    pub(crate) fn config(&self, alpn: Alpn) -> (Arc<ServerConfig>, u64) {
        let current = self.current();
        (Arc::clone(&current.configs[alpn as usize]), current.generation())
    }

    /// Who a client is by the certificates that were checked by those of a generation.
    pub(crate) fn peer(&self, chain: &[CertificateDer<'_>], generation: u64) -> Option<PeerCertificate> {
        let peer = PeerCertificate::new(chain.first()?, &self.0.options.clients)?;
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Some(peer.checked_by(Origin::new(self.clone(), chain, generation)))
    }

    /// Whether a client with these certificates would be let in now, and the generation of those who say so.
    pub(crate) fn trusts(&self, chain: &[CertificateDer<'_>], checked: u64) -> Option<u64> {
        let current = self.current();
        let clients = current.clients.as_ref()?;
        if clients.generation == checked {
            return Some(checked);
        }
        let (first, rest) = chain.split_first()?;
        let now = Clock(self.0.options.clock.clone()).current_time()?;
        clients.verifier.verify_client_cert(first, rest, now).ok().map(|_| clients.generation)
    }

    pub(crate) fn failed(&self, how: Failed) {
        self.0.failures[how as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> TlsStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TlsStats {
            expires_at: self.expires_at(),
            reloads: self.0.reloads.each_ref().map(load),
            failures: self.0.failures.each_ref().map(load),
        }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tls({} until {})", self.0.options.cert.display(), self.expires_at())
    }
}

impl Own {
    fn read(options: &TlsOptions, [cert, key]: [&Read; 2]) -> Result<Self, TlsError> {
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
        let provider = rustls::crypto::ring::default_provider();
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
    fn read(file: &Path, read: &Read, generation: u64) -> Result<Self, TlsError> {
        let unusable = |why: &dyn fmt::Display| TlsError::Unusable {
            what: "client CA",
            file: file.into(),
            why: why.to_string(),
        };
        let mut roots = RootCertStore::empty();
        for root in pem::certificates("client CA", file, bytes(read)?)? {
            roots.add(root).map_err(|error| unusable(&error))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self { verifier: verifier.map_err(|error| unusable(&error))?, digest: digest(read), generation })
    }
}

impl Loaded {
    fn new(options: &TlsOptions, own: Own, clients: Option<Clients>) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
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

    fn generation(&self) -> u64 {
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
fn digest(read: &Read) -> Option<Digest> {
    read.as_ref().ok().map(|bytes| Sha256::digest(bytes).into())
}

/// A wall clock as rustls asks one.
#[derive(Debug)]
struct Clock(Arc<dyn WallClock>);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.0.now().since(Stamp::ZERO)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
