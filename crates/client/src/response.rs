//! Validation of responses: text fields that do not convert to core types.

use std::fmt::Display;

use thiserror::Error;

/// A response field with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("invalid field `{field}` in the server's response: {why}")]
pub struct InvalidResponse {
    /// The field.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: String,
}

impl InvalidResponse {
    /// Creates an error about `field`.
    pub(crate) fn of<E: Display>(field: &'static str) -> impl Fn(E) -> Self {
        move |why| Self { field, why: why.to_string() }
    }
}
