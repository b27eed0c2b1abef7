//! Amounts by limit name. Deserializing rejects duplicate names and bounds the number of limits.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tidegate_core::limit::cascade::UNITS_MAX;
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::name::{InvalidName, LimitName};
use tidegate_core::limit::policy::LIMITS_MAX;

/// The maximum number of limits that a cost can name.
pub const AMOUNTS_MAX: usize = LIMITS_MAX * LEVELS_MAX;

/// Amounts by limit name, in insertion order: `{"rpm": 1, "tpm": 800}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Amounts<T>(Vec<(LimitName, T)>);

/// Units of each limit.
pub type Cost = Amounts<u64>;
/// Signed changes in units of each limit.
pub type Changes = Amounts<i64>;

impl<T> Default for Amounts<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Copy> Amounts<T> {
    /// Creates amounts; the first amount of a duplicate name wins.
    pub fn new(amounts: impl IntoIterator<Item = (LimitName, T)>) -> Self {
        let mut all = Self::default();
        for (name, amount) in amounts {
            if all.get(name.as_str()).is_none() {
                all.0.push((name, amount));
            }
        }
        all
    }

    /// Creates amounts from unchecked names.
    ///
    /// # Errors
    /// [`InvalidName`] for an invalid limit name.
    pub fn of<'a>(amounts: impl IntoIterator<Item = (&'a str, T)>) -> Result<Self, InvalidName> {
        let named = amounts.into_iter().map(|(name, amount)| Ok((LimitName::new(name)?, amount)));
        named.collect::<Result<Vec<_>, _>>().map(Self::new)
    }

    /// Returns the amount of a limit.
    pub fn get(&self, name: &str) -> Option<T> {
        self.0.iter().find(|(other, _)| other.as_str() == name).map(|(_, amount)| *amount)
    }

    /// Returns the names and amounts as pairs.
    pub fn pairs(&self) -> Vec<(&str, T)> {
        self.0.iter().map(|(name, amount)| (name.as_str(), *amount)).collect()
    }

    /// Whether there are no amounts.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Serialize> Serialize for Amounts<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, amount)| (name.as_str(), amount)))
    }
}

impl<'de, T: Deserialize<'de> + Copy + Into<i128>> Deserialize<'de> for Amounts<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Map(PhantomData))
    }
}

/// A limit name as a map key.
struct Key(LimitName);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a limit")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Key, E> {
                LimitName::new(name).map(Key).map_err(E::custom)
            }
        }
        from.deserialize_str(Name)
    }
}

struct Map<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Copy + Into<i128>> Visitor<'de> for Map<T> {
    type Value = Amounts<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("amounts by limit name, such as {\"rpm\": 1}")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Amounts<T>, M::Error> {
        let mut amounts = Amounts::default();
        while let Some((Key(name), amount)) = map.next_entry::<Key, T>()? {
            if amounts.get(name.as_str()).is_some() {
                return Err(M::Error::custom(format_args!("duplicate limit `{name}`")));
            }
            if amounts.0.len() == AMOUNTS_MAX {
                return Err(M::Error::custom(format_args!("more than {AMOUNTS_MAX} limits")));
            }
            let units: i128 = amount.into();
            if units.unsigned_abs() > u128::from(UNITS_MAX) {
                return Err(M::Error::custom(format_args!(
                    "{units} units of `{name}`, more than {UNITS_MAX}"
                )));
            }
            amounts.0.push((name, amount));
        }
        Ok(amounts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_reject_duplicates_and_invalid_values() {
        let read = |text: &str| serde_json::from_str::<Amounts<u64>>(text);
        assert_eq!(read(r#"{"rpm": 1, "tpm": 800}"#).unwrap().pairs(), [("rpm", 1), ("tpm", 800)]);
        let many: Vec<_> = (0..=AMOUNTS_MAX).map(|number| format!("\"l{number}\": 1")).collect();
        let table = [
            (r#"{"rpm": 1, "rpm": 5}"#.to_owned(), "duplicate limit `rpm`"),
            (r#"{"r m": 1}"#.to_owned(), "the limit `r m` has ' ' at byte 1"),
            (r#"{"rpm": -1}"#.to_owned(), "invalid value: integer `-1`, expected u64"),
            (r#"{"rpm": 1.5}"#.to_owned(), "invalid type: floating point `1.5`, expected u64"),
            (r#"{"rpm": 1099511627777}"#.to_owned(), "1099511627777 units of `rpm`, more than 1099511627776"),
            ("[]".to_owned(), "expected amounts by limit name"),
            (format!("{{{}}}", many.join(",")), "more than 128 limits"),
        ];
        for (text, sentence) in table {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
