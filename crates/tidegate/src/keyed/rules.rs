//! What the limits of each key are, and how a change of them reaches the keys.
//!
//! A change is made to the rules first and then counted. Whoever refreshes a throttle reads the count before the rules,
//! so what it reads is at least as new, and a throttle that follows a later change never goes back to an earlier one.
//! Limits are counted apart from the rest, so that turning them off and on undoes nothing that a hand has changed.
//! Plan functions are somebody's code: they are asked without any lock, and a panic of one is no other key's trouble.

use std::any::Any;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use thiserror::Error;
use tidegate_core::plan::Plan;

use super::limits::Limits;
use super::registry::Registry;
use crate::planted::{Bug, is_planted};
use crate::throttle::Inner;

pub(super) type Rule<K> = Arc<dyn Fn(&K) -> Limits + Send + Sync>;

/// What the limits of a key are.
pub(super) struct Rules<K> {
    by: Rule<K>,
    /// Keys with limits of their own.
    own: HashMap<K, Limits, RandomState>,
    is_enabled: bool,
    is_closed: bool,
}

/// What one key is to follow.
pub(super) struct Orders {
    /// With the count of changes of limits; `None` where it keeps the one it has.
    plan: Option<(Arc<Plan>, u32)>,
    pub(super) is_enabled: bool,
    pub(super) is_closed: bool,
}

/// Where the limits of one key come from.
pub(super) enum RuleOf<K> {
    Own(Limits),
    All(Rule<K>),
}

/// What a plan function panicked with.
type Panic = Box<dyn Any + Send>;

/// As many keys as there may be have limits of their own already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[error("{keys_max} keys have limits of their own, and `keyed.keys_max` is {keys_max}")]
pub struct NoRoom {
    /// The bound of keys.
    pub keys_max: usize,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    /// Other limits for all keys but those with limits of their own.
    pub(super) fn rule_by(&self, by: Rule<K>) {
        let old = self.edit(|rules| std::mem::replace(&mut rules.by, by));
        self.plans.fetch_add(1, Ordering::AcqRel);
        let renewed = self.renew();
        // It may hold anything: dropped without a lock.
        drop(old);
        renewed.unwrap_or_else(|panic| resume_unwind(panic));
    }

    /// Limits of its own for one key, or none any more.
    ///
    /// # Errors
    /// As many keys as there may be have limits of their own already.
    pub(super) fn rule_one(&self, key: &K, limits: Option<Limits>) -> Result<(), NoRoom> {
        let keys_max = self.options.keys_max;
        let kept = key.clone();
        let old = self.edit(|rules| {
            if limits.is_some() && rules.own.len() >= keys_max && !rules.own.contains_key(key) {
                return Err(NoRoom { keys_max });
            }
            // Taken out first, so that nothing of it is dropped here.
            let old = rules.own.remove_entry(key);
            if let Some(limits) = limits {
                rules.own.insert(kept, limits);
            }
            Ok(old)
        })?;
        self.plans.fetch_add(1, Ordering::AcqRel);
        self.version.fetch_add(1, Ordering::AcqRel);
        if let Some(throttle) = self.get(key) {
            self.refresh(key, &throttle);
        }
        // Keys and limits are somebody's: dropped without a lock.
        drop(old);
        Ok(())
    }

    /// Other limits for the shared entry.
    pub(super) fn rule_overflow(&self, limits: &Limits) {
        let plans = self.plans.fetch_add(1, Ordering::AcqRel) + 1;
        let version = self.version.fetch_add(1, Ordering::AcqRel) + 1;
        let (is_enabled, is_closed) = {
            let rules = self.rules.read();
            (rules.is_enabled, rules.is_closed)
        };
        let plan = Some((Arc::clone(&limits.plan), plans));
        self.overflow.follow(&Orders { plan, is_enabled, is_closed }, version, 0);
    }

    pub(super) fn enable(&self, is_enabled: bool) -> bool {
        let was = self.edit(|rules| std::mem::replace(&mut rules.is_enabled, is_enabled));
        if was != is_enabled {
            // The limits are what they were: whoever next asks for a key whose limits panic hears of it.
            drop(self.renew());
        }
        was
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.rules.read().is_enabled
    }

