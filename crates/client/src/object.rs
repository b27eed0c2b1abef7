//! Objects that are objects: a list of a type's fields is not taken for the type.
//!
//! What serde derives for a struct takes a list of its fields too, in their order. That is no part of the API, and a client that
//! relies on it would break with every new field. A body as a whole is looked at by the server; what is inside, here.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

struct Object<T>(T);

struct Reads<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Reads<T> {
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
        from.deserialize_map(Reads(PhantomData))
    }
}

/// One object.
pub(crate) fn one<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    Object::deserialize(from).map(|Object(value)| value)
}

/// One object, or none.
pub(crate) fn maybe<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(from)?.map(|Object(value)| value))
}

/// A list of objects.
pub(crate) fn many<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(from)?.into_iter().map(|Object(value)| value).collect())
}

#[cfg(test)]
mod tests {
    use crate::{Apply, Batch, Declaration, PutPolicy};

    #[test]
    fn a_list_of_fields_is_no_object_wherever_it_is() {
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
