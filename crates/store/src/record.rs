//! Records: policies, entities, tokens and audit entries, as engines store them.
//!
//! Records are opaque to an engine. It stores them by key, in the order of keys, and finds them by link.

use std::fmt;
use std::sync::Arc;

use tidegate_core::limit::audit::{AuditKey, Entry};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{Token, TokenHash, TokenId};
use tidegate_core::time::Stamp;

use crate::error::StoreError;

/// The key of a record. Keys are ordered by kind, then by name; entries of the audit by number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A policy, by its scope.
    Policy(Scope),
    /// An entity.
    Entity(EntityId),
    /// A token.
    Token(TokenId),
    /// An audit entry, numbered from 0 in the order of changes.
    Entry(u64),
}

/// A kind of record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each is the key of the same name")]
pub enum Kind {
    Policy,
    Entity,
    Token,
    Entry,
}

/// The value of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A policy.
    Policy(Arc<Policy>),
    /// An entity.
    Entity(Entity),
    /// A token and the hash of its secret.
    Token(TokenHash, Token),
    /// An audit entry.
    Entry(Entry),
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: Key,
    /// The version of the change that wrote it.
    pub version: Version,
    /// Its value.
    pub value: Value,
}

/// Records read at one moment.
#[derive(Debug, Clone)]
pub struct Records {
    /// The namespace's version.
    pub version: Version,
    /// The number of audit entries ever written, which is the number of the next one.
    pub entries: u64,
    /// The engine's time.
    pub at: Stamp,
    /// The record of each key, in that order.
    pub records: Vec<Option<Record>>,
}

/// Which records to list, in the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// The kind of record.
    pub kind: Kind,
    /// The selection.
    pub of: Of,
    /// Only records after this key.
    pub after: Option<Key>,
    /// The maximum number of records.
    pub max: usize,
}

/// A selection of the records of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Of {
    /// All of them.
    All,
    /// Those with this [link](Record::link).
    Link(String),
    /// Policies only: those of an entity for a resource ([`Scope::Subject`]).
    Entity(EntityId),
}

/// Changes to apply atomically, if the namespace has not changed since it was read.
#[derive(Debug, Clone)]
pub struct RecordWrite {
    /// The version that was read. The changes have the next one.
    pub seen: Version,
    /// The number of audit entries that was read.
    pub entries: u64,
    /// The changes, audit entries included.
    pub changes: Vec<RecordChange>,
}

/// A record to write or remove.
#[derive(Debug, Clone)]
pub struct RecordChange {
    /// The key.
    pub key: Key,
    /// The record that was read; `None` if it did not exist.
    pub before: Option<Record>,
    /// The new record; `None` removes it.
    pub after: Option<Record>,
}

impl RecordWrite {
    /// The version of the changes.
    pub const fn version(&self) -> Version {
        self.seen.next()
    }

    /// The number of audit entries after the changes.
    pub fn entries_after(&self) -> u64 {
        let is_entry = |change: &&RecordChange| matches!(change.key, Key::Entry(_));
        self.entries + self.changes.iter().filter(is_entry).count() as u64
    }
}

impl Key {
    /// Its kind.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Policy(_) => Kind::Policy,
            Self::Entity(_) => Kind::Entity,
            Self::Token(_) => Kind::Token,
            Self::Entry(_) => Kind::Entry,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(scope) => write!(f, "the policy for {scope}"),
            Self::Entity(id) => write!(f, "the entity `{id}`"),
            Self::Token(id) => write!(f, "the token `{id}`"),
            Self::Entry(number) => write!(f, "the audit entry {number}"),
        }
    }
}

impl Scan {
    /// Whether the scan selects this record, regardless of `after`.
    pub fn lists(&self, record: &Record) -> bool {
        record.key.kind() == self.kind
            && match &self.of {
                Of::All => true,
                Of::Link(link) => record.link().as_deref() == Some(link),
                Of::Entity(entity) => {
                    matches!(&record.key, Key::Policy(Scope::Subject(subject)) if subject.entity == *entity)
                }
            }
    }
}

impl Record {
    /// The secondary key of a record: a policy for an entity and a resource by the resource, an entity by its
    /// parent, a token by the hash of its secret in hexadecimal, an audit entry by what it is filed under.
    pub fn link(&self) -> Option<String> {
        match (&self.key, &self.value) {
            (Key::Policy(Scope::Subject(subject)), _) => Some(subject.resource.to_string()),
            (_, Value::Entity(entity)) => entity.parent_id().map(EntityId::to_string),
            (_, Value::Token(hash, _)) => Some(hash_text(hash)),
            (_, Value::Entry(entry)) => Some(entry.filed.to_string()),
            (_, Value::Policy(_)) => None,
        }
    }

    pub(crate) fn policy(self) -> Result<Versioned<Arc<Policy>>, StoreError> {
        let Self { key, version, value } = self;
        match value {
            Value::Policy(value) => Ok(Versioned { version, value }),
            _ => Err(misplaced(&key)),
        }
    }

    pub(crate) fn entity(&self) -> Result<&Entity, StoreError> {
        match &self.value {
            Value::Entity(entity) => Ok(entity),
            _ => Err(misplaced(&self.key)),
        }
    }

    pub(crate) fn versioned_entity(self) -> Result<Versioned<Entity>, StoreError> {
        let Self { key, version, value } = self;
        match value {
            Value::Entity(value) => Ok(Versioned { version, value }),
            _ => Err(misplaced(&key)),
        }
    }

    pub(crate) fn token(self) -> Result<(TokenHash, Versioned<Token>), StoreError> {
        let Self { key, version, value } = self;
        match value {
            Value::Token(hash, value) => Ok((hash, Versioned { version, value })),
            _ => Err(misplaced(&key)),
        }
    }

    pub(crate) fn entry(self) -> Result<Entry, StoreError> {
        match self.value {
            Value::Entry(entry) => Ok(entry),
            _ => Err(misplaced(&self.key)),
        }
    }
}

/// The link of entities with this parent.
pub(crate) fn parent_link(parent: &EntityId) -> Of {
    Of::Link(parent.to_string())
}

/// The link of policies for this resource.
pub(crate) fn resource_link(resource: &ResourceName) -> Of {
    Of::Link(resource.to_string())
}

/// The link of the token whose secret has this hash.
pub(crate) fn hash_link(hash: &TokenHash) -> Of {
    Of::Link(hash_text(hash))
}

/// The link of audit entries that are filed under this.
pub(crate) fn filed_link(filed: &AuditKey) -> Of {
    Of::Link(filed.to_string())
}

/// The hash of a token's secret as 64 hexadecimal digits.
pub(crate) fn hash_text(hash: &TokenHash) -> String {
    hex(hash.as_bytes())
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn misplaced(key: &Key) -> StoreError {
    StoreError::Corrupt { what: format!("a record of another kind in place of {key}") }
}
