//! Policies: what is written at which scope.

use std::sync::Arc;

use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};

use crate::page::{Page, Paging};
use crate::reply::Reply;

/// A policy to be written or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyChange {
    /// Where.
    pub scope: Scope,
    /// What the writer believes to be there.
    pub expect: Expect,
    /// What is to be there; `None` removes it.
    pub policy: Option<Policy>,
}

/// Policies as they were read.
#[derive(Debug, Clone)]
pub struct Written {
    /// The count of changes as of which they hold.
    pub version: Version,
    /// One for each scope that was asked for, in that order.
    pub policies: Vec<Option<Versioned<Arc<Policy>>>>,
}

/// Which policies to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listing {
    /// All of them.
    All,
    /// Those of an entity.
    Entity(EntityId),
    /// Those of entities for a resource: who has limits of its own there.
    Custom(ResourceName),
}

/// Policies by scope.
///
/// # The contract
/// Every change raises the namespace's [`Version`] by one, and what it wrote carries that version. A change whose
/// expectation does not hold is refused with the version that is there ([`Stale`](crate::StoreError::Stale)), and
/// then none of the changes it came with is made. What is made is in the audit, in the same transaction.
pub trait Policies {
    /// The policies at these scopes, in one round trip.
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written>;

    /// The count of changes.
    fn version(&self) -> Reply<'_, Version>;

    /// Policies in the order of their scopes: system, resources, entities, entities with a resource.
    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>>;

    /// Makes all of these changes, or none, and answers the version they were made at. Removing what is not there
    /// is no error, unless something was expected.
    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version>;
}
