//! The audit log: every administrative change with its actor and the values before and after.

use std::fmt;

use crate::limit::entity::Entity;
use crate::limit::name::{EntityId, LimitName, Subject};
use crate::limit::policy::{Policy, Scope, Version};
use crate::limit::token::{Token, TokenId};
use crate::time::Stamp;

/// The key that a change is filed under: the entity, `$SYSTEM` or `$RESOURCE:name` for a policy without an
/// entity, `$TOKEN:id` for a token.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AuditKey(String);

impl AuditKey {
    /// The key of an entity.
    pub fn entity(id: &EntityId) -> Self {
        Self(id.to_string())
    }

    /// The key of a policy's scope.
    pub fn scope(scope: &Scope) -> Self {
        match scope {
            Scope::System => Self("$SYSTEM".to_owned()),
            Scope::Resource(resource) => Self(format!("$RESOURCE:{resource}")),
            Scope::Entity(entity) => Self::entity(entity),
            Scope::Subject(subject) => Self::entity(&subject.entity),
        }
    }

    /// The key of a bucket: its entity, or that of the scope which limits a pool of all entities.
    pub fn bucket(bucket: &Subject) -> Self {
        match (bucket.one_entity(), bucket.one_resource()) {
            (Some(entity), _) => Self::entity(entity),
            (None, Some(resource)) => Self::scope(&Scope::Resource(resource.clone())),
            (None, None) => Self::scope(&Scope::System),
        }
    }

    /// The key of a token.
    pub fn token(id: &TokenId) -> Self {
        Self(format!("$TOKEN:{id}"))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AuditKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// A changed record before and after; `None` means that it does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// An entity.
    Entity {
        /// The previous value.
        before: Option<Entity>,
        /// The new value.
        after: Option<Entity>,
    },
    /// A policy.
    Policy {
        /// The scope.
        scope: Scope,
        /// The previous value.
        before: Option<Policy>,
        /// The new value.
        after: Option<Policy>,
    },
    /// The units available in a bucket.
    Bucket {
        /// The bucket.
        bucket: Subject,
        /// The limit.
        limit: LimitName,
        /// The units available before, as last read.
        before: i64,
        /// The units set.
        after: u64,
    },
    /// A token. Tokens are never removed.
    Token {
        /// The previous value.
        before: Option<Token>,
        /// The new value.
        after: Token,
    },
}

/// The record that a change affects, if limits depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum About {
    /// A policy.
    Policy(Scope),
    /// An entity: its parent or its `cascade` flag.
    Entity(EntityId),
}

impl Change {
    /// The affected record; `None` for a bucket or a token, because no limit depends on them.
    pub fn about(&self) -> Option<About> {
        match self {
            Self::Policy { scope, .. } => Some(About::Policy(scope.clone())),
            Self::Entity { before, after } => {
                before.as_ref().or(after.as_ref()).map(|entity| About::Entity(entity.id().clone()))
            }
            Self::Bucket { .. } | Self::Token { .. } => None,
        }
    }
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The version after the change. All entries of one change share it.
    pub version: Version,
    /// When the change was made.
    pub at: Stamp,
    /// Who made it.
    pub actor: String,
    /// The key it is filed under.
    pub filed: AuditKey,
    /// The change.
    pub change: Change,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::name::Across;

    #[test]
    fn policy_is_filed_under_its_entity_or_the_system() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let table = [
            (Scope::System, "$SYSTEM"),
            (Scope::Resource(subject.resource.clone()), "$RESOURCE:gpt"),
            (Scope::Entity(subject.entity.clone()), "acme"),
            (Scope::Subject(subject), "acme"),
        ];
        for (scope, filed) in table {
            assert_eq!(AuditKey::scope(&scope).to_string(), filed);
        }
    }

    #[test]
    fn bucket_is_filed_where_its_limit_is_defined() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let pools = Across::ALL.map(|across| AuditKey::bucket(&subject.pooled(across)).to_string());
        assert_eq!(pools, ["acme", "$RESOURCE:gpt", "$SYSTEM"]);
        assert_eq!(AuditKey::bucket(&subject).as_str(), "acme");
    }
}
