//! Problems: every error as RFC 9457 writes it, with what the caller needs to go on.

use std::fmt;

use crate::limit::LimitState;
use crate::policy::Version;
use crate::seconds::Seconds;

wire! {
    /// Why something was not done.
    ///
    /// `type` names the kind and stays the same from version to version; `detail` is a sentence for people.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct Problem {
        /// The kind: a relative address such as `/problems/limited`.
        #[serde(rename = "type")]
        pub kind: String,
        /// What problems of this kind have in common.
        pub title: String,
        /// The status of the answer.
        pub status: u16,
        /// What is wrong here: the field, the value and the bound.
        pub detail: String,
        /// Which field of the request is wrong, if one is: `cost.tpm`, `requests[3].entity`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub field: Option<String>,
        /// When it is worth asking again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
        /// Where limits refused: every limit that was asked, of every level, the subject's own first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitState>,
        /// Where something was not as expected: the version it is at; without it, it is not there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub version: Option<Version>,
        /// Where a step came late: the step that was done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub step: Option<u32>,
    }
}

impl Problem {
    /// How the type of such a body is called in `Content-Type`.
    pub const CONTENT_TYPE: &'static str = "application/problem+json";

    /// A problem of this kind, which is the last part of its `type`.
    pub fn new(status: u16, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("/problems/{kind}"),
            title: title.to_owned(),
            status,
            detail: detail.into(),
            ..Self::default()
        }
    }

    /// Whether it is of this kind, which is the last part of its `type`.
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
