//! Problem details (RFC 9457): the body of every error response.

use std::fmt;

use crate::limit::LimitState;
use crate::policy::Version;
use crate::seconds::Seconds;

wire! {
    /// An error of the API.
    ///
    /// `type` identifies the kind and is stable across versions; `detail` is a sentence for people.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct Problem {
        /// The kind: a relative URI such as `/problems/limited`.
        #[serde(rename = "type")]
        pub kind: String,
        /// A summary of the kind.
        pub title: String,
        /// The HTTP status.
        pub status: u16,
        /// What is wrong: the field, the value and the bound.
        pub detail: String,
        /// The invalid field of the request, if any: `cost.tpm`, `requests[3].entity`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub field: Option<String>,
        /// When a retry may succeed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
        /// For refusals: every applicable limit of every level, the subject's own first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitState>,
        /// For version conflicts: the current version; absent if nothing is stored.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
        /// For late steps: the step that was completed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub step: Option<u32>,
    }
}

impl Problem {
    /// The `Content-Type` of a problem body.
    pub const CONTENT_TYPE: &'static str = "application/problem+json";

    /// Creates a problem; `kind` is the last part of its `type`.
    pub fn new(status: u16, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("/problems/{kind}"),
            title: title.to_owned(),
            status,
            detail: detail.into(),
            ..Self::default()
        }
    }

    /// Whether the last part of its `type` is `kind`.
    pub fn is(&self, kind: &str) -> bool {
        self.kind.strip_prefix("/problems/") == Some(kind)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}
