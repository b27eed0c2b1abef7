//! Audit: every administrative change, who made it, and what was there before and after.

use std::fmt;

use crate::limit::entity::Entity;
use crate::limit::name::EntityId;
use crate::limit::policy::{Policy, Scope, Version};
use crate::limit::token::{Token, TokenId};
use crate::time::Stamp;

/// What a change is filed under: an entity, for policies of no entity `$SYSTEM` or `$RESOURCE:name`, for a token
/// `$TOKEN:id`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Filed(String);

impl Filed {
    /// Under an entity.
    pub fn entity(id: &EntityId) -> Self {
        Self(id.to_string())
    }

    /// Where a policy's scope is filed.
    pub fn scope(scope: &Scope) -> Self {
        match scope {
            Scope::System => Self("$SYSTEM".to_owned()),
            Scope::Resource(resource) => Self(format!("$RESOURCE:{resource}")),
            Scope::Entity(entity) => Self::entity(entity),
            Scope::Subject(subject) => Self::entity(&subject.entity),
        }
    }

    /// Where a token is filed.
    pub fn token(id: &TokenId) -> Self {
        Self(format!("$TOKEN:{id}"))
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Filed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// What was changed, from what to what; `None` is nothing there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// An entity.
    Entity {
        /// What was there.
        before: Option<Entity>,
        /// What is there now.
        after: Option<Entity>,
    },
    /// A policy.
    Policy {
        /// Where.
        scope: Scope,
        /// What was there.
        before: Option<Policy>,
        /// What is there now.
        after: Option<Policy>,
    },
    /// A token, which is never removed.
    Token {
        /// What was there.
        before: Option<Token>,
        /// What is there now.
        after: Token,
    },
}

/// What a change is about, as far as limits depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum About {
    /// A policy.
    Policy(Scope),
    /// An entity: its parent, or whether it cascades.
    Entity(EntityId),
}

impl Change {
    /// What it is about; `None` for a token, on which no limit depends.
    pub fn about(&self) -> Option<About> {
        match self {
            Self::Policy { scope, .. } => Some(About::Policy(scope.clone())),
            Self::Entity { before, after } => {
                before.as_ref().or(after.as_ref()).map(|entity| About::Entity(entity.id().clone()))
            }
            Self::Token { .. } => None,
        }
    }
}

/// An entry of the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The count of changes, this one included; several entries of one change have the same.
    pub version: Version,
    /// When.
    pub at: Stamp,
    /// Who.
    pub actor: String,
    /// What it is filed under.
    pub filed: Filed,
    /// What was changed.
    pub change: Change,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::name::Subject;

    #[test]
    fn policies_of_no_entity_are_filed_under_the_system() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let table = [
            (Scope::System, "$SYSTEM"),
            (Scope::Resource(subject.resource.clone()), "$RESOURCE:gpt"),
            (Scope::Entity(subject.entity.clone()), "acme"),
            (Scope::Subject(subject), "acme"),
        ];
        for (scope, filed) in table {
            assert_eq!(Filed::scope(&scope).to_string(), filed);
        }
    }
}
