//! A lease in the hand of its holder: renewed while it is held, and cancelled when it is dropped.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::steps::{Steps, Turn, Verb};
use super::{Client, ClientError, count, lock, renewal};
use crate::{
    Acquire, Batch, BatchResult, Changes, Cost, Degraded, Granted, LeaseRef, LimitState, Renewed, StepDone,
};

/// Units drawn at a server.
///
/// While it is held it is renewed in the background, each time a third of its time has passed. Dropped, it is cancelled in the
/// background: all it drew returns. A lease whose end has begun and was not answered goes on to that end when it is dropped.
///
/// Its calls are numbered, one at a time, and the server does each number once. After an error that
/// [`may_be_done`](ClientError::may_be_done) the same call again is the same step: it is answered as the first time if it was
/// done. Any other call goes on behind it.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    held: Arc<Held>,
    renewal: Option<AbortHandle>,
}

/// What a handle and the task that renews its lease share.
pub(super) struct Held {
    pub(super) client: Client,
    name: LeaseRef,
    degraded: Option<Degraded>,
    /// Whoever has it may take a step.
    pub(super) turn: tokio::sync::Mutex<()>,
    pub(super) steps: Mutex<Steps>,
    expires_at: Mutex<Option<Instant>>,
    runtime: Option<Handle>,
}

impl Client {
    /// Draws units of every limit of a subject and of those above it, all or nothing, and keeps them until the lease is ended.
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
    /// [`ClientError::Refused`] says which limit of which entity is short, by which policy, and when to come back.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a lease at the server, which ends by its deadline.
    pub async fn acquire(&self, request: &Acquire) -> Result<Lease, ClientError> {
        let sent = Instant::now();
        let granted = self.draw(request).await?;
        // Nobody knows when the wait was over: at the latest now.
        let since = if request.within.is_some() { Instant::now() } else { sent };
        Ok(Lease::new(self.clone(), granted, since))
    }

    /// Draws for many who have nothing to do with each other: each is granted or refused by itself, in this order. None waits.
    ///
    /// # Errors
    /// Where none was asked: the batch is empty, too large, or the server is away.
    ///
    /// # Cancel safety
    /// Dropping the future may leave leases at the server, which end by their deadlines.
    pub async fn acquire_batch(&self, batch: &Batch) -> Result<Vec<Result<Lease, ClientError>>, ClientError> {
        let sent = Instant::now();
        let done = self.draw_batch(batch).await?;
        let results = done.results.into_iter().map(|result| match result {
            BatchResult::Granted(granted) => Ok(Lease::new(self.clone(), granted, sent)),
            BatchResult::Refused(problem) => {
                let status = problem.status;
                Err(ClientError::of(problem, status, false))
            }
        });
        Ok(results.collect())
    }

    /// Takes up a lease that was let go of, and renews it for `span` at a time from now on.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for one that has ended, and [`ClientError::Forbidden`] for one of another token.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn resume(&self, lease: &LeaseRef, span: Duration) -> Result<Lease, ClientError> {
        let sent = Instant::now();
        let open = self.open_lease(lease).await?;
        let held = Held::new(self.clone(), lease.clone(), Steps::after(open.step), None);
        held.expires(sent, open.expires_in.as_duration());
        Ok(Lease::keep(held, open.expires_in.as_duration().min(span), span))
    }
}

impl Lease {
    fn new(client: Client, granted: Granted, since: Instant) -> Self {
        let span = granted.expires_in.as_duration();
        let held = Held::new(client, granted.lease, Steps::after(0), granted.degraded);
        held.expires(since, span);
        Self::keep(held, span, span)
    }

    /// Has a lease renewed, of which `left` is left, for `span` at a time.
    fn keep(held: Held, left: Duration, span: Duration) -> Self {
        let held = Arc::new(held);
        let renewal = match &held.runtime {
            Some(runtime) if held.is_kept() => {
                Some(runtime.spawn(renewal::keep(Arc::clone(&held), left, span)).abort_handle())
            }
            _ => None,
        };
        Self { held, renewal }
    }

    /// What it is called at the server. Whoever knows it and has the same token can go on with it.
    pub fn name(&self) -> &LeaseRef {
        &self.held.name
    }

    /// Why it does not stand for units of the store, if it does not. One that nobody keeps has nothing to end: its calls send
    /// nothing, and are answered yes.
    pub fn degraded(&self) -> Option<Degraded> {
        self.held.degraded
    }

