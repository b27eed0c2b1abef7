//! The entities of a store.

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Version, Versioned};

use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Entities by id.
///
/// # The contract
/// Draws do not need a record of their entity; without one it has no parent. Writes raise the namespace's
/// version, carry the expected version and are audited like those of [`Policies`](crate::Policies). A parent
/// must exist, must not be a descendant of the entity, and has at most seven levels including itself.
/// Descendants of the entity are not checked: moving a tree below another parent may put its leaves too deep
/// to draw from.
pub trait Entities {
    /// Writes an entity.
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version>;

    /// An entity, if it exists.
    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>>;

    /// The entity and the ancestors that it cascades to; empty if it does not exist, at most one more than
    /// [`LEVELS_MAX`](tidegate_core::limit::entity::LEVELS_MAX). One round trip if the engine supports it.
    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>>;

    /// Removes an entity and its policies. Refused if it has children
    /// ([`HasChildren`](crate::StoreError::HasChildren)). Its buckets stay, so that removing and recreating
    /// it does not reset its limits.
    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version>;

    /// The direct children of an entity, by id.
    fn children<'a>(&'a self, parent: &'a EntityId, paging: &'a Paging)
    -> Reply<'a, Page<Versioned<Entity>>>;

    /// All entities, by id.
    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>>;
}
