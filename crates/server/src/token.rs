//! Bearer tokens: `tg_<id>_<secret>`, with a secret of 256 bits. Only a hash of the token is stored.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tidegate_core::limit::token::{TokenHash, TokenId};

/// The number of hexadecimal digits of a secret.
const DIGITS: usize = 64;

/// A complete token. Only [`reveal`](Self::reveal) shows it.
#[derive(Clone)]
pub struct Secret {
    id: TokenId,
    hash: TokenHash,
    text: String,
}

/// Text that is not a token. The error does not contain the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a token is tg_ID_SECRET, with 64 hexadecimal digits in its secret")]
pub struct InvalidSecret;

impl Secret {
    /// Generates a token with this id.
    pub fn generate(id: &TokenId) -> Self {
        let secret: [u128; 2] = rand::random();
        Self::of(id.clone(), format!("tg_{id}_{:032x}{:032x}", secret[0], secret[1]))
    }

    fn of(id: TokenId, text: String) -> Self {
        Self { id, hash: TokenHash::new(Sha256::digest(&text).into()), text }
    }

    /// Returns its id, which is not secret.
    pub const fn id(&self) -> &TokenId {
        &self.id
    }

    /// Returns the SHA-256 hash of the whole token, which is what stores keep. A 256-bit random secret needs
    /// no slow password hash.
    pub const fn hash(&self) -> &TokenHash {
        &self.hash
    }

    /// Returns the whole token, to be shown once.
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
    fn secret_round_trips_and_debug_hides_it() {
        let token = Secret::generate(&TokenId::new("ci_7").unwrap());
        let read: Secret = token.reveal().parse().unwrap();
        assert_eq!((read.id().as_str(), read.hash()), ("ci_7", token.hash()));
        assert_eq!(format!("{token:?}"), "tg_ci_7_…");
        assert_ne!(Secret::generate(&TokenId::new("ci_7").unwrap()).hash(), token.hash());
    }

    #[test]
    fn invalid_token_text_is_rejected() {
        let digits = "0".repeat(64);
        for bad in ["", "tg_", "tg_x", "tg_x_", "x", &format!("tg__{digits}"), &format!("tg_a b_{digits}")] {
            assert!(bad.parse::<Secret>().is_err(), "{bad}");
        }
        assert!(format!("tg_x_{digits}").parse::<Secret>().is_ok());
        assert!(format!("tg_x_{digits}0").parse::<Secret>().is_err());
        assert!(format!("tg_x_{}", "A".repeat(64)).parse::<Secret>().is_err());
    }
}
