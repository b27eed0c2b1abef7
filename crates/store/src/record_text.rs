//! Keys as columns and records as text, for engines that store them that way.

use std::borrow::Cow;
use std::sync::Arc;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Scope, Version};
use tidegate_core::limit::token::{TokenHash, TokenId};
use tidegate_core::time::Stamp;

use crate::codec;
use crate::error::StoreError;
use crate::record::{Key, Kind, Record, Value};
use crate::tables;

/// The kinds of policies in [`KeyColumns`].
pub(crate) const POLICY_KINDS: std::ops::RangeInclusive<i64> = 0..=3;

/// A key as three columns, ordered as keys are: the kind, and up to two names. `kind` is 0 for the policy of
/// the system, 1 for that of a resource, 2 for that of an entity, 3 for that of an entity for a resource, 4
/// for an entity, 5 for a token and 6 for an audit entry, whose number has 20 digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyColumns<'a> {
    pub(crate) kind: i64,
    pub(crate) first: Cow<'a, str>,
    pub(crate) second: &'a str,
}

impl<'a> KeyColumns<'a> {
    /// The key of the policy for a scope.
    pub(crate) fn of(scope: &'a Scope) -> Self {
        let kind = match scope {
            Scope::System => 0,
            Scope::Resource(_) => 1,
            Scope::Entity(_) => 2,
            Scope::Subject(_) => 3,
        };
        let first = scope.entity().map_or("", EntityId::as_str).into();
        Self { kind, first, second: scope.resource().map_or("", ResourceName::as_str) }
    }
}

impl Kind {
    /// The range of its kinds in [`KeyColumns`].
    pub(crate) const fn columns(self) -> (i64, i64) {
        match self {
            Self::Policy => (*POLICY_KINDS.start(), *POLICY_KINDS.end()),
            Self::Entity => (4, 4),
            Self::Token => (5, 5),
            Self::Entry => (6, 6),
        }
    }
}

impl Key {
    /// The key as columns.
    pub(crate) fn columns(&self) -> KeyColumns<'_> {
        match self {
            Self::Policy(scope) => KeyColumns::of(scope),
            Self::Entity(id) => KeyColumns { kind: 4, first: id.as_str().into(), second: "" },
            Self::Token(id) => KeyColumns { kind: 5, first: id.as_str().into(), second: "" },
            Self::Entry(number) => KeyColumns { kind: 6, first: format!("{number:020}").into(), second: "" },
        }
    }

    /// Parses [`columns`](Self::columns).
    pub(crate) fn from_columns(kind: i64, first: &str, second: &str) -> Result<Self, StoreError> {
        let corrupt = |what: String| StoreError::Corrupt { what };
        match kind {
            0..=3 => Ok(Self::Policy(tables::scope(kind, first, second)?)),
            4 => EntityId::stored(first).map(Self::Entity).map_err(|error| corrupt(error.to_string())),
            5 => TokenId::new(first).map(Self::Token).map_err(|error| corrupt(error.to_string())),
            6 => first
                .parse()
                .map(Self::Entry)
                .map_err(|_| corrupt(format!("an audit entry numbered `{first}`"))),
            other => Err(corrupt(format!("a record of the kind {other}"))),
        }
    }
}

impl Record {
    /// The value as text (feature `codec`). An audit entry is its time in microseconds, the actor and the
    /// change, in three lines.
    pub fn body(&self) -> String {
        match &self.value {
            Value::Policy(policy) => codec::policy_to_text(policy),
            Value::Entity(entity) => codec::entity_to_text(entity),
            Value::Token(_, token) => codec::token_to_text(token),
            Value::Entry(entry) => {
                let change = codec::change_to_text(&entry.change);
                format!("{}\n{}\n{change}", entry.at.as_micros(), entry.actor)
            }
        }
    }

    /// The record with this [link](Self::link) and [body](Self::body) (feature `codec`).
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] for any other text.
    pub fn from_text(key: Key, link: Option<&str>, version: Version, body: &str) -> Result<Self, StoreError> {
        let corrupt = |what: &str| StoreError::Corrupt { what: format!("{what} of {key}") };
        let value = match &key {
            Key::Policy(_) => Value::Policy(Arc::new(codec::policy_from_text(body)?)),
            Key::Entity(_) => Value::Entity(codec::entity_from_text(body)?),
            Key::Token(_) => {
                let hash = link.and_then(read_hash).ok_or_else(|| corrupt("the hash"))?;
                Value::Token(hash, codec::token_from_text(body)?)
            }
            Key::Entry(_) => {
                let mut lines = body.splitn(3, '\n');
                let (at, actor, change) = (lines.next(), lines.next(), lines.next());
                let at = at.and_then(|at| at.parse().ok()).ok_or_else(|| corrupt("the time"))?;
                let (Some(actor), Some(change)) = (actor, change) else { return Err(corrupt("the change")) };
                let (change, filed) = codec::change_from_text(change)?;
                let at = Stamp::from_micros(at);
                Value::Entry(Entry { version, at, actor: actor.to_owned(), filed, change })
            }
        };
        Ok(Self { key, version, value })
    }
}

