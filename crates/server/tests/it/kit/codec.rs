//! JSON for tests: only files with this name may use `serde_json`.

#![allow(unused_imports, reason = "each test program uses a part of it")]

pub(crate) use serde_json::{Value, from_str, json};
