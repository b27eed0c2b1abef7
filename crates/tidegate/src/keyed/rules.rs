//! The limits of each key, and how a change of them reaches the keys.
//!
//! A change is made to the rules first and counted afterwards. A refresh reads the count before the rules, so
//! the rules are at least as new, and a throttle that follows a later change never goes back to an earlier
//! one. Changes of limits have their own count, so that turning limits off and on overwrites no manual
//! change. Limit functions are user code: they are called without any lock, and a panic for one key does not
//! affect others.

use std::any::Any;
use std::borrow::Borrow;
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
use crate::fault_injection::{Bug, is_injected};
use crate::throttle::Inner;

pub(super) type Rule<K> = Arc<dyn Fn(&K) -> Limits + Send + Sync>;

/// The source of all keys' limits.
pub(super) struct Rules<K> {
    by: Rule<K>,
    /// Keys with their own limits.
    own: HashMap<K, Limits, RandomState>,
    is_enabled: bool,
    is_closed: bool,
}

/// The settings that one key must follow.
pub(super) struct KeySettings {
    /// The plan and the count of changes of limits; `None` keeps the current plan.
    plan: Option<(Arc<Plan>, u32)>,
    pub(super) is_enabled: bool,
    pub(super) is_closed: bool,
}

/// The source of one key's limits.
pub(super) enum KeyRule<K> {
    Own(Limits),
    All(Rule<K>),
}

/// The panic payload of a limit function.
type Panic = Box<dyn Any + Send>;

/// The maximum number of keys already have their own limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[error("{keys_max} keys already have their own limits, and `keyed.keys_max` is {keys_max}")]
pub struct TooManyOwnLimits {
    /// The maximum number of keys.
    pub keys_max: usize,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    /// Replaces the limits of all keys except those with their own.
    pub(super) fn set_rule(&self, by: Rule<K>) {
        let old = self.edit(|rules| std::mem::replace(&mut rules.by, by));
        self.plans.fetch_add(1, Ordering::AcqRel);
        let refreshed = self.refresh_all();
        // User code: dropped without a lock.
        drop(old);
        refreshed.unwrap_or_else(|panic| resume_unwind(panic));
    }

