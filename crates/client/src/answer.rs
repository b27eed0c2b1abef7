//! Answers that were read and yet cannot be: the wire has texts where the inside has names.

use std::fmt::Display;

use thiserror::Error;

/// What a server said and no server should.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the server's answer has a field `{field}` that cannot be: {why}")]
pub struct InvalidAnswer {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: String,
}

impl InvalidAnswer {
    /// What is wrong with `field`.
    pub(crate) fn of<E: Display>(field: &'static str) -> impl Fn(E) -> Self {
        move |why| Self { field, why: why.to_string() }
    }
}
