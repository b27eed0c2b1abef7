//! Records: a hash per kind, and entries of the index for their order and links.
//!
//! A record is stored as texts separated by zero bytes, which none of them contains: its version, the parts
//! that scripts read, and its body.

use ::redis::Cmd;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{Scope, Version};
use tidegate_core::limit::token::TokenId;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::{Prefix, member};
use super::keyspace::{Keyspace, Layout, cross_tree_error};
use super::script::{CHAIN, COMMIT, READ};
use crate::error::StoreError;
use crate::record::{self, Key, Kind, Of, Record, RecordWrite, Records, Scan};

/// The key of the namespace's metadata.
pub(super) const META: &str = "meta";
/// The ids of tokens by the hash of their secret.
const HASHES: &str = "hashes";
pub(super) const INDEX: &str = "index";
/// The keys of the commit script after [`META`]. A change names its key by its position.
const COMMITTED: [&str; 6] = ["policies", "entities", "tokens", HASHES, "audit", INDEX];

/// The hash of a kind of record.
pub(super) const fn hash_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Policy => "policies",
        Kind::Entity => "entities",
        Kind::Token => "tokens",
        Kind::Entry => "audit",
    }
}

/// The field of a record in its hash, which is also its name in the index.
pub(super) fn field(key: &Key) -> String {
    match key {
        Key::Policy(Scope::System) => "0".to_owned(),
        Key::Policy(Scope::Resource(resource)) => member(&["1", resource.as_str()]),
        Key::Policy(Scope::Entity(entity)) => member(&["2", entity.as_str()]),
        Key::Policy(Scope::Subject(subject)) => {
            member(&["3", subject.entity.as_str(), subject.resource.as_str()])
        }
        Key::Entity(id) => id.to_string(),
        Key::Token(id) => id.to_string(),
        Key::Entry(number) => format!("{number:020}"),
    }
}

fn read_field(kind: Kind, field: &str) -> Result<Key, StoreError> {
    let key = match (kind, &field.split('\0').collect::<Vec<_>>()[..]) {
        (Kind::Policy, ["0"]) => Some(Key::Policy(Scope::System)),
        (Kind::Policy, ["1", name]) => ResourceName::stored(name).ok().map(Scope::Resource).map(Key::Policy),
        (Kind::Policy, ["2", id]) => EntityId::stored(id).ok().map(Scope::Entity).map(Key::Policy),
        (Kind::Policy, ["3", entity, resource]) => {
            Subject::stored(entity, resource).ok().map(Scope::Subject).map(Key::Policy)
        }
        (Kind::Entity, [id]) => EntityId::stored(id).ok().map(Key::Entity),
        (Kind::Token, [id]) => TokenId::new(id).ok().map(Key::Token),
        (Kind::Entry, [number]) => number.parse().ok().map(Key::Entry),
        _ => None,
    };
    key.ok_or_else(|| StoreError::Corrupt { what: format!("a record called `{}`", field.escape_debug()) })
}

fn encode(record: &Record) -> String {
    let version = record.version.to_string();
    match &record.value {
        record::Value::Policy(_) => member(&[&version, &record.body()]),
        record::Value::Entity(entity) => {
            // `chain.lua` reads the parent.
            let parent = entity.parent_id().map_or("", EntityId::as_str);
            let cascades = if entity.cascades() { "1" } else { "0" };
            member(&[&version, parent, cascades, &record.body()])
        }
        record::Value::Token(hash, _) => member(&[&version, &record::hash_text(hash), &record.body()]),
        record::Value::Entry(_) => member(&[&version, &record.body().replacen('\n', "\0", 2)]),
    }
}

fn decode(key: Key, value: &[u8]) -> Result<Record, StoreError> {
    let corrupt = |why: &str| StoreError::Corrupt { what: format!("{key}: {why}") };
    let text = std::str::from_utf8(value).map_err(|_| corrupt("it is not UTF-8"))?;
    let count = match key.kind() {
        Kind::Policy => 2,
        Kind::Token => 3,
        Kind::Entity | Kind::Entry => 4,
    };
    let parts: Vec<&str> = text.splitn(count, '\0').collect();
    if parts.len() != count {
        return Err(corrupt(&format!("it has {} parts of {count}", parts.len())));
    }
    let version = parts[0].parse().map(Version::new).map_err(|_| corrupt("its version is not a number"))?;
    let body = if key.kind() == Kind::Entry { parts[1..].join("\n") } else { parts[count - 1].to_owned() };
    Record::from_text(key, Some(parts[1]), version, &body)
}

