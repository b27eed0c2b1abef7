//! JSON for tests: wire formats are named at the edge only.

#![allow(unused_imports, reason = "each test uses a part of it")]

pub(crate) use serde_json::{Value, from_str, json};
