//! What a writer believes to be there: `any`, `absent`, or a version.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use tidegate_core::limit::policy;

/// What a writer believes to be there. A belief that is wrong is refused, with what is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expect {
    /// Whatever it is.
    #[default]
    Any,
    /// Nothing.
    Absent,
    /// What was written at this version.
    Version(u64),
}

/// Text that says nothing that can be believed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("an expectation is `any`, `absent` or the number of a version")]
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
        struct Belief;
        impl Visitor<'_> for Belief {
            type Value = Expect;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`any`, `absent` or the number of a version")
            }

            fn visit_u64<E: serde::de::Error>(self, version: u64) -> Result<Expect, E> {
                Ok(Expect::Version(version))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Expect, E> {
                text.parse().map_err(E::custom)
            }
        }
        // In an address all is text, and behind it a number stays text.
        from.deserialize_any(Belief).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_belief_is_read_back_as_it_is_written() {
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
