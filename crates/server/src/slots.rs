//! Shares a bounded number of slots among callers by dynamic thresholds (Choudhury and Hahne): a caller may
//! hold at most as many slots as are free, or a multiple of them.
//!
//! One greedy caller gets half of the slots, a second one half of the rest, and a new caller still finds one.
//! No caller has to be configured.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Number of counters. Callers are hashed to them, so memory is bounded; two callers with one counter count as
/// one.
const COUNTERS: usize = 4_096;

/// The slots. Callers are authenticated names or addresses, so the hash needs no secret.
#[derive(Debug)]
pub struct Slots {
    max: usize,
    /// How many times the free slots a caller may hold.
    share: usize,
    free: AtomicUsize,
    held: Box<[AtomicU32]>,
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
    /// Slots of which a caller may hold as many as are free: half of them, if it is alone.
    pub fn new(max: usize) -> Arc<Self> {
        Self::with_share(max, 1)
    }

    /// Slots of which a caller may hold `share` times as many as are free: all but one of `share + 1`, if it is
    /// alone.
    ///
    /// ```
    /// use tidegate_server::Slots;
    ///
    /// let slots = Slots::with_share(80, 7);
    /// let held: Vec<_> = std::iter::from_fn(|| slots.take(&"acme").ok()).collect();
    /// assert_eq!(held.len(), 70);
    /// assert!(slots.take(&"other").is_ok());
    /// ```
    pub fn with_share(max: usize, share: usize) -> Arc<Self> {
        let held = (0..COUNTERS).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Self { max, share, free: AtomicUsize::new(max), held })
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
    /// [`AtCapacity`] if the caller already holds its share.
    pub fn take(self: &Arc<Self>, caller: &impl Hash) -> Result<Slot, AtCapacity> {
        let mut hasher = DefaultHasher::new();
        caller.hash(&mut hasher);
        let counter = usize::try_from(hasher.finish() % COUNTERS as u64).unwrap_or(0);
        let held = self.held[counter].fetch_add(1, Ordering::Relaxed) as usize;
        let take =
            |free: usize| if free.saturating_mul(self.share) > held { free.checked_sub(1) } else { None };
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
    fn caller_holds_at_most_what_is_free() {
        let slots = Slots::new(100);
        let take_all = |caller: &str| {
            let mut taken = Vec::new();
            while let Ok(slot) = slots.take(&caller) {
                taken.push(slot);
            }
            taken
        };
        let greedy = take_all("greedy");
        assert_eq!((greedy.len(), slots.take(&"greedy").err()), (50, Some(AtCapacity::Share { held: 50 })));
        let second = take_all("second");
        assert_eq!((second.len(), slots.used()), (25, 75));
        assert!(slots.take(&"third").is_ok(), "a new caller finds a slot");
        drop(greedy);
        assert_eq!(take_all("second").len(), 25, "more are free, so its share grows");
        drop(second);
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
    }
}
