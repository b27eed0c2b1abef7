//! Tokens: who may ask a server for what.

use std::fmt;

use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::policy::Versioned;
use tidegate_core::limit::token;

use crate::answer::InvalidAnswer;
use crate::policy::Version;
use crate::text::Time;
pub use crate::text::{TokenId, TokenScopes};

wire! {
    /// Makes a token.
    #[serde(deny_unknown_fields)]
    pub struct PutToken {
        /// Its id, which no other token has or had.
        pub id: TokenId,
        /// A name for people, at most 256 bytes; by default its id.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// What it is good for: some of `acquire`, `read` and `admin`, parted by commas.
        pub scopes: TokenScopes,
        /// Until when it is good; without it, until it is revoked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<Time>,
    }

    /// A token as a store has it. Its secret is not there.
    #[serde(deny_unknown_fields)]
    pub struct Token {
        /// Its id.
        pub id: TokenId,
        /// A name for people.
        pub name: String,
        /// Where it is good.
        pub namespace: String,
        /// What it is good for.
        pub scopes: TokenScopes,
        /// When it was made.
        pub created_at: Time,
        /// By whom.
        pub created_by: String,
        /// Until when it is good; without it, until it is revoked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<Time>,
        /// Since when it is good no more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub revoked_at: Option<Time>,
        /// When it was last changed; without it, it is a state of the past, or of just now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
    }
}

secret_wire! {
    /// A token that was made, with its secret: it is told here, and never again.
    #[serde(deny_unknown_fields)]
    pub struct CreatedToken {
        /// The token.
        pub token: Token,
        /// The count of administrative changes, this one included.
        pub version: Version,
        /// What its holder sends behind `Bearer`.
        pub secret: String,
    }
}

impl fmt::Debug for CreatedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreatedToken")
            .field("token", &self.token)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl From<&token::Token> for Token {
    fn from(token: &token::Token) -> Self {
        Self {
            id: token.id.clone().into(),
            name: token.name.clone(),
            namespace: token.namespace.to_string(),
            scopes: token.scopes.into(),
            created_at: token.created_at.into(),
            created_by: token.created_by.clone(),
            expires_at: token.expires_at.map(Time),
            revoked_at: token.revoked_at.map(Time),
            version: None,
        }
    }
}

impl From<&Versioned<token::Token>> for Token {
    fn from(token: &Versioned<token::Token>) -> Self {
        Self { version: Some(token.version.number()), ..Self::from(&token.value) }
    }
}

impl TryFrom<Token> for token::Token {
    type Error = InvalidAnswer;

    fn try_from(wire: Token) -> Result<Self, InvalidAnswer> {
        Ok(Self {
            id: wire.id.0,
            name: wire.name,
            namespace: Namespace::new(&wire.namespace).map_err(InvalidAnswer::of("namespace"))?,
            scopes: wire.scopes.0,
            created_at: wire.created_at.0,
            created_by: wire.created_by,
            expires_at: wire.expires_at.map(|at| at.0),
            revoked_at: wire.revoked_at.map(|at| at.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::policy;
    use tidegate_core::time::Stamp;

    use super::*;

    #[test]
    fn a_token_is_read_back_as_it_was_written() {
        let token = token::Token {
            id: token::TokenId::new("ci").unwrap(),
            name: "the build".to_owned(),
            namespace: Namespace::new("prod").unwrap(),
            scopes: token::TokenScopes::new([token::TokenScope::Read]),
            created_at: Stamp::from_secs(5),
            created_by: "ops".to_owned(),
            expires_at: Some(Stamp::from_secs(9)),
            revoked_at: None,
        };
        let versioned = Versioned { version: policy::Version::new(4), value: token.clone() };
        let wire = Token::from(&versioned);
        assert_eq!((wire.version, Token::from(&token).version), (Some(4), None));
        assert_eq!(token::Token::try_from(wire.clone()).unwrap(), token);
        let elsewhere = Token { namespace: "a#b".to_owned(), ..wire };
        assert_eq!(token::Token::try_from(elsewhere).unwrap_err().field, "namespace");
    }
}
