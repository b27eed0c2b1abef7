//! The ledger: what was used, and who changed what.

use std::ops::Range;

use tidegate_core::limit::audit::{Entry, Filed};
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::{Usage, Window};
use tidegate_core::time::Stamp;

use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Which usage to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageQuery {
    /// Whose.
    pub of: UsageOf,
    /// Summed over how long a span.
    pub window: Window,
    /// Windows that begin in this range.
    pub range: Range<Stamp>,
}

/// Whose usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageOf {
    /// An entity's, of every resource.
    Entity(EntityId),
    /// Every entity's, of a resource.
    Resource(ResourceName),
}

/// Which changes to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditQuery {
    /// What they are filed under; `None` is everything.
    pub filed: Option<Filed>,
    /// When they were made.
    pub range: Range<Stamp>,
}

/// What of the ledger to forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prune {
    /// Lines of usage.
    Usage {
        /// Those summed over this long a span; lines over other spans stay as they are.
        window: Window,
        /// Those whose window ended at this time or earlier. A window that goes on after it stays whole.
        before: Stamp,
    },
    /// Entries of the audit.
    Audit {
        /// Those of this change and of all before it.
        through: Version,
    },
}

/// Usage and audit.
///
/// # The contract
/// The usage of a limit is the sum of what its leases were settled at, in the windows of their draws: nothing for
/// what was cancelled, nothing twice. The audit has an entry for every change that was made and for no other.
///
/// Both grow until somebody [prunes](Self::prune) them, or up to the bounds of a store that has such. What is pruned is
/// gone, and nothing else is: no bucket, lease, policy, version or other line of the ledger changes by it. What is
/// settled after a prune, for a draw in a window that was pruned, is counted in that window as in a new one.
pub trait Ledger {
    /// Usage by subject, then limit, then window.
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>>;

    /// Changes in the order they were made in.
    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>>;

    /// Forgets up to `max` lines and answers how many: fewer than `max` means that no more are left to forget, and a
    /// `max` of 0 forgets nothing. Entries of the audit go in the order they were made in, so that a change with many
    /// may be cut in between calls; of usage each limit's oldest window goes first. Cursors that were given out before
    /// stay good: what is listed goes on with what is left. To ask again after a lost answer does no harm.
    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64>;
}