/// Decodes the values that were found for these keys.
fn decode_all(
    found: impl Iterator<Item = (Result<Key, StoreError>, Option<Vec<u8>>)>,
) -> Result<Vec<Option<Record>>, StoreError> {
    found.map(|(key, value)| value.map(|value| decode(key?, &value)).transpose()).collect()
}

/// The members of the index that find a record.
fn members(record: &Record) -> Vec<String> {
    let (letter, linked) = match record.key.kind() {
        Kind::Policy => ("p", "x"),
        Kind::Entity => ("e", "c"),
        Kind::Token => ("t", ""),
        Kind::Entry => ("a", "f"),
    };
    let field = field(&record.key);
    let mut members = vec![member(&[letter, &field])];
    match (&record.key, record.link()) {
        // Tokens are found through the hash of secrets.
        (Key::Token(_), _) | (_, None) => {}
        (Key::Policy(Scope::Subject(subject)), Some(link)) => {
            members.push(member(&[linked, &link, subject.entity.as_str()]));
        }
        (_, Some(link)) => members.push(member(&[linked, &link, &field])),
    }
    members
}

impl Redis {
    /// Records, the version and the time, as of one moment.
    pub(super) async fn read_all(&self, keys: &[Key]) -> Result<Records, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let hashes = [Kind::Policy, Kind::Entity, Kind::Token, Kind::Entry];
        let mut names = vec![keyspace.admin(META), keyspace.clock(Keyspace::admin_home())];
        names.extend(hashes.map(|kind| keyspace.admin(hash_of(kind))));
        let args: Vec<(usize, String)> =
            keys.iter().map(|key| (3 + key.kind() as usize, field(key))).collect();
        let found = connection.run(&READ, &names, &args).await?;
        let (version, entries, at, values): (u64, u64, u64, Vec<Option<Vec<u8>>>) = found;
        let records = decode_all(keys.iter().cloned().map(Ok).zip(values))?;
        Ok(Records { version: Version::new(version), entries, at: Stamp::from_micros(at), records })
    }

    pub(super) async fn scan(&self, scan: &Scan) -> Result<Vec<Record>, StoreError> {
        if let (Kind::Token, Of::Link(hash)) = (scan.kind, &scan.of) {
            let find = Cmd::hget(self.inner.keyspace.admin(HASHES), hash);
            let id: Option<String> = self.inner.connection.query(&find).await?;
            return Ok(self.records_at(scan.kind, id.as_slice()).await?.into_iter().flatten().collect());
        }
        let (prefix, mut after) = index_range(scan);
        let mut found = Vec::new();
        // A record that is deleted between the index and its hash leaves a page short.
        while found.len() < scan.max {
            let names = self.range(&prefix, after.as_deref(), scan.max).await?;
            let is_last = names.len() < scan.max;
            let fields: Vec<String> = names.iter().map(|name| field_of_member(scan, name)).collect();
            found.extend(self.records_at(scan.kind, &fields).await?.into_iter().flatten());
            after = names.last().cloned();
            if is_last {
                break;
            }
        }
        found.truncate(scan.max);
        Ok(found)
    }

    /// Makes the changes and their audit entries; `false` if the namespace's version has changed.
    pub(super) async fn write(&self, write: &RecordWrite) -> Result<bool, StoreError> {
        let inner = &self.inner;
        for change in &write.changes {
            if let Some(Record { value: record::Value::Entity(entity), .. }) = &change.after {
                self.check_home(entity).await?;
            }
        }
        let keys = std::iter::once(META).chain(COMMITTED).map(|key| inner.keyspace.admin(key));
        let keys: Vec<String> = keys.collect();
        let mut args = vec![
            self.inner.change_ids.next(),
            write.seen.to_string(),
            write.version().to_string(),
            write.entries_after().to_string(),
            self.channel(),
        ];
        // An empty value deletes the field.
        let mut put = |hash: &str, field: String, value: String| {
            let place = COMMITTED.iter().position(|key| *key == hash).map_or(0, |place| place + 2);
            args.extend([place.to_string(), field, value]);
        };
        for change in &write.changes {
            for gone in change.before.iter().flat_map(members) {
                put(INDEX, gone, String::new());
            }
            let value = change.after.as_ref().map(encode).unwrap_or_default();
            put(hash_of(change.key.kind()), field(&change.key), value);
            if let Some(after) = &change.after {
                for member in members(after) {
                    put(INDEX, member, "1".to_owned());
                }
                if let (Key::Token(id), Some(hash)) = (&after.key, after.link()) {
                    put(HASHES, hash, id.to_string());
                }
            }
        }
        inner.connection.run(&COMMIT, &keys, &args).await
    }

    /// On a cluster, an entity that has drawn cannot move to another tree.
    async fn check_home(&self, entity: &Entity) -> Result<(), StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let Some(parent) = entity.parent_id().filter(|_| keyspace.layout() != Layout::One) else {
            return Ok(());
        };
        let Some(home) = keyspace.home_of(connection, entity.id()).await? else { return Ok(()) };
        for above in self.ancestors(parent, crate::records::ANCESTORS_MAX).await? {
            let Key::Entity(other) = &above.key else { continue };
            if keyspace.home_of(connection, other).await?.is_some_and(|other| other != home) {
                return Err(cross_tree_error(entity.id().as_str(), other.as_str()));
            }
        }
        Ok(())
    }

    /// An entity and its ancestors, by one script.
    pub(super) async fn ancestors(&self, id: &EntityId, max: usize) -> Result<Vec<Record>, StoreError> {
        let key = self.inner.keyspace.admin(hash_of(Kind::Entity));
        let values: Vec<Vec<u8>> =
            self.inner.connection.run(&CHAIN, &[key], &[id.as_str(), &max.to_string()]).await?;
        let (mut chain, mut next) = (Vec::with_capacity(values.len()), Some(id.clone()));
        for value in values {
            let Some(id) = next.take() else { break };
            let record = decode(Key::Entity(id), &value)?;
            next = record.entity()?.parent_id().cloned();
            chain.push(record);
        }
        Ok(chain)
    }

    /// Records by their fields, in the same order.
    pub(super) async fn records_at(
        &self,
        kind: Kind,
        fields: &[String],
    ) -> Result<Vec<Option<Record>>, StoreError> {
        if fields.is_empty() {
            return Ok(Vec::new());
        }
        let read = Cmd::hmget(self.inner.keyspace.admin(hash_of(kind)), fields);
        let values: Vec<Option<Vec<u8>>> = self.inner.connection.query(&read).await?;
        decode_all(fields.iter().map(|field| read_field(kind, field)).zip(values))
    }
}

