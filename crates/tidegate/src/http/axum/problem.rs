//! Maps a limiter's errors to problems of RFC 9457, for our server and for the layer.

use std::time::Duration;

use tidegate_client::{LimitState, Problem};
use tidegate_store::StoreError;

use crate::limiter::{LimitError, LimitLine};

const TOO_MANY_REQUESTS: u16 = 429;
const UNPROCESSABLE: u16 = 422;
const UNAVAILABLE: u16 = 503;
const CONFLICT: u16 = 409;
const NOT_FOUND: u16 = 404;
const FORBIDDEN: u16 = 403;
/// The retry time if none is known.
const SOON: Duration = Duration::from_secs(1);

/// The problem for a limiter's error, with every limit drawn from.
///
/// Internal errors of a store are not exposed: their messages may contain file paths. If a store refused for
/// a reason other than units, the problem names the kind and nothing else.
///
/// ```
/// use tidegate::axum::problem;
/// use tidegate::{Limit, Limiter, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 1)]).build()?;
/// limiter.spend(("acme", "api"), [("rpm", 1)]).await?;
/// let problem = problem(&limiter.spend(("acme", "api"), [("rpm", 1)]).await.unwrap_err());
/// assert_eq!((problem.status, problem.kind.as_str()), (429, "/problems/limited"));
/// assert_eq!(problem.limits[0].limit, "rpm");
/// # Ok(())
/// # }
/// ```
pub fn problem(error: &LimitError) -> Problem {
    let detail = error.to_string();
    match error {
        LimitError::Limited(limited) => {
            let problem = Problem::new(TOO_MANY_REQUESTS, "limited", "Limit used up", detail);
            after(about(problem, &limited.lines), limited.retry_after().unwrap_or_default())
        }
        LimitError::TooLarge(limited) => about(unprocessable("too-large", detail), &limited.lines),
        LimitError::Waiting { retry_after, .. } => {
            let problem = Problem::new(TOO_MANY_REQUESTS, "waiting", "Other callers are waiting", detail);
            after(problem, retry_after.unwrap_or(SOON))
        }
        LimitError::Busy { retry_after, .. } => {
            after(Problem::new(UNAVAILABLE, "busy", "Busy", detail), retry_after.unwrap_or(SOON))
        }
        LimitError::Closed => {
            after(Problem::new(UNAVAILABLE, "stopping", "Stopping", "the server is stopping"), SOON)
        }
        LimitError::Reused { .. } => {
            let problem = Problem::new(CONFLICT, "id-reused", "Not as expected", detail);
            Problem { field: Some("id".to_owned()), ..problem }
        }
        LimitError::Disabled { .. } => Problem::new(FORBIDDEN, "entity-disabled", "Disabled", detail),
        LimitError::NoLimits { .. } => unprocessable("no-limits", detail),
        LimitError::Unavailable { source, retry_after } => after(store_problem(source), *retry_after),
        LimitError::Store(error) => store_problem(error),
        LimitError::Cost(_) => invalid("cost", detail),
        LimitError::Policy(_) => invalid("limits", detail),
        LimitError::Deadline { .. } => invalid("deadline", detail),
        // A name, an entity that is too deep, and other invalid requests.
        _ => unprocessable("invalid", detail),
    }
}

/// The problem for a store's error. Internal errors are not exposed.
pub fn store_problem(error: &StoreError) -> Problem {
    let detail = error.to_string();
    let conflict = |kind, detail| Problem::new(CONFLICT, kind, "Not as expected", detail);
    let not_found = |kind, detail| Problem::new(NOT_FOUND, kind, "Not found", detail);
    match error {
        StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => {
            let detail = "the store is unavailable or did not respond in time";
            after(Problem::new(UNAVAILABLE, "store-away", "The store is unavailable", detail), SOON)
        }
        StoreError::Busy { retry_after, .. } => {
            let detail = "too many calls wait for the store";
            after(Problem::new(UNAVAILABLE, "busy", "Busy", detail), *retry_after)
        }
        StoreError::Stale { current, .. } => {
            let version = current.map(tidegate_core::limit::policy::Version::number);
            Problem { version, ..conflict("stale", detail) }
        }
        // The ids in these messages are not secret without their proofs.
        StoreError::Ended { .. } => Problem::new(410, "lease-ended", "The lease has ended", detail),
        StoreError::Late { done, .. } => Problem { step: Some(*done), ..conflict("late-step", detail) },
        StoreError::NoLease { .. } => not_found("no-lease", detail),
        StoreError::NoEntity { .. } => not_found("no-entity", detail),
        StoreError::NoToken { .. } => not_found("unknown-token", detail),
        StoreError::HasChildren { .. } => conflict("has-children", detail),
        StoreError::Entity(_) | StoreError::Token(_) | StoreError::Invalid { .. } => invalid("", detail),
        StoreError::Full { .. } => Problem::new(507, "store-full", "The store is full", detail),
        _ => internal(),
    }
}

/// An internal error.
pub(super) fn internal() -> Problem {
    let detail = "internal error; see the server's log";
    Problem::new(500, "internal", "Internal error", detail)
}

fn unprocessable(kind: &str, detail: String) -> Problem {
    Problem::new(UNPROCESSABLE, kind, "Invalid request", detail)
}

/// A field of the request is invalid.
fn invalid(field: &str, detail: String) -> Problem {
    let field = Some(field.to_owned()).filter(|field| !field.is_empty());
    Problem { field, ..unprocessable("invalid", detail) }
}

fn after(problem: Problem, span: Duration) -> Problem {
    Problem { retry_after: Some(span.into()), ..problem }
}

fn about(problem: Problem, lines: &[LimitLine]) -> Problem {
    let limits = lines.iter().map(|line| LimitState::new(&line.balance, Some(&line.source))).collect();
    Problem { limits, ..problem }
}
