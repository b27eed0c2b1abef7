//! API tokens of a server. Secrets are never stored, only their hashes.
//!
//! A secret is generated elsewhere and shown once to its holder. A store keeps its hash with the token, and
//! includes it neither in listings nor in the audit log.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::excerpt::excerpt;
use crate::limit::name::{EntityId, LIMIT_NAME_MAX, LimitName, Namespace, composed_text, hidden_letter};
use crate::time::Stamp;

/// The maximum length of a token's display name, in bytes.
pub const TOKEN_NAME_MAX: usize = 256;

/// The id of a token: up to 64 letters, digits, `_`, `-` and `.`. It is not secret.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(LimitName);

impl TokenId {
    /// Validates an id.
    ///
    /// # Errors
    /// [`InvalidToken::Id`] with the reason.
    pub fn new(id: &str) -> Result<Self, InvalidToken> {
        match LimitName::new(id) {
            Ok(name) => Ok(Self(name)),
            Err(invalid) => Err(InvalidToken::Id { id: excerpt(id), why: invalid.why.to_string() }),
        }
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Whether the id begins with a `.`. A server stores its own records under such ids; they are not listed
    /// and cannot be created or revoked through the API.
    pub fn is_reserved(&self) -> bool {
        self.as_str().starts_with('.')
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// The hash of a token's secret: 256 bits. The caller chooses the hash function and must not change it.
///
/// `==` does not take constant time. To check an untrusted secret, look the token up by its hash or compare
/// in constant time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of these bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for TokenHash {
    /// Writes the first four bytes: enough to distinguish hashes, useless to a reader of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..4] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…")
    }
}

/// A permission of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TokenScope {
    /// Draw, and continue the leases.
    Acquire,
    /// Read balances, policies, entities, usage and the audit log.
    Read,
    /// Change policies, entities and tokens.
    Admin,
}

impl TokenScope {
    /// All scopes.
    pub const ALL: [Self; 3] = [Self::Acquire, Self::Read, Self::Admin];

    /// The scope's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Read => "read",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for TokenScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for TokenScope {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let found = Self::ALL.into_iter().find(|scope| scope.as_str() == text);
        found.ok_or_else(|| InvalidToken::Scope { text: excerpt(text) })
    }
}

/// The scopes of a token. No scope includes another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenScopes(u8);

impl TokenScopes {
    /// A set of these scopes.
    pub fn new(scopes: impl IntoIterator<Item = TokenScope>) -> Self {
        Self(scopes.into_iter().fold(0, |all, scope| all | 1 << scope as u8))
    }

    /// Whether the set includes this scope.
    pub const fn has(self, scope: TokenScope) -> bool {
        self.0 & (1 << scope as u8) != 0
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The scopes, in order.
    pub fn iter(self) -> impl Iterator<Item = TokenScope> {
        TokenScope::ALL.into_iter().filter(move |scope| self.has(*scope))
    }
}

impl FromIterator<TokenScope> for TokenScopes {
    fn from_iter<I: IntoIterator<Item = TokenScope>>(scopes: I) -> Self {
        Self::new(scopes)
    }
}

impl fmt::Display for TokenScopes {
    /// Writes the names separated by commas: `acquire,read`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(TokenScope::as_str).collect();
        f.pad(&names.join(","))
    }
}

impl fmt::Debug for TokenScopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for TokenScopes {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        text.split(',').map(|scope| scope.trim().parse()).collect()
    }
}

/// A token to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its id.
    pub id: TokenId,
    /// The display name.
    pub name: String,
    /// The namespace it is valid for.
    pub namespace: Namespace,
    /// Its scopes.
    pub scopes: TokenScopes,
    /// The entity that it is bound to with its descendants; `None` for all entities.
    pub entity: Option<EntityId>,
    /// When it expires; `None` for never.
    pub expires_at: Option<Stamp>,
}

