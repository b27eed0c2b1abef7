//! Builds update and condition expressions.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;

use super::keys::{Item, Key, PK, TTL};

/// A conditional update of one item. Names and values are replaced by placeholders, because our attribute
/// names have characters that expressions do not allow.
#[derive(Debug, Clone)]
pub(super) struct UpdateExpression {
    pub(super) key: Key,
    conditions: Vec<String>,
    /// Placeholders of names and values.
    sets: Vec<(String, String)>,
    adds: Vec<String>,
    removes: Vec<String>,
    names: Vec<String>,
    values: HashMap<String, AttributeValue>,
    expiry: Expiry,
}

/// What an update does to an item's expiry. Several parts of it may set one, and an expression may name an
/// attribute once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expiry {
    /// Unchanged.
    AsItIs,
    /// The latest requested time, unless the stored one is later.
    At(u64),
    Never,
}

/// The placeholder of the expiry.
const EXPIRES: &str = ":ttl";

impl UpdateExpression {
    pub(super) fn new(key: Key) -> Self {
        Self {
            key,
            conditions: Vec::new(),
            sets: Vec::new(),
            adds: Vec::new(),
            removes: Vec::new(),
            names: Vec::new(),
            values: HashMap::new(),
            expiry: Expiry::AsItIs,
        }
    }

    fn name(&mut self, name: &str) -> String {
        let place = self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        format!("#{place}")
    }

    fn value(&mut self, value: AttributeValue) -> String {
        let place = format!(":{}", self.values.len());
        self.values.insert(place.clone(), value);
        place
    }

    /// Sets an attribute.
    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        let (name, value) = (self.name(name), self.value(value.into().0));
        self.sets.push((name, value));
    }

    /// Sets the keys of the item in an index.
    pub(super) fn set_in_index(&mut self, index: &str, pk: impl Into<Value>, sk: impl Into<Value>) {
        self.set(&format!("{index}PK"), pk);
        self.set(&format!("{index}SK"), sk);
    }

    /// Adds to a number; a missing one is zero.
    pub(super) fn add(&mut self, name: &str, value: impl Into<Value>) {
        let (name, value) = (self.name(name), self.value(value.into().0));
        self.adds.push(format!("{name} {value}"));
    }

    /// Removes an attribute, if it exists.
    pub(super) fn remove(&mut self, name: &str) {
        let name = self.name(name);
        self.removes.push(name);
    }

    /// The item must not expire before this second. The update fails if its expiry has become later than
    /// that.
    pub(super) fn expires(&mut self, at: u64) {
        self.expiry = match self.expiry {
            Expiry::AsItIs => Expiry::At(at),
            Expiry::At(known) => Expiry::At(known.max(at)),
            Expiry::Never => Expiry::Never,
        };
        self.name(TTL);
    }

    /// The item never expires, whatever else is requested.
    pub(super) fn never_expires(&mut self) {
        self.expiry = Expiry::Never;
        self.name(TTL);
    }

    /// The placeholder of the expiry attribute.
    fn expiry_name(&self) -> String {
        let place = self.names.iter().position(|known| known == TTL).unwrap_or_default();
        format!("#{place}")
    }

    /// Requires that the attribute exists and compares so: `=`, `<`, `<=`, `>` or `>=`.
    pub(super) fn only_if(&mut self, name: &str, comparison: &str, value: impl Into<Value>) {
        let (name, value) = (self.name(name), self.value(value.into().0));
        self.conditions.push(format!("{name} {comparison} {value}"));
    }

    /// Requires that the attribute is missing or compares so.
    pub(super) fn only_unless_or(&mut self, name: &str, comparison: &str, value: impl Into<Value>) {
        let (name, value) = (self.name(name), self.value(value.into().0));
        self.conditions.push(format!("(attribute_not_exists({name}) OR {name} {comparison} {value})"));
    }

    /// Requires that the item is missing or the attribute compares so.
    pub(super) fn only_if_new_or(&mut self, name: &str, comparison: &str, value: impl Into<Value>) {
        let (key, name, value) = (self.name(PK), self.name(name), self.value(value.into().0));
        self.conditions.push(format!("(attribute_not_exists({key}) OR {name} {comparison} {value})"));
    }

    /// Requires that the attribute exists.
    pub(super) fn only_with(&mut self, name: &str) {
        let name = self.name(name);
        self.conditions.push(format!("attribute_exists({name})"));
    }

    /// Requires that the attribute is missing.
    pub(super) fn only_without(&mut self, name: &str) {
        let name = self.name(name);
        self.conditions.push(format!("attribute_not_exists({name})"));
    }

    /// The update expression.
    pub(super) fn update(&self) -> String {
        let mut sets: Vec<String> =
            self.sets.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        let mut removes = self.removes.clone();
        match self.expiry {
            Expiry::AsItIs => {}
            Expiry::At(_) => sets.push(format!("{} = {EXPIRES}", self.expiry_name())),
            Expiry::Never => removes.push(self.expiry_name()),
        }
        let clauses = [("SET", &sets), ("ADD", &self.adds), ("REMOVE", &removes)];
        let clauses = clauses.iter().filter(|(_, parts)| !parts.is_empty());
        clauses.map(|(word, parts)| format!("{word} {}", parts.join(", "))).collect::<Vec<_>>().join(" ")
    }

    /// The attributes that are set, except those of limits, whose values depend on the stored ones.
    pub(super) fn set_values(&self) -> Item {
        let name = |place: &str| place[1..].parse().ok().and_then(|place: usize| self.names.get(place));
        let set = |(place, value): &(String, String)| {
            let name =
                name(place).filter(|name| !["f:", "c:", "r:"].contains(&&name[..name.len().min(2)]))?;
            Some((name.clone(), self.values.get(value)?.clone()))
        };
        let mut item: Item = self.sets.iter().filter_map(set).collect();
        if let Expiry::At(at) = self.expiry {
            item.insert(TTL.to_owned(), Value::from(at).0);
        }
        item
    }

    /// The condition expression.
    pub(super) fn condition(&self) -> Option<String> {
        let mut conditions = self.conditions.clone();
        if let Expiry::At(_) = self.expiry {
            let name = self.expiry_name();
            conditions.push(format!("(attribute_not_exists({name}) OR {name} <= {EXPIRES})"));
        }
        (!conditions.is_empty()).then(|| conditions.join(" AND "))
    }

    pub(super) fn names(&self) -> Option<HashMap<String, String>> {
        let named = self.names.iter().enumerate().map(|(place, name)| (format!("#{place}"), name.clone()));
        (!self.names.is_empty()).then(|| named.collect())
    }

    pub(super) fn values(&self) -> Option<HashMap<String, AttributeValue>> {
        let mut values = self.values.clone();
        if let Expiry::At(at) = self.expiry {
            values.insert(EXPIRES.to_owned(), Value::from(at).0);
        }
        (!values.is_empty()).then_some(values)
    }
}