fn read_hash(text: &str) -> Option<TokenHash> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let byte = |place: usize| u8::from_str_radix(&text[2 * place..2 * place + 2], 16).ok();
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    bytes?.try_into().ok().map(TokenHash::new)
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::audit::{AuditKey, Change};
    use tidegate_core::limit::entity::Entity;
    use tidegate_core::limit::name::{ResourceName, Subject};
    use tidegate_core::limit::policy::{Policy, Scope};
    use tidegate_core::limit::rule::Limit;
    use tidegate_core::limit::token::{NewToken, Token, TokenScope, TokenScopes};

    use super::*;

    fn records() -> Vec<Record> {
        let policy = Policy::new([Limit::per_minute("rpm", 7)]).unwrap();
        let id = EntityId::new("größe 7").unwrap();
        let entity = Entity::new(id.clone()).parent(EntityId::new("acme").unwrap());
        let new = NewToken {
            id: TokenId::new("ci").unwrap(),
            name: "ci".to_owned(),
            namespace: tidegate_core::limit::name::Namespace::new("prod").unwrap(),
            scopes: TokenScopes::new([TokenScope::Acquire]),
            entity: None,
            expires_at: None,
        };
        let token = Token::made(&new, Stamp::from_secs(9), "root");
        let version = Version::new(4);
        let scope =
            Scope::Subject(Subject { entity: id.clone(), resource: ResourceName::new("gpt").unwrap() });
        let change = Change::Policy { scope: scope.clone(), before: None, after: Some(policy.clone()) };
        let entry = Entry {
            version,
            at: Stamp::from_micros(1_800_000_000_000_007),
            actor: "root".to_owned(),
            filed: AuditKey::scope(&scope),
            change,
        };
        let hash = TokenHash::new([0xa5; 32]);
        let record = |key, value| Record { key, version, value };
        vec![
            record(Key::Policy(Scope::System), Value::Policy(Arc::new(policy.clone()))),
            record(Key::Policy(scope), Value::Policy(Arc::new(policy))),
            record(Key::Entity(id), Value::Entity(entity)),
            record(Key::Token(new.id.clone()), Value::Token(hash, token)),
            record(Key::Entry(12), Value::Entry(entry)),
        ]
    }

    #[test]
    fn records_roundtrip_as_text() {
        for record in records() {
            let columns = record.key.columns();
            let key = Key::from_columns(columns.kind, &columns.first, columns.second).unwrap();
            let (link, body) = (record.link(), record.body());
            assert_eq!(Record::from_text(key, link.as_deref(), record.version, &body).unwrap(), record);
        }
    }

    #[test]
    fn names_of_earlier_versions_are_read() {
        let names = ["a\u{200c}b", "a\u{fe0f}", "cafe\u{301}"];
        for name in names {
            for kind in 1..=4 {
                let (first, second) =
                    (if kind == 1 { "" } else { name }, if kind % 2 == 0 { "" } else { name });
                let key = Key::from_columns(kind, first, second).unwrap();
                let KeyColumns { first: read, second: also_read, .. } = key.columns();
                assert_eq!((&*read, also_read), (first, second));
            }
            let id = EntityId::stored(name).unwrap();
            let scope = Scope::Subject(Subject::stored(name, name).unwrap());
            let entity = Entity::new(id.clone()).parent(EntityId::stored("o\u{308}").unwrap());
            let changes = [
                Change::Entity { before: None, after: Some(entity.clone()) },
                Change::Policy { scope: scope.clone(), before: None, after: None },
            ];
            let entries = changes.map(|change| {
                let filed = match &change {
                    Change::Policy { scope, .. } => AuditKey::scope(scope),
                    _ => AuditKey::entity(&id),
                };
                let at = Stamp::from_micros(7);
                let entry = Entry { version: Version::ZERO, at, actor: "root".to_owned(), filed, change };
                (Key::Entry(0), Value::Entry(entry))
            });
            let entity = (Key::Entity(id), Value::Entity(entity));
            for (key, value) in entries.into_iter().chain([entity]) {
                let record = Record { key: key.clone(), version: Version::ZERO, value };
                let text = record.body();
                assert_eq!(Record::from_text(key, None, Version::ZERO, &text).unwrap(), record);
            }
        }
    }

    #[test]
    fn columns_are_ordered_as_keys() {
        let mut records = records();
        records.sort_by(|one, other| one.key.cmp(&other.key));
        let columns = |record: &Record| {
            let KeyColumns { kind, first, second } = record.key.columns();
            (kind, first.into_owned(), second.to_owned())
        };
        assert!(records.iter().map(columns).is_sorted());
        assert!(Key::Entry(9).columns().first < Key::Entry(10).columns().first);
    }

    #[test]
    fn damaged_records_are_rejected() {
        assert!(Key::from_columns(7, "x", "").is_err());
        assert!(Key::from_columns(6, "x", "").is_err());
        for (key, link, body) in [
            (Key::Token(TokenId::new("ci").unwrap()), Some("a5"), "{}"),
            (Key::Token(TokenId::new("ci").unwrap()), None, "{}"),
            (Key::Entry(1), None, "x"),
            (Key::Entry(1), None, "7\nroot"),
            (Key::Entity(EntityId::new("a").unwrap()), None, "no"),
        ] {
            let error = Record::from_text(key, link, Version::ZERO, body).unwrap_err();
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        }
    }
}