impl NewToken {
    /// Checks that the token can be created at `now`.
    ///
    /// # Errors
    /// [`InvalidToken`] names the field, its value and its bound.
    pub fn check(&self, now: Stamp) -> Result<(), InvalidToken> {
        let (id, name) = (&self.id, &self.name);
        if name.is_empty() || name.len() > TOKEN_NAME_MAX || hidden_letter(name).is_some() {
            return Err(InvalidToken::Name { id: id.clone(), bytes: name.len() });
        }
        if self.scopes.is_empty() {
            return Err(InvalidToken::NoScope { id: id.clone() });
        }
        if let Some(entity) = self.entity.clone().filter(|_| self.scopes.has(TokenScope::Admin)) {
            return Err(InvalidToken::BoundAdmin { id: id.clone(), entity });
        }
        match self.expires_at {
            Some(expires_at) if expires_at <= now => {
                Err(InvalidToken::Past { id: id.clone(), expires_at, now })
            }
            _ => Ok(()),
        }
    }
}

/// A stored token. The time of last use is not stored, which would take a write per request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// The display name.
    pub name: String,
    /// The namespace it is valid for.
    pub namespace: Namespace,
    /// Its scopes.
    pub scopes: TokenScopes,
    /// The entity that it is bound to with its descendants; `None` for all entities.
    pub entity: Option<EntityId>,
    /// When it was created.
    pub created_at: Stamp,
    /// Who created it.
    pub created_by: String,
    /// When it expires; `None` for never.
    pub expires_at: Option<Stamp>,
    /// When it was revoked.
    pub revoked_at: Option<Stamp>,
}

/// Whether a token is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenState {
    /// It is valid.
    Good,
    /// It has expired.
    Expired,
    /// It was revoked.
    Revoked,
}

impl Token {
    /// The requested token, created at `now` by `actor`.
    pub fn made(new: &NewToken, now: Stamp, actor: &str) -> Self {
        let NewToken { id, name, namespace, scopes, entity, expires_at } = new.clone();
        let (created_at, created_by, name) = (now, actor.to_owned(), composed_text(&name));
        Self { id, name, namespace, scopes, entity, created_at, created_by, expires_at, revoked_at: None }
    }

    /// The state at `now`. A revoked token stays revoked.
    pub fn state(&self, now: Stamp) -> TokenState {
        if self.revoked_at.is_some() {
            TokenState::Revoked
        } else if self.expires_at.is_some_and(|expires_at| expires_at <= now) {
            TokenState::Expired
        } else {
            TokenState::Good
        }
    }
}

