//! Policies, entities and tokens as the traits ask for them.

use ::redis::Value;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, Subject};
use tidegate_core::limit::policy::{Expect, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use super::Redis;
use super::admin::{META, Records, entry_number, number};
use super::index::Prefix;
use super::plans::{Apply, Create, Put, Remove, Revoke};
use super::records::{hash_text, read_entity, read_entry, read_policy, read_scope, read_token, scope_text};
use super::script::READ;
use crate::cursor::{entity_cursor, parse_entity, parse_scope, parse_token, scope_cursor, token_cursor};
use crate::entities::Entities;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::policies::{CHANGED_MAX, Changed, Listing, Policies, PolicyChange, Written, check_actor};
use crate::reply::Reply;
use crate::tables::{WrittenPolicy, subject};
use crate::tokens::Tokens;

impl Policies for Redis {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        Reply::later(async move {
            let (places, link) = (&self.inner.places, &self.inner.link);
            let keys = [META, Records::Policies.key()].map(|key| places.admin(key));
            let fields: Vec<String> = scopes.iter().map(scope_text).collect();
            let fields: Vec<&[u8]> = fields.iter().map(String::as_bytes).collect();
            let answer = link.run(&READ, &keys.each_ref().map(String::as_bytes), &fields).await?;
            let Value::Array(mut found) = answer else { return Err(link.whose().unexpected(&answer)) };
            // The version comes first.
            let policies = found.split_off(found.len().min(1));
            let version = Version::new(number(found.first().unwrap_or(&Value::Nil))?);
            let found = self.values(Value::Array(policies))?;
            let policies = found.iter().map(|found| found.as_deref().map(read_policy).transpose());
            Ok(Written { version, policies: policies.collect::<Result<_, _>>()? })
        })
    }

    fn version(&self) -> Reply<'_, Version> {
        Reply::later(async move {
            let mut read = ::redis::cmd("HGET");
            read.arg(self.inner.places.admin(META)).arg("version");
            Ok(Version::new(number(&self.inner.link.query(&read).await?)?))
        })
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        Reply::later(async move {
            let (version, next) = self.audited().await?;
            let numbers: Vec<String> =
                (next.saturating_sub(CHANGED_MAX as u64)..next).map(entry_number).collect();
            let mut entries = Vec::with_capacity(numbers.len());
            for entry in self.records(Records::Audit, &numbers).await?.into_iter().flatten() {
                let entry = read_entry(&entry)?;
                entries.push((entry.version, entry.change));
            }
            Ok(Changed::since(since, version, entries))
        })
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_scope).transpose()?;
            let mut found: Vec<(Scope, WrittenPolicy)> = Vec::new();
            let mut last = after;
            // One that is removed between the index and its record leaves a page short.
            while found.len() <= paging.max() {
                let scopes = self.scopes(listing, last.as_ref(), paging.max() + 1).await?;
                let is_last = scopes.len() <= paging.max();
                let there = self.policies_at(&scopes).await?;
                last = scopes.last().cloned();
                found
                    .extend(scopes.into_iter().zip(there).filter_map(|(scope, there)| Some((scope, there?))));
                if is_last {
                    break;
                }
            }
            Ok(Page::cut(found, paging, |(scope, _)| scope_cursor(scope)))
        })
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Apply { changes }).await })
    }
}

