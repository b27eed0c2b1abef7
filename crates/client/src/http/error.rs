//! Errors of API calls, classified by what the caller does next.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use thiserror::Error;
use tidegate_core::duration::Rounded;

use crate::limit::LimitState;
use crate::problem::Problem;
use crate::seconds::Seconds;

/// The error of an API call. It never contains the token.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// A limit is exceeded: `problem.limits` has the limits, their entities and sources, and
    /// [`retry_after`](Self::retry_after) returns when to retry. Nothing was drawn.
    #[error("refused: {problem}")]
    Refused {
        /// The server's problem.
        problem: Box<Problem>,
    },
    /// The token is missing, unknown, expired or revoked.
    #[error("unauthorized: {problem}")]
    Unauthorized {
        /// The server's problem.
        problem: Box<Problem>,
    },
    /// The token is valid but lacks permission.
    #[error("not allowed: {problem}")]
    Forbidden {
        /// The server's problem.
        problem: Box<Problem>,
    },
    /// The lease has ended: it expired, or was ended before.
    #[error("{problem}")]
    Ended {
        /// The server's problem, possibly from an earlier call.
        problem: Box<Problem>,
    },
    /// The server rejected the call: `problem.kind` identifies the reason.
    #[error("{problem}{}", if *.may_be_done { " (an earlier attempt may have succeeded)" } else { "" })]
    Problem {
        /// The server's problem.
        problem: Box<Problem>,
        /// Whether an earlier attempt of the call may have been executed, and may be the reason for this
        /// response: a retried write that expects version 3 may find its own version 4.
        may_be_done: bool,
    },
    /// The server cannot be reached, times out or fails, and retries are exhausted.
    #[error(transparent)]
    Unavailable(Box<Outage>),
    /// The client or the server rejected the other's certificate. Nothing was executed, and a retry does not
    /// help.
    #[error("{method} {route} was not sent: {why}")]
    Untrusted {
        /// The HTTP method.
        method: String,
        /// The path template, with placeholders in braces.
        route: &'static str,
        /// Which certificate was rejected, and why.
        why: String,
    },
    /// The URL begins with `https://`, and the server at it does not use TLS. Nothing was sent.
    #[error("{method} {route} was not sent: the server does not use TLS, and its URL begins with https://")]
    NoTls {
        /// The HTTP method.
        method: String,
        /// The path template, with placeholders in braces.
        route: &'static str,
    },
    /// The response is not valid for this API. Another service may be listening at this URL.
    #[error("{method} {route} returned an invalid response with status {status}: {why}")]
    Garbled {
        /// The HTTP method.
        method: String,
        /// The path template, with placeholders in braces.
        route: &'static str,
        /// The HTTP status.
        status: u16,
        /// What is wrong with it.
        why: String,
        /// The `Retry-After` of the response, if any.
        retry_after: Option<Duration>,
    },
    /// The call is invalid and was not sent.
    #[error("{method} {route} cannot be sent: {why}")]
    Invalid {
        /// The HTTP method.
        method: String,
        /// The path template, with placeholders in braces.
        route: &'static str,
        /// What is wrong with it.
        why: String,
    },
}

/// An unavailable server, and the attempts to reach it.
#[derive(Debug, Error)]
#[error("server unavailable: {method} {route} failed {} in {} ({why}): {cause}", times(*.attempts), Rounded(*.took))]
#[non_exhaustive]
pub struct Outage {
    /// The HTTP method.
    pub method: String,
    /// The path template, with placeholders in braces.
    pub route: &'static str,
    /// The number of attempts.
    pub attempts: u32,
    /// The duration of all attempts.
    pub took: Duration,
    /// Why there was no further attempt.
    pub why: StopReason,
    /// The failure of the last attempt.
    #[source]
    pub cause: Cause,
    /// Whether an attempt may have been executed.
    pub may_be_done: bool,
}

