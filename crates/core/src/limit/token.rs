//! Tokens: who may ask a server for what. The secret itself is never here, only what is known of it.
//!
//! A secret is made outside, shown once and kept by its holder. A store keeps its hash beside the token, and neither tells
//! it in listings nor in the audit.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::limit::name::{LIMIT_NAME_MAX, LimitName, Namespace, shown};
use crate::time::Stamp;

/// A token's name for people has at most so many bytes.
pub const TOKEN_NAME_MAX: usize = 256;

/// The id of a token: letters, digits, `_`, `-` and `.`, at most 64 of them. It is no secret.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(LimitName);

impl TokenId {
    /// The checked id.
    ///
    /// # Errors
    /// [`InvalidToken::Id`] says what is wrong with it.
    pub fn new(id: &str) -> Result<Self, InvalidToken> {
        match LimitName::new(id) {
            Ok(name) => Ok(Self(name)),
            Err(invalid) => Err(InvalidToken::Id { id: shown(id), why: invalid.why.to_string() }),
        }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Whether it begins with a `.`: such ids are for what a server keeps for itself where tokens are. Nobody holds such a
    /// token; it is not listed, and neither made nor revoked by hand.
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

/// The hash of a token's secret: 256 bits. Which function made it is its maker's affair, as long as it is always the same.
///
/// `==` takes as long as the first difference is deep. Whoever compares what a stranger sent looks it up by its hash, or
/// compares in constant time.
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
    /// Its first four bytes: enough to tell two apart, and no use to anybody who reads logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..4] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…")
    }
}

/// One thing that a token lets its holder do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TokenScope {
    /// Draw, and go on with what it drew.
    Acquire,
    /// Look at balances, policies, entities, usage and the audit.
    Read,
    /// Change them.
    Admin,
}

impl TokenScope {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Acquire, Self::Read, Self::Admin];

    /// What it is called.
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
        found.ok_or_else(|| InvalidToken::Scope { text: shown(text) })
    }
}

/// What a token lets its holder do: each by itself, none of them includes another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenScopes(u8);

impl TokenScopes {
    /// These.
    pub fn new(scopes: impl IntoIterator<Item = TokenScope>) -> Self {
        Self(scopes.into_iter().fold(0, |all, scope| all | 1 << scope as u8))
    }

    /// Whether it may do this.
    pub const fn has(self, scope: TokenScope) -> bool {
        self.0 & (1 << scope as u8) != 0
    }

    /// Whether it may do nothing.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them, in their order.
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
    /// As people write them: `acquire,read`.
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

/// A token that is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its id.
    pub id: TokenId,
    /// A name for people.
    pub name: String,
    /// Where it is good.
    pub namespace: Namespace,
    /// For what.
    pub scopes: TokenScopes,
    /// Until when; `None` until it is revoked.
    pub expires_at: Option<Stamp>,
}

impl NewToken {
    /// Whether it may be at `now`.
    ///
    /// # Errors
    /// [`InvalidToken`] names the field, its value and its bound.
    pub fn check(&self, now: Stamp) -> Result<(), InvalidToken> {
        let (id, name) = (&self.id, &self.name);
        if name.is_empty() || name.len() > TOKEN_NAME_MAX || name.contains(char::is_control) {
            return Err(InvalidToken::Name { id: id.clone(), bytes: name.len() });
        }
        if self.scopes.is_empty() {
            return Err(InvalidToken::NoScope { id: id.clone() });
        }
        match self.expires_at {
            Some(expires_at) if expires_at <= now => {
                Err(InvalidToken::Past { id: id.clone(), expires_at, now })
            }
            _ => Ok(()),
        }
    }
}

/// A token as a store has it. When it was last used is not kept: that would be a write with every request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// A name for people.
    pub name: String,
    /// Where it is good.
    pub namespace: Namespace,
    /// For what.
    pub scopes: TokenScopes,
    /// When it was made.
    pub created_at: Stamp,
    /// By whom.
    pub created_by: String,
    /// Until when it is good; `None` until it is revoked.
    pub expires_at: Option<Stamp>,
    /// Since when it is good no more.
    pub revoked_at: Option<Stamp>,
}

