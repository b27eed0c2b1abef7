//! JSON for tests: only files of this name may use the crate that reads and writes it.

#![allow(unused_imports, reason = "each test program uses a part of it")]

pub(crate) use serde_json::{Value, from_str, json};
