//! Entities: the users of resources, in a tree of parents.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::limit::name::EntityId;

/// The maximum number of levels of an entity and its ancestors.
pub const LEVELS_MAX: usize = 8;
/// The maximum length of a display name, and of a metadata key or value, in bytes.
pub const TEXT_MAX: usize = 1_024;
/// The maximum number of metadata entries.
pub const METADATA_MAX: usize = 32;

/// A tenant, a team, a user or an API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entity {
    id: EntityId,
    name: Option<String>,
    parent: Option<EntityId>,
    cascade: bool,
    disabled: bool,
    metadata: BTreeMap<String, String>,
}

/// The error for an invalid entity.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidEntity {
    /// A text is too long.
    #[error("{field} of entity `{entity}` has {bytes} bytes, more than {TEXT_MAX}")]
    Long {
        /// The entity.
        entity: EntityId,
        /// The text.
        field: String,
        /// Its length in bytes.
        bytes: usize,
    },
    /// There are too many metadata entries.
    #[error("the metadata of entity `{entity}` has {count} entries, more than {METADATA_MAX}")]
    Metadata {
        /// The entity.
        entity: EntityId,
        /// The number of entries.
        count: usize,
    },
    /// The parent is the entity itself or one of its descendants.
    #[error("`{parent}` cannot be the parent of `{entity}`: it is one of its descendants")]
    Cycle {
        /// The entity.
        entity: EntityId,
        /// The requested parent.
        parent: EntityId,
    },
    /// The parent does not exist.
    #[error("`{parent}` cannot be the parent of `{entity}`: there is no such entity")]
    NoParent {
        /// The entity.
        entity: EntityId,
        /// The requested parent.
        parent: EntityId,
    },
    /// The parent has too many ancestors.
    #[error("`{parent}` cannot be the parent of `{entity}`: more than {LEVELS_MAX} levels")]
    Deep {
        /// The entity.
        entity: EntityId,
        /// The requested parent.
        parent: EntityId,
    },
}

impl Entity {
    /// An entity with no parent.
    pub const fn new(id: EntityId) -> Self {
        Self { id, name: None, parent: None, cascade: false, disabled: false, metadata: BTreeMap::new() }
    }

    /// Sets the display name.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the parent. Draws also take from the parent only with [`cascade`](Self::cascade).
    #[must_use]
    pub fn parent(mut self, parent: EntityId) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Makes draws take from the parent too, all or nothing.
    #[must_use]
    pub const fn cascade(mut self) -> Self {
        self.cascade = true;
        self
    }

    /// Sets whether draws of the entity are refused, and those of entities that cascade to it.
    #[must_use]
    pub const fn disabled(mut self, is_disabled: bool) -> Self {
        self.disabled = is_disabled;
        self
    }

    /// Adds a metadata entry.
    #[must_use]
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// The id.
    pub const fn id(&self) -> &EntityId {
        &self.id
    }

    /// The display name.
    pub fn display_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The parent.
    pub const fn parent_id(&self) -> Option<&EntityId> {
        self.parent.as_ref()
    }

    /// Whether draws take from the parent too.
    pub const fn cascades(&self) -> bool {
        self.cascade
    }

    /// Whether its draws are refused, and those of entities that cascade to it.
    pub const fn is_disabled(&self) -> bool {
        self.disabled
    }

