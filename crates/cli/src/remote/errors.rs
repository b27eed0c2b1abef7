//! Maps errors of the client to the failures that a store would produce.

use tidegate::{LimitLine, Subject};
use tidegate_client::{Cause, ClientError, InvalidClient, InvalidResponse, LimitState, Problem};

use super::line;
use crate::failure::{Exit, Failure};
use crate::format;

/// The failure of a request for a subject.
pub(super) fn for_subject(error: ClientError, subject: &Subject) -> Failure {
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
                Self::new(Exit::Refused, format::rewrite_wait(&problem.detail, retry_after))
            }
            ClientError::Unauthorized { problem } => unauthorized(&problem),
            ClientError::Forbidden { problem } => forbidden(*problem),
            ClientError::Ended { problem } => Self::failed(problem.detail),
            ClientError::Problem { problem, .. } => rejected(*problem, what),
            ClientError::Unavailable(unavailable) => match unavailable.cause {
                Cause::Status { problem: Some(problem), .. } => server_failure(*problem),
                _ => Self::new(Exit::Unavailable, what).next(if may_be_done {
                    "the request may have been executed: check when the server is back, before you retry"
                } else {
                    "check that the server runs, or choose another one with --server URL"
                }),
            },
            ClientError::Untrusted { .. } => Self::failed(what).next(
                "set the trusted certificates with --ca FILE, and your own with --client-cert and --client-key",
            ),
            ClientError::NoTls { .. } => {
                Self::failed(what).next("write http:// in --server or TIDEGATE_SERVER, if that is the right server")
            }
            ClientError::Garbled { .. } => Self::failed(what)
                .next("check that --server is the address of a tidegate server of this version"),
            _ => Self::usage(what),
        };
        Self { retry_after, ..failure }
    }
}

/// A missing or invalid token. The message contains no part of it.
fn unauthorized(problem: &Problem) -> Failure {
    if problem.is("no-token") {
        return Failure::failed("the server requires a token")
            .next("pass a file that holds one with --token-file FILE, or set TIDEGATE_TOKEN");
    }
    Failure::failed(format!("the server rejected the token: {}", problem.detail))
        .next("use a valid token; at the store: tidegate token create ID --scopes SCOPES")
}

fn forbidden(problem: Problem) -> Failure {
    if problem.is("entity-disabled") {
        return Failure::disabled(problem.detail);
    }
    let next = if problem.is("scope") {
        "use a token that has it; at the store: tidegate token create ID --scopes acquire,read,admin"
    } else if problem.is("namespace") {
        "use a token of the server's namespace"
    } else {
        "use the token that the lease was granted to"
    };
    Failure::failed(problem.detail).next(next)
}

/// The server rejected the request. `what` has the detail, and whether an earlier attempt may have been
/// executed.
fn rejected(problem: Problem, what: String) -> Failure {
    match problem.kind.trim_start_matches("/problems/") {
        "too-large" => Failure::too_large(problem.detail, lines(problem.limits)),
        "stale" => Failure::stale(what),
        "unknown-token" => Failure::no_token(what),
        "invalid" if problem.field.is_some() => Failure::usage(what),
        _ => Failure::failed(what),
    }
}

/// The server or its store failed.
fn server_failure(problem: Problem) -> Failure {
    match problem.kind.trim_start_matches("/problems/") {
        "store-full" => Failure::full(problem.detail),
        "store-away" => {
            Failure::new(Exit::Unavailable, format!("the server's store failed: {}", problem.detail))
                .next("retry when it is available again")
        }
        "busy" | "stopping" => Failure::new(Exit::Unavailable, problem.detail).next("retry soon"),
        _ => Failure::failed(problem.detail).next("see the server's log"),
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

impl From<InvalidResponse> for Failure {
    fn from(error: InvalidResponse) -> Self {
        Self::failed(error.to_string()).next("check that the server and this program have the same version")
    }
}

/// The limits that can be parsed; the message names the others.
fn lines(states: Vec<LimitState>) -> Vec<LimitLine> {
    states.into_iter().filter_map(|state| line(state).ok()).collect()
}
