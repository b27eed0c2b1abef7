//! Fault injection: an engine behind a simulated bad network, deterministic by seed.
//!
//! Calls fail before they are made, replies are lost, calls arrive twice, and abandoned steps arrive after
//! later calls of their caller. A caller that follows the contract and retries with the same step stays
//! exact. The engine can also be unavailable, or hang.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tidegate_core::random::Random;

use super::fault_plan::{Fate, FaultPlan, Faults, InvalidFaultPlan};
use super::verb::Verb;
use super::wrapper::Wrapper;
use crate::sync::lock;
use crate::{Capabilities, Engine, QueuedStep, Reply, Step, StepResult, StoreError};

/// How long a call may take before the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);
/// The maximum number of deferred steps; further ones are made at once.
const LATE_MAX: usize = 1_024;

/// An engine behind a simulated bad network.
#[derive(Debug)]
pub struct Faulty<E> {
    engine: E,
    plan: FaultPlan,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: Random,
    presence: Presence,
    fail_next: u32,
    /// Calls to pass before the presence changes.
    away_after: Option<(u32, Presence)>,
    late: VecDeque<QueuedStep>,
    faults: Faults,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Away,
    Busy,
    Hanging,
}

impl<E: Engine> Faulty<E> {
    /// Wraps `engine` with the faults of `plan`.
    ///
    /// # Errors
    /// [`InvalidFaultPlan`] for more faults than calls.
    pub fn new(engine: E, plan: FaultPlan) -> Result<Self, InvalidFaultPlan> {
        let plan = plan.check()?;
        let state = State {
            random: plan.random(),
            presence: Presence::Here,
            fail_next: 0,
            away_after: None,
            late: VecDeque::new(),
            faults: Faults::default(),
        };
        Ok(Self { engine, plan, state: Mutex::new(state) })
    }

    /// Makes every call fail without effect from now on.
    pub fn go_away(&self) {
        self.lock().presence = Presence::Away;
    }

    /// Refuses every call from now on, as a full queue of this process does.
    pub fn fill_queue(&self) {
        self.lock().presence = Presence::Busy;
    }

    /// Makes every call fail without effect after `calls` more, to stop in the middle of a series.
    pub fn go_away_after(&self, calls: u32) {
        self.lock().away_after = Some((calls, Presence::Away));
    }

    /// Makes every call hang after `calls` more, in the middle of a series.
    pub fn hang_after(&self, calls: u32) {
        self.lock().away_after = Some((calls, Presence::Hanging));
    }

    /// Makes every call hang from now on, without effect.
    pub fn hang(&self) {
        self.lock().presence = Presence::Hanging;
    }

    /// Makes calls pass again. Hanging calls stay hanging.
    pub fn come_back(&self) {
        let mut state = self.lock();
        (state.presence, state.away_after) = (Presence::Here, None);
    }

    /// Makes the next `count` calls fail without effect.
    pub fn fail_next(&self, count: u32) {
        self.lock().fail_next = count;
    }

    /// Delivers the deferred steps and returns their number.
    pub async fn deliver(&self) -> usize {
        let late = std::mem::take(&mut self.lock().late);
        let count = late.len();
        self.make(late).await;
        count
    }

    /// The faults injected so far, without those of the switches.
    pub fn faults(&self) -> Faults {
        self.lock().faults
    }

    /// The wrapped engine.
    pub const fn inner(&self) -> &E {
        &self.engine
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The fate of a call, after its delay and after delivering due steps.
    async fn meet(&self) -> Result<Fate, StoreError> {
        if self.presence()? == Presence::Hanging {
            std::future::pending::<()>().await;
        }
        let (fate, delay, due) = self.lock().roll(&self.plan);
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
        self.make(due).await;
        Ok(fate)
    }

    fn presence(&self) -> Result<Presence, StoreError> {
        let mut state = self.lock();
        match &mut state.away_after {
            Some((0, then)) => state.presence = *then,
            Some((calls, _)) => *calls -= 1,
            None => {}
        }
        if state.presence == Presence::Away {
            return Err(StoreError::unavailable("set to be unavailable"));
        }
        if state.presence == Presence::Busy {
            let place = "the faulty engine".to_owned();
            return Err(StoreError::Busy { place, waiting_max: 0, retry_after: Duration::ZERO });
        }
        if state.fail_next > 0 {
            state.fail_next -= 1;
            return Err(StoreError::unavailable("set to fail"));
        }
        Ok(state.presence)
    }

    async fn answer<'a, T: Unpin>(
        &'a self,
        fate: Fate,
        call: impl Fn() -> Reply<'a, T>,
    ) -> Result<T, StoreError> {
        match fate {
            Fate::Pass => call().await,
            Fate::Fail => Err(StoreError::unavailable("a planned failure")),
            Fate::Repeat => {
                drop(call().await);
                call().await
            }
            Fate::Lose | Fate::Defer => {
                drop(call().await);
                Err(self.lost())
            }
        }
    }

    /// Queues a step for later, unless the queue is full.
    fn defer(&self, late: QueuedStep) -> bool {
        let mut state = self.lock();
        let has_space = state.late.len() < LATE_MAX;
        if has_space {
            state.late.push_back(late);
        }
        has_space
    }

    fn lost(&self) -> StoreError {
        if self.lock().random.below(2) == 0 {
            return StoreError::unavailable("the reply was lost, as planned");
        }
        StoreError::TimedOut { millis: 50 }
    }

    async fn make(&self, late: VecDeque<QueuedStep>) {
        for late in late {
            // The caller no longer waits for it.
            drop(self.engine.apply_step(late.as_step()).await);
        }
    }
}

impl State {
    /// The fate of the next call, its delay, and the late steps that arrive before it.
    fn roll(&mut self, plan: &FaultPlan) -> (Fate, Option<Duration>, VecDeque<QueuedStep>) {
        let (fate, delay) = plan.roll(&mut self.random);
        self.faults.count(fate, delay.is_some());
        let (mut due, mut kept) = (VecDeque::new(), VecDeque::new());
        for late in self.late.drain(..) {
            let arrives = self.random.below(2) == 0;
            if arrives { due.push_back(late) } else { kept.push_back(late) }
        }
        self.late = kept;
        (fate, delay, due)
    }
}

impl<E: Engine> Wrapper for Faulty<E> {
    type Inner = E;

    fn inner(&self) -> &E {
        &self.engine
    }

    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        _: Verb,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        Reply::later(async move {
            let fate = self.meet().await?;
            self.answer(fate, call).await
        })
    }

    fn step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(async move {
            let fate = self.meet().await?;
            if fate == Fate::Defer && self.defer(step.into()) {
                return Err(self.lost());
            }
            self.answer(fate, || self.engine.apply_step(step)).await
        })
    }

    fn describe(&self) -> Capabilities {
        Capabilities { is_immediate: false, deadline: DEADLINE, ..self.engine.about() }
    }
}
