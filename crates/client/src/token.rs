//! Tokens and their scopes.

use std::fmt;

use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::policy::Versioned;
use tidegate_core::limit::token;

use crate::policy::Version;
use crate::response::InvalidResponse;
use crate::text::{EntityId, Time};
pub use crate::text::{TokenId, TokenScopes};

wire! {
    /// Creates a token.
    #[serde(deny_unknown_fields)]
    pub struct PutToken {
        /// Its id, never used by another token.
        pub id: TokenId,
        /// Display name, at most 256 bytes; defaults to the id.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// Its scopes: some of `acquire`, `read` and `admin`, separated by commas.
        pub scopes: TokenScopes,
        /// Binds it to this entity and its descendants, without the scope `admin`; by default it is valid for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// When it expires; without it, it is valid until revoked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<Time>,
    }

    /// A stored token, without its secret.
    #[serde(deny_unknown_fields)]
    pub struct Token {
        /// Its id.
        pub id: TokenId,
        /// Display name.
        pub name: String,
        /// The namespace it is valid in.
        pub namespace: String,
        /// Its scopes.
        pub scopes: TokenScopes,
        /// The entity that it is bound to with its descendants; without it, it is valid for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// When it was created.
        pub created_at: Time,
        /// Who created it.
        pub created_by: String,
        /// When it expires; without it, it is valid until revoked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<Time>,
        /// When it was revoked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub revoked_at: Option<Time>,
        /// The version of the last change; absent for a past or newly created state.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
    }
}

secret_wire! {
    /// A new token with its secret, which is shown only here.
    #[serde(deny_unknown_fields)]
    pub struct CreatedToken {
        /// The token.
        pub token: Token,
        /// The number of administrative changes, including this one.
        pub version: Version,
        /// The credentials to send after `Bearer`.
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
            entity: token.entity.clone().map(EntityId),
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
    type Error = InvalidResponse;

    fn try_from(wire: Token) -> Result<Self, InvalidResponse> {
        Ok(Self {
            id: wire.id.0,
            name: wire.name,
            namespace: Namespace::new(&wire.namespace).map_err(InvalidResponse::of("namespace"))?,
            scopes: wire.scopes.0,
            entity: wire.entity.map(|entity| entity.0),
            created_at: wire.created_at.0,
            created_by: wire.created_by,
            expires_at: wire.expires_at.map(|at| at.0),
            revoked_at: wire.revoked_at.map(|at| at.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::{name, policy};
    use tidegate_core::time::Stamp;

    use super::*;

    #[test]
    fn token_round_trips() {
        let token = token::Token {
            id: token::TokenId::new("ci").unwrap(),
            name: "the build".to_owned(),
            namespace: Namespace::new("prod").unwrap(),
            scopes: token::TokenScopes::new([token::TokenScope::Read]),
            entity: name::EntityId::new("acme").ok(),
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
