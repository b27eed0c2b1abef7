//! Tokens of the memory store, under the lock of what administrators change.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use super::{Memory, Space};
use crate::cursor::{parse_token, token_cursor};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::policies::check_actor;
use crate::reply::Reply;
use crate::sync::lock;
use crate::tokens::{Tokens, is_anothers, is_taken, is_to_be_revoked};

/// A store holds at most so many tokens, revoked ones included.
const TOKENS_MAX: usize = 1 << 17;

/// Tokens by id, and by hash.
#[derive(Default)]
pub(super) struct Kept {
    by_id: BTreeMap<TokenId, (TokenHash, Versioned<Token>)>,
    by_hash: BTreeMap<TokenHash, TokenId>,
}

impl Tokens for Memory {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        Reply::ready(self.space.create_token(token, hash, actor))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        Reply::ready(Ok(lock(&self.space.admin).tokens.by_id.get(id).cloned()))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        let admin = lock(&self.space.admin);
        let found = admin.tokens.by_hash.get(hash).and_then(|id| admin.tokens.by_id.get(id));
        Reply::ready(Ok(found.map(|(_, token)| token.clone())))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        Reply::ready(lock(&self.space.admin).tokens.page(paging))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::ready(self.space.revoke_token(id, expect, actor))
    }
}

impl Space {
    fn create_token(
        &self,
        token: &NewToken,
        hash: &TokenHash,
        actor: &str,
    ) -> Result<Versioned<Token>, StoreError> {
        check_actor(actor)?;
        let now = self.clock.now();
        token.check(now)?;
        let mut admin = lock(&self.admin);
        if let Some((_, there)) = admin.tokens.by_id.get(&token.id) {
            return Err(is_taken(&token.id, there.version));
        }
        if admin.tokens.by_hash.contains_key(hash) {
            return Err(is_anothers(&token.id));
        }
        if admin.tokens.by_id.len() >= TOKENS_MAX {
            return Err(StoreError::Full { what: "tokens", max: TOKENS_MAX as u64 });
        }
        let made = Token::made(token, now, actor);
        let version = admin.next_version();
        let written = Versioned { version, value: made.clone() };
        admin.tokens.by_id.insert(made.id.clone(), (*hash, written.clone()));
        admin.tokens.by_hash.insert(*hash, made.id.clone());
        let change = Change::Token { before: None, after: made };
        admin.note(Filed::token(&token.id), change, actor, now);
        self.publish(&admin, now);
        Ok(written)
    }

    fn revoke_token(&self, id: &TokenId, expect: Expect, actor: &str) -> Result<Version, StoreError> {
        check_actor(actor)?;
        let now = self.clock.now();
        let mut admin = lock(&self.admin);
        let Some((_, there)) = admin.tokens.by_id.get(id).cloned() else {
            return Err(StoreError::NoToken { token: id.clone() });
        };
        if !is_to_be_revoked(&there, expect)? {
            return Ok(there.version);
        }
        let version = admin.next_version();
        let after = Token { revoked_at: Some(now), ..there.value.clone() };
        if let Some((_, kept)) = admin.tokens.by_id.get_mut(id) {
            *kept = Versioned { version, value: after.clone() };
        }
        let change = Change::Token { before: Some(there.value), after };
        admin.note(Filed::token(id), change, actor, now);
        Ok(self.publish(&admin, now))
    }
}

impl Kept {
    fn page(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, StoreError> {
        let after = paging.cursor().map(parse_token).transpose()?;
        let from = after.as_ref().map_or(Unbounded, Excluded);
        let found = self.by_id.range::<TokenId, _>((from, Unbounded)).take(paging.max() + 1);
        let found = found.map(|(_, (_, token))| token.clone()).collect();
        Ok(Page::cut(found, paging, |token| token_cursor(&token.value.id)))
    }
}
