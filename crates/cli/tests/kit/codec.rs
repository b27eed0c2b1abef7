//! JSON as the program's users read it.

pub(crate) type Json = serde_json::Value;

/// One document, and nothing else.
pub(crate) fn parse(text: &str) -> Json {
    serde_json::from_str(text).expect("one JSON document")
}

/// The names of an object's fields, in the order of the alphabet.
pub(crate) fn fields(json: &Json) -> Vec<&str> {
    let mut names: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}
