//! The ledger: what was used, and who changed what.

use std::ops::Range;

use tidegate_core::limit::audit::{Entry, Filed};
use tidegate_core::limit::name::{EntityId, ResourceName};
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

/// Usage and audit.
///
/// # The contract
/// The usage of a limit is the sum of what its leases were settled at, in the windows of their draws: nothing for
/// what was cancelled, nothing twice. The audit has an entry for every change that was made and for no other.
pub trait Ledger {
    /// Usage by subject, then limit, then window.
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>>;

    /// Changes in the order they were made in.
    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>>;
}
