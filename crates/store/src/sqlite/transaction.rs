//! A transaction of the writer, the jobs that run in it, and the replies to their callers.

use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};
use std::time::Instant;

use foldhash::HashMap;
use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::time::Stamp;
use tokio::sync::oneshot;

use super::errors::CallError;
use super::evict::EvictionCursor;
use super::namespace::NamespaceState;
use super::queue::Queue;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::retention::Retention;

/// The most namespaces, and the most buckets and leases of all of them, that are cached between transactions.
const NAMESPACES_MAX: usize = 64;
const CACHED_MAX: usize = 1 << 17;

/// The state of namespaces, loaded and cached between transactions.
#[derive(Default)]
pub(super) struct Cache {
    namespaces: HashMap<i64, NamespaceState>,
    /// The eviction cursors of namespaces that are not loaded.
    eviction_cursors: HashMap<i64, EvictionCursor>,
}

impl Cache {
    /// Drops all namespaces. Keeps their eviction cursors, which writes of other processes would otherwise
    /// reset.
    pub(super) fn clear(&mut self) {
        self.eviction_cursors
            .extend(self.namespaces.drain().map(|(namespace, state)| (namespace, state.eviction_cursor)));
    }

    /// Drops all namespaces if there are too many of them, or too much in them.
    pub(super) fn bound(&mut self) {
        let kept = self.namespaces.values().map(NamespaceState::len).sum::<usize>();
        if self.namespaces.len() > NAMESPACES_MAX || kept > CACHED_MAX {
            self.clear();
        }
    }
}

/// A write transaction, with the state of the namespaces in it.
pub(super) struct Transaction<'a> {
    pub(super) connection: &'a Connection,
    /// One reading of the clock, taken within the transaction.
    pub(super) anchor: Anchor,
    pub(super) now: Stamp,
    pub(super) cache: &'a mut Cache,
    pub(super) retention: Retention,
    /// Namespaces that this transaction has used.
    pub(super) visited: Vec<i64>,
    pub(super) draws: u64,
    /// Why draws are refused, if the file is full.
    pub(super) no_space: Option<String>,
    /// The number of calls in it.
    pub(super) calls: usize,
    /// Whether more data may be past its retention than this transaction has deleted.
    pub(super) is_behind: bool,
}

impl Transaction<'_> {
    /// Counts a draw, and refuses it if the file is full.
    pub(super) fn draws(&mut self) -> Result<(), StoreError> {
        self.draws += 1;
        self.no_space.clone().map_or(Ok(()), |what| Err(StoreError::unavailable(what)))
    }

    /// The state of a namespace, after its leases past their deadline have been ended.
    pub(super) fn namespace(&mut self, namespace: i64) -> Result<&mut NamespaceState, CallError> {
        let (connection, now) = (self.connection, self.now);
        let (is_first, calls) = (!self.visited.contains(&namespace), self.calls);
        let state = self.namespace_as_is(namespace)?;
        if is_first {
            state.clean_up(connection, now, calls)?;
        }
        Ok(state)
    }

    /// The state of a namespace without a sweep, for callers that sweep and count it themselves.
    pub(super) fn namespace_as_is(&mut self, namespace: i64) -> Result<&mut NamespaceState, CallError> {
        if !self.visited.contains(&namespace) {
            self.visited.push(namespace);
        }
        let state = match self.cache.namespaces.entry(namespace) {
            Entry::Occupied(state) => state.into_mut(),
            Entry::Vacant(place) => {
                let state = place.insert(NamespaceState::open(self.connection, namespace)?);
                state.eviction_cursor = self.cache.eviction_cursors.remove(&namespace).unwrap_or_default();
                state
            }
        };
        state.clock_offset = self.anchor.offset();
        Ok(state)
    }

    /// Writes all changes so far.
    pub(super) fn write(&mut self) -> Result<(), CallError> {
        for namespace in &self.visited {
            if let Some(state) = self.cache.namespaces.get_mut(namespace) {
                state.write(self.connection)?;
            }
        }
        Ok(())
    }
}

/// A queued job, and when it arrived.
pub(super) struct QueuedJob {
    pub(super) at: Instant,
    pub(super) time: EngineTime,
    pub(super) job: Box<dyn Job>,
}

impl QueuedJob {
    pub(super) fn new(job: Box<dyn Job>) -> Self {
        let time = EngineTime::current();
        time.wait("writer");
        Self { at: Instant::now(), time, job }
    }
}

/// A unit of work in a transaction.
pub(super) trait Job: Send {
    /// Whether the job should still run: its caller waits, or it needs none.
    fn is_wanted(&self) -> bool;

