//! The expected current state in conditional writes: `any`, `absent` or a version.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use tidegate_core::limit::policy;

/// The expected current state of a conditional write. On a mismatch the write is rejected with the current
/// version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expect {
    /// Any state.
    #[default]
    Any,
    /// Nothing stored.
    Absent,
    /// The value written at this version.
    Version(u64),
}

/// Text that is not an expectation.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("an expectation is `any`, `absent` or a version number")]
pub struct InvalidExpect;

impl From<Expect> for policy::Expect {
    fn from(expect: Expect) -> Self {
        match expect {
            Expect::Any => Self::Any,
            Expect::Absent => Self::Absent,
            Expect::Version(version) => Self::Version(policy::Version::new(version)),
        }
    }
}

impl From<policy::Expect> for Expect {
    fn from(expect: policy::Expect) -> Self {
        match expect {
            policy::Expect::Any => Self::Any,
            policy::Expect::Absent => Self::Absent,
            policy::Expect::Version(version) => Self::Version(version.number()),
        }
    }
}

impl FromStr for Expect {
    type Err = InvalidExpect;

    fn from_str(text: &str) -> Result<Self, InvalidExpect> {
        match text {
            "any" => Ok(Self::Any),
            "absent" => Ok(Self::Absent),
            number if number.bytes().all(|digit| digit.is_ascii_digit()) => {
                number.parse().map(Self::Version).map_err(|_| InvalidExpect)
            }
            _ => Err(InvalidExpect),
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Absent => f.write_str("absent"),
            Self::Version(version) => write!(f, "{version}"),
        }
    }
}

impl Serialize for Expect {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Version(version) => to.serialize_u64(*version),
            other => to.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for Expect {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ExpectVisitor;
        impl Visitor<'_> for ExpectVisitor {
            type Value = Expect;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`any`, `absent` or a version number")
            }

            fn visit_u64<E: serde::de::Error>(self, version: u64) -> Result<Expect, E> {
                Ok(Expect::Version(version))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Expect, E> {
                text.parse().map_err(E::custom)
            }
        }
        // Query strings carry versions as text, JSON carries them as numbers.
        from.deserialize_any(ExpectVisitor).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expect_round_trips() {
        for expect in [Expect::Any, Expect::Absent, Expect::Version(0), Expect::Version(u64::MAX)] {
            let text = serde_json::to_string(&expect).unwrap();
            assert_eq!(serde_json::from_str::<Expect>(&text).unwrap(), expect);
            assert_eq!(expect.to_string().parse(), Ok(expect));
        }
        for bad in ["\"\"", "\"+1\"", "\"some\"", "-1", "1.5", "null", "true"] {
            assert!(serde_json::from_str::<Expect>(bad).is_err(), "{bad}");
        }
    }
}
