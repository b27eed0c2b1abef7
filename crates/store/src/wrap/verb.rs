//! What a store can be asked, and how often it was.

use std::sync::atomic::{AtomicU64, Ordering};

/// A call of a [`Store`](crate::Store).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each is the method of the same name")]
pub enum Verb {
    Draw,
    Extend,
    Adjust,
    Renew,
    Settle,
    Cancel,
    Spend,
    Lease,
    Balances,
    Buckets,
    Read,
    Version,
    List,
    Apply,
    Put,
    Get,
    Lineage,
    Remove,
    Children,
    Entities,
    Usage,
    Audit,
    Prune,
    CreateToken,
    Token,
    FindToken,
    Tokens,
    RevokeToken,
    Sweep,
}

/// How many verbs there are.
const VERBS: usize = Verb::Sweep as usize + 1;

/// How often each verb was called, at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Calls([u64; VERBS]);

impl Calls {
    /// How often `verb` was called.
    pub const fn of(&self, verb: Verb) -> u64 {
        self.0[verb as usize]
    }

    /// How often anything was.
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