    /// Sets or removes the limits of one key.
    ///
    /// # Errors
    /// The maximum number of keys already have their own limits.
    pub(super) fn set_own_limits<Q>(&self, key: &Q, limits: Option<Limits>) -> Result<(), TooManyOwnLimits>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let keys_max = self.options.keys_max;
        // Cloned here, because no user code runs under the lock.
        let kept = key.to_owned();
        let old = self.edit(|rules| {
            if limits.is_some() && rules.own.len() >= keys_max && !rules.own.contains_key(key) {
                return Err(TooManyOwnLimits { keys_max });
            }
            // Removed first, so that nothing is dropped under the lock.
            let old = rules.own.remove_entry(key);
            if let Some(limits) = limits {
                rules.own.insert(kept, limits);
            }
            Ok(old)
        })?;
        self.plans.fetch_add(1, Ordering::AcqRel);
        self.version.fetch_add(1, Ordering::AcqRel);
        if let Some(throttle) = self.get(key) {
            self.refresh(&key.to_owned(), &throttle);
        }
        // Keys and limits are user types: dropped without a lock.
        drop(old);
        Ok(())
    }

    /// Replaces the limits of the overflow throttle.
    pub(super) fn set_overflow(&self, limits: &Limits) {
        let plans = self.plans.fetch_add(1, Ordering::AcqRel) + 1;
        let version = self.version.fetch_add(1, Ordering::AcqRel) + 1;
        let (is_enabled, is_closed) = {
            let rules = self.rules.read();
            (rules.is_enabled, rules.is_closed)
        };
        let plan = Some((Arc::clone(&limits.plan), plans));
        self.overflow.follow(&KeySettings { plan, is_enabled, is_closed }, version, 0);
    }

    pub(super) fn enable(&self, is_enabled: bool) -> bool {
        let was = self.edit(|rules| std::mem::replace(&mut rules.is_enabled, is_enabled));
        if was != is_enabled {
            // The limits are unchanged: a limit function that panics does so again on the key's next use.
            drop(self.refresh_all());
        }
        was
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.rules.read().is_enabled
    }

    /// Returns whether it was open.
    pub(super) fn close(&self) -> bool {
        let was_closed = self.edit(|rules| std::mem::replace(&mut rules.is_closed, true));
        if !was_closed {
            drop(self.refresh_all());
        }
        !was_closed
    }

    /// Makes a throttle follow the current rules.
    pub(super) fn refresh(&self, key: &K, throttle: &Inner) {
        self.try_refresh(key, throttle).unwrap_or_else(|panic| resume_unwind(panic));
    }

    /// The same, returning a panic of the limit function.
    fn try_refresh(&self, key: &K, throttle: &Inner) -> Result<(), Panic> {
        let (epoch, version) = (self.epoch.load(Ordering::Acquire), self.version.load(Ordering::Acquire));
        let plans = self.plans.load(Ordering::Acquire);
        let (rule, mut settings) = self.rule_of(key);
        // User code: no lock is held.
        let limits = catch_unwind(AssertUnwindSafe(|| rule.limits(key)));
        // Without limits it still follows enabled and closed, and stays stale, so that the function is called
        // again.
        let epoch = if limits.is_ok() { epoch } else { throttle.epoch() };
        settings.plan = limits.as_ref().ok().map(|limits| (Arc::clone(&limits.plan), plans));
        throttle.follow(&settings, version, epoch);
        limits.map(drop)
    }

    /// The source of a key's limits, and the settings known without calling it.
    pub(super) fn rule_of(&self, key: &K) -> (KeyRule<K>, KeySettings) {
        let rules = self.rules.read();
        let rule = match rules.own.get(key) {
            Some(limits) => KeyRule::Own(limits.clone()),
            None => KeyRule::All(Arc::clone(&rules.by)),
        };
        (rule, KeySettings { plan: None, is_enabled: rules.is_enabled, is_closed: rules.is_closed })
    }

    fn edit<T>(&self, edit: impl FnOnce(&mut Rules<K>) -> T) -> T {
        edit(&mut self.rules.write())
    }

    /// The rules changed for all keys. Keys with waiters or handles follow at once, the others on their next
    /// use. If the limit function panics for one key, the others still follow.
    ///
    /// # Errors
    /// The first such panic.
    fn refresh_all(&self) -> Result<(), Panic> {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let mut refreshed = Ok(());
        for (key, throttle) in self.in_use() {
            refreshed = refreshed.and(self.try_refresh(&key, &throttle));
        }
        // Read before the rules, as for every key: the rules are then at least as new.
        let mut version = self.version.load(Ordering::Acquire);
        let (is_enabled, is_closed) = {
            let rules = self.rules.read();
            (rules.is_enabled, rules.is_closed)
        };
        if is_injected(Bug::ReadVersionLate) {
            version = self.version.load(Ordering::Acquire);
        }
        // The overflow throttle has its own limits.
        self.overflow.follow(&KeySettings { plan: None, is_enabled, is_closed }, version, 0);
        refreshed
    }
}

impl<K> Rules<K> {
    pub(super) fn new(by: Rule<K>, is_enabled: bool) -> Self {
        Self { by, own: HashMap::default(), is_enabled, is_closed: false }
    }
}

impl<K> KeyRule<K> {
    pub(super) fn limits(&self, key: &K) -> Limits {
        match self {
            Self::Own(limits) => limits.clone(),
            Self::All(by) => by(key),
        }
    }
}

impl Inner {
    /// Follows the registry's settings, unless it already follows later ones.
    fn follow(&self, settings: &KeySettings, version: u32, epoch: u32) {
        self.change(|state, now, effects| {
            if version < state.version {
                return;
            }
            state.version = version;
            self.follows(epoch);
            state.gates.bypass(!settings.is_enabled);
            if let Some((plan, plans)) = &settings.plan
                && *plans != std::mem::replace(&mut state.plans, *plans)
                && !Arc::ptr_eq(&state.plan, plan)
                && state.plan != *plan
            {
                self.put(state, plan, now, effects);
            }
            if settings.is_closed {
                state.gates.close(&mut effects.events);
            }
        });
    }
}
