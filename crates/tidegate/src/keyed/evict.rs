//! Forgetting keys: in small steps, on the backs of those who call, and only what holds nobody back.
//!
//! A full bucket equals no entry, so forgetting it is no amnesty; everything else stays (invariant 8). A call looks at
//! no more than [`LOOK_MAX`] entries, so no caller pays for the keys of others.

use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tidegate_core::gate::Rest;
use tidegate_core::time::Instant;

use super::events::{Evict, KeyedEvent, KeyedNotice};
use super::registry::{Entry, Left, Registry};
use crate::events::Registrar as _;
use crate::planted::{Bug, is_planted};
use crate::throttle::Inner;

/// Entries that one call looks at.
const LOOK_MAX: usize = 8;
/// Places, of which most may be empty, that one call walks over in a shard.
const PLACES_MAX: usize = 64;
/// Shards in which one call looks for room.
const SHARDS_MAX: usize = 16;
/// A table gives room back when fewer than one in so many of its places are taken.
const SPARSE: usize = 8;
/// A table of no more than so many places is not worth the work.
const SMALL: usize = 64;

/// Overflow is told once in so many nanoseconds: a second.
const TELL_EVERY: u64 = 1_000_000_000;

/// How many entries a call may still look at.
pub(super) struct Look {
    left: usize,
}

impl Look {
    pub(super) const fn new() -> Self {
        Self { left: LOOK_MAX }
    }
}

/// What makes a key leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Only those that nobody asks for any more.
    Nothing,
    /// Room for another.
    Room,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    /// Takes a place for one more key, if there is one.
    pub(super) fn take_place(&self) -> bool {
        let more = |keys: usize| (keys < self.options.keys_max).then_some(keys + 1);
        self.keys.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Whether there is a place for one more key, if need be that of another.
    pub(super) fn make_room(&self, now: Instant, look: &mut Look) -> bool {
        let has_room = || self.keys.load(Ordering::Acquire) < self.options.keys_max;
        let shards = self.shards.len();
        let mut walked = 0;
        // From where the last one stopped: a shard of keys that must stay does not hide the others.
        while !has_room() {
            if look.left == 0 || walked == shards.min(SHARDS_MAX) {
                return false;
            }
            let next = self.gone.next_shard.fetch_add(1, Ordering::Relaxed) % shards;
            self.sweep(next, now, Need::Room, look);
            walked += 1;
        }
        true
    }

    /// Forgets keys of a shard that nobody asks for any more.
    pub(super) fn sweep_idle(&self, shard: usize, now: Instant, look: &mut Look) {
        self.sweep(shard, now, Need::Nothing, look);
    }

    /// There is no room: the shared entry serves, and from time to time that is told.
    pub(super) fn overflowed(&self, now: Instant) -> Arc<Inner> {
        self.gone.overflowed.fetch_add(1, Ordering::Relaxed);
        self.setup.sinks.guard(|| self.meter.overflowed());
        let told = self.gone.told.load(Ordering::Relaxed);
        let is_news = told == 0 || now.nanos_since(Instant::from_nanos(told)) >= TELL_EVERY;
        // Of those who come at once, one tells.
        let is_first = |told| {
            let now = now.as_nanos().max(1);
            self.gone.told.compare_exchange(told, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if is_news && is_first(told) {
            let event = KeyedEvent::Overflowed { keys_max: self.options.keys_max };
            self.sinks.note(|| KeyedNotice { at: now, key: None, event });
            self.sinks.tell();
            self.setup.observer.overflowed(&self.setup.sinks, self.options.keys_max);
        }
        Arc::clone(&self.overflow)
    }

    fn sweep(&self, shard: usize, now: Instant, need: Need, look: &mut Look) {
        let mut leaving: SmallVec<[(Entry<K>, Evict); LOOK_MAX]> = SmallVec::new();
        let before = look.left;
        let mut table = self.shards[shard].lock();
        let places = table.entries.num_buckets();
        for _ in 0..places.min(PLACES_MAX) {
            if look.left == 0 {
                break;
            }
            let place = table.cursor % places;
            table.cursor = place + 1;
            let Some(entry) = table.entries.get_bucket(place) else { continue };
            look.left -= 1;
            if let Some(cause) = self.may_leave(entry, now, need)
                && let Ok(taken) = table.entries.get_bucket_entry(place)
            {
                let (entry, _) = taken.remove();
                self.keys.fetch_sub(1, Ordering::AcqRel);
                table.left.add(place, entry.throttle.lock().gates.admitted());
                // Under the lock: what is told of the key's next life comes after its end.
                self.sinks.note(|| {
                    let key = Some(entry.key.clone());
                    KeyedNotice { at: now, key, event: KeyedEvent::Evicted { cause } }
                });
                leaving.push((entry, cause));
                if need == Need::Room {
                    break;
                }
            }
        }
        if !leaving.is_empty() && places > SMALL && table.entries.len() * SPARSE < places {
            let wanted = table.entries.len() * 2;
            table.entries.shrink_to(wanted, |entry| self.hash_of(&entry.key));
            table.moves = table.moves.wrapping_add(1);
        }
        drop(table);
        self.gone.examined.fetch_add((before - look.left) as u64, Ordering::Relaxed);
        // Without the lock: keys are somebody's, and listeners too.
        let idle = leaving.iter().filter(|(_, cause)| *cause == Evict::Idle).count();
        let size = leaving.len() - idle;
        self.gone.idle.fetch_add(idle as u64, Ordering::Relaxed);
        self.gone.size.fetch_add(size as u64, Ordering::Relaxed);
        for (entry, cause) in leaving {
            self.sinks.trace_evicted(&self.setup, entry.key, cause);
        }
        if idle + size > 0 {
            self.sinks.tell();
            self.setup.sinks.guard(|| self.meter.evicted(idle, size));
        }
    }

    /// Whether a key may be forgotten, and why.
    fn may_leave(&self, entry: &Entry<K>, now: Instant, need: Need) -> Option<Evict> {
        // Under the shard's lock nobody can come to hold it; and what whoever held it did, is seen with its lock.
        if Arc::strong_count(&entry.throttle) > 1 && !is_planted(Bug::EvictHandedOut) {
            return None;
        }
        let state = entry.throttle.lock();
        let is_idle = now.since(state.gates.latest()) >= self.options.idle_ttl;
        if !is_idle && need == Need::Nothing {
            return None;
        }
        match state.gates.rest(&state.plan, now) {
            Rest::Busy => None,
            _ if state.waiting() > 0 => None,
            Rest::Learned | Rest::Fresh if is_idle => Some(Evict::Idle),
            Rest::Learned => None,
            Rest::Fresh => {
                let counts_retries =
                    state.retries.iter().flat_map(|all| all.iter()).any(|one| one.has_any(now));
                (!counts_retries).then_some(Evict::Size)
            }
        }
    }
}

impl Left {
    /// A key leaves its place.
    const fn add(&mut self, place: usize, admitted: u64) {
        self.admitted += admitted;
        if place < self.walked {
            self.read += admitted;
        }
    }
}
