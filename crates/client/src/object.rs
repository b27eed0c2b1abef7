//! Deserializers that accept JSON objects only.
//!
//! A struct's derived `Deserialize` also accepts an array of its fields in order. That is not part of the
//! API, and clients relying on it would break with every new field. The server checks the outermost body;
//! these functions check nested values.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

struct Object<T>(T);

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Object<T>, M::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Object)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// Deserializes one object.
pub(crate) fn one<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    Object::deserialize(from).map(|Object(value)| value)
}

/// Deserializes an optional object.
pub(crate) fn maybe<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(from)?.map(|Object(value)| value))
}

/// Deserializes a list of objects.
pub(crate) fn many<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(from)?.into_iter().map(|Object(value)| value).collect())
}

#[cfg(test)]
mod tests {
    use crate::{Apply, Batch, Declaration, PutPolicy};

    #[test]
    fn nested_arrays_are_rejected_as_objects() {
        let batch = |text: &str| serde_json::from_str::<Batch>(text).map(drop);
        let apply = |text: &str| serde_json::from_str::<Apply>(text).map(drop);
        let declaration = |text: &str| serde_json::from_str::<Declaration>(text).map(drop);
        let put = |text: &str| serde_json::from_str::<PutPolicy>(text).map(drop);
        let table = [
            (batch(r#"{"requests": [["a", "b", {"rpm": 1}]]}"#), "expected an object"),
            (apply(r#"{"changes": [[null, null]]}"#), "expected an object"),
            (apply(r#"{"changes": [{"policy": [["rpm:1/s"], false]}]}"#), "expected an object"),
            (declaration(r#"{"policies": [["a", "b", {}]]}"#), "expected an object"),
            (declaration(r#"{"policies": [{"policy": [[]]}]}"#), "expected an object"),
            (put(r#"{"policy": [["rpm:1/s"]]}"#), "expected an object"),
            (put(r#"{"policy": 7}"#), "expected an object"),
        ];
        for (number, (read, sentence)) in table.into_iter().enumerate() {
            let error = read.unwrap_err().to_string();
            assert!(error.contains(sentence), "{number}: {error}");
        }
        batch(r#"{"requests": [{"entity": "a", "resource": "b", "cost": {"rpm": 1}}]}"#).unwrap();
        apply(r#"{"changes": [{"policy": null}, {"policy": {"limits": ["rpm:1/s"]}}]}"#).unwrap();
    }
}
