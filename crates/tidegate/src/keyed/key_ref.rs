//! A permit's reference to a key that has no throttle: two numbers, and no counted reference.
//!
//! A call of such a key changes a few words under the lock of its shard. A counted reference to the registry would
//! add two atomic operations, as many as the lock itself. So permits carry the number of the registry, which is looked
//! up in the rare case that a permit ends with something to learn from.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
// No model checker's: the table outlives its runs.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::throttle::{Inner, Throttle};

/// The registries of this process, by number.
static REGISTRIES: Mutex<BTreeMap<u64, Weak<dyn Throttles>>> = Mutex::new(BTreeMap::new());
/// Numbers are not used again: 64 bits last forever.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A permit's reference to a key that had no throttle. It keeps neither the key nor its registry.
#[derive(Clone, Copy)]
pub(crate) struct KeyRef {
    pub(super) registry: u64,
    pub(super) hash: u64,
}

/// A registry, whatever its keys are.
pub(super) trait Throttles: Send + Sync {
    /// The throttle of the key with this hash, which is created if it has none.
    fn throttle(&self, hash: u64) -> Arc<Inner>;
}

impl KeyRef {
    /// The key's throttle. If the registry is gone, one of its own: there is no caller left to limit.
    #[cold]
    pub(crate) fn throttle(self) -> Arc<Inner> {
        // The lock is released before the handle is dropped: if it is the last one, that takes the lock.
        let registry = registries().get(&self.registry).and_then(Weak::upgrade);
        match registry {
            Some(registry) => registry.throttle(self.hash),
            None => Throttle::builder().build().expect("a draft without limits is within its bounds").inner,
        }
    }
}

impl fmt::Debug for KeyRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRef").finish_non_exhaustive()
    }
}

/// Creates a registry under a new number.
pub(super) fn register<T: Throttles + 'static>(new: impl FnOnce(u64) -> T) -> Arc<T> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let registry = Arc::new(new(number));
    let weak: Weak<T> = Arc::downgrade(&registry);
    registries().insert(number, weak);
    registry
}

/// A registry is gone.
pub(super) fn unregister(number: u64) {
    // Dropped after the lock is released: it may free the registry's memory.
    let gone = registries().remove(&number);
    drop(gone);
}

fn registries() -> MutexGuard<'static, BTreeMap<u64, Weak<dyn Throttles>>> {
    REGISTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct OneThrottle {
        number: u64,
        inner: Arc<Inner>,
    }

    impl Throttles for OneThrottle {
        fn throttle(&self, _: u64) -> Arc<Inner> {
            Arc::clone(&self.inner)
        }
    }

    impl Drop for OneThrottle {
        fn drop(&mut self) {
            unregister(self.number);
        }
    }

    fn one() -> Arc<OneThrottle> {
        register(|number| OneThrottle { number, inner: Throttle::new().inner })
    }

    #[test]
    fn key_ref_finds_its_own_registry() {
        for registry in [one(), one()] {
            let key = KeyRef { registry: registry.number, hash: 7 };
            assert!(Arc::ptr_eq(&key.throttle(), &registry.inner));
        }
    }

    #[test]
    fn dropped_registry_leaves_the_table() {
        let registry = one();
        let (number, inner) = (registry.number, Arc::clone(&registry.inner));
        drop(registry);
        assert!(!registries().contains_key(&number));
        assert!(!Arc::ptr_eq(&KeyRef { registry: number, hash: 7 }.throttle(), &inner));
    }
}
