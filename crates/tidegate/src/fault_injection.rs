//! Fault injection for the models: a model that does not find an injected bug proves nothing.
//!
//! Compiled to nothing except under `--cfg tidegate_model`.

/// A plausible mistake in this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, unreachable_pub, reason = "injected by the models only")]
pub enum Bug {
    /// A grant that is dropped uncollected is not refunded.
    LoseUnseenGrant = 1,
    /// The lock is released between the decision to wait and joining the queue.
    JoinLate = 2,
    /// A timer missing on the head's host is not replaced.
    LoseTimer = 3,
    /// When the head leaves, the waiters behind it are not served.
    SkipPump = 4,
    /// A key is evicted while a handle to its throttle exists.
    EvictInUse = 5,
    /// A new key is inserted without checking whether it exists by now.
    InsertUnchecked = 6,
    /// Limits that changed while a key was created are not checked.
    MissLimitChange = 7,
    /// A key that another thread created concurrently is returned under outdated limits.
    ReturnStale = 8,
    /// The shared entry's version is read after its contents.
    ReadVersionLate = 9,
    /// A key that finds no capacity uses the shared throttle without checking whether it exists by now.
    ShareUnchecked = 10,
}

#[cfg(not(tidegate_model))]
#[inline]
pub(crate) const fn is_injected(_: Bug) -> bool {
    false
}

#[cfg(tidegate_model)]
pub use model::inject;
#[cfg(tidegate_model)]
pub(crate) use model::is_injected;

#[cfg(tidegate_model)]
mod model {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Bug;

    static INJECTED: AtomicU8 = AtomicU8::new(0);

    /// Injects a bug, or clears it.
    pub fn inject(bug: Option<Bug>) {
        INJECTED.store(bug.map_or(0, |bug| bug as u8), Ordering::SeqCst);
    }

    pub(crate) fn is_injected(bug: Bug) -> bool {
        INJECTED.load(Ordering::SeqCst) == bug as u8
    }
}
