//! Entities: who there is, and under whom.

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Version, Versioned};

use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Entities by id.
///
/// # The contract
/// An entity need not be written to be drawn from: without a record it has no parent. Writes raise the namespace's
/// version, carry what the writer expects and are audited as those of [`Policies`](crate::Policies) are. A parent
/// must be there, must not be below the entity, and has at most seven levels from itself up. Those below the entity are
/// not looked at: whoever moves a tree below another may put its leaves too deep to draw from.
pub trait Entities {
    /// Writes an entity.
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version>;

    /// An entity, if it is there.
    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>>;

    /// The entity and those above it that it draws from too, as far as each cascades: none if it is not there, at
    /// most one more than [`LEVELS_MAX`](tidegate_core::limit::entity::LEVELS_MAX). One round trip where the engine
    /// can.
    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>>;

    /// Removes an entity and its policies. One with others below it is refused
    /// ([`HasChildren`](crate::StoreError::HasChildren)). Its buckets stay: to remove and write it anew is no amnesty.
    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version>;

    /// Those directly below an entity, by id.
    fn children<'a>(&'a self, parent: &'a EntityId, paging: &'a Paging)
    -> Reply<'a, Page<Versioned<Entity>>>;

    /// All entities, by id.
    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>>;
}