/// A value of an attribute.
pub(super) struct Value(pub(super) AttributeValue);

macro_rules! numbers {
    ($($number:ty),+) => {
        $(impl From<$number> for Value {
            fn from(number: $number) -> Self {
                Self(AttributeValue::N(number.to_string()))
            }
        })+
    };
}

numbers!(u32, u64, u128, i64, i128);

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self(AttributeValue::S(text.to_owned()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self(AttributeValue::S(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_names_each_attribute_once() {
        let mut write = UpdateExpression::new(Key { pk: "a".to_owned(), sk: "b".to_owned() });
        assert!(write.condition().is_none() && write.names().is_none());
        write.only_if("f:rpm", "<=", 7_u128);
        write.only_without("o:1");
        write.only_unless_or("h", "<", 3_u64);
        write.set("o:1", "x");
        write.add("f:rpm", -5_i64);
        write.remove("ttl");
        assert_eq!(write.update(), "SET #1 = :2 ADD #0 :3 REMOVE #3");
        let condition = "#0 <= :0 AND attribute_not_exists(#1) AND (attribute_not_exists(#2) OR #2 < :1)";
        assert_eq!(write.condition().unwrap(), condition);
        assert_eq!(write.names().unwrap()["#0"], "f:rpm");
        assert_eq!(write.values().unwrap()[":3"], AttributeValue::N("-5".to_owned()));
    }

    #[test]
    fn write_expires_at_the_latest_time() {
        let mut write = UpdateExpression::new(Key { pk: "a".to_owned(), sk: "b".to_owned() });
        for at in [7, 9, 8] {
            write.expires(at);
        }
        assert_eq!(write.update(), "SET #0 = :ttl");
        assert_eq!(write.condition().unwrap(), "(attribute_not_exists(#0) OR #0 <= :ttl)");
        assert_eq!(write.values().unwrap()[":ttl"], AttributeValue::N("9".to_owned()));
        write.never_expires();
        write.expires(10);
        assert_eq!(write.update(), "REMOVE #0");
        assert!(write.condition().is_none() && write.values().is_none());
    }
}
