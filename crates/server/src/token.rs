//! Bearer tokens: `tg_<id>_<secret>`. The secret has 256 bits; what is kept of it is a hash.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tidegate_core::limit::token::{TokenHash, TokenId};

/// How many hexadecimal digits a secret has.
const DIGITS: usize = 64;

/// A token as its holder has it. It is shown once, by [`reveal`](Self::reveal), and by nothing else.
#[derive(Clone)]
pub struct Secret {
    id: TokenId,
    hash: TokenHash,
    text: String,
}

/// Text that is no token. What it was is not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a token is tg_ID_SECRET, with 64 hexadecimal digits in its secret")]
pub struct InvalidSecret;

impl Secret {
    /// A new token with this id.
    pub fn generate(id: &TokenId) -> Self {
        let secret: [u128; 2] = rand::random();
        Self::of(id.clone(), format!("tg_{id}_{:032x}{:032x}", secret[0], secret[1]))
    }

    fn of(id: TokenId, text: String) -> Self {
        Self { id, hash: TokenHash::new(Sha256::digest(&text).into()), text }
    }

    /// Its id, which is no secret.
    pub const fn id(&self) -> &TokenId {
        &self.id
    }

    /// What is kept of it: the SHA-256 of the whole text. To guess a secret of 256 bits is as hard as to find its hash, so
    /// that nothing slower is needed.
    pub const fn hash(&self) -> &TokenHash {
        &self.hash
    }

    /// The whole token, to be shown once.
    pub fn reveal(&self) -> &str {
        &self.text
    }
}

impl FromStr for Secret {
    type Err = InvalidSecret;

    fn from_str(text: &str) -> Result<Self, InvalidSecret> {
        let (id, secret) =
            text.strip_prefix("tg_").and_then(|rest| rest.rsplit_once('_')).ok_or(InvalidSecret)?;
        let is_hex = secret.len() == DIGITS
            && secret.bytes().all(|digit| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit));
        match TokenId::new(id) {
            Ok(id) if is_hex => Ok(Self::of(id, text.to_owned())),
            _ => Err(InvalidSecret),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tg_{}_…", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_back_as_it_was_shown_and_is_not_shown_otherwise() {
        let token = Secret::generate(&TokenId::new("ci_7").unwrap());
        let read: Secret = token.reveal().parse().unwrap();
        assert_eq!((read.id().as_str(), read.hash()), ("ci_7", token.hash()));
        assert_eq!(format!("{token:?}"), "tg_ci_7_…");
        assert_ne!(Secret::generate(&TokenId::new("ci_7").unwrap()).hash(), token.hash());
    }

    #[test]
    fn text_that_is_no_token_is_refused() {
        let digits = "0".repeat(64);
        for bad in ["", "tg_", "tg_x", "tg_x_", "x", &format!("tg__{digits}"), &format!("tg_a b_{digits}")] {
            assert!(bad.parse::<Secret>().is_err(), "{bad}");
        }
        assert!(format!("tg_x_{digits}").parse::<Secret>().is_ok());
        assert!(format!("tg_x_{digits}0").parse::<Secret>().is_err());
        assert!(format!("tg_x_{}", "A".repeat(64)).parse::<Secret>().is_err());
    }
}
