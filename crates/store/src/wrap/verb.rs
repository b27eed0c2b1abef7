//! The kinds of calls of an engine, and their counters.

use std::sync::atomic::{AtomicU64, Ordering};

/// A call of an [`Engine`](crate::Engine): a kind of step, or a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each is the step or the method of the same name")]
pub enum Verb {
    Draw,
    Extend,
    Adjust,
    Renew,
    Settle,
    Cancel,
    Spend,
    Repair,
    Lease,
    Look,
    Buckets,
    Usage,
    Prune,
    Sweep,
    Read,
    Scan,
    Write,
    Version,
    Chain,
}

impl Verb {
    /// All verbs.
    pub const ALL: [Self; VERBS] = [
        Self::Draw,
        Self::Extend,
        Self::Adjust,
        Self::Renew,
        Self::Settle,
        Self::Cancel,
        Self::Spend,
        Self::Repair,
        Self::Lease,
        Self::Look,
        Self::Buckets,
        Self::Usage,
        Self::Prune,
        Self::Sweep,
        Self::Read,
        Self::Scan,
        Self::Write,
        Self::Version,
        Self::Chain,
    ];

    /// The name in lower case, for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Draw => "draw",
            Self::Extend => "extend",
            Self::Adjust => "adjust",
            Self::Renew => "renew",
            Self::Settle => "settle",
            Self::Cancel => "cancel",
            Self::Spend => "spend",
            Self::Repair => "repair",
            Self::Lease => "lease",
            Self::Look => "look",
            Self::Buckets => "buckets",
            Self::Usage => "usage",
            Self::Prune => "prune",
            Self::Sweep => "sweep",
            Self::Read => "read",
            Self::Scan => "scan",
            Self::Write => "write",
            Self::Version => "version",
            Self::Chain => "chain",
        }
    }
}

/// The number of verbs.
const VERBS: usize = Verb::Chain as usize + 1;

/// A snapshot of the number of calls of each verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Calls([u64; VERBS]);

impl Calls {
    /// The number of calls of `verb`.
    pub const fn of(&self, verb: Verb) -> u64 {
        self.0[verb as usize]
    }

    /// The number of all calls.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// Counts calls.
#[derive(Debug, Default)]
pub(super) struct Counter([AtomicU64; VERBS]);

impl Counter {
    pub(super) fn count(&self, verb: Verb) {
        self.0[verb as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn calls(&self) -> Calls {
        Calls(std::array::from_fn(|verb| self.0[verb].load(Ordering::Relaxed)))
    }
}
