//! The kinds of calls of an engine, and their counters.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! verbs {
    ($($Verb:ident $name:literal),+) => {
        /// A call of an [`Engine`](crate::Engine): a kind of step, or a method.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(missing_docs, reason = "each is the step or the method of the same name")]
        pub enum Verb {
            $($Verb),+
        }

        impl Verb {
            /// All verbs.
            pub const ALL: [Self; VERBS] = [$(Self::$Verb),+];

            /// The name in lower case, for metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Verb => $name),+
                }
            }
        }

        /// The number of verbs.
        const VERBS: usize = [$($name),+].len();
    };
}

verbs! {
    Draw "draw", Extend "extend", Adjust "adjust", Renew "renew", Settle "settle", Cancel "cancel",
    Spend "spend", Repair "repair", Lease "lease", Look "look", Buckets "buckets", Usage "usage",
    Prune "prune", Sweep "sweep", Read "read", Scan "scan", Write "write", Version "version",
    Chain "chain"
}

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
