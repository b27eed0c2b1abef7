//! The batchers of a namespace, one per home, so that one script reaches all keys of a batch.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use foldhash::HashMap;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::Inner;
use super::batch_call::{EncodedStep, StepReply, send_batch};
use super::keyspace::Home;
use crate::batcher::{self, BatchLimits, BatchSender, BatchedCall, Job};
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most steps of a batch. Larger batches are hardly cheaper per step, and block the server for longer.
const BATCH_MAX: usize = 32;
/// The most levels of a batch.
const LEVELS_MAX: usize = 128;
/// The most batches in flight: one that the server executes and one on the network.
const IN_FLIGHT_MAX: usize = 2;
/// After this time, or the deadline of a call if that is less, a caller sends the queue itself if no batch was
/// sent since: the task that should may be on a runtime that no thread polls.
const STALLED: Duration = Duration::from_millis(500);
/// The most batches in flight when some of them are stalled.
const STALLED_MAX: usize = 64;

/// Batches the steps of one home.
pub(super) type Batcher = batcher::Batcher<EncodedStep>;

/// The batchers of a namespace.
#[derive(Debug)]
pub(super) struct Batchers {
    deadline: Duration,
    by_home: Mutex<HashMap<Home, Arc<Batcher>>>,
}

impl Batchers {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, by_home: Mutex::default() }
    }

    pub(super) fn at(&self, home: Home) -> Arc<Batcher> {
        let limits = BatchLimits {
            calls_max: BATCH_MAX,
            weight_max: LEVELS_MAX,
            in_flight_max: IN_FLIGHT_MAX,
            deadline: self.deadline,
        };
        let batcher = || Arc::new(Batcher::new(limits));
        Arc::clone(lock(&self.by_home).entry(home).or_insert_with(batcher))
    }
}

impl BatchedCall for EncodedStep {
    type Reply = StepReply;

    fn weight(&self) -> usize {
        self.encoded.limits.len()
    }
}

impl BatchSender for Inner {
    type Call = EncodedStep;

    fn place(&self) -> &str {
        &self.connection.context().place
    }

    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.runtime.clone())
    }

    async fn send(&self, jobs: Vec<Job<EncodedStep>>) {
        let steps: Vec<&EncodedStep> = jobs.iter().map(|job| &job.call).collect();
        match send_batch(&self.connection, &steps).await {
            Ok(answers) => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    job.reply(Ok(answer));
                }
            }
            Err(error) => {
                for job in jobs {
                    job.reply(Err(self.connection.context().store_error(error.clone())));
                }
            }
        }
    }
}

/// Runs a step, alone or in a batch, and waits for its reply.
pub(super) async fn run(
    batcher: &Arc<Batcher>,
    inner: &Arc<Inner>,
    step: EncodedStep,
) -> Result<StepReply, StoreError> {
    let (context, time) = (inner.connection.context(), EngineTime::current());
    let mut answer = batcher.submit(inner, step, time.clone())?;
    let stalled = STALLED.min(inner.options.deadline).min(context.timeout / 2);
    let mut wait = stalled;
    loop {
        if let Ok(answer) = timeout(wait, &mut answer).await {
            let ended = "the runtime that the store was used in has shut down";
            return answer.unwrap_or_else(|_| Err(StoreError::unavailable(ended)));
        }
        wait = match time.elapsed().map(|elapsed| context.timeout.saturating_sub(elapsed)) {
            Some(Duration::ZERO) => return Err(context.timed_out()),
            Some(left) => left,
            None => {
                batcher.send_stalled(inner, stalled, STALLED_MAX);
                stalled
            }
        };
    }
}
