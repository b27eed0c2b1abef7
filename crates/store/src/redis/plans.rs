//! The changes that administrators make, each worked out from what is there.

use std::collections::BTreeMap;

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use super::Redis;
use super::admin::{Log, Plan, Planned, Records};
use super::index::Prefix;
use super::records::{entity_record, hash_text, token_record};
use crate::error::StoreError;
use crate::policies::{PolicyChange, check_changes};
use crate::tables::WrittenPolicy;
use crate::tokens::{is_anothers, is_taken, is_to_be_revoked};

/// Policies to be written or removed.
pub(super) struct Apply<'a> {
    pub(super) changes: &'a [PolicyChange],
}

impl Plan for Apply<'_> {
    type Answer = Version;

    async fn plan(&self, store: &Redis, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let Self { changes } = self;
        let scopes: Vec<Scope> = changes.iter().map(|change| change.scope.clone()).collect();
        let there = store.policies_at(&scopes).await?;
        let mut before: BTreeMap<&Scope, Option<WrittenPolicy>> = scopes.iter().zip(there).collect();
        let version_at =
            |scope: &Scope| Ok(before.get(scope).and_then(|there| there.as_ref().map(|there| there.version)));
        let made = check_changes(changes, version_at)?;
        if made.is_empty() {
            return Ok(Planned::Nothing(log.seen));
        }
        for change in made {
            let before = before.remove(&change.scope).flatten();
            let before = before.map(|before| Policy::clone(&before.value));
            log.write_policy(&change.scope, before, change.policy.clone());
        }
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}

/// An entity to be written.
pub(super) struct Put<'a> {
    pub(super) entity: &'a Entity,
    pub(super) expect: Expect,
}

impl Plan for Put<'_> {
    type Answer = Version;

    async fn plan(&self, store: &Redis, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let Self { entity, expect } = self;
        let id = entity.id();
        let before = store.entity(id).await?;
        let current = before.as_ref().map(|before| before.version);
        if !expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        let chain = match entity.parent_id() {
            Some(parent) => store.chain(parent, true).await?,
            None => Vec::new(),
        };
        let above: BTreeMap<&EntityId, Option<EntityId>> =
            chain.iter().map(|above| (above.value.id(), above.value.parent_id().cloned())).collect();
        entity.check_parent(|id| above.get(id).cloned())?;
        store.check_home(id, &chain).await?;
        log.write(Records::Entities, id.as_str(), entity_record(log.version, entity));
        log.index(&["e", id.as_str()]);
        let old = before.as_ref().and_then(|before| before.value.parent_id());
        if let Some(old) = old.filter(|old| Some(*old) != entity.parent_id()) {
            log.unindex(&["c", old.as_str(), id.as_str()]);
        }
        if let Some(parent) = entity.parent_id() {
            log.index(&["c", parent.as_str(), id.as_str()]);
        }
        let before = before.map(|before| before.value);
        log.note(&Filed::entity(id), &Change::Entity { before, after: Some(Entity::clone(entity)) });
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}

/// An entity to be removed.
pub(super) struct Remove<'a> {
    pub(super) id: &'a EntityId,
    pub(super) expect: Expect,
}

impl Plan for Remove<'_> {
    type Answer = Version;

    async fn plan(&self, store: &Redis, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let Self { id, expect } = self;
        let before = store.entity(id).await?;
        let current = before.as_ref().map(|before| before.version);
        if !expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        let Some(before) = before else { return Err(StoreError::NoEntity { entity: EntityId::clone(id) }) };
        let children = store.range_all(&Prefix::of(&["c", id.as_str()])).await?.len() as u64;
        if children > 0 {
            return Err(StoreError::HasChildren { entity: EntityId::clone(id), children });
        }
        let scopes = store.scopes_of(id).await?;
        let there = store.policies_at(&scopes).await?;
        for (scope, there) in scopes.iter().zip(there) {
            if let Some(there) = there {
                log.write_policy(scope, Some(Policy::clone(&there.value)), None);
            }
        }
        log.remove(Records::Entities, id.as_str());
        log.unindex(&["e", id.as_str()]);
        if let Some(parent) = before.value.parent_id() {
            log.unindex(&["c", parent.as_str(), id.as_str()]);
        }
        log.note(&Filed::entity(id), &Change::Entity { before: Some(before.value), after: None });
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}

/// A token to be made.
pub(super) struct Create<'a> {
    pub(super) token: &'a NewToken,
    pub(super) hash: &'a TokenHash,
}

impl Plan for Create<'_> {
    type Answer = Versioned<Token>;

    async fn plan(&self, store: &Redis, mut log: Log) -> Result<Planned<Versioned<Token>>, StoreError> {
        let Self { token, hash } = self;
        token.check(log.at)?;
        if let Some((_, there)) = store.token_at(&token.id).await? {
            return Err(is_taken(&token.id, there.version));
        }
        if store.records(Records::Hashes, &[hash_text(hash)]).await?.into_iter().flatten().next().is_some() {
            return Err(is_anothers(&token.id));
        }
        let (id, made) = (token.id.as_str(), Token::made(token, log.at, log.actor()));
        log.write(Records::Tokens, id, token_record(log.version, hash, &made));
        log.write(Records::Hashes, &hash_text(hash), id.to_owned());
        log.index(&["t", id]);
        log.note(&Filed::token(&made.id), &Change::Token { before: None, after: made.clone() });
        let version = log.version;
        Ok(Planned::Change(log, Versioned { version, value: made }))
    }
}

/// A token to be revoked.
pub(super) struct Revoke<'a> {
    pub(super) id: &'a TokenId,
    pub(super) expect: Expect,
}

impl Plan for Revoke<'_> {
    type Answer = Version;

    async fn plan(&self, store: &Redis, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let Self { id, expect } = self;
        let Some((hash, there)) = store.token_at(id).await? else {
            return Err(StoreError::NoToken { token: TokenId::clone(id) });
        };
        if !is_to_be_revoked(&there, *expect)? {
            return Ok(Planned::Nothing(there.version));
        }
        let after = Token { revoked_at: Some(log.at), ..there.value.clone() };
        log.write(Records::Tokens, id.as_str(), token_record(log.version, &hash, &after));
        log.note(&Filed::token(id), &Change::Token { before: Some(there.value), after });
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}