/// Why there was no further attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The maximum number of attempts is reached.
    Attempts,
    /// The next attempt would have started after the deadline of the call.
    Deadline,
    /// The retry budget is exhausted.
    Budget,
    /// The call may have been executed and is not idempotent.
    MayBeDone,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attempts => "attempt limit reached",
            Self::Deadline => "deadline reached",
            Self::Budget => "retry budget exhausted",
            Self::MayBeDone => "not retried because it may have been executed",
        })
    }
}

/// The failure of an attempt.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// The connection could not be established. Nothing was sent.
    #[error("no connection: {}", root_cause(&**.0))]
    Connect(#[source] Box<dyn Error + Send + Sync>),
    /// The attempt timed out.
    #[error("no response within {}", Rounded(*.0))]
    Timeout(Duration),
    /// The connection was lost before the response was complete.
    #[error("the connection was lost: {}", root_cause(&**.0))]
    Cut(#[source] Box<dyn Error + Send + Sync>),
    /// The server or a proxy failed.
    #[error("status {status}{}", suffix(.problem.as_deref()))]
    Status {
        /// The HTTP status.
        status: u16,
        /// The problem, if the server itself responded.
        problem: Option<Box<Problem>>,
        /// The `Retry-After` of the response, if any.
        retry_after: Option<Duration>,
    },
}

impl ClientError {
    /// Returns when a retry may succeed, if the server says so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable(outage) => match &outage.cause {
                Cause::Status { retry_after, .. } => *retry_after,
                _ => None,
            },
            Self::Garbled { retry_after, .. } => *retry_after,
            other => other.problem()?.retry_after.map(Seconds::as_duration),
        }
    }

    /// Whether the server is unavailable: the same call may succeed later.
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Whether the call may have been executed despite the error.
    pub fn may_be_done(&self) -> bool {
        match self {
            Self::Unavailable(outage) => outage.may_be_done,
            Self::Problem { may_be_done, .. } => *may_be_done,
            // The status says success; only the body is invalid.
            Self::Garbled { status, .. } => (200..300).contains(status),
            _ => false,
        }
    }

    /// Returns the server's problem, if it responded with one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused { problem }
            | Self::Unauthorized { problem }
            | Self::Forbidden { problem }
            | Self::Ended { problem }
            | Self::Problem { problem, .. } => Some(problem),
            Self::Unavailable(outage) => match &outage.cause {
                Cause::Status { problem, .. } => problem.as_deref(),
                _ => None,
            },
            Self::Garbled { .. } | Self::Invalid { .. } | Self::Untrusted { .. } | Self::NoTls { .. } => None,
        }
    }

    /// Returns the limits that refused: those with less than the requested amount available, the subject's
    /// own first.
    pub fn short_limits(&self) -> impl Iterator<Item = &LimitState> {
        let all = self.problem().map_or(&[][..], |problem| &problem.limits);
        all.iter().filter(|limit| limit.retry_after != Some(Seconds::default()))
    }

    /// Classifies a problem by its status.
    pub(super) fn from_problem(problem: Box<Problem>, status: u16, may_be_done: bool) -> Self {
        match status {
            429 => Self::Refused { problem },
            401 => Self::Unauthorized { problem },
            403 => Self::Forbidden { problem },
            410 => Self::Ended { problem },
            // The lease ended so long ago that its record was removed.
            404 if problem.is("no-lease") => Self::Ended { problem },
            _ => Self::Problem { problem, may_be_done },
        }
    }

    /// Whether the outcome is known: a repeated call is a new call.
    pub(super) const fn is_definitive(&self) -> bool {
        !matches!(self, Self::Unavailable(_) | Self::Garbled { .. })
    }
}

fn times(attempts: u32) -> String {
    if attempts == 1 { "once".to_owned() } else { format!("{attempts} times") }
}

fn suffix(problem: Option<&Problem>) -> String {
    problem.map(|problem| format!(", {problem}")).unwrap_or_default()
}

/// Returns the innermost source of an error. The outer ones only say that a request failed.
pub(crate) fn root_cause<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut root_cause = error;
    while let Some(source) = root_cause.source() {
        root_cause = source;
    }
    root_cause
}
