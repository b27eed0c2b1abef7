//! The client: calls of the API as functions, tried again by rules, and leases that look after themselves.

mod builder;
mod call;
mod course;
mod endings;
pub(crate) mod error;
mod events;
mod lease;
mod pages;
mod renewal;
#[macro_use]
mod routes;
mod secret;
mod send;
mod steps;
mod trust;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reqwest::Url;
use serde::de::DeserializeOwned;
use tidegate_core::retry::Retries;
use tokio::time::Instant;

pub use builder::{ClientBuilder, InvalidClient};
pub use error::{Away, Cause, ClientError, GaveUp};
pub use events::Events;
pub use lease::Lease;
pub use pages::{Page, Pages, Query};

pub(crate) use trust::Trust;

use builder::Patience;
use call::Call;
use endings::Endings;
use secret::Secret;

/// A client of one server. Clones share its connections, its retry budget and its counts.
///
/// It needs a tokio runtime; [`blocking::Client`](crate::blocking::Client) brings its own.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    token: Option<Secret>,
}

/// What clones of a client share.
struct Inner {
    http: reqwest::Client,
    base: Url,
    patience: Patience,
    born: Instant,
    retries: Option<Mutex<Retries>>,
    endings: Endings,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    retries: AtomicU64,
    out_of_budget: AtomicU64,
    renewals: AtomicU64,
    leases_lost: AtomicU64,
}

/// What a client and its clones have counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Attempts that were not the first of their call.
    pub retries: u64,
    /// Calls that ended because too much of the traffic were retries.
    pub out_of_budget: u64,
    /// Leases that were given more time in the background, each time counted.
    pub renewals: u64,
    /// Leases that were found to have ended while their handle held them.
    pub leases_lost: u64,
    /// Leases that are being ended in the background.
    pub endings_pending: u64,
    /// Leases that were dropped, and that the server could not be told of: they end by their deadline.
    pub endings_lost: u64,
}

impl Client {
    /// A client without a token, with the patience there is by default. Nothing is sent yet.
    ///
    /// # Errors
    /// [`InvalidClient`] for an address that is none of a server.
    pub fn new(url: &str) -> Result<Self, InvalidClient> {
        Self::builder(url).build()
    }

    /// A client of the server at this address, to be changed.
    pub fn builder(url: &str) -> ClientBuilder {
        ClientBuilder::new(url)
    }

    /// The same client with another token. It shares connections, retry budget and counts.
    ///
    /// # Errors
    /// [`InvalidClient::Token`] for what cannot be sent.
    pub fn token(mut self, token: &str) -> Result<Self, InvalidClient> {
        self.token = Some(Secret::new(token).map_err(|_| InvalidClient::Token)?);
        Ok(self)
    }

    /// The address of the server.
    pub fn url(&self) -> &str {
        self.inner.base.as_str()
    }

    /// What was counted so far.
    pub fn stats(&self) -> ClientStats {
        let counts = &self.inner.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ClientStats {
            retries: read(&counts.retries),
            out_of_budget: read(&counts.out_of_budget),
            renewals: read(&counts.renewals),
            leases_lost: read(&counts.leases_lost),
            endings_pending: self.inner.endings.pending() as u64,
            endings_lost: self.inner.endings.lost(),
        }
    }

    /// Waits until no lease is being ended in the background.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn drain(&self) {
        self.inner.endings.drained().await;
    }

    /// Sends a call, and again as the rules say, and reads the answer.
    async fn ask<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        self.ask_within(call, None).await
    }

    /// The same, for `total` in all.
    async fn ask_within<T: DeserializeOwned>(
        &self,
        call: Call,
        total: Option<Duration>,
    ) -> Result<T, ClientError> {
        let answer = self.inner.ask(self.token.as_ref(), &call, total).await?;
        // Nothing is a body too.
        let body = if answer.body.is_empty() { b"null" } else { &answer.body[..] };
        serde_json::from_slice(body).map_err(|error| self.garbled(&call, answer.status, &error))
    }

    /// The same for an answer that is text.
    async fn read(&self, call: Call) -> Result<String, ClientError> {
        let answer = self.inner.ask(self.token.as_ref(), &call, None).await?;
        String::from_utf8(answer.body).map_err(|error| self.garbled(&call, answer.status, &error))
    }

    fn garbled(&self, call: &Call, status: u16, why: &impl fmt::Display) -> ClientError {
        send::garbled(self.token.as_ref(), call, status, &why.to_string(), None)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("url", &self.url())
            .field("token", &self.token)
            .field("patience", &self.inner.patience)
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn new(http: reqwest::Client, base: Url, patience: Patience) -> Self {
        let retries = patience.retry.retry_budget().map(|budget| Mutex::new(Retries::new(&budget)));
        let endings = Endings::new(patience.endings_max);
        Self { http, base, patience, born: Instant::now(), retries, endings, counts: Counts::default() }
    }
}

/// A lock that a panic elsewhere has not spoiled: what is behind it is whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
