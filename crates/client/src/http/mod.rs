//! The HTTP client: API calls as functions with retries, and self-renewing leases.

mod builder;
mod call;
mod certificates;
mod endings;
pub(crate) mod error;
mod events;
mod lease;
mod pages;
mod renewal;
mod retry_state;
#[macro_use]
mod routes;
mod secret;
mod send;
mod steps;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reqwest::Url;
use serde::de::DeserializeOwned;
use tidegate_core::retry::Retries;
use tokio::time::Instant;

pub use builder::{ClientBuilder, InvalidClient};
pub use error::{Cause, ClientError, Outage, StopReason};
pub use events::Events;
pub use lease::Lease;
pub use pages::{Page, Pages, Query};

pub(crate) use certificates::Certificates;

use builder::Settings;
use call::Call;
use endings::Endings;
use secret::Secret;

/// A client of one server. Clones share connections, retry budget and counters.
///
/// It requires a tokio runtime; [`blocking::Client`](crate::blocking::Client) brings its own.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    token: Option<Secret>,
}

/// State shared by clones of a client.
struct Inner {
    http: reqwest::Client,
    base: Url,
    settings: Settings,
    created_at: Instant,
    retries: Option<Mutex<Retries>>,
    endings: Endings,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    retries: AtomicU64,
    out_of_budget: AtomicU64,
    renewals: AtomicU64,
    leases_lost: AtomicU64,
}

/// Counters of a client and its clones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Retries: attempts after the first of a call.
    pub retries: u64,
    /// Calls that failed because the retry budget was exhausted.
    pub out_of_budget: u64,
    /// Background renewals.
    pub renewals: u64,
    /// Leases that ended while their handle held them.
    pub leases_lost: u64,
    /// Dropped leases whose ending is being sent.
    pub endings_pending: u64,
    /// Dropped leases whose ending could not be delivered: they end at their deadline.
    pub endings_lost: u64,
}

impl Client {
    /// Creates a client without a token, with default settings. Nothing is sent yet.
    ///
    /// # Errors
    /// [`InvalidClient`] for an invalid URL.
    pub fn new(url: &str) -> Result<Self, InvalidClient> {
        Self::builder(url).build()
    }

    /// Creates a builder for a client of this server.
    pub fn builder(url: &str) -> ClientBuilder {
        ClientBuilder::new(url)
    }

    /// Replaces the token. The client shares connections, retry budget and counters with the original.
    ///
    /// # Errors
    /// [`InvalidClient::Token`] for an invalid token.
    pub fn token(mut self, token: &str) -> Result<Self, InvalidClient> {
        self.token = Some(Secret::new(token).map_err(|_| InvalidClient::Token)?);
        Ok(self)
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> &str {
        self.inner.base.as_str()
    }

    /// Returns the counters.
    pub fn stats(&self) -> ClientStats {
        let counters = &self.inner.counters;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ClientStats {
            retries: read(&counters.retries),
            out_of_budget: read(&counters.out_of_budget),
            renewals: read(&counters.renewals),
            leases_lost: read(&counters.leases_lost),
            endings_pending: self.inner.endings.pending() as u64,
            endings_lost: self.inner.endings.lost(),
        }
    }

    /// Waits until all background endings are complete.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn drain(&self) {
        self.inner.endings.drained().await;
    }

    /// Sends a call with retries and parses the JSON response.
    async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        self.json_within(call, None).await
    }

    /// Like `json`, within `total`.
    async fn json_within<T: DeserializeOwned>(
        &self,
        call: Call,
        total: Option<Duration>,
    ) -> Result<T, ClientError> {
        let payload = self.inner.send_with_retries(self.token.as_ref(), &call, total).await?;
        // An empty body deserializes as `()`.
        let body = if payload.body.is_empty() { b"null" } else { &payload.body[..] };
        serde_json::from_slice(body).map_err(|error| self.garbled(&call, payload.status, &error))
    }

    /// Like `json`, for a text response.
    async fn text(&self, call: Call) -> Result<String, ClientError> {
        let payload = self.inner.send_with_retries(self.token.as_ref(), &call, None).await?;
        String::from_utf8(payload.body).map_err(|error| self.garbled(&call, payload.status, &error))
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
            .field("settings", &self.inner.settings)
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn new(http: reqwest::Client, base: Url, settings: Settings) -> Self {
        let retries = settings.retry.retry_budget().map(|budget| Mutex::new(Retries::new(&budget)));
        let endings = Endings::new(settings.endings_max);
        Self {
            http,
            base,
            settings,
            created_at: Instant::now(),
            retries,
            endings,
            counters: Counters::default(),
        }
    }
}

/// Ignores poisoning: every statement under these locks leaves the state consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
