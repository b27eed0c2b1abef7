//! The API tokens of a store.

use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// Tokens by id, and by the hash of their secret.
///
/// # The contract
/// A store keeps the hash of a secret, never the secret. It returns the hash only with a single token by its
/// id, neither in listings nor in the audit log. A token is valid for the namespace it names, which may
/// differ from the one that stores it: a server keeps all of its tokens in one namespace.
///
/// Changes raise the namespace's version and are audited as those of [`Policies`](crate::Policies) are, filed
/// under `$TOKEN:id`. A token is never removed: a revoked one stays, and its id is never reused.
pub trait Tokens {
    /// Creates a token, by the store's clock. An id that exists is refused with its version
    /// ([`Stale`](crate::StoreError::Stale)), and so is the hash of another token
    /// ([`Invalid`](crate::StoreError::Invalid)).
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>>;

    /// A token and the hash of its secret, if it exists: valid, expired or revoked. Compare the hash in
    /// constant time.
    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>>;

    /// The token whose secret has this hash, if it exists: valid, expired or revoked.
    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>>;

    /// All tokens, by id.
    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>>;

    /// Revokes a token, and returns the version of the revocation. Revoking it again is no error and changes
    /// nothing, whatever version is expected. A token that does not exist is
    /// [unknown](crate::StoreError::NoToken).
    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version>;
}

/// The error for an id that exists.
pub(crate) fn is_taken(id: &TokenId, current: Version) -> StoreError {
    StoreError::Stale { what: format!("the token `{id}`"), current: Some(current) }
}

/// The error for the secret of another token, without its id.
pub(crate) fn is_anothers(id: &TokenId) -> StoreError {
    StoreError::Invalid {
        what: format!("the secret of the token `{id}` is that of another token: create a new one"),
    }
}

/// Whether a token has to be revoked: not if it is revoked already.
///
/// # Errors
/// [`StoreError::Stale`] for an expectation that does not hold.
pub(crate) fn is_to_be_revoked(token: &Versioned<Token>, expect: Expect) -> Result<bool, StoreError> {
    if token.value.revoked_at.is_some() {
        return Ok(false);
    }
    if expect.holds(Some(token.version)) { Ok(true) } else { Err(is_taken(&token.value.id, token.version)) }
}
