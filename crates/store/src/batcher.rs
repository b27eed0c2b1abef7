//! Batches the calls of concurrent callers (group commit): calls that arrive while batches are in flight are
//! sent together in the next one.
//!
//! Tasks of their own send the batches: a caller that is dropped or not polled delays no other, and one that
//! is dropped before its call is sent is not charged.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::{HashSet, HashSetExt};
use tidegate_core::limit::lease::LeaseId;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::batch_size::BatchSize;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most calls that may wait.
const QUEUE_MAX: usize = 1 << 16;
/// The most waiting calls that are examined for a batch, as a multiple of the largest batch. Those of dropped
/// callers are not counted: with nothing in flight, a batch without calls would be the last.
const SCANNED_PER_CALL: usize = 4;
/// How many times the collector yields first: callers that were just answered usually send another call.
const YIELDS: u32 = 3;

/// A call that is sent in batches.
pub(crate) trait BatchedCall: Send + 'static {
    /// The engine's reply.
    type Reply: Send + 'static;

    /// Its share of the largest batch.
    fn weight(&self) -> usize;

    /// Keys that only one batch in flight may have: calls with a key in flight wait here.
    fn keys(&self) -> &[u64] {
        &[]
    }

    /// The lease that at most one call of a batch may have.
    fn lease(&self) -> Option<LeaseId> {
        None
    }
}

/// Sends batches to an engine.
pub(crate) trait BatchSender: Send + Sync + 'static {
    /// A call of a batch.
    type Call: BatchedCall;

    /// The engine's address.
    fn place(&self) -> &str;

    /// The runtime for the tasks that send; without one, calls fail.
    fn runtime(&self) -> Option<Handle>;

    /// Sends these calls in order, and replies to each.
    fn send(&self, jobs: Vec<Job<Self::Call>>) -> impl Future<Output = ()> + Send;
}

/// Bounds of batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchLimits {
    /// The most calls of a batch.
    pub(crate) calls_max: usize,
    /// The weight from which a batch takes no further call.
    pub(crate) weight_max: usize,
    /// The most batches in flight.
    pub(crate) in_flight_max: usize,
    /// The engine's deadline, which bounds the size of batches.
    pub(crate) deadline: Duration,
}

/// A call in the queue or in a batch.
pub(crate) struct Job<C: BatchedCall> {
    pub(crate) call: C,
    reply: oneshot::Sender<Result<C::Reply, StoreError>>,
    time: EngineTime,
}

impl<C: BatchedCall> Job<C> {
    /// Replies to the caller, unless it was dropped.
    pub(crate) fn reply(self, answer: Result<C::Reply, StoreError>) {
        drop(self.reply.send(answer));
    }
}

/// The reply to a submitted call. An error means that the runtime has shut down.
pub(crate) type PendingReply<C> = oneshot::Receiver<Result<<C as BatchedCall>::Reply, StoreError>>;

/// A queue of calls that are sent in batches.
pub(crate) struct Batcher<C: BatchedCall> {
    limits: BatchLimits,
    state: Mutex<State<C>>,
}

struct State<C: BatchedCall> {
    queue: VecDeque<Job<C>>,
    /// Keys of the calls in flight.
    busy: HashSet<u64>,
    in_flight: usize,
    /// A collector is scheduled.
    is_collecting: bool,
    /// When a batch was last taken.
    taken_at: Instant,
    size: BatchSize,
}

impl<C: BatchedCall> Batcher<C> {
    pub(crate) fn new(limits: BatchLimits) -> Self {
        let state = State {
            queue: VecDeque::new(),
            busy: HashSet::new(),
            in_flight: 0,
            is_collecting: false,
            taken_at: Instant::now(),
            size: BatchSize::new(limits.calls_max, limits.deadline),
        };
        Self { limits, state: Mutex::new(state) }
    }

