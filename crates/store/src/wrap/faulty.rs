//! A store behind a bad network, from a seed.
//!
//! Calls fail before they are made, replies are lost, calls arrive twice, and steps that their caller has given
//! up on arrive after what the caller did next. Whoever keeps to the contract, and asks again with the same step,
//! loses nothing by it. The engine can also be unavailable, or hang.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tidegate_core::random::Random;

use super::plan::{Fate, Faults, InvalidPlan, Plan};
use super::verb::Verb;
use super::wrapper::Wrapper;
use crate::sync::lock;
use crate::{Applied, Capabilities, Engine, QueuedStep, Reply, Step, StoreError};

/// A call may take so long before the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);
/// Steps that are to be made later, at most; further ones are made at once.
const LATE_MAX: usize = 1_024;

/// A store behind a bad network.
#[derive(Debug)]
pub struct Faulty<E> {
    engine: E,
    plan: Plan,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: Random,
    presence: Presence,
    fail_next: u32,
    /// Calls that are made before it is unavailable.
    away_after: Option<(u32, Presence)>,
    late: VecDeque<QueuedStep>,
    faults: Faults,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Away,
    Hanging,
}

impl<E: Engine> Faulty<E> {
    /// Puts `engine` behind a network that is as bad as planned.
    ///
    /// # Errors
    /// [`InvalidPlan`] for more faults than calls.
    pub fn new(engine: E, plan: Plan) -> Result<Self, InvalidPlan> {
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

    /// From now on every call fails, and does nothing.
    pub fn go_away(&self) {
        self.lock().presence = Presence::Away;
    }

    /// After `calls` more every call fails and does nothing: a series of calls is stopped in the middle.
    pub fn go_away_after(&self, calls: u32) {
        self.lock().away_after = Some((calls, Presence::Away));
    }

    /// After `calls` more no call is answered or made: a series of calls hangs in the middle.
    pub fn hang_after(&self, calls: u32) {
        self.lock().away_after = Some((calls, Presence::Hanging));
    }

    /// From now on no call is answered, or made.
    pub fn hang(&self) {
        self.lock().presence = Presence::Hanging;
    }

    /// From now on calls are made and answered again. Those that hang stay so.
    pub fn come_back(&self) {
        let mut state = self.lock();
        (state.presence, state.away_after) = (Presence::Here, None);
    }

    /// The next `count` calls fail, and do nothing.
    pub fn fail_next(&self, count: u32) {
        self.lock().fail_next = count;
    }

    /// Makes the steps that were given up on and are still on their way, and says how many they were.
    pub async fn deliver(&self) -> usize {
        let late = std::mem::take(&mut self.lock().late);
        let count = late.len();
        self.make(late).await;
        count
    }

    /// Faults that were made so far, switches apart.
    pub fn faults(&self) -> Faults {
        self.lock().faults
    }

    /// The store behind the network.
    pub const fn inner(&self) -> &E {
        &self.engine
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What becomes of a call, once it has taken its time and those have arrived that were on their way.
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
            return Err(StoreError::unavailable("it was told to go away"));
        }
        if state.fail_next > 0 {
            state.fail_next -= 1;
            return Err(StoreError::unavailable("it was told to fail"));
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

    /// Keeps a step for later; not if too many are kept.
    fn defer(&self, late: QueuedStep) -> bool {
        let mut state = self.lock();
        let has_room = state.late.len() < LATE_MAX;
        if has_room {
            state.late.push_back(late);
        }
        has_room
    }

    fn lost(&self) -> StoreError {
        if self.lock().random.below(2) == 0 {
            return StoreError::unavailable("the reply was lost, as planned");
        }
        StoreError::TimedOut { millis: 50 }
    }

    async fn make(&self, late: VecDeque<QueuedStep>) {
        for late in late {
            // Its caller has given up on it.
            drop(self.engine.apply_step(late.as_step()).await);
        }
    }
}

impl State {
    /// What becomes of the next call, how much longer it takes, and which late steps arrive before it.
    fn roll(&mut self, plan: &Plan) -> (Fate, Option<Duration>, VecDeque<QueuedStep>) {
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

    fn step<'a>(&'a self, step: Step<'a>) -> Reply<'a, Applied> {
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
