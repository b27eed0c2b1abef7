//! Tokens in a server, each change with its entry of the audit in the same transaction.

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tokio_postgres::Row;

use super::Postgres;
use super::admin::Work;
use super::trouble::get;
use crate::codec;
use crate::cursor::{parse_token, token_cursor};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::tables::{column, more_than, number};
use crate::tokens::{Tokens, is_anothers, is_taken, is_to_be_revoked};

const BY_ID: &str = "SELECT version, body, hash FROM @.tokens WHERE namespace = $1 AND id = $2";
const BY_HASH: &str = "SELECT version, body FROM @.tokens WHERE namespace = $1 AND hash = $2";

impl Tokens for Postgres {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        let make = async |work: &mut Work<'_>| {
            token.check(work.now)?;
            let there = work.query(BY_ID, &[&work.namespace(), &token.id.as_str()]).await?;
            if let Some(there) = there.first() {
                return Err(is_taken(&token.id, written(there)?.version));
            }
            if !work.query(BY_HASH, &[&work.namespace(), &&hash.as_bytes()[..]]).await?.is_empty() {
                return Err(is_anothers(&token.id));
            }
            let made = Token::made(token, work.now, actor);
            let statement =
                "INSERT INTO @.tokens (namespace, id, hash, version, body) VALUES ($1, $2, $3, $4, $5)";
            let (version, body) = (column(work.version().number()), codec::token_to_text(&made));
            let (namespace, id) = (work.namespace(), made.id.as_str());
            work.query(statement, &[&namespace, &id, &&hash.as_bytes()[..], &version, &body]).await?;
            let change = Change::Token { before: None, after: made.clone() };
            work.note(&Filed::token(&made.id), &change).await?;
            Ok(made)
        };
        Reply::later(async move {
            let (value, version) = self.change(actor, make).await?;
            Ok(Versioned { version, value })
        })
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        Reply::later(async move {
            let rows = self.inner.query(BY_ID, &[&self.namespace, &id.as_str()]).await?;
            let Some(row) = rows.first() else { return Ok(None) };
            let hash: &[u8] = get(row, 2)?;
            let corrupt = |_| StoreError::Corrupt {
                what: format!("the hash of the token `{id}` has {} bytes, and not 32", hash.len()),
            };
            Ok(Some((TokenHash::new(hash.try_into().map_err(corrupt)?), written(row)?)))
        })
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        Reply::later(async move {
            let rows = self.inner.query(BY_HASH, &[&self.namespace, &&hash.as_bytes()[..]]).await?;
            rows.first().map(written).transpose()
        })
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_token).transpose()?;
            let after = after.as_ref().map_or("", TokenId::as_str);
            let statement =
                "SELECT version, body FROM @.tokens WHERE namespace = $1 AND id > $2 ORDER BY id LIMIT $3";
            let rows = self.inner.query(statement, &[&self.namespace, &after, &more_than(paging)]).await?;
            let tokens = rows.iter().map(written).collect::<Result<_, _>>()?;
            Ok(Page::cut(tokens, paging, |token: &Versioned<Token>| token_cursor(&token.value.id)))
        })
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        let revoke = async move |work: &mut Work<'_>| {
            let rows = work.query(BY_ID, &[&work.namespace(), &id.as_str()]).await?;
            let there = rows.first().ok_or_else(|| StoreError::NoToken { token: id.clone() })?;
            let there = written(there)?;
            if !is_to_be_revoked(&there, expect)? {
                return Ok(Some(there.version));
            }
            let after = Token { revoked_at: Some(work.now), ..there.value.clone() };
            let statement = "UPDATE @.tokens SET version = $3, body = $4 WHERE namespace = $1 AND id = $2";
            let (version, body) = (column(work.version().number()), codec::token_to_text(&after));
            work.query(statement, &[&work.namespace(), &id.as_str(), &version, &body]).await?;
            work.note(&Filed::token(id), &Change::Token { before: Some(there.value), after }).await?;
            Ok(None)
        };
        Reply::later(async move {
            let (before, version) = self.change(actor, revoke).await?;
            Ok(before.unwrap_or(version))
        })
    }
}

fn written(row: &Row) -> Result<Versioned<Token>, StoreError> {
    let version = Version::new(number(get(row, 0)?, "the version of a token")?);
    Ok(Versioned { version, value: codec::token_from_text(get(row, 1)?)? })
}
