//! Who may call when, so that the times that calls are stamped with run as the calls do.
//!
//! Where the engine says when it is, that is so by itself. Where callers do, a call that is stamped first may be written last,
//! and draw what returned meanwhile: exact up to how far clocks are apart, which the checker knows nothing of. There time that
//! is set by hand passes between calls and never under one, and where time passes by itself calls come one after the other.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use super::Fixture;
use crate::Clocked;

/// Who is under way.
pub(super) type Turns = Arc<RwLock<()>>;

/// A caller's turn, for as long as it is held.
#[derive(Debug)]
pub(super) enum Turn {
    /// Any time is a good one.
    Any,
    /// Beside others, while no time passes.
    Shared { _held: OwnedRwLockReadGuard<()> },
    /// Alone.
    Alone { _held: OwnedRwLockWriteGuard<()> },
}

impl Fixture {
    /// Waits for the turn to make a call that the checker judges.
    pub(super) async fn turn(&self) -> Turn {
        match self.store.capabilities().clock {
            Clocked::Caller if self.time.can_jump() => {
                Turn::Shared { _held: Arc::clone(&self.turns).read_owned().await }
            }
            Clocked::Caller => Turn::Alone { _held: Arc::clone(&self.turns).write_owned().await },
            _ => Turn::Any,
        }
    }

    /// Lets time pass, between the calls of others where that matters.
    pub(super) async fn pass_in_turn(&self, span: Duration) {
        let is_between = self.store.capabilities().clock == Clocked::Caller && self.time.can_jump();
        let _alone = if is_between { Some(self.turns.write().await) } else { None };
        self.time.pass(span).await;
    }
}