    /// Queues a call, unless the queue is full.
    pub(crate) fn submit<S: BatchSender<Call = C>>(
        self: &Arc<Self>,
        sender: &Arc<S>,
        call: C,
        time: EngineTime,
    ) -> Result<PendingReply<C>, StoreError> {
        let (reply, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.queue.len() >= QUEUE_MAX {
            let first = state.queue.front().and_then(|job| job.time.queued_for());
            return Err(StoreError::Busy {
                place: sender.place().to_owned(),
                waiting_max: QUEUE_MAX,
                retry_after: first.unwrap_or_default(),
            });
        }
        time.wait("batches");
        state.queue.push_back(Job { call, reply, time });
        self.collect(sender, state);
        Ok(answer)
    }

    /// Sends another batch, up to `in_flight_max`, if none was taken for `span`: the collector's task may be on
    /// a runtime that no longer runs.
    #[allow(dead_code, reason = "the store in PostgreSQL has one runtime")]
    pub(crate) fn send_stalled<S: BatchSender<Call = C>>(
        self: &Arc<Self>,
        sender: &Arc<S>,
        span: Duration,
        in_flight_max: usize,
    ) {
        let state = lock(&self.state);
        if state.taken_at.elapsed() >= span && !state.queue.is_empty() && state.in_flight < in_flight_max {
            self.spawn_collector(sender, state);
        }
    }

    /// Schedules a collector unless one is scheduled, none is needed, or the limit of batches is reached.
    fn collect<S: BatchSender<Call = C>>(self: &Arc<Self>, sender: &Arc<S>, state: MutexGuard<'_, State<C>>) {
        let is_full = state.in_flight >= self.limits.in_flight_max;
        if !state.is_collecting && !state.queue.is_empty() && !is_full {
            self.spawn_collector(sender, state);
        }
    }

    fn spawn_collector<S: BatchSender<Call = C>>(
        self: &Arc<Self>,
        sender: &Arc<S>,
        mut state: MutexGuard<'_, State<C>>,
    ) {
        state.is_collecting = true;
        // A runtime that has shut down drops the task at once, which locks the state.
        drop(state);
        let collector = Collector { batcher: Arc::clone(self), sender: Arc::clone(sender), has_run: false };
        if let Some(runtime) = sender.runtime() {
            runtime.spawn(collector.run());
        }
    }

    /// The next batch, and the guard that marks it as in flight.
    fn take<S: BatchSender<Call = C>>(
        self: &Arc<Self>,
        sender: &Arc<S>,
    ) -> Option<(InFlightBatch<S>, Vec<Job<C>>)> {
        let mut state = lock(&self.state);
        state.is_collecting = false;
        let jobs = state.take(&self.limits);
        if jobs.is_empty() {
            return None;
        }
        let keys: Vec<u64> = jobs.iter().flat_map(|job| job.call.keys().iter().copied()).collect();
        state.in_flight += 1;
        state.busy.extend(&keys);
        let in_flight = InFlightBatch { batcher: Arc::clone(self), sender: Arc::clone(sender), keys };
        // Other keys may be sent in parallel.
        self.collect(sender, state);
        Some((in_flight, jobs))
    }
}

impl<C: BatchedCall> State<C> {
    /// Takes calls that can be sent together: none whose keys are in flight or belong to an earlier call that
    /// has to wait.
    fn take(&mut self, limits: &BatchLimits) -> Vec<Job<C>> {
        let calls_max = self.size.get();
        let (mut jobs, mut left) = (Vec::with_capacity(self.queue.len().min(calls_max)), Vec::new());
        let (mut behind, mut leases) = (HashSet::<u64>::new(), HashSet::new());
        let (mut weight, mut scanned) = (0, 0);
        while jobs.len() < calls_max
            && weight < limits.weight_max
            && scanned < SCANNED_PER_CALL * limits.calls_max
        {
            let Some(job) = self.queue.pop_front() else { break };
            if job.reply.is_closed() {
                continue;
            }
            scanned += 1;
            let is_held = |key: &u64| self.busy.contains(key) || behind.contains(key);
            let keys = job.call.keys();
            if keys.iter().any(is_held) || job.call.lease().is_some_and(|lease| !leases.insert(lease)) {
                behind.extend(keys);
                left.push(job);
            } else {
                weight += job.call.weight();
                job.time.send();
                jobs.push(job);
            }
        }
        while let Some(job) = left.pop() {
            self.queue.push_front(job);
        }
        self.taken_at = Instant::now();
        jobs
    }
}

/// A scheduled search for the next batch.
struct Collector<S: BatchSender> {
    batcher: Arc<Batcher<S::Call>>,
    sender: Arc<S>,
    has_run: bool,
}

impl<S: BatchSender> Collector<S> {
    async fn run(mut self) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        self.has_run = true;
        if let Some((in_flight, jobs)) = self.batcher.take(&self.sender) {
            let (count, start) = (jobs.len(), Instant::now());
            self.sender.send(jobs).await;
            lock(&self.batcher.state).size.learn(count, start.elapsed());
            drop(in_flight);
        }
    }
}

impl<S: BatchSender> Drop for Collector<S> {
    /// If it has not run, the runtime has shut down: the waiting calls fail.
    fn drop(&mut self) {
        if self.has_run {
            return;
        }
        let left = {
            let mut state = lock(&self.batcher.state);
            state.is_collecting = false;
            std::mem::take(&mut state.queue)
        };
        // Dropping the jobs wakes their callers, which must not happen under the lock.
        drop(left);
    }
}

/// A batch in flight. Dropping it releases its keys and schedules the next batch.
struct InFlightBatch<S: BatchSender> {
    batcher: Arc<Batcher<S::Call>>,
    sender: Arc<S>,
    keys: Vec<u64>,
}