    /// Answers whether it was open.
    pub(super) fn close(&self) -> bool {
        let was_closed = self.edit(|rules| std::mem::replace(&mut rules.is_closed, true));
        if !was_closed {
            drop(self.renew());
        }
        !was_closed
    }

    /// Lets a throttle follow the rules of now.
    pub(super) fn refresh(&self, key: &K, throttle: &Inner) {
        self.try_refresh(key, throttle).unwrap_or_else(|panic| resume_unwind(panic));
    }

    /// The same where a panic of the plan function is not the end of it.
    fn try_refresh(&self, key: &K, throttle: &Inner) -> Result<(), Panic> {
        let (epoch, version) = (self.epoch.load(Ordering::Acquire), self.version.load(Ordering::Acquire));
        let plans = self.plans.load(Ordering::Acquire);
        let (rule, mut orders) = self.rule_of(key);
        // Somebody's code: no lock is held.
        let limits = catch_unwind(AssertUnwindSafe(|| rule.limits(key)));
        // Without its limits it is still told whether anybody may enter, and stays stale: they are asked for again.
        let epoch = if limits.is_ok() { epoch } else { throttle.epoch() };
        orders.plan = limits.as_ref().ok().map(|limits| (Arc::clone(&limits.plan), plans));
        throttle.follow(&orders, version, epoch);
        limits.map(drop)
    }

    /// What says the limits of `key`, and what is known without asking it.
    pub(super) fn rule_of(&self, key: &K) -> (RuleOf<K>, Orders) {
        let rules = self.rules.read();
        let rule = match rules.own.get(key) {
            Some(limits) => RuleOf::Own(limits.clone()),
            None => RuleOf::All(Arc::clone(&rules.by)),
        };
        (rule, Orders { plan: None, is_enabled: rules.is_enabled, is_closed: rules.is_closed })
    }

    fn edit<T>(&self, edit: impl FnOnce(&mut Rules<K>) -> T) -> T {
        edit(&mut self.rules.write())
    }

    /// The rules changed for all keys. Those that somebody waits at or holds follow at once, the others when they are
    /// next asked for. One whose limits panic keeps the others from nothing.
    ///
    /// # Errors
    /// The first such panic.
    fn renew(&self) -> Result<(), Panic> {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let mut renewed = Ok(());
        for (key, throttle) in self.held() {
            renewed = renewed.and(self.try_refresh(&key, &throttle));
        }
        // Before what the rules say, as for every key: what is read later is at least as new.
        let mut version = self.version.load(Ordering::Acquire);
        let (is_enabled, is_closed) = {
            let rules = self.rules.read();
            (rules.is_enabled, rules.is_closed)
        };
        if is_planted(Bug::ReadVersionLate) {
            version = self.version.load(Ordering::Acquire);
        }
        // The shared entry has limits of its own.
        self.overflow.follow(&Orders { plan: None, is_enabled, is_closed }, version, 0);
        renewed
    }
}

impl<K> Rules<K> {
    pub(super) fn new(by: Rule<K>, is_enabled: bool) -> Self {
        Self { by, own: HashMap::default(), is_enabled, is_closed: false }
    }
}

impl<K> RuleOf<K> {
    pub(super) fn limits(&self, key: &K) -> Limits {
        match self {
            Self::Own(limits) => limits.clone(),
            Self::All(by) => by(key),
        }
    }
}

impl Inner {
    /// Follows what a registry asks for, unless it follows something later already.
    fn follow(&self, orders: &Orders, version: u32, epoch: u32) {
        self.change(|state, now, effects| {
            if version < state.version {
                return;
            }
            state.version = version;
            self.follows(epoch);
            state.gates.bypass(!orders.is_enabled);
            if let Some((plan, plans)) = &orders.plan
                && *plans != std::mem::replace(&mut state.plans, *plans)
                && !Arc::ptr_eq(&state.plan, plan)
                && state.plan != *plan
            {
                self.put(state, plan, now, effects);
            }
            if orders.is_closed {
                state.gates.close(&mut effects.events);
            }
        });
    }
}
