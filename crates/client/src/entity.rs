//! Entities: who there is, and under whom.

use std::collections::BTreeMap;

use tidegate_core::limit::{entity, name, policy};

use crate::expect::Expect;
use crate::policy::Version;
use crate::text::EntityId;

wire! {
    /// Writes an entity, in the place of what was there.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct PutEntity {
        /// A name for people, at most 1,024 bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The entity above it, which must be there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parent: Option<EntityId>,
        /// Whether it draws from its parent too.
        #[serde(default)]
        pub cascade: bool,
        /// Texts kept beside it: at most 32, each of at most 1,024 bytes.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub metadata: BTreeMap<String, String>,
        /// What the writer believes to be there: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
    }

    /// An entity as it was written.
    #[serde(deny_unknown_fields)]
    pub struct Entity {
        /// Its id.
        pub id: EntityId,
        /// A name for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The entity above it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parent: Option<EntityId>,
        /// Whether it draws from its parent too.
        #[serde(default)]
        pub cascade: bool,
        /// Texts kept beside it.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub metadata: BTreeMap<String, String>,
        /// When it was last written; without it, it is a state of the past.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
    }
}

impl PutEntity {
    /// The entity `id` as it is to be.
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
        self.metadata.into_iter().fold(entity, |entity, (key, value)| entity.metadata(key, value))
    }
}

impl Entity {
    /// An entity, and the version it was written at if it is there now.
    pub fn new(entity: &entity::Entity, version: Option<policy::Version>) -> Self {
        Self {
            id: entity.id().clone().into(),
            name: entity.display_name().map(str::to_owned),
            parent: entity.parent_id().cloned().map(EntityId),
            cascade: entity.cascades(),
            metadata: entity.notes().clone(),
            version: version.map(policy::Version::number),
        }
    }
}

impl From<Entity> for entity::Entity {
    fn from(wire: Entity) -> Self {
        let Entity { id, name, parent, cascade, metadata, version: _ } = wire;
        PutEntity { name, parent, cascade, metadata, expect: Expect::Any }.entity(id.0)
    }
}

impl PutEntity {
    /// Writes this entity, if what is there is as expected.
    pub fn new(entity: &entity::Entity, expect: Expect) -> Self {
        let Entity { name, parent, cascade, metadata, .. } = Entity::new(entity, None);
        Self { name, parent, cascade, metadata, expect }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entity_is_read_back_as_it_was_written() {
        let id = |text: &str| name::EntityId::new(text).expect("a name");
        let plain = entity::Entity::new(id("acme"));
        let whole = entity::Entity::new(id("team")).name("The team").parent(id("acme")).cascade();
        for entity in [plain, whole.metadata("tier", "gold")] {
            let wire = Entity::new(&entity, Some(policy::Version::new(3)));
            assert_eq!(wire.version, Some(3));
            assert_eq!(entity::Entity::from(wire), entity);
            assert_eq!(PutEntity::new(&entity, Expect::Absent).entity(entity.id().clone()), entity);
        }
    }
}
