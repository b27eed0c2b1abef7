//! Tokens: who may ask a server for what.

use tidegate_core::limit::token;

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
    }

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
        }
    }
}