impl<S: BatchSender> Drop for InFlightBatch<S> {
    fn drop(&mut self) {
        let mut state = lock(&self.batcher.state);
        state.in_flight -= 1;
        for key in &self.keys {
            state.busy.remove(key);
        }
        self.batcher.collect(&self.sender, state);
    }
}

impl<C: BatchedCall> fmt::Debug for Batcher<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    const CALLS_MAX: usize = 2;

    struct Numbered(u32, [u64; 1]);

    impl BatchedCall for Numbered {
        type Reply = u32;

        fn weight(&self) -> usize {
            1
        }

        fn keys(&self) -> &[u64] {
            &self.1
        }
    }

    /// Replies to a batch once it may.
    struct Upstream {
        batches: Mutex<Vec<Vec<u32>>>,
        may_reply: Semaphore,
        runtime: Option<Handle>,
    }

    impl BatchSender for Upstream {
        type Call = Numbered;

        fn place(&self) -> &'static str {
            "upstream"
        }

        fn runtime(&self) -> Option<Handle> {
            self.runtime.clone()
        }

        async fn send(&self, jobs: Vec<Job<Numbered>>) {
            lock(&self.batches).push(jobs.iter().map(|job| job.call.0).collect());
            self.may_reply.acquire().await.expect("it is never closed").forget();
            for job in jobs {
                let number = job.call.0;
                job.reply(Ok(number));
            }
        }
    }

    struct Rig(Arc<Batcher<Numbered>>, Arc<Upstream>);

    impl Rig {
        fn new(runtime: Option<Handle>) -> Self {
            let limits = BatchLimits {
                calls_max: CALLS_MAX,
                weight_max: 2,
                in_flight_max: 2,
                deadline: Duration::from_secs(1),
            };
            let upstream = Upstream { batches: Mutex::default(), may_reply: Semaphore::new(0), runtime };
            Self(Arc::new(Batcher::new(limits)), Arc::new(upstream))
        }

        fn submit(&self, number: u32, key: u64) -> PendingReply<Numbered> {
            self.0.submit(&self.1, Numbered(number, [key]), EngineTime::current()).expect("there is space")
        }

        /// The batches after every task has run until it waits.
        async fn sent(&self) -> Vec<Vec<u32>> {
            for _ in 0..20 {
                yield_now().await;
            }
            lock(&self.1.batches).clone()
        }
    }

    #[tokio::test]
    async fn call_waits_for_its_key_and_others_pass() {
        let rig = Rig::new(Some(Handle::current()));
        let first = rig.submit(1, 7);
        assert_eq!(rig.sent().await, [[1]]);
        let (second, third, last) = (rig.submit(2, 7), rig.submit(3, 8), rig.submit(4, 9));
        assert_eq!(rig.sent().await, [vec![1], vec![3, 4]]);
        rig.1.may_reply.add_permits(3);
        assert_eq!(rig.sent().await, [vec![1], vec![3, 4], vec![2]]);
        for (number, reply) in [(1, first), (2, second), (3, third), (4, last)] {
            assert_eq!(reply.await.unwrap().unwrap(), number);
        }
    }

    #[tokio::test]
    async fn dropped_call_is_not_sent() {
        let rig = Rig::new(Some(Handle::current()));
        drop(rig.submit(1, 7));
        let second = rig.submit(2, 7);
        rig.1.may_reply.add_permits(1);
        assert_eq!(second.await.unwrap().unwrap(), 2);
        assert_eq!(rig.sent().await, [[2]]);
    }

    /// Calls of dropped callers were counted as examined: more than the bound of them hid the calls behind them,
    /// which no batch in flight would ever have sent.
    #[tokio::test]
    async fn dropped_calls_hide_no_live_call() {
        let rig = Rig::new(Some(Handle::current()));
        for number in 0..=u32::try_from(SCANNED_PER_CALL * CALLS_MAX).unwrap() {
            drop(rig.submit(number, 7));
        }
        let _last = rig.submit(100, 7);
        assert_eq!(rig.sent().await, [[100]]);
    }

    #[tokio::test]
    async fn full_queue_is_busy_with_a_retry_after() {
        let rig = Rig::new(Some(Handle::current()));
        let _waiting: Vec<_> = (0..QUEUE_MAX).map(|_| rig.submit(1, 7)).collect();
        let busy =
            rig.0.submit(&rig.1, Numbered(2, [7]), EngineTime::current()).expect_err("the queue is full");
        let StoreError::Busy { waiting_max, .. } = busy else { panic!("{busy}") };
        assert_eq!(waiting_max, QUEUE_MAX);
    }

    #[tokio::test]
    async fn call_without_a_runtime_fails() {
        let rig = Rig::new(None);
        assert!(rig.submit(1, 7).await.is_err());
    }
}