/// The error for an invalid token.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidToken {
    /// Its id is invalid.
    #[error("the token `{id}` {why}: an id has 1..={LIMIT_NAME_MAX} letters, digits, `_`, `-` and `.`")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it.
        why: String,
    },
    /// Its name is invalid.
    #[error(
        "the name of token `{id}` has {bytes} bytes, outside 1..={TOKEN_NAME_MAX} without control and invisible characters"
    )]
    Name {
        /// The token.
        id: TokenId,
        /// Its length in bytes.
        bytes: usize,
    },
    /// It has no scope.
    #[error("the token `{id}` has no scope: give it some of acquire, read, admin")]
    NoScope {
        /// The token.
        id: TokenId,
    },
    /// It is bound to an entity, and would change those of others.
    #[error("the token `{id}` is bound to the entity `{entity}`, so it cannot have the scope admin")]
    BoundAdmin {
        /// The token.
        id: TokenId,
        /// The entity.
        entity: EntityId,
    },
    /// A scope is unknown.
    #[error("`{text}` is not a token scope: expected acquire, read or admin")]
    Scope {
        /// The text.
        text: String,
    },
    /// It would expire before it is created.
    #[error("the token `{id}` expires at {expires_at}, which is not after now, {now}")]
    Past {
        /// The token.
        id: TokenId,
        /// The requested expiry.
        expires_at: Stamp,
        /// The time.
        now: Stamp,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Stamp = Stamp::from_secs(1_800_000_000);

    fn new_token() -> NewToken {
        NewToken {
            id: TokenId::new("ci-7").expect("valid"),
            name: "the build".to_owned(),
            namespace: Namespace::new("default").expect("valid"),
            scopes: TokenScopes::new([TokenScope::Read, TokenScope::Acquire]),
            entity: None,
            expires_at: Some(NOW + std::time::Duration::from_secs(60)),
        }
    }

    #[test]
    fn invalid_token_error_has_field_and_bound() {
        assert_eq!(new_token().check(NOW), Ok(()));
        let long = "x".repeat(TOKEN_NAME_MAX + 1);
        let table = [
            (
                NewToken { name: String::new(), ..new_token() },
                "the name of token `ci-7` has 0 bytes, outside 1..=256",
            ),
            (NewToken { name: long, ..new_token() }, "the name of token `ci-7` has 257 bytes"),
            (NewToken { name: "a\nb".to_owned(), ..new_token() }, "without control and invisible characters"),
            (
                NewToken { name: "a\u{202e}b".to_owned(), ..new_token() },
                "without control and invisible characters",
            ),
            (NewToken { scopes: TokenScopes::new([]), ..new_token() }, "the token `ci-7` has no scope"),
            (NewToken { expires_at: Some(NOW), ..new_token() }, "which is not after now"),
        ];
        let entity = EntityId::new("acme").ok();
        let admin = NewToken { entity, scopes: TokenScopes::new(TokenScope::ALL), ..new_token() };
        let sentence = "the token `ci-7` is bound to the entity `acme`, so it cannot have the scope admin";
        assert_eq!(admin.check(NOW).unwrap_err().to_string(), sentence);
        for (token, sentence) in table {
            let error = token.check(NOW).unwrap_err().to_string();
            assert!(error.contains(sentence), "{error}");
        }
        for bad in ["", "a b", "a#b", "$x", "ö", &"x".repeat(65)] {
            let error = TokenId::new(bad).unwrap_err().to_string();
            assert!(error.ends_with("an id has 1..=64 letters, digits, `_`, `-` and `.`"), "{error}");
        }
    }

    #[test]
    fn scopes_roundtrip_and_include_no_other() {
        for bits in 1..8_u8 {
            let scopes = TokenScopes(bits);
            assert_eq!(scopes.to_string().parse(), Ok(scopes));
            assert_eq!(scopes.iter().collect::<TokenScopes>(), scopes);
        }
        assert_eq!(new_token().scopes.to_string(), "acquire,read");
        assert!(!TokenScopes::new([TokenScope::Admin]).has(TokenScope::Read));
        assert_eq!("read, admin".parse(), Ok(TokenScopes::new([TokenScope::Admin, TokenScope::Read])));
        let error = "read,write".parse::<TokenScopes>().unwrap_err().to_string();
        assert_eq!(error, "`write` is not a token scope: expected acquire, read or admin");
        assert!("".parse::<TokenScopes>().is_err());
    }

    #[test]
    fn token_is_valid_until_expiry_or_revocation() {
        let token = Token::made(&new_token(), NOW, "ops");
        let expires_at = NOW + std::time::Duration::from_secs(60);
        assert_eq!((token.created_at, token.created_by.as_str()), (NOW, "ops"));
        let before = Stamp::from_micros(expires_at.as_micros() - 1);
        assert_eq!((token.state(before), token.state(expires_at)), (TokenState::Good, TokenState::Expired));
        let revoked = Token { revoked_at: Some(NOW), ..token };
        assert_eq!(
            (revoked.state(NOW), revoked.state(Stamp::MAX)),
            (TokenState::Revoked, TokenState::Revoked)
        );
        let lasting = Token { expires_at: None, revoked_at: None, ..revoked };
        assert_eq!(lasting.state(Stamp::MAX), TokenState::Good);
    }

    #[test]
    fn debug_hides_most_of_the_hash() {
        let hash = TokenHash::new(std::array::from_fn(|byte| u8::try_from(byte).unwrap() + 0xa0));
        assert_eq!(format!("{hash:?}"), "a0a1a2a3…");
        assert_eq!(hash.as_bytes()[31], 0xbf);
    }
}
