//! What a server says no to, as the same failures that a store has.

use tidegate::{LimitLine, Subject};
use tidegate_client::{Cause, ClientError, InvalidAnswer, InvalidClient, LimitState, Problem};

use super::line;
use crate::failure::{Exit, Failure};
use crate::words;

/// What went wrong with what was asked of a subject.
pub(super) fn of(error: ClientError, subject: &Subject) -> Failure {
    match error {
        ClientError::Problem { problem, .. } if problem.is("no-limits") => Failure::no_limits(subject),
        error => error.into(),
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let (what, retry_after, may_be_done) = (error.to_string(), error.retry_after(), error.may_be_done());
        let failure = match error {
            ClientError::Refused { problem } if problem.is("limited") => {
                Self::limited(&problem.detail, retry_after, lines(problem.limits))
            }
            ClientError::Refused { problem } => {
                Self::new(Exit::Refused, words::come_back(&problem.detail, retry_after))
            }
            ClientError::Unauthorized { problem } => not_let_in(&problem),
            ClientError::Forbidden { problem } => not_allowed(*problem),
            ClientError::Ended { problem } => Self::failed(problem.detail),
            ClientError::Problem { problem, .. } => refused(*problem, what),
            ClientError::Away(away) => match away.cause {
                Cause::Status { problem: Some(problem), .. } => failing(*problem),
                _ => Self::new(Exit::Away, what).next(if may_be_done {
                    "it may have been done all the same: look, once the server is back, before you repeat it"
                } else {
                    "see whether the server runs, or name another one with --server URL"
                }),
            },
            ClientError::Untrusted { .. } => Self::failed(what).next(
                "name whose signature to trust with --ca FILE, and a certificate of yours with --client-cert and --client-key",
            ),
            ClientError::Garbled { .. } => Self::failed(what)
                .next("see whether --server is the address of a tidegate, and of this version"),
            _ => Self::usage(what),
        };
        Self { retry_after, ..failure }
    }
}

/// Without a good token. Nothing of it is repeated.
fn not_let_in(problem: &Problem) -> Failure {
    if problem.is("no-token") {
        return Failure::failed("the server lets nobody in without a token")
            .next("name a file that holds it with --token-file FILE, or set TIDEGATE_TOKEN");
    }
    Failure::failed(format!("the server does not let this token in: {}", problem.detail))
        .next("ask for a good one; where the store is: tidegate token create ID --scopes SCOPES")
}

fn not_allowed(problem: Problem) -> Failure {
    let next = if problem.is("scope") {
        "use a token that has it; where the store is: tidegate token create ID --scopes acquire,read,admin"
    } else if problem.is("namespace") {
        "use a token of the server's own namespace"
    } else {
        "use the token that it was given to"
    };
    Failure::failed(problem.detail).next(next)
}

/// The server understood, and does not do it. `what` has the detail, and whether it may have been done before.
fn refused(problem: Problem, what: String) -> Failure {
    match problem.kind.trim_start_matches("/problems/") {
        "too-large" => Failure::too_large(problem.detail, lines(problem.limits)),
        "stale" => Failure::stale(what),
        "unknown-token" => Failure::no_token(what),
        "invalid" if problem.field.is_some() => Failure::usage(what),
        _ => Failure::failed(what),
    }
}

/// The server, or its store, failed.
fn failing(problem: Problem) -> Failure {
    match problem.kind.trim_start_matches("/problems/") {
        "store-full" => Failure::full(problem.detail),
        "store-away" => Failure::new(Exit::Away, format!("behind the server, {}", problem.detail))
            .next("wait until it is back, and try again"),
        "busy" | "stopping" => Failure::new(Exit::Away, problem.detail).next("try again soon"),
        _ => Failure::failed(problem.detail).next("see the log of the server"),
    }
}

impl From<InvalidClient> for Failure {
    fn from(error: InvalidClient) -> Self {
        let failure = Self::usage(error.to_string());
        match error {
            InvalidClient::Url { .. } => {
                failure.next("correct --server or TIDEGATE_SERVER, such as http://127.0.0.1:8707")
            }
            InvalidClient::Tls { .. } => {
                failure.next("correct the files of --ca, --client-cert and --client-key: they hold PEM")
            }
            InvalidClient::Token => failure.next("correct the file of --token-file, or TIDEGATE_TOKEN"),
            _ => failure,
        }
    }
}

impl From<InvalidAnswer> for Failure {
    fn from(error: InvalidAnswer) -> Self {
        Self::failed(error.to_string()).next("see whether the server is of the version of this program")
    }
}

/// Those that can be read; the sentence names the others.
fn lines(states: Vec<LimitState>) -> Vec<LimitLine> {
    states.into_iter().filter_map(|state| line(state).ok()).collect()
}
