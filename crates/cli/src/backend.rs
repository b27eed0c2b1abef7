//! What a verb may ask, whoever answers: a store in this process, or a server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::archive::Archived;
use tidegate::store::{AuditQuery, Listing, Page, PolicyChange};
use tidegate::{
    Balance, Capacity, Entity, EntityId, Expect, Explanation, Extra, LimitLine, LimitName, Paging, Plan,
    Policy, ResourceName, Scope, Settled, Stamp, Subject, Usage, UsageQuery, UsageSum, Version, Versioned,
};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{Token, TokenId, TokenScopes};

use crate::failure::Failure;
use crate::words::Units;

/// A policy, its scope and its version.
pub(crate) type Written = (Scope, Versioned<Arc<Policy>>);

/// Units that are asked for.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) subject: Subject,
    pub(crate) cost: Vec<Units>,
    /// Wait for them for so long.
    pub(crate) within: Option<Duration>,
    /// How long a lease of them lasts unless it is renewed.
    pub(crate) deadline: Duration,
}

impl Ask {
    /// The cost as the library takes it.
    pub(crate) fn pairs(&self) -> Vec<(&str, u64)> {
        self.cost.iter().map(|units| (units.limit.as_str(), units.units)).collect()
    }
}

/// By whom something was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Granted {
    /// By the store.
    ByStore,
    /// Without it: it is away, and the policy lets callers in all the same.
    WithoutStore,
}

/// A token that is to be.
#[derive(Debug)]
pub(crate) struct TokenAsk {
    pub(crate) id: TokenId,
    pub(crate) name: String,
    pub(crate) scopes: TokenScopes,
    pub(crate) expires_at: Option<Stamp>,
}

/// A token that was made, and the whole of it as its holder has it: it is told now, and never again.
pub(crate) struct MadeToken {
    pub(crate) token: Versioned<Token>,
    pub(crate) secret: String,
}

/// What the far side says of itself.
#[derive(Debug)]
pub(crate) struct Status {
    /// What it is: a store or a server.
    pub(crate) kind: &'static str,
    /// Its address.
    pub(crate) url: String,
    /// The namespace that is asked.
    pub(crate) namespace: Namespace,
    /// What the engine is called.
    pub(crate) engine: String,
    /// What is settled survives the process.
    pub(crate) is_durable: bool,
    /// Whose clock decides.
    pub(crate) clock: String,
    /// The time by that clock.
    pub(crate) at: Stamp,
    /// How far that time is ahead of the clock.
    pub(crate) clock_offset: Duration,
    /// The count of administrative changes.
    pub(crate) version: Version,
    /// How long it took to answer.
    pub(crate) took: Duration,
}

/// Where limits are kept. All but [`acquire`](Self::acquire) and [`spend`](Self::spend) may be dropped at any time; these take
/// nothing, or give it back, if [`close`](Self::close) is awaited after them.
pub(crate) trait Backend {
    type Lease: Hold;

    async fn status(&self) -> Result<Status, Failure>;

    async fn policy(&self, scope: &Scope) -> Result<Option<Versioned<Arc<Policy>>>, Failure>;
    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<Written>, Failure>;
    async fn change(&self, change: PolicyChange) -> Result<Version, Failure>;
    async fn plan(&self, declared: &[(Scope, Policy)], extra: Extra) -> Result<Plan, Failure>;
    async fn apply(&self, plan: &Plan) -> Result<Version, Failure>;

    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, Failure>;
    async fn entities(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure>;
    async fn children(&self, parent: &EntityId, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure>;
    async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, Failure>;
    async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, Failure>;

    async fn acquire(&self, ask: &Ask) -> Result<Self::Lease, Failure>;
    /// Draws and settles at once.
    async fn spend(&self, ask: &Ask) -> Result<Granted, Failure>;

    async fn balances(&self, subject: &Subject) -> Result<Vec<LimitLine>, Failure>;
    async fn balances_of_entity(&self, entity: &EntityId) -> Result<Vec<Balance>, Failure>;
    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitName, Capacity>, Failure>;
    async fn explain(&self, ask: &Ask) -> Result<Explanation, Failure>;

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, Failure>;
    async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, Failure>;
    async fn audit(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, Failure>;
    async fn archive(&self, folder: &Path, before: Stamp) -> Result<Archived, Failure>;

    async fn create_token(&self, ask: TokenAsk) -> Result<MadeToken, Failure>;
    async fn tokens(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, Failure>;
    async fn revoke_token(&self, id: &TokenId) -> Result<Version, Failure>;

    /// Waits until every ending has arrived; for a while, and no longer. Answers how many have not.
    async fn close(self) -> usize;
}

/// A lease that is held.
pub(crate) trait Hold {
    fn granted(&self) -> Granted;
    async fn renew(&mut self, span: Duration) -> Result<(), Failure>;
    /// Ends it at what it drew.
    async fn settle(&mut self) -> Result<Settled, Failure>;
    /// Returns all of it.
    async fn cancel(&mut self) -> Result<Settled, Failure>;
}
