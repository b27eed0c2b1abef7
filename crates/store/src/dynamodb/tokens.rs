//! Tokens: an item for each, and one for its secret's hash that says whose it is.

use std::fmt::Write as _;

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use super::DynamoDb;
use super::expression::Write;
use super::keys::Item;
use super::link::{Action, Range};
use super::log::{Log, Plan, Planned};
use super::view::{number_of, text_of};
use crate::codec;
use crate::cursor::{parse_token, token_cursor};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::tokens::{Tokens, is_anothers, is_taken, is_to_be_revoked};

/// What the sort keys of tokens begin with.
const PREFIX: &str = "#TOKEN#";

impl Tokens for DynamoDb {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        Reply::later(async move { self.change(actor, &Create { token, hash }).await })
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        Reply::later(self.within(async move {
            let found = self.inner.link.get(&self.inner.keys.token(id)).await?;
            found.map(|item| Ok((read_hash(&item)?, read(&item)?))).transpose()
        }))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        Reply::later(self.within(async move {
            let Some(item) = self.inner.link.get(&self.inner.keys.secret(hash)).await? else {
                return Ok(None);
            };
            let id = TokenId::new(text_of(&item, "token")?);
            let id = id.map_err(|error| StoreError::Corrupt { what: error.to_string() })?;
            let found = self.inner.link.get(&self.inner.keys.token(&id)).await?;
            found.as_ref().map(read).transpose()
        }))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_token).transpose()?.map(|id| format!("{PREFIX}{id}"));
            let range = Range::new(None, self.inner.keys.tokens_pk(), PREFIX.to_owned()).after(after);
            let found = self.inner.link.range(&range, paging.max() + 1).await?;
            let tokens = found.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            Ok(Page::cut(tokens, paging, |token| token_cursor(&token.value.id)))
        })
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Revoke { id, expect }).await })
    }
}

/// A token that is to be made.
struct Create<'a> {
    token: &'a NewToken,
    hash: &'a TokenHash,
}

impl Plan for Create<'_> {
    type Answer = Versioned<Token>;

    async fn plan(&self, store: &DynamoDb, mut log: Log) -> Result<Planned<Versioned<Token>>, StoreError> {
        let (id, keys) = (&self.token.id, &store.inner.keys);
        self.token.check(log.at)?;
        let (own, secret) = (keys.token(id), keys.secret(self.hash));
        let found = store.inner.link.get_all(&[own.clone(), secret.clone()]).await?;
        if let Some(item) = found.get(&own) {
            return Err(is_taken(id, read(item)?.version));
        }
        if found.contains_key(&secret) {
            return Err(is_anothers(id));
        }
        let value = Token::made(self.token, log.at, &log.actor);
        let mut write = Write::new(own);
        write.set("version", log.version.number());
        write.set("body", codec::token_to_text(&value));
        let hash = self.hash.as_bytes().iter().fold(String::new(), |mut text, byte| {
            // To a string nothing fails.
            let _ = write!(text, "{byte:02x}");
            text
        });
        write.set("hash", hash);
        log.push(Action::Update(write));
        let mut write = Write::new(secret);
        write.set("token", id.as_str());
        log.push(Action::Update(write));
        log.note(store, &Filed::token(id), &Change::Token { before: None, after: value.clone() });
        let answer = Versioned { version: log.version, value };
        Ok(Planned::Change(log, answer))
    }
}

/// A token that is to be good no more.
struct Revoke<'a> {
    id: &'a TokenId,
    expect: Expect,
}

impl Plan for Revoke<'_> {
    type Answer = Version;

    async fn plan(&self, store: &DynamoDb, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let key = store.inner.keys.token(self.id);
        let Some(item) = store.inner.link.get(&key).await? else {
            return Err(StoreError::NoToken { token: self.id.clone() });
        };
        let there = read(&item)?;
        if !is_to_be_revoked(&there, self.expect)? {
            return Ok(Planned::Nothing(there.version));
        }
        let after = Token { revoked_at: Some(log.at), ..there.value.clone() };
        let mut write = Write::new(key);
        write.set("version", log.version.number());
        write.set("body", codec::token_to_text(&after));
        log.push(Action::Update(write));
        log.note(store, &Filed::token(self.id), &Change::Token { before: Some(there.value), after });
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}

fn read(item: &Item) -> Result<Versioned<Token>, StoreError> {
    let value = codec::token_from_text(text_of(item, "body")?)?;
    Ok(Versioned { version: Version::new(number_of(item, "version")?), value })
}

fn read_hash(item: &Item) -> Result<TokenHash, StoreError> {
    let text = text_of(item, "hash")?;
    let bytes: Option<Vec<u8>> = (0..text.len() / 2)
        .map(|place| text.get(2 * place..2 * place + 2).and_then(|byte| u8::from_str_radix(byte, 16).ok()))
        .collect();
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    let corrupt =
        || StoreError::Corrupt { what: format!("the hash of a token has {} digits, and not 64", text.len()) };
    Ok(TokenHash::new(bytes.ok_or_else(corrupt)?))
}
