//! The store trait, which combines buckets, policies, entities, ledger and tokens.

use std::time::Duration;

use tidegate_core::limit::policy::OnExpiry;

use crate::buckets::Buckets;
use crate::changes::Changes;
use crate::engine::Engine;
use crate::entities::Entities;
use crate::ledger::Ledger;
use crate::policies::Policies;
use crate::reply::Reply;
use crate::tokens::Tokens;

/// A store of the shared limits of one namespace.
///
/// The contract is written at its five parts: [`Buckets`], [`Policies`], [`Entities`], [`Ledger`] and
/// [`Tokens`]. The feature `conformance` has a suite that shows whether a store keeps it.
///
/// # Cancel safety
/// A call whose reply is dropped may or may not have been applied. Calls on leases can be retried with the
/// same step, and administrative calls with the same expected version.
pub trait Store: Engine + Buckets + Policies + Entities + Ledger + Tokens {
    /// What the store is and can do.
    fn capabilities(&self) -> Capabilities {
        self.about()
    }

    /// Ends up to `max` leases that are past their deadline, and deletes expired records. A store in use does
    /// so itself from time to time; this is for an idle one.
    fn sweep(&self, max: usize) -> Reply<'_, SweepReport> {
        self.sweep_leases(max)
    }

    /// Closes the store for all of its handles, after completing and persisting calls in flight. Does nothing
    /// if the store has nothing to close.
    fn close(&self) -> Reply<'_, ()> {
        self.shut_down()
    }

    /// The engine's announcements of administrative changes in this namespace by any process; `None` if it
    /// has none. A cache of policies drops those that are older.
    fn changes(&self) -> Option<Changes> {
        self.announcements()
    }

    /// A warning for the operator: a setting of the engine that may break the store's guarantees, and what to
    /// change. Checked when the store was opened.
    fn caution(&self) -> Option<String> {
        self.warning()
    }
}

impl<E: Engine> Store for E {}

/// What a store is and can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The name of the engine.
    pub engine: &'static str,
    /// Whether replies are ready at once: calls neither wait nor fail because the engine is unavailable.
    pub is_immediate: bool,
    /// Whether settlements survive the process.
    pub is_durable: bool,
    /// The clock that decides.
    pub clock: ClockSource,
    /// How long a call may take before the engine counts as unavailable.
    pub deadline: Duration,
}

/// The clock that decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockSource {
    /// The clock of this process, which all users of the store share.
    Process,
    /// The clock of the machine that all users share.
    Host,
    /// The engine's own clock.
    Engine,
    /// Each caller's clock, corrected: exact up to their skew.
    Caller,
}

impl ClockSource {
    /// A lower-case name, for output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Host => "host",
            Self::Engine => "engine",
            Self::Caller => "caller",
        }
    }
}

/// The result of a sweep. It may include leases that other calls have ended since the last sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Leases settled because their deadline had passed.
    pub settled: u64,
    /// Leases returned because their deadline had passed.
    pub returned: u64,
    /// Records of ended leases that were deleted.
    pub forgotten: u64,
}

impl SweepReport {
    /// Counts a lease that has expired.
    #[allow(dead_code, reason = "used depending on the features")]
    pub(crate) const fn ended(&mut self, how: OnExpiry) {
        match how {
            OnExpiry::Settle => self.settled += 1,
            OnExpiry::Return => self.returned += 1,
        }
    }

    /// Adds the counts of another sweep.
    pub(crate) const fn add(&mut self, other: Self) {
        self.settled += other.settled;
        self.returned += other.returned;
        self.forgotten += other.forgotten;
    }

    /// Adds the counts of other calls since the last sweep, up to `max` leases in all. The rest stays in
    /// `passed`.
    pub(crate) fn with(mut self, passed: &mut Self, max: usize) -> Self {
        let left = (max as u64).saturating_sub(self.settled + self.returned);
        let settled = passed.settled.min(left);
        let returned = passed.returned.min(left - settled);
        self.add(Self { settled, returned, forgotten: passed.forgotten });
        passed.settled -= settled;
        passed.returned -= returned;
        passed.forgotten = 0;
        self
    }
}
