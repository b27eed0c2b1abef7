//! Eviction of keys, in small steps during calls, and only of keys that hold back no caller.
//!
//! A full bucket is equivalent to no entry, so evicting it grants no amnesty; all other keys stay (invariant
//! 8). A call examines at most [`ENTRIES_MAX`] entries, so no caller pays for the keys of others.

use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tidegate_core::gate::Idleness;
use tidegate_core::time::Instant;

use super::events::{EvictCause, KeyedEvent, KeyedNotice};
use super::registry::Registry;
use super::shard::{Entry, Slot};
use crate::events::Registrar as _;
use crate::fault_injection::{Bug, is_injected};
use crate::throttle::Inner;

/// Entries that one call examines.
const ENTRIES_MAX: usize = 8;
/// Table slots, most of which may be empty, that one call walks over in a shard.
const SLOTS_MAX: usize = 64;
/// Walks of one call that needs space, from shard to shard and around. Hashes of some keys cluster, so a walk may
/// meet no entry.
const WALKS_MAX: usize = 16;
/// A table shrinks when fewer than one in this many slots are used.
const SPARSE: usize = 8;
/// A table of at most this many slots is not worth shrinking.
const SMALL: usize = 64;

/// Overflow is reported once per this many nanoseconds: a second.
const REPORT_EVERY: u64 = 1_000_000_000;

/// The entries that a call may still examine.
pub(super) struct SweepBudget {
    left: usize,
}

impl SweepBudget {
    pub(super) const fn new() -> Self {
        Self { left: ENTRIES_MAX }
    }
}

/// Which keys to evict.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Only idle keys.
    Idle,
    /// Any evictable key, to make space.
    Space,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    /// Reserves a place for one more key, if there is one.
    pub(super) fn reserve_place(&self) -> bool {
        let more = |keys: usize| (keys < self.options.keys_max).then_some(keys + 1);
        self.keys.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Whether there is a place for one more key, after an eviction if necessary.
    pub(super) fn make_space(&self, now: Instant, budget: &mut SweepBudget) -> bool {
        let has_space = || self.keys.load(Ordering::Acquire) < self.options.keys_max;
        let shards = self.shards.len();
        let mut walks = 0;
        // From where the last search stopped: a shard of keys that must stay does not hide the others.
        while !has_space() {
            if budget.left == 0 || walks == WALKS_MAX {
                return false;
            }
            let next = self.evictions.next_shard.fetch_add(1, Ordering::Relaxed) % shards;
            self.sweep(next, now, Goal::Space, budget);
            walks += 1;
        }
        true
    }

    /// Evicts idle keys of a shard.
    pub(super) fn sweep_idle(&self, shard: usize, now: Instant, budget: &mut SweepBudget) {
        self.sweep(shard, now, Goal::Idle, budget);
    }

    /// The registry is full: returns the overflow throttle, and reports this from time to time.
    pub(super) fn overflowed(&self, now: Instant) -> Arc<Inner> {
        self.evictions.overflowed.fetch_add(1, Ordering::Relaxed);
        self.setup.sinks.guard(|| self.meter.overflowed());
        let reported_at = self.evictions.reported_at.load(Ordering::Relaxed);
        let is_due = reported_at == 0 || now.nanos_since(Instant::from_nanos(reported_at)) >= REPORT_EVERY;
        // Compare-and-set: one of several concurrent callers reports it.
        let is_first = |reported_at| {
            let now = now.as_nanos().max(1);
            self.evictions
                .reported_at
                .compare_exchange(reported_at, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        if is_due && is_first(reported_at) {
            let event = KeyedEvent::Overflowed { keys_max: self.options.keys_max };
            self.sinks.enqueue(|| KeyedNotice { at: now, key: None, event });
            self.sinks.deliver();
            self.setup.observer.overflowed(&self.setup.sinks, self.options.keys_max);
        }
        Arc::clone(&self.overflow)
    }

    fn sweep(&self, shard: usize, now: Instant, goal: Goal, budget: &mut SweepBudget) {
        let mut leaving: SmallVec<[(Entry<K>, EvictCause); ENTRIES_MAX]> = SmallVec::new();
        let before = budget.left;
        let mut table = self.shards[shard].lock();
        let slots = table.entries.num_buckets();
        for _ in 0..slots.min(SLOTS_MAX) {
            if budget.left == 0 {
                break;
            }
            let place = table.cursor % slots;
            table.cursor = place + 1;
            let Some(entry) = table.entries.get_bucket(place) else { continue };
            budget.left -= 1;
            if let Some(cause) = self.may_leave(entry, now, goal)
                && let Ok(taken) = table.entries.get_bucket_entry(place)
            {
                let (entry, _) = taken.remove();
                self.keys.fetch_sub(1, Ordering::AcqRel);
                table.evicted.add(place, entry.admitted());
                // Under the lock: events of the key's next throttle come after this one.
                self.sinks.enqueue(|| {
                    let key = Some(entry.key.clone());
                    KeyedNotice { at: now, key, event: KeyedEvent::Evicted { cause } }
                });
                leaving.push((entry, cause));
                if goal == Goal::Space {
                    break;
                }
            }
        }
        if !leaving.is_empty() && slots > SMALL && table.entries.len() * SPARSE < slots {
            let wanted = table.entries.len() * 2;
            table.entries.shrink_to(wanted, |entry| self.hash_of(&entry.key));
            table.moves = table.moves.wrapping_add(1);
        }
        drop(table);
        self.evictions.examined.fetch_add((before - budget.left) as u64, Ordering::Relaxed);
        // Without the lock: dropping keys and calling listeners is user code.
        let idle = leaving.iter().filter(|(_, cause)| *cause == EvictCause::Idle).count();
        let size = leaving.len() - idle;
        self.evictions.idle.fetch_add(idle as u64, Ordering::Relaxed);
        self.evictions.size.fetch_add(size as u64, Ordering::Relaxed);
        for (entry, cause) in leaving {
            self.sinks.trace_evicted(&self.setup, entry.key, cause);
        }
        if idle + size > 0 {
            self.sinks.deliver();
            self.setup.sinks.guard(|| self.meter.evicted(idle, size));
        }
    }

    /// Whether a key may be evicted, and why.
    fn may_leave(&self, entry: &Entry<K>, now: Instant, goal: Goal) -> Option<EvictCause> {
        // Under the shard's lock no new handle can be created, and the effects of earlier handles are
        // visible.
        if entry.is_in_use() && !is_injected(Bug::EvictInUse) {
            return None;
        }
        let is_idle = |latest: Instant| now.since(latest) >= self.options.idle_ttl;
        let throttle = match entry.slot() {
            Slot::Rate { state, .. } => {
                let is_idle = is_idle(state.latest());
                let may_leave = (is_idle || goal == Goal::Space) && state.idleness(now) == Idleness::Fresh;
                return may_leave.then_some(if is_idle { EvictCause::Idle } else { EvictCause::Size });
            }
            Slot::Throttle(throttle) => throttle,
        };
        let state = throttle.lock();
        let is_idle = is_idle(state.gates.latest());
        if !is_idle && goal == Goal::Idle {
            return None;
        }
        match state.gates.idleness(&state.plan, now) {
            Idleness::Busy => None,
            _ if state.waiting() > 0 => None,
            Idleness::Learned | Idleness::Fresh if is_idle => Some(EvictCause::Idle),
            Idleness::Learned => None,
            Idleness::Fresh => {
                let counts_retries =
                    state.retries.iter().flat_map(|all| all.iter()).any(|one| one.has_any(now));
                (!counts_retries).then_some(EvictCause::Size)
            }
        }
    }
}
