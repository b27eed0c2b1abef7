//! Tokens: who may ask a server for what.

use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Tokens by id, and by the hash of their secret.
///
/// # The contract
/// A store keeps the hash of a secret, never the secret, and tells it only to those who ask for one token by its id. Neither
/// listings nor the audit have it. A token is good for the namespace it names, which need not be the one whose store keeps
/// it: a server keeps all of its tokens in one place.
///
/// Changes raise the namespace's version and are audited as those of [`Policies`](crate::Policies) are, filed under
/// `$TOKEN:id`. A token is never removed: what was revoked stays, and its id is never another's.
pub trait Tokens {
    /// Makes a token, by the store's clock. An id that is taken is refused with its version
    /// ([`Stale`](crate::StoreError::Stale)), and so is a hash that another token has ([`Invalid`](crate::StoreError::Invalid)).
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>>;

    /// A token and the hash of its secret, if it is there: good, expired or revoked. Whoever compares the hash with another
    /// does so in constant time.
    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>>;

    /// The token whose secret has this hash, if there is one: good, expired or revoked.
    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>>;

    /// All tokens, by id.
    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>>;

    /// Makes a token good no more, and answers the version at which it was. To revoke it again is no error and changes
    /// nothing, whatever is expected. One that is not there is [unknown](crate::StoreError::NoToken).
    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version>;
}

/// An id that is taken.
pub(crate) fn is_taken(id: &TokenId, current: Version) -> StoreError {
    StoreError::Stale { what: format!("the token `{id}`"), current: Some(current) }
}

/// A secret that is another token's: which one is not told.
pub(crate) fn is_anothers(id: &TokenId) -> StoreError {
    StoreError::Invalid { what: format!("the secret of the token `{id}` is that of another: make a new one") }
}

/// Whether a token is to be revoked: not if it was already.
///
/// # Errors
/// [`StoreError::Stale`] for an expectation that does not hold.
pub(crate) fn is_to_be_revoked(there: &Versioned<Token>, expect: Expect) -> Result<bool, StoreError> {
    if there.value.revoked_at.is_some() {
        return Ok(false);
    }
    if expect.holds(Some(there.version)) { Ok(true) } else { Err(is_taken(&there.value.id, there.version)) }
}
