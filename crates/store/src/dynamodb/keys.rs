//! The keys of items in the single table and in its three indexes.
//!
//! The layout is that of the zae-limiter table. The parts between `#`s are names, which never contain one.
//! Partition keys of namespaces other than `default` have a prefix. Sort keys of several names are separated
//! by [`PART`], which sorts before every letter of a name, so that they sort as the names do.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::audit::AuditKey;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{DEFAULT, EntityId, Namespace, ResourceName, Subject};
use tidegate_core::limit::policy::Scope;
use tidegate_core::limit::token::TokenId;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use crate::record_text::KeyColumns;

/// The partition key.
pub(super) const PK: &str = "PK";
/// The sort key.
pub(super) const SK: &str = "SK";
/// Children by parent, and items by due time.
pub(super) const GSI1: &str = "GSI1";
/// Buckets and usage by resource, and lists of a kind.
pub(super) const GSI2: &str = "GSI2";
/// Entities with limits of their own for a resource.
pub(super) const GSI3: &str = "GSI3";
/// The attribute that the engine expires an item by, in seconds.
pub(super) const TTL: &str = "ttl";
/// Separates the names of a sort key.
pub(super) const PART: char = '\u{1}';
/// The partition of namespaces in the second index.
pub(super) const NAMESPACES: &str = "NAMESPACES#";
/// The number of partitions of due items, so that none is hot.
pub(super) const DUE_PARTS: u64 = 4;

/// An item.
pub(super) type Item = HashMap<String, AttributeValue>;

/// The key of an item.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) pk: String,
    pub(super) sk: String,
}

impl Key {
    /// The key of an item.
    pub(super) fn of(item: &Item) -> Option<Self> {
        let text = |name: &str| item.get(name)?.as_s().ok().cloned();
        Some(Self { pk: text(PK)?, sk: text(SK)? })
    }

    /// The key as attributes.
    pub(super) fn attributes(&self) -> Item {
        let text = |text: &String| AttributeValue::S(text.clone());
        Item::from([(PK.to_owned(), text(&self.pk)), (SK.to_owned(), text(&self.sk))])
    }
}

/// The keys of one namespace.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    name: String,
    prefix: String,
}

impl Keys {
    pub(super) fn new(namespace: &Namespace) -> Self {
        let prefix = match namespace.as_str() {
            "default" => String::new(),
            name => format!("NS#{name}#"),
        };
        Self { name: namespace.to_string(), prefix }
    }

    /// The namespace's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn pk(&self, rest: impl std::fmt::Display) -> String {
        format!("{}{rest}", self.prefix)
    }

    fn key(&self, pk: impl std::fmt::Display, sk: impl Into<String>) -> Key {
        Key { pk: self.pk(pk), sk: sk.into() }
    }

    pub(super) fn entity_pk(&self, id: &EntityId) -> String {
        self.pk(format_args!("ENTITY#{id}"))
    }

    pub(super) fn entity(&self, id: &EntityId) -> Key {
        Key { pk: self.entity_pk(id), sk: "#META".to_owned() }
    }

    pub(super) fn bucket(&self, subject: &Subject) -> Key {
        Key { pk: self.entity_pk(&subject.entity), sk: format!("#BUCKET#{}", subject.resource) }
    }

    pub(super) fn policy(&self, scope: &Scope) -> Key {
        match scope {
            Scope::System => self.key("SYSTEM#", "#CONFIG"),
            Scope::Resource(resource) => self.key(format_args!("RESOURCE#{resource}"), "#CONFIG"),
            Scope::Entity(entity) => Key { pk: self.entity_pk(entity), sk: format!("#CONFIG#{DEFAULT}") },
            Scope::Subject(subject) => {
                Key { pk: self.entity_pk(&subject.entity), sk: format!("#CONFIG#{}", subject.resource) }
            }
        }
    }

    /// The version record.
    pub(super) fn version(&self) -> Key {
        self.key("SYSTEM#", "#VERSION")
    }

    pub(super) fn tokens_pk(&self) -> String {
        self.pk("SYSTEM#")
    }

    pub(super) fn token(&self, id: &TokenId) -> Key {
        self.key("SYSTEM#", format!("#TOKEN#{id}"))
    }

    /// The item that finds a token by the hash of its secret, in hexadecimal.
    pub(super) fn secret(&self, hash: &str) -> Key {
        self.key("SYSTEM#", format!("#SECRET#{hash}"))
    }

    pub(super) fn lease(&self, lease: LeaseId) -> Key {
        self.key(format_args!("LEASE#{lease}"), "#LEASE")
    }

    pub(super) fn audit(&self, filed: &AuditKey, number: u64) -> Key {
        Key { pk: self.audit_pk(filed), sk: format!("#AUDIT#{}", padded(number)) }
    }

    pub(super) fn audit_pk(&self, filed: impl std::fmt::Display) -> String {
        self.pk(format_args!("AUDIT#{filed}"))
    }

    pub(super) fn usage(&self, subject: &Subject, window: Window, start: Stamp) -> Key {
        let sk = format!("{}{start}", usage_prefix(&subject.resource, window));
        Key { pk: self.entity_pk(&subject.entity), sk }
    }

    /// The children of an entity, in the first index.
    pub(super) fn children_of(&self, parent: &str) -> String {
        self.pk(format_args!("PARENT#{parent}"))
    }

    /// Due items, in the first index.
    pub(super) fn due(&self, part: u64) -> String {
        self.pk(format_args!("DUE#{}", part % DUE_PARTS))
    }

    /// Buckets and usage of a resource, in the second index.
    pub(super) fn resource(&self, resource: &ResourceName) -> String {
        self.pk(format_args!("RESOURCE#{resource}"))
    }

    /// All of a kind, in the second index: `ENTITIES`, `CONFIGS`, `AUDITS`.
    pub(super) fn all(&self, kind: &str) -> String {
        self.pk(format_args!("{kind}#"))
    }

    /// Entities with limits of their own for a resource, in the third index.
    pub(super) fn custom_of(&self, resource: &str) -> String {
        self.pk(format_args!("ENTITY_CONFIG#{resource}"))
    }

    /// A partition key without the prefix of the namespace; `None` in another namespace.
    pub(super) fn own<'a>(&self, pk: &'a str) -> Option<&'a str> {
        let rest = pk.strip_prefix(&self.prefix)?;
        (!self.prefix.is_empty() || !rest.starts_with("NS#")).then_some(rest)
    }

    /// The subject of a bucket's key, if it is one of this namespace.
    pub(super) fn subject(&self, key: &Key) -> Option<Subject> {
        let entity = self.own(&key.pk)?.strip_prefix("ENTITY#")?;
        let resource = key.sk.strip_prefix("#BUCKET#")?;
        Subject::stored(entity, resource).ok()
    }

    /// The lease of a lease's key, if it is one of this namespace.
    pub(super) fn lease_of(&self, key: &Key) -> Option<LeaseId> {
        self.own(&key.pk)?.strip_prefix("LEASE#")?.parse().ok()
    }
}

