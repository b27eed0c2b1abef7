//! Lease handles: renewed while held, cancelled when dropped.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::steps::{Dispatch, Steps, Verb};
use super::{Client, ClientError, count, lock, renewal};
use crate::{
    Acquire, Batch, BatchResult, Changes, Cost, Degraded, Granted, LeaseRef, LimitState, Renewed, StepDone,
};

/// Units drawn at a server.
///
/// A background task renews the lease each time a third of its duration has passed. Dropping the handle
/// cancels the lease in the background and returns its units. If an ending was sent but not confirmed,
/// dropping the handle resends that ending.
///
/// Steps of a lease are numbered and sent one at a time, and the server executes each number once. After an
/// error that [`may_be_done`](ClientError::may_be_done), repeating the same call repeats the same step, which
/// returns the first result if it was executed. Any other call gets a new number.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    inner: Arc<LeaseInner>,
    renewal: Option<AbortHandle>,
}

/// State shared by a handle and its renewal task.
pub(super) struct LeaseInner {
    pub(super) client: Client,
    name: LeaseRef,
    degraded: Option<Degraded>,
    /// Serializes steps.
    pub(super) step_lock: tokio::sync::Mutex<()>,
    pub(super) steps: Mutex<Steps>,
    expires_at: Mutex<Option<Instant>>,
    runtime: Option<Handle>,
}

impl Client {
    /// Draws units of every limit of a subject and of the levels above it, all or nothing, and holds them
    /// until the lease ends.
    ///
    /// ```no_run
    /// use tidegate_client::{Acquire, Client, Cost};
    ///
    /// # async fn draw() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = Client::new("http://127.0.0.1:8707")?.token("tg_ci_0123")?;
    /// let request = Acquire::new("acme".parse()?, "gpt-4".parse()?, Cost::of([("rpm", 1), ("tpm", 800)])?);
    /// let lease = client.acquire(&request).await?;
    /// let used = 640; // what the work took
    /// lease.settle(Cost::of([("tpm", used)])?).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ClientError::Refused`] names the exceeded limit, its entity and source, and when to retry.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a lease at the server, which ends at its deadline.
    pub async fn acquire(&self, request: &Acquire) -> Result<Lease, ClientError> {
        let sent = Instant::now();
        let granted = self.draw(request).await?;
        // The time spent in the queue is unknown: assume that the wait ended just now.
        let since = if request.within.is_some() { Instant::now() } else { sent };
        Ok(Lease::new(self.clone(), granted, since))
    }

    /// Draws for independent requests: each is granted or refused by itself, in this order. None waits.
    ///
    /// # Errors
    /// If the batch as a whole fails: it is empty, too large, or the server is unavailable.
    ///
    /// # Cancel safety
    /// Dropping the future may leave leases at the server, which end at their deadlines.
    pub async fn acquire_batch(&self, batch: &Batch) -> Result<Vec<Result<Lease, ClientError>>, ClientError> {
        let sent = Instant::now();
        let done = self.draw_batch(batch).await?;
        let results = done.results.into_iter().map(|result| match result {
            BatchResult::Granted(granted) => Ok(Lease::new(self.clone(), granted, sent)),
            BatchResult::Refused(problem) => {
                let status = problem.status;
                Err(ClientError::from_problem(problem, status, false))
            }
        });
        Ok(results.collect())
    }

    /// Resumes a detached lease, and renews it for `span` at a time.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for an ended lease, and [`ClientError::Forbidden`] for a lease of another
    /// token.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn resume(&self, lease: &LeaseRef, span: Duration) -> Result<Lease, ClientError> {
        let sent = Instant::now();
        let open = self.open_lease(lease).await?;
        let inner = LeaseInner::new(self.clone(), lease.clone(), Steps::after(open.step), None);
        inner.set_expiry(sent, open.expires_in.as_duration());
        Ok(Lease::start(inner, open.expires_in.as_duration().min(span), span))
    }
}

impl Lease {
    fn new(client: Client, granted: Granted, since: Instant) -> Self {
        let span = granted.expires_in.as_duration();
        let inner = LeaseInner::new(client, granted.lease, Steps::after(0), granted.degraded);
        inner.set_expiry(since, span);
        Self::start(inner, span, span)
    }

    /// Starts renewing a lease that expires in `left`, for `span` at a time.
    fn start(inner: LeaseInner, left: Duration, span: Duration) -> Self {
        let inner = Arc::new(inner);
        let renewal = match &inner.runtime {
            Some(runtime) if inner.is_stored() => {
                Some(runtime.spawn(renewal::run(Arc::clone(&inner), left, span)).abort_handle())
            }
            _ => None,
        };
        Self { inner, renewal }
    }

    /// Returns the name of the lease. A client with this name and the same token can continue the lease.
    pub fn name(&self) -> &LeaseRef {
        &self.inner.name
    }

    /// Returns why the lease is not backed by the store, if it is not. The calls of an
    /// [allowed](Degraded::Allowed) lease succeed without sending anything.
    pub fn degraded(&self) -> Option<Degraded> {
        self.inner.degraded
    }

