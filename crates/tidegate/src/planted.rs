//! Bugs for the models to find: a model that cannot catch one proves nothing.
//!
//! Compiled to nothing except under `--cfg tidegate_model`.

/// A mistake that is easy to make in this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, unreachable_pub, reason = "planted by the models only")]
pub enum Bug {
    /// A grant that is dropped unseen is not given back.
    ForgetUnseen = 1,
    /// Between being told to wait and joining the line, the lock is let go.
    JoinLate = 2,
    /// A timer that is missing where the head lives is nobody's business.
    LoseTimer = 3,
    /// Those behind a head that leaves are not asked.
    ForgetThoseBehind = 4,
    /// A key is forgotten though somebody has a handle on its throttle.
    EvictHandedOut = 5,
    /// A new key is put in its table without looking whether it is there by now.
    InsertUnlooked = 6,
    /// Limits that changed while a key was made are not looked for.
    MissChange = 7,
    /// A key that another made meanwhile is handed out under the limits it was made with.
    HandOutStale = 8,
    /// Which change the shared entry follows is read after what it says.
    ReadVersionLate = 9,
    /// A key for which there is no room shares without looking whether it is there by now.
    ShareUnlooked = 10,
}

#[cfg(not(tidegate_model))]
#[inline]
pub(crate) const fn is_planted(_: Bug) -> bool {
    false
}

#[cfg(tidegate_model)]
pub(crate) use model::is_planted;
#[cfg(tidegate_model)]
pub use model::plant;

#[cfg(tidegate_model)]
mod model {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Bug;

    static PLANTED: AtomicU8 = AtomicU8::new(0);

    /// Plants a bug, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.store(bug.map_or(0, |bug| bug as u8), Ordering::SeqCst);
    }

    pub(crate) fn is_planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::SeqCst) == bug as u8
    }
}
