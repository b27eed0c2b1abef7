//! TLS: a certificate, whose clients are let in, and new files without a restart.
//!
//! The files are read when a server starts, when somebody asks for it, and when they have changed. What cannot be used leaves
//! what was there before: a server never loses its certificate because somebody wrote half a file. Connections that are
//! open go on with the certificate that they began with.

mod loaded;
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

use loaded::{Clients, Clock, Digest, Loaded, Own, digest};
pub use options::{TlsError, TlsOptions};

use crate::peer::{Origin, PeerCertificate};

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

impl Tls {
    /// What was loaded, from files that were so.
    fn new(options: TlsOptions, loaded: Loaded, digests: [Option<Digest>; 2]) -> Self {
        Self(Arc::new(Shared {
            options,
            current: Mutex::new(Arc::new(loaded)),
            seen: Mutex::new(Seen { digests, trouble: None }),
            reloads: Default::default(),
            failures: Default::default(),
        }))
    }

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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