/// The sort key of a policy in the list of all policies.
pub(super) fn scope_order(scope: &Scope) -> String {
    let KeyColumns { kind, first: entity, second: resource } = KeyColumns::of(scope);
    format!("{kind}{PART}{entity}{PART}{resource}")
}

/// The prefix of the sort keys of a resource's usage.
pub(super) fn usage_prefix(resource: &ResourceName, window: Window) -> String {
    format!("#USAGE#{resource}#{}#", window_word(window))
}

/// The name of a window in keys.
pub(super) const fn window_word(window: Window) -> &'static str {
    match window {
        Window::Minute => "minute",
        Window::Hour => "hour",
        Window::Day => "day",
        Window::Month => "month",
    }
}

/// A number as text that sorts numerically.
pub(super) fn padded(number: u64) -> String {
    format!("{number:020}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(namespace: &str) -> Keys {
        Keys::new(&Namespace::new(namespace).unwrap())
    }

    #[test]
    fn keys_are_those_of_zae_limiter() {
        let keys = keys("default");
        let subject = Subject::new("user-1", "gpt-4").unwrap();
        let shown = |key: Key| format!("{} {}", key.pk, key.sk);
        let start = Stamp::from_secs(1_704_117_600);
        let table = [
            (keys.entity(&subject.entity), "ENTITY#user-1 #META"),
            (keys.bucket(&subject), "ENTITY#user-1 #BUCKET#gpt-4"),
            (keys.policy(&Scope::Subject(subject.clone())), "ENTITY#user-1 #CONFIG#gpt-4"),
            (keys.policy(&Scope::Entity(subject.entity.clone())), "ENTITY#user-1 #CONFIG#_default_"),
            (keys.policy(&Scope::Resource(subject.resource.clone())), "RESOURCE#gpt-4 #CONFIG"),
            (keys.policy(&Scope::System), "SYSTEM# #CONFIG"),
            (keys.version(), "SYSTEM# #VERSION"),
            (
                keys.usage(&subject, Window::Hour, start),
                "ENTITY#user-1 #USAGE#gpt-4#hour#2024-01-01T14:00:00Z",
            ),
            (keys.audit(&AuditKey::entity(&subject.entity), 7), "AUDIT#user-1 #AUDIT#00000000000000000007"),
        ];
        for (key, expected) in table {
            assert_eq!(shown(key), expected);
        }
        assert_eq!(keys.children_of(subject.entity.as_str()), "PARENT#user-1");
        assert_eq!(keys.resource(&subject.resource), "RESOURCE#gpt-4");
        assert_eq!(keys.custom_of(subject.resource.as_str()), "ENTITY_CONFIG#gpt-4");
    }

    #[test]
    fn key_has_a_subject_in_its_own_namespace() {
        let subject = Subject::new("a b", "größe/7").unwrap();
        for (one, other) in [("default", "prod"), ("prod", "default"), ("prod", "prod2")] {
            let key = keys(one).bucket(&subject);
            assert_eq!(keys(one).subject(&key), Some(subject.clone()));
            assert_eq!(keys(other).subject(&key), None, "{one} is not {other}");
        }
        let lease = LeaseId::new(5, 7);
        assert_eq!(keys("prod").lease_of(&keys("prod").lease(lease)), Some(lease));
    }

    #[test]
    fn policies_sort_as_their_scopes_do() {
        let subject = |entity: &str, resource: &str| Scope::Subject(Subject::new(entity, resource).unwrap());
        let entity = |name: &str| Scope::Entity(EntityId::new(name).unwrap());
        let sorted = [
            Scope::System,
            entity("a"),
            entity("a b"),
            subject("a", "x"),
            subject("a", "y"),
            subject("a b", "c"),
        ];
        assert!(sorted.map(|scope| scope_order(&scope)).is_sorted());
    }
}
