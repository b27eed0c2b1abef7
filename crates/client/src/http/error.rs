//! What can go wrong with a call, told by what its caller does next.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::limit::LimitState;
use crate::problem::Problem;
use crate::seconds::Seconds;

/// Why a call was not answered as was hoped for. No token is in it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// A limit is used up for now: `problem.limits` says which limit of which entity, by which policy, and
    /// [`retry_after`](Self::retry_after) when to come back. Nothing was taken.
    #[error("refused: {problem}")]
    Refused {
        /// What the server says.
        problem: Box<Problem>,
    },
    /// The token is missing, unknown, expired or revoked.
    #[error("not let in: {problem}")]
    Unauthorized {
        /// What the server says.
        problem: Box<Problem>,
    },
    /// The token is good, and not for this.
    #[error("not allowed: {problem}")]
    Forbidden {
        /// What the server says.
        problem: Box<Problem>,
    },
    /// The lease has ended: by its deadline, or by whoever ended it before.
    #[error("{problem}")]
    Ended {
        /// What the server says, or said when it was asked last.
        problem: Box<Problem>,
    },
    /// The server understood, and does not do it: `problem.kind` says why.
    #[error("{problem}{}", if *.unheard { " (an earlier attempt was not answered, and may have been done)" } else { "" })]
    Problem {
        /// What the server says.
        problem: Box<Problem>,
        /// An earlier attempt of the same call was not answered. It may have been done, and be the reason for this answer: a
        /// change that expected version 3 finds version 4, which is its own.
        unheard: bool,
    },
    /// The server cannot be reached, does not answer in time, or fails, and the attempts are used up.
    #[error(transparent)]
    Away(Box<Away>),
    /// One of the two sides does not trust the other one's certificate. Nothing was sent or done, and to ask again does not help.
    #[error("{method} {route} was not sent: {why}")]
    Untrusted {
        /// The method.
        method: String,
        /// The address, with the names of its parts in braces.
        route: &'static str,
        /// Who does not trust whom, and why.
        why: String,
    },
    /// The answer is not what the API says. Perhaps something else answers at this address.
    #[error("{method} {route} was answered with status {status}, and not as the API says: {why}")]
    Garbled {
        /// The method.
        method: String,
        /// The address, with the names of its parts in braces.
        route: &'static str,
        /// The status of the answer.
        status: u16,
        /// What is wrong with it.
        why: String,
        /// When to come back, where the answer says that much.
        retry_after: Option<Duration>,
    },
    /// The call cannot be sent. Nothing was.
    #[error("{method} {route} cannot be sent: {why}")]
    Invalid {
        /// The method.
        method: String,
        /// The address, with the names of its parts in braces.
        route: &'static str,
        /// What is wrong with it.
        why: String,
    },
}

/// A server that is away, and what was tried.
#[derive(Debug, Error)]
#[error("the server is away: {method} {route} failed {} in {took:?}, {why}: {cause}", times(*.attempts))]
#[non_exhaustive]
pub struct Away {
    /// The method.
    pub method: String,
    /// The address, with the names of its parts in braces.
    pub route: &'static str,
    /// How often it was tried.
    pub attempts: u32,
    /// How long that took.
    pub took: Duration,
    /// Why there was no further attempt.
    pub why: GaveUp,
    /// How the last attempt failed.
    #[source]
    pub cause: Cause,
    /// At least one attempt may have been heard: what was asked for may have been done.
    pub unheard: bool,
}

/// Why there was no further attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GaveUp {
    /// There were as many as there may be.
    Attempts,
    /// The next one would have come after the deadline of the whole call.
    Deadline,
    /// Too much of the client's traffic were retries.
    Budget,
    /// It may have been done, and to say it again might do it twice.
    MayBeDone,
}

impl fmt::Display for GaveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attempts => "as often as it may be tried",
            Self::Deadline => "and the time is up",
            Self::Budget => "and no more retries are allowed for now",
            Self::MayBeDone => "and to try again might do it twice",
        })
    }
}

/// How an attempt failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// There was no connection, and so nothing was sent.
    #[error("no connection: {}", deepest(&**.0))]
    Connect(#[source] Box<dyn Error + Send + Sync>),
    /// No answer came in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The connection was lost before the answer was there.
    #[error("the connection was lost: {}", deepest(&**.0))]
    Cut(#[source] Box<dyn Error + Send + Sync>),
    /// The server, or something before it, failed.
    #[error("status {status}{}", said(.problem.as_deref()))]
    Status {
        /// The status.
        status: u16,
        /// What the server says, if it was the server.
        problem: Option<Box<Problem>>,
        /// When to come back, if that was said.
        retry_after: Option<Duration>,
    },
}

impl ClientError {
    /// When it is worth asking again, where the server says so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Away(away) => match &away.cause {
                Cause::Status { retry_after, .. } => *retry_after,
                _ => None,
            },
            Self::Garbled { retry_after, .. } => *retry_after,
            other => other.problem()?.retry_after.map(Seconds::as_duration),
        }
    }

    /// Whether the server is away: the same call may be answered later.
    pub const fn is_away(&self) -> bool {
        matches!(self, Self::Away(_))
    }

    /// Whether what was asked for may have been done all the same.
    pub fn may_be_done(&self) -> bool {
        match self {
            Self::Away(away) => away.unheard,
            Self::Problem { unheard, .. } => *unheard,
            // The server said yes, to all that can be understood of it.
            Self::Garbled { status, .. } => (200..300).contains(status),
            _ => false,
        }
    }

    /// What the server says, where it answered.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused { problem }
            | Self::Unauthorized { problem }
            | Self::Forbidden { problem }
            | Self::Ended { problem }
            | Self::Problem { problem, .. } => Some(problem),
            Self::Away(away) => match &away.cause {
                Cause::Status { problem, .. } => problem.as_deref(),
                _ => None,
            },
            Self::Garbled { .. } | Self::Invalid { .. } | Self::Untrusted { .. } => None,
        }
    }

    /// The limits that refused: those that have less than was asked of them, the subject's own first.
    pub fn short_limits(&self) -> impl Iterator<Item = &LimitState> {
        let all = self.problem().map_or(&[][..], |problem| &problem.limits);
        all.iter().filter(|limit| limit.retry_after != Some(Seconds::default()))
    }

    /// What a problem means to its caller.
    pub(super) fn of(problem: Box<Problem>, status: u16, unheard: bool) -> Self {
        match status {
            429 => Self::Refused { problem },
            401 => Self::Unauthorized { problem },
            403 => Self::Forbidden { problem },
            410 => Self::Ended { problem },
            // It ended so long ago that nobody remembers.
            404 if problem.is("no-lease") => Self::Ended { problem },
            _ => Self::Problem { problem, unheard },
        }
    }

    /// Whether the server has decided: to ask the same again is not to repeat a question.
    pub(super) const fn is_answer(&self) -> bool {
        !matches!(self, Self::Away(_) | Self::Garbled { .. })
    }
}

fn times(attempts: u32) -> String {
    if attempts == 1 { "once".to_owned() } else { format!("{attempts} times") }
}

fn said(problem: Option<&Problem>) -> String {
    problem.map(|problem| format!(", {problem}")).unwrap_or_default()
}

/// The last of an error's sources: the others say that a request could not be sent, which is known.
pub(crate) fn deepest<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}