    /// Returns a lower bound of the time until it expires, unless it is renewed; zero once that time has
    /// passed.
    pub fn expires_in(&self) -> Duration {
        let expires_at = *lock(&self.inner.expires_at);
        expires_at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the server has reported that the lease ended, other than by this handle: it expired while the
    /// server was unreachable, or another client ended it. Further calls return [`ClientError::Ended`].
    pub fn is_lost(&self) -> bool {
        lock(&self.inner.steps).is_lost()
    }

    /// Draws more units, all or nothing, and returns the affected limits. On refusal the lease is unchanged.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if a limit is exceeded, and [`ClientError::Ended`] for a lease that has ended
    /// or whose ending was sent.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the outcome unknown. Repeating the same call repeats the same step.
    pub async fn extend(&self, more: Cost) -> Result<Vec<LimitState>, ClientError> {
        self.step(Verb::Extend(more)).await
    }

    /// Adjusts the held units, up or down, and returns the affected limits. Never refused: units beyond the
    /// limit become debt.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for a lease that has ended or whose ending was sent.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the outcome unknown. Repeating the same call repeats the same step.
    pub async fn adjust(&self, changes: Changes) -> Result<Vec<LimitState>, ClientError> {
        self.step(Verb::Adjust(changes)).await
    }

    /// Ends the lease. Limits that `actual` names are settled at that amount, all others at what the lease
    /// holds. Repeating the call returns the first result.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for a lease that ended otherwise. If the server is unavailable, the ending is
    /// pending: it can be repeated, and dropping the handle resends it. After any other error the lease is
    /// unchanged.
    ///
    /// # Cancel safety
    /// Dropping the future does not revoke the ending: dropping the handle resends it.
    pub async fn settle(&self, actual: Cost) -> Result<(), ClientError> {
        self.step(Verb::Settle(actual)).await.map(drop)
    }

    /// Ends the lease and returns all its units.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    /// As [`settle`](Self::settle).
    pub async fn cancel(&self) -> Result<(), ClientError> {
        self.step(Verb::Cancel).await.map(drop)
    }

    /// Releases the handle without ending the lease. The lease is no longer renewed, and ends at its deadline
    /// unless a client [resumes](Client::resume) it. A pending ending is still sent.
    pub fn detach(self) -> LeaseRef {
        lock(&self.inner.steps).detach();
        self.inner.name.clone()
    }

    async fn step(&self, verb: Verb) -> Result<Vec<LimitState>, ClientError> {
        let inner = &*self.inner;
        let _guard = inner.step_lock.lock().await;
        let step = match lock(&inner.steps).begin(&verb) {
            Dispatch::Send(step) => step,
            Dispatch::Done(done) => return Ok(done.map(|done| done.limits).unwrap_or_default()),
            Dispatch::Rejected(error) => return Err(error),
        };
        if !inner.is_stored() {
            inner.record(&verb, &Ok(()));
            return Ok(Vec::new());
        }
        let result = inner.send(&verb, step).await;
        inner.record(&verb, &result);
        result.map(|done| done.limits)
    }
}

impl LeaseInner {
    fn new(client: Client, name: LeaseRef, steps: Steps, degraded: Option<Degraded>) -> Self {
        Self {
            client,
            name,
            degraded,
            step_lock: tokio::sync::Mutex::default(),
            steps: Mutex::new(steps),
            expires_at: Mutex::new(None),
            runtime: Handle::try_current().ok(),
        }
    }

    /// Whether the lease is stored at the server.
    fn is_stored(&self) -> bool {
        self.degraded != Some(Degraded::Allowed)
    }

    pub(super) async fn send(&self, verb: &Verb, step: u32) -> Result<StepDone, ClientError> {
        self.send_within(verb, step, None).await
    }

    /// Sends a renewal, which is pointless after the lease expires: the remaining time bounds the call.
    pub(super) async fn send_renewal(&self, verb: &Verb, step: u32) -> Result<Renewed, ClientError> {
        let left = lock(&self.expires_at).map(|at| at.saturating_duration_since(Instant::now()));
        let settings = &self.client.inner.settings;
        self.send_within(verb, step, left.map(|left| left.max(settings.connect).min(settings.total))).await
    }

    async fn send_within<T: DeserializeOwned>(
        &self,
        verb: &Verb,
        step: u32,
        total: Option<Duration>,
    ) -> Result<T, ClientError> {
        self.client.json_within(verb.call(&self.name, step), total).await
    }

    /// Records the result of a step.
    pub(super) fn record<T>(&self, verb: &Verb, result: &Result<T, ClientError>) {
        if lock(&self.steps).complete(verb, result) {
            count(&self.client.inner.counters.leases_lost);
        }
    }

    /// Sets the expiry to `span` after `since`.
    pub(super) fn set_expiry(&self, since: Instant, span: Duration) {
        *lock(&self.expires_at) = since.checked_add(span);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
        let Some((verb, step)) = lock(&self.inner.steps).take_ending().filter(|_| self.inner.is_stored())
        else {
            return;
        };
        let client = &self.inner.client;
        client.inner.spawn_ending(
            self.inner.runtime.as_ref(),
            client.token.clone(),
            verb.call(&self.inner.name, step),
        );
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", &self.inner.name)
            .field("degraded", &self.inner.degraded)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
