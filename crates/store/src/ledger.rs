//! The ledger: usage and the audit log.

use std::ops::Range;

use tidegate_core::limit::audit::{AuditKey, Entry};
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::{Usage, Window};
use tidegate_core::time::Stamp;

use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Which usage to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageQuery {
    /// The entity or resource.
    pub of: UsageOf,
    /// The window of the sums.
    pub window: Window,
    /// The range that windows begin in.
    pub range: Range<Stamp>,
}

/// The entity or resource of a usage query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageOf {
    /// An entity's usage of all resources.
    Entity(EntityId),
    /// All entities' usage of a resource.
    Resource(ResourceName),
}

impl UsageOf {
    /// The usage of limits that are pooled across all resources.
    pub fn all_resources() -> Self {
        Self::Resource(Subject::pool(None, None).resource)
    }
}

/// Which changes to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditQuery {
    /// The key they are filed under; `None` for all.
    pub filed: Option<AuditKey>,
    /// The range of times.
    pub range: Range<Stamp>,
}

/// The part of the ledger to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prune {
    /// Lines of usage.
    Usage {
        /// The window of the lines. Lines of other windows are kept.
        window: Window,
        /// The end of the range: windows that ended at this time or earlier. A window that ends later is kept
        /// whole.
        before: Stamp,
    },
    /// Entries of the audit.
    Audit {
        /// The last change to delete, with all earlier ones.
        through: Version,
    },
}

/// Usage and audit.
///
/// # The contract
/// The usage of a limit is the sum of the amounts that its leases were settled at, in the windows of their
/// draws. Cancelled leases do not count, and no lease counts twice. The audit log has an entry for every
/// change that was made and for no other.
///
/// Both grow until they are [pruned](Self::prune), or up to the retention or bounds of the store. Pruning
/// changes no bucket, lease, policy, version or other line of the ledger. A settlement after a prune, for a
/// draw in a pruned window, counts in that window as in a new one.
pub trait Ledger {
    /// Usage by subject, then limit, then window.
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>>;

    /// Changes in the order in which they were made.
    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>>;

    /// Deletes up to `max` lines and returns their number: fewer than `max` means that none are left, and a
    /// `max` of 0 deletes nothing. Audit entries are deleted in the order in which they were made, so that a
    /// change with many entries may be cut between calls; of usage, each limit's oldest window is deleted
    /// first. Earlier cursors stay valid: a listing continues with the remaining lines. A retry after a lost
    /// reply is safe.
    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64>;
}