impl Redis {
    /// Up to `max` scopes of a listing that come after one.
    async fn scopes(
        &self,
        listing: &Listing,
        after: Option<&Scope>,
        max: usize,
    ) -> Result<Vec<Scope>, StoreError> {
        match listing {
            Listing::All => {
                let after = after.map(scope_text);
                let found = self.range(&Prefix::of(&["p"]), after.as_deref(), max).await?;
                found.iter().map(|scope| read_scope(scope)).collect()
            }
            Listing::Entity(entity) => {
                let own = Scope::Entity(entity.clone());
                let mut scopes: Vec<Scope> = Vec::new();
                // Scopes are compared as they are listed.
                if after.is_none_or(|after| scope_text(after) < scope_text(&own)) {
                    scopes.push(own);
                }
                let prefix = Prefix::of(&["p", "3", entity.as_str()]);
                let after = match after {
                    Some(Scope::Subject(Subject { entity: other, resource })) if other >= entity => {
                        if other > entity {
                            return Ok(scopes);
                        }
                        Some(resource.as_str())
                    }
                    _ => None,
                };
                for resource in self.range(&prefix, after, max).await? {
                    scopes.push(Scope::Subject(subject(entity.as_str(), &resource)?));
                }
                Ok(scopes)
            }
            Listing::Custom(resource) => {
                let after = match after {
                    Some(Scope::Subject(subject)) => Some(subject.entity.as_str()),
                    _ => None,
                };
                let found = self.range(&Prefix::of(&["x", resource.as_str()]), after, max).await?;
                let scope = |entity: &String| subject(entity, resource.as_str()).map(Scope::Subject);
                found.iter().map(scope).collect()
            }
        }
    }

    /// A page of entities behind a prefix of the index.
    async fn page_of_entities(
        &self,
        prefix: &Prefix,
        paging: &Paging,
    ) -> Result<Page<Versioned<Entity>>, StoreError> {
        let after = paging.cursor().map(parse_entity).transpose()?;
        let after = after.as_ref().map(EntityId::as_str);
        let found = self.page_of(Records::Entities, prefix, after, paging, read_entity).await?;
        Ok(Page::cut(found, paging, |entity| entity_cursor(entity.value.id())))
    }

    /// One more of the records behind a prefix than a page holds, if there are.
    pub(super) async fn page_of<T>(
        &self,
        records: Records,
        prefix: &Prefix,
        after: Option<&str>,
        paging: &Paging,
        read: impl Fn(&[u8]) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let (mut found, mut last) = (Vec::new(), after.map(str::to_owned));
        while found.len() <= paging.max() {
            let names = self.range(prefix, last.as_deref(), paging.max() + 1).await?;
            let is_last = names.len() <= paging.max();
            for record in self.records(records, &names).await?.iter().flatten() {
                found.push(read(record)?);
            }
            last = names.last().cloned();
            if is_last {
                break;
            }
        }
        Ok(found)
    }
}

impl Entities for Redis {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move {
            check_actor(actor)?;
            entity.check()?;
            self.change(actor, &Put { entity, expect }).await
        })
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        Reply::later(self.entity(id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        Reply::later(self.chain(id, false))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Remove { id, expect }).await })
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::later(async move { self.page_of_entities(&Prefix::of(&["c", parent.as_str()]), paging).await })
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::later(async move { self.page_of_entities(&Prefix::of(&["e"]), paging).await })
    }
}

impl Tokens for Redis {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        Reply::later(async move { self.change(actor, &Create { token, hash }).await })
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        Reply::later(self.token_at(id))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        Reply::later(async move {
            let found = self.records(Records::Hashes, &[hash_text(hash)]).await?.into_iter().flatten().next();
            let Some(id) = found else { return Ok(None) };
            let corrupt = || StoreError::Corrupt { what: format!("the token `{}`", id.escape_ascii()) };
            let id = std::str::from_utf8(&id).map_err(|_| corrupt())?;
            let id = TokenId::new(id).map_err(|_| corrupt())?;
            Ok(self.token_at(&id).await?.map(|(_, token)| token))
        })
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_token).transpose()?;
            let (prefix, after) = (Prefix::of(&["t"]), after.as_ref().map(TokenId::as_str));
            let read = |record: &[u8]| read_token(record).map(|(_, token)| token);
            let found = self.page_of(Records::Tokens, &prefix, after, paging, read).await?;
            Ok(Page::cut(found, paging, |token| token_cursor(&token.value.id)))
        })
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Revoke { id, expect }).await })
    }
}

impl Redis {
    pub(super) async fn token_at(
        &self,
        id: &TokenId,
    ) -> Result<Option<(TokenHash, Versioned<Token>)>, StoreError> {
        let found = self.records(Records::Tokens, &[id.as_str().to_owned()]).await?;
        found.into_iter().flatten().next().map(|found| read_token(&found)).transpose()
    }
}
