//! Tokens in a file, each change with its entry of the audit in the same transaction.

use rusqlite::{Connection, Row};
use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use super::Sqlite;
use super::admin::Log;
use super::trouble::Trouble;
use super::work::{Call, Work};
use crate::codec;
use crate::cursor::{parse_token, token_cursor};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::policies::check_actor;
use crate::reply::Reply;
use crate::tables::{column, more_than, number};
use crate::tokens::{Tokens, is_anothers, is_taken, is_to_be_revoked};

/// A token to be made, and by whom.
struct Create {
    namespace: i64,
    token: NewToken,
    hash: TokenHash,
    actor: String,
}

/// A token to be revoked, and by whom.
struct Revoke {
    namespace: i64,
    id: TokenId,
    expect: Expect,
    actor: String,
}

impl Tokens for Sqlite {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        let (namespace, token, actor) = (self.namespace, token.clone(), actor.to_owned());
        Reply::later(self.inner.write(Call::new(Create { namespace, token, hash: *hash, actor }, create)))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        let (namespace, id) = (self.namespace, id.clone());
        Reply::later(self.inner.read(move |connection, _| by_id(connection, namespace, &id)))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        let (namespace, hash) = (self.namespace, *hash);
        Reply::later(self.inner.read(move |connection, _| by_hash(connection, namespace, &hash)))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        let (namespace, paging) = (self.namespace, paging.clone());
        Reply::later(self.inner.read(move |connection, _| page(connection, namespace, &paging)))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        let (namespace, id, actor) = (self.namespace, id.clone(), actor.to_owned());
        Reply::later(self.inner.write(Call::new(Revoke { namespace, id, expect, actor }, revoke)))
    }
}

fn create(work: &mut Work<'_>, asked: &Create) -> Result<Versioned<Token>, Trouble> {
    let Create { namespace, token, hash, actor } = asked;
    check_actor(actor)?;
    token.check(work.now).map_err(StoreError::from)?;
    let connection = work.connection;
    if let Some((_, there)) = by_id(connection, *namespace, &token.id)? {
        return Err(is_taken(&token.id, there.version).into());
    }
    if by_hash(connection, *namespace, hash)?.is_some() {
        return Err(is_anothers(&token.id).into());
    }
    let mut log = Log::begin(work, *namespace, actor)?;
    let made = Token::made(token, work.now, actor);
    let mut write = connection.prepare_cached(
        "INSERT INTO tokens (namespace, id, hash, version, body) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?;
    let (version, body) = (column(log.version().number()), codec::token_to_text(&made));
    write.execute((namespace, made.id.as_str(), hash.as_bytes(), version, body))?;
    log.note(&Filed::token(&made.id), &Change::Token { before: None, after: made.clone() })?;
    Ok(Versioned { version: log.end()?, value: made })
}

fn revoke(work: &mut Work<'_>, asked: &Revoke) -> Result<Version, Trouble> {
    let Revoke { namespace, id, expect, actor } = asked;
    check_actor(actor)?;
    let connection = work.connection;
    let Some((_, there)) = by_id(connection, *namespace, id)? else {
        return Err(StoreError::NoToken { token: id.clone() }.into());
    };
    if !is_to_be_revoked(&there, *expect)? {
        return Ok(there.version);
    }
    let mut log = Log::begin(work, *namespace, actor)?;
    let after = Token { revoked_at: Some(work.now), ..there.value.clone() };
    let mut write = connection
        .prepare_cached("UPDATE tokens SET version = ?3, body = ?4 WHERE namespace = ?1 AND id = ?2")?;
    let version = column(log.version().number());
    write.execute((namespace, id.as_str(), version, codec::token_to_text(&after)))?;
    log.note(&Filed::token(id), &Change::Token { before: Some(there.value), after })?;
    log.end()
}

fn by_id(
    connection: &Connection,
    namespace: i64,
    id: &TokenId,
) -> Result<Option<(TokenHash, Versioned<Token>)>, Trouble> {
    let mut read = connection
        .prepare_cached("SELECT version, body, hash FROM tokens WHERE namespace = ?1 AND id = ?2")?;
    let mut rows = read.query((namespace, id.as_str()))?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let hash: Vec<u8> = row.get(2)?;
    let corrupt = |hash: Vec<u8>| StoreError::Corrupt {
        what: format!("the hash of the token `{id}` has {} bytes, and not 32", hash.len()),
    };
    Ok(Some((TokenHash::new(hash.try_into().map_err(corrupt)?), written(row)?)))
}

fn by_hash(
    connection: &Connection,
    namespace: i64,
    hash: &TokenHash,
) -> Result<Option<Versioned<Token>>, Trouble> {
    let mut read =
        connection.prepare_cached("SELECT version, body FROM tokens WHERE namespace = ?1 AND hash = ?2")?;
    let mut rows = read.query((namespace, hash.as_bytes()))?;
    rows.next()?.map(written).transpose()
}

fn page(connection: &Connection, namespace: i64, paging: &Paging) -> Result<Page<Versioned<Token>>, Trouble> {
    let after = paging.cursor().map(parse_token).transpose()?;
    let mut found = connection.prepare_cached(
        "SELECT version, body FROM tokens WHERE namespace = ?1 AND id > ?2 ORDER BY id LIMIT ?3",
    )?;
    let mut rows = found.query((namespace, after.as_ref().map_or("", TokenId::as_str), more_than(paging)))?;
    let mut tokens = Vec::new();
    while let Some(row) = rows.next()? {
        tokens.push(written(row)?);
    }
    Ok(Page::cut(tokens, paging, |token| token_cursor(&token.value.id)))
}

fn written(row: &Row<'_>) -> Result<Versioned<Token>, Trouble> {
    let (version, body): (i64, String) = (row.get(0)?, row.get(1)?);
    let version = Version::new(number(version, "the version of a token")?);
    Ok(Versioned { version, value: codec::token_from_text(&body)? })
}