/// Whether a token is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenState {
    /// It is.
    Good,
    /// Its time is over.
    Expired,
    /// It was revoked.
    Revoked,
}

impl Token {
    /// The token that was asked for, made at `now` by `actor`.
    pub fn made(new: &NewToken, now: Stamp, actor: &str) -> Self {
        let NewToken { id, name, namespace, scopes, expires_at } = new.clone();
        let (created_at, created_by) = (now, actor.to_owned());
        Self { id, name, namespace, scopes, created_at, created_by, expires_at, revoked_at: None }
    }

    /// Whether it is good at `now`. One that was revoked stays so.
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

/// A token that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidToken {
    /// Its id is none.
    #[error("the token `{id}` {why}: an id has 1..={LIMIT_NAME_MAX} letters, digits, `_`, `-` and `.`")]
    Id {
        /// What was to be the id.
        id: String,
        /// What is wrong with it.
        why: String,
    },
    /// Its name is none.
    #[error(
        "the name of token `{id}` has {bytes} bytes, outside 1..={TOKEN_NAME_MAX} without control characters"
    )]
    Name {
        /// Whose.
        id: TokenId,
        /// Its bytes.
        bytes: usize,
    },
    /// It would be good for nothing.
    #[error("the token `{id}` has no scope: give it some of acquire, read, admin")]
    NoScope {
        /// Which token.
        id: TokenId,
    },
    /// There is no such scope.
    #[error("`{text}` is no scope of a token: there are acquire, read and admin")]
    Scope {
        /// What was written.
        text: String,
    },
    /// Its time would be over before it begins.
    #[error("the token `{id}` expires at {expires_at}, which is not after now, {now}")]
    Past {
        /// Which token.
        id: TokenId,
        /// When it was to expire.
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
            expires_at: Some(NOW + std::time::Duration::from_secs(60)),
        }
    }

    #[test]
    fn a_token_that_cannot_be_is_named_with_its_field_and_bound() {
        assert_eq!(new_token().check(NOW), Ok(()));
        let long = "x".repeat(TOKEN_NAME_MAX + 1);
        let table = [
            (
                NewToken { name: String::new(), ..new_token() },
                "the name of token `ci-7` has 0 bytes, outside 1..=256",
            ),
            (NewToken { name: long, ..new_token() }, "the name of token `ci-7` has 257 bytes"),
            (NewToken { name: "a\nb".to_owned(), ..new_token() }, "without control characters"),
            (NewToken { scopes: TokenScopes::new([]), ..new_token() }, "the token `ci-7` has no scope"),
            (NewToken { expires_at: Some(NOW), ..new_token() }, "which is not after now"),
        ];
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
    fn scopes_are_read_back_as_they_are_written_and_none_includes_another() {
        for bits in 1..8_u8 {
            let scopes = TokenScopes(bits);
            assert_eq!(scopes.to_string().parse(), Ok(scopes));
            assert_eq!(scopes.iter().collect::<TokenScopes>(), scopes);
        }
        assert_eq!(new_token().scopes.to_string(), "acquire,read");
        assert!(!TokenScopes::new([TokenScope::Admin]).has(TokenScope::Read));
        assert_eq!("read, admin".parse(), Ok(TokenScopes::new([TokenScope::Admin, TokenScope::Read])));
        let error = "read,write".parse::<TokenScopes>().unwrap_err().to_string();
        assert_eq!(error, "`write` is no scope of a token: there are acquire, read and admin");
        assert!("".parse::<TokenScopes>().is_err());
    }

    #[test]
    fn a_token_is_good_until_it_expires_or_is_revoked() {
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
    fn a_hash_is_not_shown() {
        let hash = TokenHash::new(std::array::from_fn(|byte| u8::try_from(byte).unwrap() + 0xa0));
        assert_eq!(format!("{hash:?}"), "a0a1a2a3…");
        assert_eq!(hash.as_bytes()[31], 0xbf);
    }
}
