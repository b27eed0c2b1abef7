//! The operations a verb may call, on a store in this process or on a server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::archive::ArchiveReport;
use tidegate::store::{AuditQuery, Listing, Page, PolicyChange};
use tidegate::{
    Balance, BucketLimit, Capacity, Entity, EntityId, Expect, Explanation, LimitKey, LimitLine, Paging,
    Policy, PolicyChanges, ResourceName, Scope, SettleStatus, Stamp, Subject, Undeclared, Usage, UsageQuery,
    UsageSum, Version, Versioned,
};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{Token, TokenId, TokenScopes};
use tidegate_server::Secret;

use crate::failure::Failure;
use crate::parse::Units;

/// A policy, its scope and its version.
pub(crate) type StoredPolicy = (Scope, Versioned<Arc<Policy>>);

/// A request for units.
#[derive(Debug)]
pub(crate) struct AcquireRequest {
    pub(crate) subject: Subject,
    pub(crate) cost: Vec<Units>,
    /// How long to wait for the units.
    pub(crate) within: Option<Duration>,
    /// How long a lease of them lasts unless renewed.
    pub(crate) deadline: Duration,
}

impl AcquireRequest {
    /// The cost in the form that the library takes.
    pub(crate) fn pairs(&self) -> Vec<(&str, u64)> {
        self.cost.iter().map(|units| (units.limit.as_str(), units.units)).collect()
    }
}

/// How a request was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grant {
    /// The store granted it.
    ByStore,
    /// The store is unavailable, and the policy allows callers without it.
    WithoutStore,
}

/// A token to be created.
#[derive(Debug)]
pub(crate) struct TokenRequest {
    pub(crate) id: TokenId,
    pub(crate) name: String,
    pub(crate) scopes: TokenScopes,
    pub(crate) entity: Option<EntityId>,
    pub(crate) expires_at: Option<Stamp>,
    /// Its secret; generated if absent. A server generates it always.
    pub(crate) secret: Option<Secret>,
}

/// A created token and its secret, which is shown once and not stored.
pub(crate) struct CreatedToken {
    pub(crate) token: Versioned<Token>,
    pub(crate) secret: String,
}

/// The state of the store or the server.
#[derive(Debug)]
pub(crate) struct Status {
    /// `store` or `server`.
    pub(crate) kind: &'static str,
    /// Its address.
    pub(crate) url: String,
    /// The namespace in use.
    pub(crate) namespace: Namespace,
    /// The name of the engine.
    pub(crate) engine: String,
    /// Whether settled units survive the process.
    pub(crate) is_durable: bool,
    /// The clock that decides.
    pub(crate) clock: String,
    /// The time by that clock.
    pub(crate) at: Stamp,
    /// How far that time is ahead of the clock.
    pub(crate) clock_offset: Duration,
    /// The count of administrative changes.
    pub(crate) version: Version,
    /// How long the response took.
    pub(crate) took: Duration,
}

/// A store or a server. Every method but [`acquire`](Self::acquire) and [`spend`](Self::spend) is cancel
/// safe; a cancelled call of those two draws nothing, or returns its units, if [`close`](Self::close) is
/// awaited afterwards.
pub(crate) trait Backend {
    type Lease: LeaseHandle;

    async fn status(&self) -> Result<Status, Failure>;

    async fn policy(&self, scope: &Scope) -> Result<Option<Versioned<Arc<Policy>>>, Failure>;
    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<StoredPolicy>, Failure>;
    async fn change(&self, change: PolicyChange) -> Result<Version, Failure>;
    async fn plan(&self, declared: &[(Scope, Policy)], extra: Undeclared) -> Result<PolicyChanges, Failure>;
    async fn apply(&self, plan: &PolicyChanges) -> Result<Version, Failure>;

    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, Failure>;
    async fn entities(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure>;
    async fn children(&self, parent: &EntityId, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure>;
    async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, Failure>;
    async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, Failure>;

    async fn acquire(&self, request: &AcquireRequest) -> Result<Self::Lease, Failure>;
    /// Draws and settles at once.
    async fn spend(&self, request: &AcquireRequest) -> Result<Grant, Failure>;

    async fn balances(&self, subject: &Subject) -> Result<Vec<LimitLine>, Failure>;
    async fn balances_of_entity(&self, entity: &EntityId) -> Result<Vec<Balance>, Failure>;
    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitKey, Capacity>, Failure>;
    /// Sets the units available in a bucket that a subject draws from; `None` fills it.
    async fn set_bucket(
        &self,
        subject: &Subject,
        limit: &BucketLimit,
        units: Option<u64>,
    ) -> Result<Versioned<Balance>, Failure>;
    async fn explain(&self, request: &AcquireRequest) -> Result<Explanation, Failure>;

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, Failure>;
    async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, Failure>;
    async fn audit(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, Failure>;
    async fn archive(&self, folder: &Path, before: Stamp) -> Result<ArchiveReport, Failure>;

    async fn create_token(&self, request: TokenRequest) -> Result<CreatedToken, Failure>;
    async fn tokens(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, Failure>;
    async fn revoke_token(&self, id: &TokenId) -> Result<Version, Failure>;

    /// Waits, up to a bound, until every settlement has arrived. Returns the number that have not.
    async fn close(self) -> usize;
}

/// An open lease.
pub(crate) trait LeaseHandle {
    fn grant(&self) -> Grant;
    async fn renew(&mut self, span: Duration) -> Result<(), Failure>;
    /// Settles the lease at the units it drew.
    async fn settle(&mut self) -> Result<SettleStatus, Failure>;
    /// Cancels the lease and returns all units.
    async fn cancel(&mut self) -> Result<SettleStatus, Failure>;
}
