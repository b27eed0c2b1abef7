//! Scheduling of calls, so that their timestamps agree with their order.
//!
//! This is given if the engine's clock decides. If callers' clocks do, a call with an earlier timestamp may
//! be written later, and draw units returned in between: exact up to the clock skew, which the checker does
//! not know. With such an engine, manual time advances only between calls, and with real time calls are
//! serialized.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use super::Fixture;
use crate::ClockSource;

/// Calls in progress.
pub(super) type Turns = Arc<RwLock<()>>;

/// A caller's permission to call, until it is dropped.
#[derive(Debug)]
pub(super) enum Turn {
    /// Unrestricted.
    Any,
    /// Concurrent with others, while time stands still.
    Shared { _guard: OwnedRwLockReadGuard<()> },
    /// Exclusive.
    Exclusive { _guard: OwnedRwLockWriteGuard<()> },
}

impl Fixture {
    /// Waits for permission to make a call that the checker verifies.
    pub(super) async fn turn(&self) -> Turn {
        match self.store.capabilities().clock {
            ClockSource::Caller if self.time.can_jump() => {
                Turn::Shared { _guard: Arc::clone(&self.turns).read_owned().await }
            }
            ClockSource::Caller => Turn::Exclusive { _guard: Arc::clone(&self.turns).write_owned().await },
            _ => Turn::Any,
        }
    }

    /// Lets time pass, between calls if necessary.
    pub(super) async fn pass_time(&self, span: Duration) {
        let is_between = self.store.capabilities().clock == ClockSource::Caller && self.time.can_jump();
        let _exclusive = if is_between { Some(self.turns.write().await) } else { None };
        self.time.pass(span).await;
    }
}
