//! The bearer token: sent with each request, and hidden from `Debug` and errors.

use std::fmt;

use reqwest::header::HeaderValue;

/// The replacement for the token in texts.
const REDACTED: &str = "…";

/// A token as header value.
#[derive(Clone)]
pub(super) struct Secret {
    text: String,
    header: HeaderValue,
}

/// A token that is empty or not a valid header value.
#[derive(Debug, Clone, Copy)]
pub(super) struct InvalidToken;

impl Secret {
    /// Validates a token.
    pub(super) fn new(token: &str) -> Result<Self, InvalidToken> {
        let text = token.trim().to_owned();
        if text.is_empty() {
            return Err(InvalidToken);
        }
        let mut header = HeaderValue::from_str(&format!("Bearer {text}")).map_err(|_| InvalidToken)?;
        header.set_sensitive(true);
        Ok(Self { text, header })
    }

    /// The value of the `Authorization` header.
    pub(super) fn header(&self) -> HeaderValue {
        self.header.clone()
    }

    /// Replaces the token in a text of the server, which may echo it.
    pub(super) fn redact(&self, text: &str) -> String {
        text.replace(&self.text, REDACTED)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_hidden_and_invalid_tokens_are_rejected() {
        let secret = Secret::new(" tg_ci_0123 \n").unwrap();
        assert_eq!(format!("{secret:?} {:?}", secret.header()), "… Sensitive");
        assert_eq!(secret.redact("no such token: tg_ci_0123!"), "no such token: …!");
        for bad in ["", "  ", "a\nb", "a\0b"] {
            assert!(Secret::new(bad).is_err(), "{bad:?}");
        }
    }
}
