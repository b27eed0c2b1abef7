//! The token: sent with each request, and shown to nobody.

use std::fmt;

use reqwest::header::HeaderValue;

/// What is shown in its place.
const HIDDEN: &str = "…";

/// A token, ready to be sent.
#[derive(Clone)]
pub(super) struct Secret {
    text: String,
    header: HeaderValue,
}

/// A token that is empty, or cannot stand in a header.
#[derive(Debug, Clone, Copy)]
pub(super) struct InvalidToken;

impl Secret {
    /// The token, unless it cannot stand in a header.
    pub(super) fn new(token: &str) -> Result<Self, InvalidToken> {
        let text = token.trim().to_owned();
        if text.is_empty() {
            return Err(InvalidToken);
        }
        let mut header = HeaderValue::from_str(&format!("Bearer {text}")).map_err(|_| InvalidToken)?;
        header.set_sensitive(true);
        Ok(Self { text, header })
    }

    /// What is sent as `Authorization`.
    pub(super) fn header(&self) -> HeaderValue {
        self.header.clone()
    }

    /// The same text without the token, for whatever a far side says: it may say what it was sent.
    pub(super) fn hide(&self, text: &str) -> String {
        text.replace(&self.text, HIDDEN)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_shown_and_what_cannot_be_sent_is_none() {
        let secret = Secret::new(" tg_ci_0123 \n").unwrap();
        assert_eq!(format!("{secret:?} {:?}", secret.header()), "… Sensitive");
        assert_eq!(secret.hide("no such token: tg_ci_0123!"), "no such token: …!");
        for bad in ["", "  ", "a\nb", "a\0b"] {
            assert!(Secret::new(bad).is_err(), "{bad:?}");
        }
    }
}