/// The members of the index that a scan lists, and the name to start after.
fn index_range(scan: &Scan) -> (Prefix, Option<String>) {
    let subject = match &scan.after {
        Some(Key::Policy(Scope::Subject(subject))) => Some(subject),
        _ => None,
    };
    let after = match (scan.kind, &scan.of) {
        (Kind::Policy, Of::Link(_)) => subject.map(|subject| subject.entity.to_string()),
        (Kind::Policy, Of::Entity(_)) => subject.map(|subject| subject.resource.to_string()),
        _ => scan.after.as_ref().map(field),
    };
    let prefix = match (scan.kind, &scan.of) {
        (Kind::Policy, Of::Link(resource)) => Prefix::of(&["x", resource]),
        (Kind::Policy, Of::Entity(entity)) => Prefix::of(&["p", "3", entity.as_str()]),
        (Kind::Policy, Of::All) => Prefix::of(&["p"]),
        (Kind::Entity, Of::Link(parent)) => Prefix::of(&["c", parent]),
        (Kind::Entity, _) => Prefix::of(&["e"]),
        (Kind::Token, _) => Prefix::of(&["t"]),
        (Kind::Entry, Of::Link(filed)) => Prefix::of(&["f", filed]),
        (Kind::Entry, _) => Prefix::of(&["a"]),
    };
    (prefix, after)
}

/// The field of the record that this index name refers to.
fn field_of_member(scan: &Scan, name: &str) -> String {
    match (scan.kind, &scan.of) {
        (Kind::Policy, Of::Link(resource)) => member(&["3", name, resource]),
        (Kind::Policy, Of::Entity(entity)) => member(&["3", entity.as_str(), name]),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_back_and_ordered_as_keys() {
        let subject = Subject::new("größe 7", "gpt:4").unwrap();
        let mut keys = vec![
            Key::Policy(Scope::System),
            Key::Policy(Scope::Resource(subject.resource.clone())),
            Key::Policy(Scope::Entity(subject.entity.clone())),
            Key::Policy(Scope::Subject(subject.clone())),
        ];
        assert!(keys.iter().map(field).is_sorted());
        keys.extend([Key::Entity(subject.entity), Key::Token(TokenId::new("ci").unwrap()), Key::Entry(12)]);
        for key in keys {
            assert_eq!(read_field(key.kind(), &field(&key)).unwrap(), key);
        }
        assert!(read_field(Kind::Policy, "4").is_err() && read_field(Kind::Entry, "x").is_err());
    }

    #[test]
    fn damaged_records_are_refused() {
        for bad in [&b""[..], b"1", b"x\0{}", b"\xff\0{}"] {
            let error = decode(Key::Policy(Scope::System), bad).unwrap_err();
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        }
    }
}
