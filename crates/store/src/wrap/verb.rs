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

/// The names of the verbs, in their order.
const NAMES: [&str; VERBS] = [
    "draw", "extend", "adjust", "renew", "settle", "cancel", "spend", "repair", "lease", "look", "buckets",
    "usage", "prune", "sweep", "read", "scan", "write", "version", "chain",
];

impl Verb {
    /// All verbs.
    pub const ALL: [Self; VERBS] = {
        use Verb::{
            Adjust, Buckets, Cancel, Chain, Draw, Extend, Lease, Look, Prune, Read, Renew, Repair, Scan,
            Settle, Spend, Sweep, Usage, Version, Write,
        };
        [
            Draw, Extend, Adjust, Renew, Settle, Cancel, Spend, Repair, Lease, Look, Buckets, Usage, Prune,
            Sweep, Read, Scan, Write, Version, Chain,
        ]
    };

    /// The name in lower case, for metrics.
    pub const fn name(self) -> &'static str {
        NAMES[self as usize]
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
