//! Shares a bounded number of slots among callers by dynamic thresholds (Choudhury and Hahne): a caller may
//! hold at most as many slots as are free, and more as long as the others can double theirs.
//!
//! A caller that is alone gets 15 of 16 slots. When others come, it gets none back until they have all they
//! want or as much as it has, and a new caller always finds a slot. No caller has to be configured.

use std::hash::{BuildHasher as _, Hash, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Number of counters. Callers are hashed to them, so memory is bounded; two callers with one counter count as
/// one.
const COUNTERS: usize = 4_096;

/// The part of the slots that stays free for new callers, at least one slot.
const SPARE_PART: usize = 16;

/// Whether a caller that holds `held` slots may take one more.
pub(crate) fn may_take(max: usize, free: usize, held: usize) -> bool {
    let others = max.saturating_sub(free).saturating_sub(held);
    let spare = (max / SPARE_PART).max(1);
    free > held || free > spare.saturating_add(others)
}

/// The slots. The hash is keyed at random: no caller can choose a name or an address that shares the counter of another.
#[derive(Debug)]
pub struct Slots {
    max: usize,
    free: AtomicUsize,
    held: Box<[AtomicU32]>,
    hasher: RandomState,
}

/// One slot, which is returned on drop.
#[derive(Debug)]
pub struct Slot {
    slots: Arc<Slots>,
    counter: usize,
}

/// Why there is no slot for a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtCapacity {
    /// No slot is free.
    Full,
    /// The caller holds its share.
    Share {
        /// The number of slots that it holds.
        held: usize,
    },
}

impl Slots {
    /// Slots that callers share.
    ///
    /// ```
    /// use tidegate_server::Slots;
    ///
    /// let slots = Slots::new(80);
    /// let held: Vec<_> = std::iter::from_fn(|| slots.take(&"acme").ok()).collect();
    /// assert_eq!(held.len(), 75);
    /// assert!(slots.take(&"other").is_ok());
    /// ```
    pub fn new(max: usize) -> Arc<Self> {
        let held = (0..COUNTERS).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Self { max, free: AtomicUsize::new(max), held, hasher: RandomState::new() })
    }

    pub(crate) const fn max(&self) -> usize {
        self.max
    }

    /// The number of slots in use.
    pub(crate) fn used(&self) -> usize {
        self.max.saturating_sub(self.free.load(Ordering::Relaxed))
    }

    /// Takes a slot for a caller.
    ///
    /// # Errors
    /// [`AtCapacity`] if the caller already has its share.
    pub fn take(self: &Arc<Self>, caller: &impl Hash) -> Result<Slot, AtCapacity> {
        let counter = usize::try_from(self.hasher.hash_one(caller) % COUNTERS as u64).unwrap_or(0);
        self.take_if(counter, |free, held| may_take(self.max, free, held))
    }

    /// Takes any free slot, for callers that are not told apart.
    ///
    /// # Errors
    /// [`AtCapacity::Full`] if none is free.
    pub fn take_any(self: &Arc<Self>) -> Result<Slot, AtCapacity> {
        self.take_if(0, |_, _| true)
    }

    fn take_if(
        self: &Arc<Self>,
        counter: usize,
        may_take: impl Fn(usize, usize) -> bool,
    ) -> Result<Slot, AtCapacity> {
        let held = self.held[counter].fetch_add(1, Ordering::Relaxed) as usize;
        let take = |free: usize| if may_take(free, held) { free.checked_sub(1) } else { None };
        match self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(Slot { slots: Arc::clone(self), counter }),
            Err(free) => {
                self.held[counter].fetch_sub(1, Ordering::Relaxed);
                Err(if free == 0 { AtCapacity::Full } else { AtCapacity::Share { held } })
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.held[self.counter].fetch_sub(1, Ordering::Relaxed);
        self.slots.free.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_gets_what_others_leave() {
        let slots = Slots::new(160);
        let take_all = |caller: &str| {
            let mut taken = Vec::new();
            while let Ok(slot) = slots.take(&caller) {
                taken.push(slot);
            }
            taken
        };
        let mut greedy = take_all("greedy");
        assert_eq!((greedy.len(), slots.take(&"greedy").err()), (150, Some(AtCapacity::Share { held: 150 })));
        let mut second = take_all("second");
        assert_eq!(second.len(), 5, "half of the rest");
        assert!(slots.take(&"third").is_ok(), "a new caller finds a slot");
        for _ in 0..200 {
            drop(greedy.pop());
            second.extend(take_all("second"));
            greedy.extend(slots.take(&"greedy"));
        }
        assert_eq!((greedy.len(), second.len()), (53, 54), "both want all: each gets what is free");
        drop(second);
        assert_eq!(take_all("greedy").len() + greedy.len(), 150, "it is alone again");
        drop(greedy);
        assert_eq!(slots.used(), 0);
    }

    #[test]
    fn last_slot_goes_to_a_new_caller() {
        let slots = Slots::new(1);
        let first = slots.take(&"a").unwrap();
        assert_eq!(slots.take(&"b").err(), Some(AtCapacity::Full));
        drop(first);
        assert!(slots.take(&"b").is_ok());
        assert_eq!(Slots::new(0).take(&"a").err(), Some(AtCapacity::Full));
        let slots = Slots::new(2);
        let all = [slots.take_any(), slots.take_any()];
        assert!(all.iter().all(Result::is_ok) && slots.take_any().err() == Some(AtCapacity::Full));
    }
}
