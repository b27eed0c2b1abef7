//! Values that are text on the wire and checked types inside: names, limits, times, lease ids.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use tidegate_core::limit::name;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::token;
use tidegate_core::time::Stamp;

/// Reads a value from text without a copy of the text.
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

/// What is said of text that is no such value.
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
    /// Who uses: 1 to 256 bytes without `#`, control characters, a leading `$`, and not `_default_`.
    EntityId(name::EntityId), "the name of an entity", name::EntityId::new
);
text!(
    /// What is used: named as an entity is.
    ResourceName(name::ResourceName), "the name of a resource", name::ResourceName::new
);
text!(
    /// A limit as people write it: `name:amount/period[:burst]`, such as `tpm:100k/min:150k`.
    LimitText(Limit), "a limit such as tpm:100k/min:150k", str::parse
);
text!(
    /// A point in time as RFC 3339 writes it.
    Time(Stamp), "a time such as 2026-01-31T09:30:00Z", str::parse
);
text!(
    /// The id of a token: 1 to 64 letters, digits, `_`, `-` and `.`.
    TokenId(token::TokenId), "the id of a token", token::TokenId::new
);
text!(
    /// What a token is good for: some of `acquire`, `read` and `admin`, parted by commas.
    TokenScopes(token::TokenScopes), "scopes such as acquire,read", str::parse
);

/// A request's id is at least so many bytes: one that is chosen by chance is not shorter.
pub const REQUEST_ID_MIN: usize = 16;
/// A request's id is at most so many bytes.
pub const REQUEST_ID_MAX: usize = 64;

/// What a caller calls a request, so that to send it again does no harm: 16 to 64 letters, digits, `_`, `-` and `.`, such as a
/// UUID.
///
/// It is chosen by chance, once for each request, and sent again with the same request until there is an answer. It stands
/// for a request of one token for one entity and resource: others may use the same one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RequestId(Box<str>);

/// Text that is no id of a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidRequestId {
    /// It is too short or too long.
    #[error("an id of {bytes} bytes, outside {REQUEST_ID_MIN}..={REQUEST_ID_MAX}")]
    Length {
        /// How long it is.
        bytes: usize,
    },
    /// It holds what it may not.
    #[error("the id holds {found:?} at byte {at}: it has letters, digits, `_`, `-` and `.`")]
    Character {
        /// What.
        found: char,
        /// Where.
        at: usize,
    },
}

impl RequestId {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<u128> for RequestId {
    /// The id of this number, which is chosen by chance.
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
        let is_fine = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.');
        match text.char_indices().find(|(_, letter)| !is_fine(*letter)) {
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

/// A lease as its holder names it: 64 hexadecimal digits, of which the second half proves whose it is.
///
/// It is worth as much as what it holds: it is not shown in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct LeaseRef {
    /// The lease's own id.
    pub id: u128,
    /// The proof that it was given to whoever shows it.
    pub proof: u128,
}

/// Text that names no lease.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a lease of {bytes} bytes: it has 64 hexadecimal digits")]
pub struct InvalidLeaseRef {
    /// How long the text is.
    pub bytes: usize,
}

impl FromStr for LeaseRef {
    type Err = InvalidLeaseRef;

    fn from_str(text: &str) -> Result<Self, InvalidLeaseRef> {
        let invalid = || InvalidLeaseRef { bytes: text.len() };
        // A sign is read as part of a number, and is no digit.
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
    fn an_id_is_long_enough_to_be_chosen_by_chance_and_short_enough_to_be_kept() {
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
    fn a_lease_is_read_back_as_it_is_written_and_its_proof_is_not_shown() {
        let lease = LeaseRef { id: 7, proof: u128::MAX - 1 };
        assert_eq!(lease.to_string().parse(), Ok(lease.clone()));
        assert_eq!(format!("{lease:?}"), "00000000000000000000000000000007…");
        for bad in ["", "7", &"+".repeat(64), &"g".repeat(64), &"0".repeat(65), &"ö".repeat(32)] {
            let error = bad.parse::<LeaseRef>().unwrap_err().to_string();
            assert_eq!(error, format!("a lease of {} bytes: it has 64 hexadecimal digits", bad.len()));
        }
    }

    #[test]
    fn text_that_is_no_such_value_is_refused_with_what_is_wrong() {
        let read = |text: &str| serde_json::from_str::<EntityId>(text).unwrap_err().to_string();
        assert!(read("\"\"").starts_with("the entity `` is empty"));
        assert!(read("5").starts_with("invalid type: integer `5`, expected the name of an entity"));
        let limit = serde_json::from_str::<LimitText>("\"tpm\"").unwrap_err().to_string();
        assert!(limit.starts_with("`tpm` is no limit: there is no `:`"), "{limit}");
        let time = serde_json::from_str::<Time>("\"now\"").unwrap_err().to_string();
        assert!(time.starts_with("`now` is no time"), "{time}");
    }
}
