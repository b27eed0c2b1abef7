//! What administrators write, as records: their parts as text, with zeros between them, which no text of ours holds.

use std::sync::Arc;

use tidegate_core::limit::audit::{Change, Entry, Filed};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{Token, TokenHash};
use tidegate_core::time::Stamp;

use super::index::member;
use crate::codec;
use crate::error::StoreError;
use crate::tables::WrittenPolicy;

pub(super) fn policy_record(version: Version, policy: &Policy) -> String {
    member(&[&version.to_string(), &codec::policy_to_text(policy)])
}

pub(super) fn read_policy(record: &[u8]) -> Result<WrittenPolicy, StoreError> {
    let [version, body] = parts(record, "a policy")?;
    Ok(Versioned {
        version: read_version(version, "a policy")?,
        value: Arc::new(codec::policy_from_text(body)?),
    })
}

/// Who is above an entity stands before its body, for the script that goes up.
pub(super) fn entity_record(version: Version, entity: &Entity) -> String {
    let parent = entity.parent_id().map_or("", EntityId::as_str);
    let cascades = if entity.cascades() { "1" } else { "0" };
    member(&[&version.to_string(), parent, cascades, &codec::entity_to_text(entity)])
}

pub(super) fn read_entity(record: &[u8]) -> Result<Versioned<Entity>, StoreError> {
    let [version, _, _, body] = parts(record, "an entity")?;
    Ok(Versioned { version: read_version(version, "an entity")?, value: codec::entity_from_text(body)? })
}

pub(super) fn token_record(version: Version, hash: &TokenHash, token: &Token) -> String {
    member(&[&version.to_string(), &hash_text(hash), &codec::token_to_text(token)])
}

pub(super) fn read_token(record: &[u8]) -> Result<(TokenHash, Versioned<Token>), StoreError> {
    let [version, hash, body] = parts(record, "a token")?;
    let version = read_version(version, "a token")?;
    Ok((read_hash(hash)?, Versioned { version, value: codec::token_from_text(body)? }))
}

/// The hash of a token's secret as 64 digits.
pub(super) fn hash_text(hash: &TokenHash) -> String {
    let mut text = String::with_capacity(64);
    for byte in hash.as_bytes() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
        }
    }
    text
}

fn read_hash(text: &str) -> Result<TokenHash, StoreError> {
    let bytes = (0..32).map(|place| text.get(2 * place..2 * place + 2));
    let bytes: Option<Vec<u8>> = bytes.map(|digits| u8::from_str_radix(digits?, 16).ok()).collect();
    let hash = bytes.filter(|_| text.len() == 64).and_then(|bytes| bytes.try_into().ok());
    hash.map(TokenHash::new).ok_or_else(|| corrupt("a token", "its hash is none"))
}

pub(super) fn entry_record(version: Version, at: Stamp, actor: &str, change: &Change) -> String {
    member(&[&version.to_string(), &at.as_micros().to_string(), actor, &codec::change_to_text(change)])
}

pub(super) fn read_entry(record: &[u8]) -> Result<Entry, StoreError> {
    const WHAT: &str = "an entry of the audit";
    let [version, at, actor, change] = parts(record, WHAT)?;
    let at = at.parse().map_err(|_| corrupt(WHAT, "its time is none"))?;
    let (change, filed): (Change, Filed) = codec::change_from_text(change)?;
    let version = read_version(version, WHAT)?;
    Ok(Entry { version, at: Stamp::from_micros(at), actor: actor.to_owned(), filed, change })
}

/// A scope as the name of its record; in the order of scopes.
pub(super) fn scope_text(scope: &Scope) -> String {
    match scope {
        Scope::System => "0".to_owned(),
        Scope::Resource(resource) => member(&["1", resource.as_str()]),
        Scope::Entity(entity) => member(&["2", entity.as_str()]),
        Scope::Subject(subject) => member(&["3", subject.entity.as_str(), subject.resource.as_str()]),
    }
}

pub(super) fn read_scope(text: &str) -> Result<Scope, StoreError> {
    let bad = |_| corrupt("a policy", &format!("its scope is `{}`", text.escape_debug()));
    match text.split('\0').collect::<Vec<_>>()[..] {
        ["0"] => Ok(Scope::System),
        ["1", resource] => Ok(Scope::Resource(ResourceName::new(resource).map_err(bad)?)),
        ["2", entity] => Ok(Scope::Entity(EntityId::new(entity).map_err(bad)?)),
        ["3", entity, resource] => Ok(Scope::Subject(Subject::new(entity, resource).map_err(bad)?)),
        _ => Err(corrupt("a policy", &format!("its scope is `{}`", text.escape_debug()))),
    }
}

fn read_version(text: &str, what: &str) -> Result<Version, StoreError> {
    text.parse().map(Version::new).map_err(|_| corrupt(what, "its version is no number"))
}

fn parts<'a, const N: usize>(record: &'a [u8], what: &str) -> Result<[&'a str; N], StoreError> {
    let text = std::str::from_utf8(record).map_err(|_| corrupt(what, "it is no text"))?;
    let parts: Vec<&str> = text.splitn(N, '\0').collect();
    parts
        .try_into()
        .map_err(|parts: Vec<&str>| corrupt(what, &format!("it has {} parts of {N}", parts.len())))
}

fn corrupt(what: &str, why: &str) -> StoreError {
    StoreError::Corrupt { what: format!("{what}: {why}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_record_is_read_back_as_it_was_written() {
        let subject = Subject::new("größe 7", "gpt:4").unwrap();
        let scopes = [
            Scope::System,
            Scope::Resource(subject.resource.clone()),
            Scope::Entity(subject.entity.clone()),
            Scope::Subject(subject.clone()),
        ];
        for scope in &scopes {
            assert_eq!(read_scope(&scope_text(scope)).unwrap(), *scope);
        }
        assert!(scopes.iter().map(scope_text).is_sorted());
        let version = Version::new(7);
        let entity = Entity::new(subject.entity.clone()).parent(EntityId::new("p").unwrap()).cascade();
        let found = read_entity(entity_record(version, &entity).as_bytes()).unwrap();
        assert_eq!((found.version, &found.value), (version, &entity));
        let hash = TokenHash::new([0xA7; 32]);
        assert_eq!(read_hash(&hash_text(&hash)).unwrap().as_bytes(), hash.as_bytes());
        let change = Change::Entity { before: None, after: Some(entity) };
        let at = Stamp::from_secs(1_800_000_000);
        let entry = read_entry(entry_record(version, at, "ops", &change).as_bytes()).unwrap();
        assert_eq!((entry.at, entry.actor.as_str(), &entry.change), (at, "ops", &change));
        for bad in [&b""[..], b"1", b"x\0{}", b"\xff\0{}"] {
            assert!(matches!(read_policy(bad), Err(StoreError::Corrupt { .. })), "{}", bad.escape_ascii());
        }
        assert!(read_hash("zz").is_err() && read_scope("4").is_err());
    }
}
