//! A store behind a bad network, from a seed.
//!
//! Calls fail before they are made, replies are lost, calls arrive twice, and steps that their caller has given
//! up on arrive after what the caller did next. Whoever keeps to the contract, and asks again with the same step,
//! loses nothing by it. The engine can also be away altogether, or hang.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;
use tidegate_core::random::Random;

use super::plan::{Fate, Faults, InvalidPlan, Plan};
use crate::sync::lock;
use crate::{
    Adjust, AggregateOptions, Aggregator, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changed,
    Changes, Draw, Drawn, Entities, Extend, Ledger, Listing, Lookup, Moved, Page, Paging, Policies,
    PolicyChange, Prune, Renew, Renewed, Reply, Seen, Settle, Standing, Store, StoreError, Swept, Tokens,
    UsageQuery, Written,
};

/// A call may take so long before the engine counts as away.
const DEADLINE: Duration = Duration::from_millis(50);
/// Steps that are to be made later, at most; further ones are made at once.
const LATE_MAX: usize = 1_024;

/// A store behind a bad network.
#[derive(Debug)]
pub struct Faulty<S> {
    store: S,
    plan: Plan,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: Random,
    presence: Presence,
    fail_next: u32,
    /// Calls that are made before it goes away.
    away_after: Option<(u32, Presence)>,
    late: VecDeque<Late>,
    faults: Faults,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Away,
    Hanging,
}

/// A step that is to be made later.
#[derive(Debug, Clone)]
enum Late {
    Draw(Draw),
    Extend(Extend),
    Adjust(Adjust),
    Renew(Renew),
    Settle(Settle),
    Cancel(Cancel),
    Spend(Draw),
}

impl<S: Store> Faulty<S> {
    /// Puts `store` behind a network that is as bad as planned.
    ///
    /// # Errors
    /// [`InvalidPlan`] for more faults than calls.
    pub fn new(store: S, plan: Plan) -> Result<Self, InvalidPlan> {
        let plan = plan.check()?;
        let state = State {
            random: plan.random(),
            presence: Presence::Here,
            fail_next: 0,
            away_after: None,
            late: VecDeque::new(),
            faults: Faults::default(),
        };
        Ok(Self { store, plan, state: Mutex::new(state) })
    }

    /// From now on every call fails, and does nothing.
    pub fn go_away(&self) {
        self.lock().presence = Presence::Away;
    }

    /// After `calls` more every call fails, and does nothing: whoever makes many is stopped in the middle.
    pub fn go_away_after(&self, calls: u32) {
        self.lock().away_after = Some((calls, Presence::Away));
    }

    /// After `calls` more no call is answered, or made: whoever makes many is held in the middle.
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
    pub const fn inner(&self) -> &S {
        &self.store
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        Reply::later(async move {
            let fate = self.meet().await?;
            self.answer(fate, call).await
        })
    }

    fn step<'a, T: Unpin + Send + 'a>(
        &'a self,
        late: impl FnOnce() -> Late + Send + 'a,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        Reply::later(async move {
            let fate = self.meet().await?;
            if fate == Fate::Defer && self.defer(late()) {
                return Err(self.lost());
            }
            self.answer(fate, call).await
        })
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
    fn defer(&self, late: Late) -> bool {
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

    async fn make(&self, late: VecDeque<Late>) {
        for late in late {
            // Nobody waits for the answer.
            match &late {
                Late::Draw(draw) => drop(self.store.draw(draw).await),
                Late::Extend(extend) => drop(self.store.extend(extend).await),
                Late::Adjust(adjust) => drop(self.store.adjust(adjust).await),
                Late::Renew(renew) => drop(self.store.renew(renew).await),
                Late::Settle(settle) => drop(self.store.settle(settle).await),
                Late::Cancel(cancel) => drop(self.store.cancel(cancel).await),
                Late::Spend(draw) => drop(self.store.spend(draw).await),
            }
        }
    }
}

impl State {
    /// What becomes of the next call, how much longer it takes, and which late steps arrive before it.
    fn roll(&mut self, plan: &Plan) -> (Fate, Option<Duration>, VecDeque<Late>) {
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

impl<S: Store> Buckets for Faulty<S> {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.step(move || Late::Draw(draw.clone()), move || self.store.draw(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.step(move || Late::Extend(extend.clone()), move || self.store.extend(extend))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.step(move || Late::Adjust(adjust.clone()), move || self.store.adjust(adjust))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        self.step(move || Late::Renew(renew.clone()), move || self.store.renew(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        self.step(move || Late::Settle(settle.clone()), move || self.store.settle(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        self.step(move || Late::Cancel(cancel.clone()), move || self.store.cancel(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.step(move || Late::Spend(draw.clone()), move || self.store.spend(draw))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.call(move || self.store.lease(lease))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.call(move || self.store.balances(lookup))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.call(move || self.store.buckets(resource, paging))
    }
}

impl<S: Store> Policies for Faulty<S> {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.call(move || self.store.read(scopes))
    }

    fn version(&self) -> Reply<'_, Version> {
        self.call(move || self.store.version())
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        self.call(move || self.store.changed(since))
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.call(move || self.store.list(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        self.call(move || self.store.apply(changes, actor))
    }
}

impl<S: Store> Entities for Faulty<S> {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(move || self.store.put(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.call(move || self.store.get(id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        self.call(move || self.store.lineage(id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(move || self.store.remove(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.call(move || self.store.children(parent, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        self.call(move || self.store.entities(paging))
    }
}

impl<S: Store> Ledger for Faulty<S> {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        self.call(move || self.store.usage(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.call(move || self.store.audit(query, paging))
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.call(move || self.store.prune(prune, max))
    }
}

impl<S: Store> Tokens for Faulty<S> {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.call(move || self.store.create_token(token, hash, actor))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.call(move || self.store.token(id))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.call(move || self.store.find_token(hash))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.call(move || self.store.tokens(paging))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(move || self.store.revoke_token(id, expect, actor))
    }
}

impl<S: Store> Store for Faulty<S> {
    fn capabilities(&self) -> Capabilities {
        Capabilities { is_immediate: false, deadline: DEADLINE, ..self.store.capabilities() }
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.call(move || self.store.sweep(max))
    }

    fn close(&self) -> Reply<'_, ()> {
        self.store.close()
    }

    fn changes(&self) -> Option<Changes> {
        self.store.changes()
    }

    fn caution(&self) -> Option<String> {
        self.store.caution()
    }

    fn aggregator(&self, options: &AggregateOptions) -> Option<Arc<dyn Aggregator>> {
        self.store.aggregator(options)
    }
}