    /// How long it has at least, unless it is renewed: nothing once that time has passed.
    pub fn expires_in(&self) -> Duration {
        let expires_at = *lock(&self.held.expires_at);
        expires_at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the server has said that it has ended, and not by this handle: its deadline passed while the server could not be
    /// reached, or somebody else ended it. Every further call is answered with [`ClientError::Ended`].
    pub fn is_lost(&self) -> bool {
        lock(&self.held.steps).is_lost()
    }

    /// Draws more, all or nothing. Refused, the lease stays as it is. Answers the limits that took part, after it.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where a limit is short, and [`ClientError::Ended`] for a lease that has ended, or whose end
    /// has begun.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same again is the same step, and finds out.
    pub async fn extend(&self, more: Cost) -> Result<Vec<LimitState>, ClientError> {
        self.step(Verb::Extend(more)).await
    }

    /// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt. Answers the
    /// limits that took part, after it.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for a lease that has ended, or whose end has begun.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same again is the same step, and finds out.
    pub async fn adjust(&self, changes: Changes) -> Result<Vec<LimitState>, ClientError> {
        self.step(Verb::Adjust(changes)).await
    }

    /// Ends it at what was used of the limits named, and at what it holds of the others. The same again is answered as the first
    /// time.
    ///
    /// # Errors
    /// [`ClientError::Ended`] for one that has ended otherwise. Where the server is away the end has begun: the same can be
    /// said again, and is said again when the lease is dropped. After any other error the lease is as it was.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo it: it is said again when the lease is dropped.
    pub async fn settle(&self, actual: Cost) -> Result<(), ClientError> {
        self.step(Verb::Settle(actual)).await.map(drop)
    }

    /// Ends it as if it had never been: all of it returns.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    /// As [`settle`](Self::settle).
    pub async fn cancel(&self) -> Result<(), ClientError> {
        self.step(Verb::Cancel).await.map(drop)
    }

    /// Lets go of it without ending it: it is renewed no more, and ends by its deadline unless somebody
    /// [resumes](Client::resume) it. One whose end has begun goes on to that end.
    pub fn detach(self) -> LeaseRef {
        lock(&self.held.steps).let_go();
        self.held.name.clone()
    }

    async fn step(&self, verb: Verb) -> Result<Vec<LimitState>, ClientError> {
        let held = &*self.held;
        let _turn = held.turn.lock().await;
        let step = match lock(&held.steps).begin(&verb) {
            Turn::Send(step) => step,
            Turn::Done(done) => return Ok(done.map(|done| done.limits).unwrap_or_default()),
            Turn::Over(error) => return Err(error),
        };
        if !held.is_kept() {
            held.note(&verb, &Ok(()));
            return Ok(Vec::new());
        }
        let answer = held.send(&verb, step).await;
        held.note(&verb, &answer);
        answer.map(|done| done.limits)
    }
}

impl Held {
    fn new(client: Client, name: LeaseRef, steps: Steps, degraded: Option<Degraded>) -> Self {
        Self {
            client,
            name,
            degraded,
            turn: tokio::sync::Mutex::default(),
            steps: Mutex::new(steps),
            expires_at: Mutex::new(None),
            runtime: Handle::try_current().ok(),
        }
    }

    /// Whether somebody keeps it.
    fn is_kept(&self) -> bool {
        self.degraded != Some(Degraded::Allowed)
    }

    pub(super) async fn send(&self, verb: &Verb, step: u32) -> Result<StepDone, ClientError> {
        self.say(verb, step, None).await
    }

    /// The same for a renewal, which is of no use when the lease has ended.
    pub(super) async fn send_renewal(&self, verb: &Verb, step: u32) -> Result<Renewed, ClientError> {
        let left = lock(&self.expires_at).map(|at| at.saturating_duration_since(Instant::now()));
        let patience = &self.client.inner.patience;
        self.say(verb, step, left.map(|left| left.max(patience.connect).min(patience.total))).await
    }

    async fn say<T: DeserializeOwned>(
        &self,
        verb: &Verb,
        step: u32,
        total: Option<Duration>,
    ) -> Result<T, ClientError> {
        self.client.ask_within(verb.call(&self.name, step), total).await
    }

    /// Remembers what became of a step.
    pub(super) fn note<T>(&self, verb: &Verb, answer: &Result<T, ClientError>) {
        if lock(&self.steps).end(verb, answer) {
            count(&self.client.inner.counts.leases_lost);
        }
    }

    /// It has `span` since then.
    pub(super) fn expires(&self, since: Instant, span: Duration) {
        *lock(&self.expires_at) = since.checked_add(span);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
        let Some((verb, step)) = lock(&self.held.steps).drop_it().filter(|_| self.held.is_kept()) else {
            return;
        };
        let client = &self.held.client;
        client.inner.end_later(
            self.held.runtime.as_ref(),
            client.token.clone(),
            verb.call(&self.held.name, step),
        );
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", &self.held.name)
            .field("degraded", &self.held.degraded)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
