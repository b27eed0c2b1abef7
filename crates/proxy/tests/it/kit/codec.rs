//! JSON of requests and responses.

#![allow(unused_imports, reason = "each test program uses a part of it")]

pub(crate) use serde_json::{Value, json};

pub(crate) fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}
