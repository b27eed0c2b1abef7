//! A store: all of it together.

use std::time::Duration;

use crate::buckets::Buckets;
use crate::changes::Changes;
use crate::engine::Engine;
use crate::entities::Entities;
use crate::ledger::Ledger;
use crate::policies::Policies;
use crate::reply::Reply;
use crate::tokens::Tokens;

/// Where the shared limits of one namespace live.
///
/// The contract is written at its five parts: [`Buckets`], [`Policies`], [`Entities`], [`Ledger`] and [`Tokens`]. The
/// feature `conformance` has a suite that shows whether a store keeps it.
///
/// # Cancel safety
/// A reply that is dropped before its end may have been done or not. Calls on leases can be made again with the
/// same step, and administrative ones with the same expectation.
pub trait Store: Engine + Buckets + Policies + Entities + Ledger + Tokens {
    /// What the store is and can do.
    fn capabilities(&self) -> Capabilities;

    /// Ends up to `max` leases that are past their deadline, and forgets what need not be remembered. A store that
    /// is used does so by itself now and then; this is for one that is not.
    fn sweep(&self, max: usize) -> Reply<'_, Swept>;

    /// Ends it, for all who share it: what was asked is done, and is where it is to last. A store that has nothing to end does
    /// nothing.
    fn close(&self) -> Reply<'_, ()> {
        Reply::ready(Ok(()))
    }

    /// What the engine announces of administrative changes in this namespace, by whatever process they are made; `None`
    /// where it announces none. Whoever remembers policies drops those that are older.
    fn changes(&self) -> Option<Changes> {
        None
    }

    /// What whoever runs the engine should know: it is set up so that it may break what the store promises, in a sentence
    /// that says what to change. It was looked for when the store was opened.
    fn caution(&self) -> Option<String> {
        None
    }
}

impl<E: Engine> Store for E {
    fn capabilities(&self) -> Capabilities {
        self.about()
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.sweep_leases(max)
    }

    fn close(&self) -> Reply<'_, ()> {
        self.shut_down()
    }

    fn changes(&self) -> Option<Changes> {
        self.announcements()
    }

    fn caution(&self) -> Option<String> {
        self.warning()
    }
}

/// What a store is and can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// What the engine is called.
    pub engine: &'static str,
    /// Replies are ready at once: there is nothing to wait for, and nothing that can be away.
    pub is_immediate: bool,
    /// What is settled survives the process.
    pub is_durable: bool,
    /// Whose clock decides.
    pub clock: Clocked,
    /// How long a call may take before the engine counts as away.
    pub deadline: Duration,
}

/// Whose clock decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clocked {
    /// This process's: all users of the store are in it.
    Process,
    /// That of the machine all users share.
    Host,
    /// The engine's own.
    Engine,
    /// Each caller's, corrected: exact up to their skew.
    Caller,
}

impl Clocked {
    /// In a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Host => "host",
            Self::Engine => "engine",
            Self::Caller => "caller",
        }
    }
}

/// What a sweep did. A store may tell with it what calls have done in passing since the last one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Leases settled because their deadline had passed.
    pub settled: u64,
    /// Leases returned because their deadline had passed.
    pub returned: u64,
    /// Ended leases that were forgotten.
    pub forgotten: u64,
}

impl Swept {
    /// Adds what another sweep did.
    pub(crate) const fn add(&mut self, other: Self) {
        self.settled += other.settled;
        self.returned += other.returned;
        self.forgotten += other.forgotten;
    }

    /// What a sweep of up to `max` tells: what it did, and as much of what was done in passing as it may.
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