    /// Runs the job. Its result is kept until the commit; an error fails the whole transaction.
    fn run(&mut self, transaction: &mut Transaction<'_>) -> Result<(), rusqlite::Error>;

    /// Replies to the caller after the commit. If the caller was dropped, returns the job that undoes this
    /// one; if it is dropped before it takes the reply, the undo job is pushed to `writer`.
    fn reply(self: Box<Self>, writer: &Arc<Queue<QueuedJob>>) -> Option<Box<dyn Job>>;

    /// Reports a failed transaction to the caller. Returns a job without a caller, to be retried.
    fn fail(self: Box<Self>, error: StoreError) -> Option<Box<dyn Job>>;
}

/// A call: its request, its function, and the channel to its caller.
pub(super) struct Call<R, T> {
    request: R,
    run: fn(&mut Transaction<'_>, &R) -> Result<T, CallError>,
    undo: fn(&R, &T) -> Option<Box<dyn Job>>,
    /// `None` for a job that undoes another.
    reply_to: Option<oneshot::Sender<CallReply<T>>>,
    answer: Option<Result<T, StoreError>>,
}

/// An undo job, and the writer that runs it.
type UndoJob = (Box<dyn Job>, Weak<Queue<QueuedJob>>);

/// A reply on its way to the caller. If it is dropped without being taken, its call is undone.
pub(super) struct CallReply<T> {
    answer: Option<Result<T, StoreError>>,
    undo: Option<UndoJob>,
}

impl<T> CallReply<T> {
    /// Takes the result.
    pub(super) fn into_result(mut self) -> Result<T, StoreError> {
        self.undo = None;
        self.answer.take().unwrap_or_else(|| Err(StoreError::unavailable("the reply was taken before")))
    }
}

impl<T> Drop for CallReply<T> {
    fn drop(&mut self) {
        if let Some((job, writer)) = self.undo.take()
            && let Some(writer) = writer.upgrade()
        {
            // If the queue is full, the draw returns at its deadline.
            drop(writer.push(QueuedJob::new(job)));
        }
    }
}

impl<R: Send + 'static, T: Send + 'static> Call<R, T> {
    /// A call, and the receiver of its reply.
    pub(super) fn new(
        request: R,
        run: fn(&mut Transaction<'_>, &R) -> Result<T, CallError>,
    ) -> (Self, oneshot::Receiver<CallReply<T>>) {
        let (sender, answer) = oneshot::channel();
        (Self { request, run, undo: |_, _| None, reply_to: Some(sender), answer: None }, answer)
    }

    /// A call without a caller.
    pub(super) fn detached(request: R, run: fn(&mut Transaction<'_>, &R) -> Result<T, CallError>) -> Self {
        Self { request, run, undo: |_, _| None, reply_to: None, answer: None }
    }

    /// Sets the call that undoes this one if its caller is dropped.
    pub(super) fn or_undo(mut self, undo: fn(&R, &T) -> Option<Box<dyn Job>>) -> Self {
        self.undo = undo;
        self
    }
}

impl<R: Send + 'static, T: Send + 'static> Job for Call<R, T> {
    fn is_wanted(&self) -> bool {
        self.reply_to.as_ref().is_none_or(|sender| !sender.is_closed())
    }

    fn run(&mut self, transaction: &mut Transaction<'_>) -> Result<(), rusqlite::Error> {
        self.answer = Some(match (self.run)(transaction, &self.request) {
            Ok(answer) => Ok(answer),
            Err(CallError::Reply(error)) => Err(error),
            Err(CallError::Transaction(error)) => return Err(error),
        });
        Ok(())
    }

    fn reply(self: Box<Self>, writer: &Arc<Queue<QueuedJob>>) -> Option<Box<dyn Job>> {
        let Self { request, undo, reply_to, answer, .. } = *self;
        let undo_job = answer.as_ref()?.as_ref().ok().and_then(|done| undo(&request, done));
        let undo_job = undo_job.map(|job| (job, Arc::downgrade(writer)));
        let mut unsent = reply_to?.send(CallReply { answer, undo: undo_job }).err()?;
        unsent.undo.take().map(|(job, _)| job)
    }

    fn fail(mut self: Box<Self>, error: StoreError) -> Option<Box<dyn Job>> {
        let Some(sender) = self.reply_to.take() else { return Some(self) };
        // A failed send means that the caller was dropped.
        drop(sender.send(CallReply { answer: Some(Err(error)), undo: None }));
        None
    }
}
