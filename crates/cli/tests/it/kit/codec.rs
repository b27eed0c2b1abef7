//! JSON as the program's users read it.

pub(crate) use serde_json::json;

pub(crate) type Json = serde_json::Value;

/// One document, and nothing else.
pub(crate) fn parse(text: &str) -> Json {
    serde_json::from_str(text).expect("one JSON document")
}

/// One document on each line.
pub(crate) fn lines(text: &str) -> Vec<Json> {
    text.lines().map(parse).collect()
}

/// The names of an object's fields, in alphabetical order.
pub(crate) fn fields(json: &Json) -> Vec<&str> {
    let mut names: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}
