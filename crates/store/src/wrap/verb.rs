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
    Changed,
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

impl Verb {
    /// Every one.
    pub const ALL: [Self; VERBS] = [
        Self::Draw,
        Self::Extend,
        Self::Adjust,
        Self::Renew,
        Self::Settle,
        Self::Cancel,
        Self::Spend,
        Self::Lease,
        Self::Balances,
        Self::Buckets,
        Self::Read,
        Self::Version,
        Self::Changed,
        Self::List,
        Self::Apply,
        Self::Put,
        Self::Get,
        Self::Lineage,
        Self::Remove,
        Self::Children,
        Self::Entities,
        Self::Usage,
        Self::Audit,
        Self::Prune,
        Self::CreateToken,
        Self::Token,
        Self::FindToken,
        Self::Tokens,
        Self::RevokeToken,
        Self::Sweep,
    ];

    /// The name of the method.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Draw => "draw",
            Self::Extend => "extend",
            Self::Adjust => "adjust",
            Self::Renew => "renew",
            Self::Settle => "settle",
            Self::Cancel => "cancel",
            Self::Spend => "spend",
            Self::Lease => "lease",
            Self::Balances => "balances",
            Self::Buckets => "buckets",
            Self::Read => "read",
            Self::Version => "version",
            Self::Changed => "changed",
            Self::List => "list",
            Self::Apply => "apply",
            Self::Put => "put",
            Self::Get => "get",
            Self::Lineage => "lineage",
            Self::Remove => "remove",
            Self::Children => "children",
            Self::Entities => "entities",
            Self::Usage => "usage",
            Self::Audit => "audit",
            Self::Prune => "prune",
            Self::CreateToken => "create_token",
            Self::Token => "token",
            Self::FindToken => "find_token",
            Self::Tokens => "tokens",
            Self::RevokeToken => "revoke_token",
            Self::Sweep => "sweep",
        }
    }
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
