//! Entities: who uses, and under whom.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::limit::name::EntityId;

/// An entity and its ancestors are at most so many levels.
pub const LEVELS_MAX: usize = 8;
/// A display name, and a value of the metadata, have at most so many bytes.
pub const TEXT_MAX: usize = 1_024;
/// The metadata has at most so many entries.
pub const METADATA_MAX: usize = 32;

/// A tenant, a team, a user, a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entity {
    id: EntityId,
    name: Option<String>,
    parent: Option<EntityId>,
    cascade: bool,
    metadata: BTreeMap<String, String>,
}

/// An entity that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidEntity {
    /// A text has too many bytes.
    #[error("{field} of entity `{entity}` has {bytes} bytes, more than {TEXT_MAX}")]
    Long {
        /// Whose.
        entity: EntityId,
        /// Which text.
        field: String,
        /// Its bytes.
        bytes: usize,
    },
    /// Too much metadata.
    #[error("the metadata of entity `{entity}` has {count} entries, more than {METADATA_MAX}")]
    Metadata {
        /// Whose.
        entity: EntityId,
        /// How many.
        count: usize,
    },
    /// The parent is the entity itself, or below it.
    #[error("`{parent}` cannot be the parent of `{entity}`: it is below it")]
    Cycle {
        /// Whose parent was to be set.
        entity: EntityId,
        /// To whom.
        parent: EntityId,
    },
    /// The parent is not there.
    #[error("`{parent}` cannot be the parent of `{entity}`: there is no such entity")]
    NoParent {
        /// Whose parent was to be set.
        entity: EntityId,
        /// To whom.
        parent: EntityId,
    },
    /// The parent has too many above it.
    #[error("`{parent}` cannot be the parent of `{entity}`: more than {LEVELS_MAX} levels")]
    Deep {
        /// Whose parent was to be set.
        entity: EntityId,
        /// To whom.
        parent: EntityId,
    },
}

impl Entity {
    /// An entity with no parent.
    pub const fn new(id: EntityId) -> Self {
        Self { id, name: None, parent: None, cascade: false, metadata: BTreeMap::new() }
    }

    /// A name for people.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The entity above it. What it draws is drawn from the parent too only if it is told to
    /// [`cascade`](Self::cascade).
    #[must_use]
    pub fn parent(mut self, parent: EntityId) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Draws from the parent too, all or nothing.
    #[must_use]
    pub const fn cascade(mut self) -> Self {
        self.cascade = true;
        self
    }

    /// Keeps a text beside it.
    #[must_use]
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Its id.
    pub const fn id(&self) -> &EntityId {
        &self.id
    }

    /// Its name for people.
    pub fn display_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The entity above it.
    pub const fn parent_id(&self) -> Option<&EntityId> {
        self.parent.as_ref()
    }

    /// Whether it draws from its parent too.
    pub const fn cascades(&self) -> bool {
        self.cascade
    }

    /// The texts kept beside it.
    pub const fn notes(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The next one to draw from, if it cascades to one.
    pub const fn next(&self) -> Option<&EntityId> {
        if self.cascade { self.parent.as_ref() } else { None }
    }

    /// Whether its texts are within their bounds.
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

    /// Whether its parent may be its parent, given how to find who is above whom.
    ///
    /// # Errors
    /// [`InvalidEntity`] for a parent that is not there, that is below the entity, or that is too deep.
    pub fn check_parent(
        &self,
        parent_of: impl Fn(&EntityId) -> Option<Option<EntityId>>,
    ) -> Result<(), InvalidEntity> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let (entity, parent) = (self.id.clone(), parent.clone());
        let mut above = Some(parent.clone());
        // The entity itself is the first level.
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

    /// `e0` has no parent, and each `eN` has the one before it, up to `e{len - 1}`.
    fn chain(len: usize) -> impl Fn(&EntityId) -> Option<Option<EntityId>> {
        move |asked| {
            let number: usize = asked.as_str().strip_prefix('e')?.parse().ok()?;
            (number < len).then(|| number.checked_sub(1).map(|above| id(&format!("e{above}"))))
        }
    }

    #[test]
    fn a_parent_is_there_not_below_and_not_too_deep() {
        let under = |entity: &str, parent: &str| Entity::new(id(entity)).parent(id(parent));
        let table = [
            (under("new", "e6"), None),
            (under("new", "e7"), Some("`e7` cannot be the parent of `new`: more than 8 levels")),
            (under("new", "x"), Some("`x` cannot be the parent of `new`: there is no such entity")),
            (under("e3", "e5"), Some("`e5` cannot be the parent of `e3`: it is below it")),
            (under("e3", "e3"), Some("`e3` cannot be the parent of `e3`: it is below it")),
            (under("e0", "e7"), Some("`e7` cannot be the parent of `e0`: it is below it")),
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
