//! Values that are text on the wire and validated types in Rust: names, limits, timestamps, lease ids.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use tidegate_core::limit::name;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::token;
use tidegate_core::time::Stamp;

/// Parses a value from borrowed text.
struct Text<T>(&'static str, std::marker::PhantomData<T>);

impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! text {
    ($(#[$doc:meta])* $Name:ident($Inner:ty), $expected:literal, $parse:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq)]
        pub struct $Name(pub $Inner);

        impl FromStr for $Name {
            type Err = <$Inner as TextError>::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $parse(text).map(Self)
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl From<$Inner> for $Name {
            fn from(inner: $Inner) -> Self {
                Self(inner)
            }
        }

        impl Serialize for $Name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $Name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_str(Text($expected, std::marker::PhantomData))
            }
        }
    };
}

/// Maps a type to its parse error.
pub trait TextError {
    /// The error.
    type Error;
}

impl TextError for name::EntityId {
    type Error = name::InvalidName;
}

impl TextError for name::ResourceName {
    type Error = name::InvalidName;
}

impl TextError for Limit {
    type Error = tidegate_core::limit::rule::InvalidLimit;
}

impl TextError for token::TokenId {
    type Error = token::InvalidToken;
}

impl TextError for token::TokenScopes {
    type Error = token::InvalidToken;
}

impl TextError for Stamp {
    type Error = tidegate_core::time::InvalidStamp;
}

text!(
    /// The name of an entity: 1 to 256 bytes without `#` and control characters, not beginning with `$`, and
    /// not `_default_`.
    EntityId(name::EntityId), "the name of an entity", name::EntityId::new
);
text!(
    /// The name of a resource, with the same rules as entity names.
    ResourceName(name::ResourceName), "the name of a resource", name::ResourceName::new
);
text!(
    /// A limit in text form: `name:amount/period[:burst]`, such as `tpm:100k/min:150k`, optionally followed by
    /// `,across=resources|entities|both` and `,debt=units`.
    LimitText(Limit), "a limit such as tpm:100k/min:150k", str::parse
);
text!(
    /// A timestamp in RFC 3339 format.
    Time(Stamp), "a time such as 2026-01-31T09:30:00Z", str::parse
);
text!(
    /// The id of a token: 1 to 64 letters, digits, `_`, `-` and `.`.
    TokenId(token::TokenId), "the id of a token", token::TokenId::new
);
text!(
    /// The scopes of a token: some of `acquire`, `read` and `admin`, separated by commas.
    TokenScopes(token::TokenScopes), "scopes such as acquire,read", str::parse
);

/// The minimum length of a request id in bytes; random ids are not shorter.
pub const REQUEST_ID_MIN: usize = 16;
/// The maximum length of a request id in bytes.
pub const REQUEST_ID_MAX: usize = 64;

/// An idempotency key: 16 to 64 letters, digits, `_`, `-` and `.`, such as a UUID.
///
/// Callers choose one at random for each request, and send the same one with every retry. Its scope is one
/// token, entity and resource: other tokens or subjects may use the same id.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RequestId(Box<str>);

/// Text that is not a valid request id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidRequestId {
    /// It is too short or too long.
    #[error("an id of {bytes} bytes, outside {REQUEST_ID_MIN}..={REQUEST_ID_MAX}")]
    Length {
        /// Its length.
        bytes: usize,
    },
    /// It contains an invalid character.
    #[error("the id holds {found:?} at byte {at}: it has letters, digits, `_`, `-` and `.`")]
    Character {
        /// The character.
        found: char,
        /// Its byte position.
        at: usize,
    },
}

impl RequestId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<u128> for RequestId {
    /// Formats a random number as an id.
    fn from(number: u128) -> Self {
        Self(format!("{number:032x}").into())
    }
}

impl FromStr for RequestId {
    type Err = InvalidRequestId;

    fn from_str(text: &str) -> Result<Self, InvalidRequestId> {
        if !(REQUEST_ID_MIN..=REQUEST_ID_MAX).contains(&text.len()) {
            return Err(InvalidRequestId::Length { bytes: text.len() });
        }
        let is_valid = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.');
        match text.char_indices().find(|(_, letter)| !is_valid(*letter)) {
            Some((at, found)) => Err(InvalidRequestId::Character { found, at }),
            None => Ok(Self(text.into())),
        }
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Text("an id of 16 to 64 letters and digits", std::marker::PhantomData))
    }
}

/// The name of a lease: 64 hexadecimal digits, of which the second half proves ownership.
///
/// It is a credential for the units that the lease holds: `Debug` hides the proof.
#[derive(Clone, PartialEq, Eq)]
pub struct LeaseRef {
    /// The lease id.
    pub id: u128,
    /// The proof of ownership.
    pub proof: u128,
}

/// Text that is not a valid lease name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a lease of {bytes} bytes: it has 64 hexadecimal digits")]
pub struct InvalidLeaseRef {
    /// The length of the text.
    pub bytes: usize,
}

impl FromStr for LeaseRef {
    type Err = InvalidLeaseRef;

    fn from_str(text: &str) -> Result<Self, InvalidLeaseRef> {
        let invalid = || InvalidLeaseRef { bytes: text.len() };
        // `from_str_radix` would accept a sign.
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        let half = |digits: &str| u128::from_str_radix(digits, 16).map_err(|_| invalid());
        Ok(Self { id: half(&text[..32])?, proof: half(&text[32..])? })
    }
}

impl fmt::Display for LeaseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}{:032x}", self.id, self.proof)
    }
}

impl fmt::Debug for LeaseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}…", self.id)
    }
}

impl Serialize for LeaseRef {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LeaseRef {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Text("64 hexadecimal digits", std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_checks_length_and_characters() {
        let id: RequestId = "01890a5d-ac96-774b-bcce-b302099a8057".parse().unwrap();
        assert_eq!(id.to_string().parse(), Ok(id));
        let table = [
            ("x".repeat(15), "an id of 15 bytes, outside 16..=64"),
            ("x".repeat(65), "an id of 65 bytes, outside 16..=64"),
            ("0123456789 12345".to_owned(), "the id holds ' ' at byte 10"),
            ("ö".repeat(8), "the id holds 'ö' at byte 0"),
        ];
        for (bad, sentence) in table {
            let error = bad.parse::<RequestId>().unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn lease_ref_round_trips_and_debug_hides_proof() {
        let lease = LeaseRef { id: 7, proof: u128::MAX - 1 };
        assert_eq!(lease.to_string().parse(), Ok(lease.clone()));
        assert_eq!(format!("{lease:?}"), "00000000000000000000000000000007…");
        for bad in ["", "7", &"+".repeat(64), &"g".repeat(64), &"0".repeat(65), &"ö".repeat(32)] {
            let error = bad.parse::<LeaseRef>().unwrap_err().to_string();
            assert_eq!(error, format!("a lease of {} bytes: it has 64 hexadecimal digits", bad.len()));
        }
    }

    #[test]
    fn invalid_text_error_names_problem() {
        let read = |text: &str| serde_json::from_str::<EntityId>(text).unwrap_err().to_string();
        assert!(read("\"\"").starts_with("the entity `` is empty"));
        assert!(read("5").starts_with("invalid type: integer `5`, expected the name of an entity"));
        let limit = serde_json::from_str::<LimitText>("\"tpm\"").unwrap_err().to_string();
        assert!(limit.starts_with("`tpm` is not a limit: there is no `:`"), "{limit}");
        let time = serde_json::from_str::<Time>("\"now\"").unwrap_err().to_string();
        assert!(time.starts_with("`now` is not an RFC 3339 time"), "{time}");
    }
}