    /// The metadata.
    pub const fn notes(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The parent, if draws cascade to it.
    pub const fn next(&self) -> Option<&EntityId> {
        if self.cascade { self.parent.as_ref() } else { None }
    }

    /// Checks that the texts are within their bounds.
    ///
    /// # Errors
    /// [`InvalidEntity`] names the text and its bound.
    pub fn check(&self) -> Result<(), InvalidEntity> {
        if self.metadata.len() > METADATA_MAX {
            return Err(InvalidEntity::Metadata { entity: self.id.clone(), count: self.metadata.len() });
        }
        let name = self.name.iter().map(|name| ("the name".to_owned(), name));
        let keys = self.metadata.keys().map(|key| ("a key of the metadata".to_owned(), key));
        let values = self.metadata.iter().map(|(key, value)| (format!("`{key}`"), value));
        match name.chain(keys).chain(values).find(|(_, text)| text.len() > TEXT_MAX) {
            Some((field, text)) => {
                Err(InvalidEntity::Long { entity: self.id.clone(), field, bytes: text.len() })
            }
            None => Ok(()),
        }
    }

    /// Checks the parent, given a function that returns the parent of an entity.
    ///
    /// # Errors
    /// [`InvalidEntity`] for a parent that does not exist, is a descendant of the entity, or has too many
    /// ancestors.
    pub fn check_parent(
        &self,
        parent_of: impl Fn(&EntityId) -> Option<Option<EntityId>>,
    ) -> Result<(), InvalidEntity> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let (entity, parent) = (self.id.clone(), parent.clone());
        let mut above = Some(parent.clone());
        // The entity itself counts as the first level.
        for _ in 1..LEVELS_MAX {
            let Some(id) = above else { return Ok(()) };
            if id == entity {
                return Err(InvalidEntity::Cycle { entity, parent });
            }
            above = match parent_of(&id) {
                Some(next) => next,
                None => return Err(InvalidEntity::NoParent { entity, parent: id }),
            };
        }
        match above {
            None => Ok(()),
            Some(id) if id == entity => Err(InvalidEntity::Cycle { entity, parent }),
            Some(_) => Err(InvalidEntity::Deep { entity, parent }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> EntityId {
        EntityId::new(name).expect("valid")
    }

    /// A chain of entities: `e0` has no parent, the parent of each `eN` is `e{N - 1}`, up to `e{len - 1}`.
    fn chain(len: usize) -> impl Fn(&EntityId) -> Option<Option<EntityId>> {
        move |entity| {
            let number: usize = entity.as_str().strip_prefix('e')?.parse().ok()?;
            (number < len).then(|| number.checked_sub(1).map(|above| id(&format!("e{above}"))))
        }
    }

    #[test]
    fn parent_exists_and_is_no_descendant() {
        let under = |entity: &str, parent: &str| Entity::new(id(entity)).parent(id(parent));
        let table = [
            (under("new", "e6"), None),
            (under("new", "e7"), Some("`e7` cannot be the parent of `new`: more than 8 levels")),
            (under("new", "x"), Some("`x` cannot be the parent of `new`: there is no such entity")),
            (under("e3", "e5"), Some("`e5` cannot be the parent of `e3`: it is one of its descendants")),
            (under("e3", "e3"), Some("`e3` cannot be the parent of `e3`: it is one of its descendants")),
            (under("e0", "e7"), Some("`e7` cannot be the parent of `e0`: it is one of its descendants")),
            (Entity::new(id("alone")), None),
        ];
        for (entity, sentence) in table {
            let error = entity.check_parent(chain(9)).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), sentence);
        }
    }

    #[test]
    fn texts_have_bounds() {
        let entity = Entity::new(id("a"));
        assert_eq!(entity.clone().name("A").metadata("tier", "gold").check(), Ok(()));
        let long = "x".repeat(TEXT_MAX + 1);
        let table = [
            (entity.clone().name(&long), "the name of entity `a` has 1025 bytes, more than 1024"),
            (entity.clone().metadata("k", &long), "`k` of entity `a` has 1025 bytes, more than 1024"),
            (entity.clone().metadata(&long, ""), "a key of the metadata of entity `a` has 1025 bytes"),
            (
                (0..33).fold(entity, |entity, n| entity.metadata(n.to_string(), "")),
                "the metadata of entity `a` has 33 entries, more than 32",
            ),
        ];
        for (entity, sentence) in table {
            let error = entity.check().unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn cascade_without_a_parent_is_harmless() {
        assert_eq!(Entity::new(id("a")).cascade().next(), None);
        assert_eq!(Entity::new(id("a")).parent(id("b")).next(), None);
        assert_eq!(Entity::new(id("a")).parent(id("b")).cascade().next(), Some(&id("b")));
    }
}
