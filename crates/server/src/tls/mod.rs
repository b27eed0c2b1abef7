//! TLS: certificates, client verification and hot reload.
//!
//! The files are read at startup, on request and when they change. Invalid files keep the current
//! configuration, so a half-written file never takes the certificate away. Open connections keep the
//! certificate of their handshake.

mod certificates;
mod options;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::time_provider::TimeProvider as _;
use tidegate::Stamp;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use certificates::{ClientVerifier, Clock, Digest, LoadedTls, ServerCertificate, digest};
pub use options::{TlsError, TlsOptions};

use crate::peer::{PeerCertificate, Verification};

/// The TLS configuration of a server, which reloads its files. Clones share the same state.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    options: TlsOptions,
    current: Mutex<Arc<LoadedTls>>,
    /// The state of the last reload. Its lock serializes reloads.
    reload_state: Mutex<ReloadState>,
    reloads: [AtomicU64; 2],
    failures: [AtomicU64; 3],
}

struct ReloadState {
    /// Hashes of the current certificate and key.
    digests: [Option<Digest>; 2],
    /// The error of the last reload, if it failed. It is retried with every check, but logged once.
    last_error: Option<String>,
}

/// The application protocol (ALPN).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Alpn {
    /// `http/1.1`
    Http1,
    /// `h2`
    Http2,
}

/// How a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeFailure {
    /// One side rejected the other's messages.
    Broken,
    /// It timed out.
    TimedOut,
    /// The client does not speak TLS.
    Plain,
}

/// TLS counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TlsStats {
    pub(crate) expires_at: Stamp,
    /// Successful and failed reloads.
    pub(crate) reloads: [u64; 2],
    /// By [`HandshakeFailure`].
    pub(crate) failures: [u64; 3],
}

impl Tls {
    /// Creates the state from loaded files and their hashes.
    fn new(options: TlsOptions, loaded: LoadedTls, digests: [Option<Digest>; 2]) -> Self {
        Self(Arc::new(Shared {
            options,
            current: Mutex::new(Arc::new(loaded)),
            reload_state: Mutex::new(ReloadState { digests, last_error: None }),
            reloads: Default::default(),
            failures: Default::default(),
        }))
    }

    /// Reloads the files for new connections. On failure, the error is returned, logged and counted, and the
    /// current configuration is kept.
    ///
    /// # Errors
    /// [`TlsError`] names the file and what is wrong with it.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop the reload.
    pub async fn reload(&self) -> Result<(), TlsError> {
        let this = self.clone();
        let reading = spawn_blocking(move || this.reload_files(true));
        reading.await.unwrap_or_else(|error| {
            let file = self.0.options.cert.clone();
            Err(TlsError::Unreadable { what: "certificate", file, source: error.into() })
        })
    }

    /// Returns when the current certificate expires.
    pub fn expires_at(&self) -> Stamp {
        self.current().server.expires_at
    }

    /// Whether clients must present a certificate.
    pub fn is_mutual(&self) -> bool {
        self.0.options.client_ca.is_some()
    }

    /// Reloads the files when they change. Never returns.
    ///
    /// # Cancel safety
    /// Dropping the future stops the checks.
    pub async fn watch_files(self) -> JoinSet<()> {
        let every = self.0.options.check_every.max(Duration::from_millis(1));
        // The files were just loaded.
        let mut ticks = interval_at(Instant::now() + every, every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let this = self.clone();
            // The reload has logged its error.
            let _ = spawn_blocking(move || this.reload_files(false)).await;
        }
    }

    /// Reads the files and applies valid changes. An error is logged if the reload `is_explicit`, and
    /// otherwise once.
    fn reload_files(&self, is_explicit: bool) -> Result<(), TlsError> {
        let (options, mut reload_state) = (&self.0.options, lock(&self.0.reload_state));
        let (cert, key, ca) = options.read();
        let current = self.current();
        let digests = [&cert, &key].map(digest);
        let has_new_pair = is_explicit || digests != reload_state.digests || digests.contains(&None);
        let server = has_new_pair.then(|| ServerCertificate::read(options, [&cert, &key])).transpose();
        let client_verifier = match (&options.client_ca, &ca, &current.client_verifier) {
            (Some(file), Some(ca), Some(old)) => {
                let is_same = digest(ca).is_some_and(|digest| Some(digest) == old.digest);
                (!is_same).then(|| ClientVerifier::read(file, ca, old.generation + 1)).transpose()
            }
            _ => Ok(None),
        };
        let has_changes = matches!(server, Ok(Some(_))) || matches!(client_verifier, Ok(Some(_)));
        let (server, failure) = server.map_or_else(|error| (None, Some(error)), |server| (server, None));
        let (client_verifier, client_error) =
            client_verifier.map_or_else(|error| (None, Some(error)), |verifier| (verifier, None));
        let mut failure = failure.or(client_error);
        if has_changes {
            if server.is_some() {
                reload_state.digests = digests;
            }
            let server = server.unwrap_or_else(|| current.server.clone());
            match LoadedTls::new(options, server, client_verifier.or_else(|| current.client_verifier.clone()))
            {
                Ok(loaded) => *lock(&self.0.current) = Arc::new(loaded),
                Err(error) => failure = Some(error),
            }
        }
        let [done, failed] = &self.0.reloads;
        let Some(error) = failure else {
            reload_state.last_error = None;
            if has_changes {
                done.fetch_add(1, Ordering::Relaxed);
                tracing::info!(expires_at = %self.expires_at(), "reloaded the TLS files");
            }
            return Ok(());
        };
        let last_error = Some(error.fingerprint());
        if is_explicit || reload_state.last_error != last_error {
            failed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "failed to reload the TLS files; keeping the current ones");
        }
        reload_state.last_error = last_error;
        Err(error)
    }

    fn current(&self) -> Arc<LoadedTls> {
        Arc::clone(&lock(&self.0.current))
    }

    /// Returns the configuration of new connections, and the generation of the client CAs.
    pub(crate) fn config(&self, alpn: Alpn) -> (Arc<ServerConfig>, u64) {
        let current = self.current();
        (Arc::clone(&current.configs[alpn as usize]), current.generation())
    }

    /// Identifies a client whose certificates were verified by this generation of the client CAs.
    pub(crate) fn peer(&self, chain: &[CertificateDer<'_>], generation: u64) -> Option<PeerCertificate> {
        let peer = PeerCertificate::new(chain.first()?, &self.0.options.clients)?;
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Some(peer.with_verification(Verification::new(self.clone(), chain, generation)))
    }

    /// Verifies a client's certificates with the current client CAs and returns their generation.
    pub(crate) fn trusts(&self, chain: &[CertificateDer<'_>], checked: u64) -> Option<u64> {
        let current = self.current();
        let client_verifier = current.client_verifier.as_ref()?;
        if client_verifier.generation == checked {
            return Some(checked);
        }
        let (first, rest) = chain.split_first()?;
        let now = Clock(self.0.options.clock.clone()).current_time()?;
        client_verifier.verifier.verify_client_cert(first, rest, now).ok().map(|_| client_verifier.generation)
    }

    pub(crate) fn count_failure(&self, how: HandshakeFailure) {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
