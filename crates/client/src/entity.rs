//! Entities and their parents.

use std::collections::BTreeMap;

use tidegate_core::limit::{entity, name, policy};

use crate::expect::Expect;
use crate::policy::Version;
use crate::text::EntityId;

wire! {
    /// Creates or replaces an entity.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct PutEntity {
        /// Display name, at most 1,024 bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The parent, which must exist.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parent: Option<EntityId>,
        /// Whether its draws also draw from its parent.
        #[serde(default)]
        pub cascade: bool,
        /// Whether its draws are refused, and those of entities that also draw from it.
        #[serde(default, skip_serializing_if = "is_false")]
        pub disabled: bool,
        /// Free-form metadata: at most 32 entries, each of at most 1,024 bytes.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub metadata: BTreeMap<String, String>,
        /// The expected current state: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
    }

    /// A stored entity.
    #[serde(deny_unknown_fields)]
    pub struct Entity {
        /// Its id.
        pub id: EntityId,
        /// Display name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The parent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parent: Option<EntityId>,
        /// Whether its draws also draw from its parent.
        #[serde(default)]
        pub cascade: bool,
        /// Whether its draws are refused, and those of entities that also draw from it.
        #[serde(default, skip_serializing_if = "is_false")]
        pub disabled: bool,
        /// Free-form metadata.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub metadata: BTreeMap<String, String>,
        /// The version of the last write; absent for a past state.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
    }
}

impl PutEntity {
    /// Converts into the entity `id`.
    pub fn entity(self, id: name::EntityId) -> entity::Entity {
        let mut entity = entity::Entity::new(id);
        if let Some(name) = self.name {
            entity = entity.name(name);
        }
        if let Some(parent) = self.parent {
            entity = entity.parent(parent.0);
        }
        if self.cascade {
            entity = entity.cascade();
        }
        entity = entity.disabled(self.disabled);
        self.metadata.into_iter().fold(entity, |entity, (key, value)| entity.metadata(key, value))
    }
}

impl Entity {
    /// Converts a stored entity; `version` is `None` for a past state.
    pub fn new(entity: &entity::Entity, version: Option<policy::Version>) -> Self {
        Self {
            id: entity.id().clone().into(),
            name: entity.display_name().map(str::to_owned),
            parent: entity.parent_id().cloned().map(EntityId),
            cascade: entity.cascades(),
            disabled: entity.is_disabled(),
            metadata: entity.notes().clone(),
            version: version.map(policy::Version::number),
        }
    }
}

impl From<Entity> for entity::Entity {
    fn from(wire: Entity) -> Self {
        let Entity { id, name, parent, cascade, disabled, metadata, version: _ } = wire;
        PutEntity { name, parent, cascade, disabled, metadata, expect: Expect::Any }.entity(id.0)
    }
}

impl PutEntity {
    /// Creates a conditional write of this entity.
    pub fn new(entity: &entity::Entity, expect: Expect) -> Self {
        let Entity { name, parent, cascade, disabled, metadata, .. } = Entity::new(entity, None);
        Self { name, parent, cascade, disabled, metadata, expect }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(is_set: &bool) -> bool {
    !*is_set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entity_round_trips() {
        let id = |text: &str| name::EntityId::new(text).expect("a name");
        let plain = entity::Entity::new(id("acme"));
        let whole = entity::Entity::new(id("team")).name("The team").parent(id("acme")).cascade();
        for entity in [plain.clone(), plain.disabled(true), whole.metadata("tier", "gold")] {
            let wire = Entity::new(&entity, Some(policy::Version::new(3)));
            assert_eq!(wire.version, Some(3));
            assert_eq!(entity::Entity::from(wire), entity);
            assert_eq!(PutEntity::new(&entity, Expect::Absent).entity(entity.id().clone()), entity);
        }
    }
}
