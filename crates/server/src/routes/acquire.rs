//! Drawing.

use std::time::Duration;

use axum::extract::State as With;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tidegate_client::{
    Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, Granted, LimitState, Problem, Seconds, Spend,
};

use crate::codec::{Done, Sent};
use crate::fields;
use crate::gate::Caller;
use crate::refusal::Refusal;
use crate::state::State;

/// Draws units of every limit of a subject and of those above it, all or nothing.
///
/// With `within` it waits, in the order of asking. A lease that is neither ended nor renewed in its time ends by itself.
#[utoipa::path(post, path = "/v1/acquire", request_body = Acquire, responses(
    (status = 200, description = "Drawn.", body = Granted),
    (status = 429, description = "A limit is used up for now.", body = Problem),
))]
pub(super) async fn acquire(
    With(state): With<State>,
    caller: Caller,
    Sent(ask): Sent<Acquire>,
) -> Result<Response, Refusal> {
    let (granted, limits) = draw(&state, &caller, ask).await?;
    let mut headers = HeaderMap::new();
    fields::rate_limit(&mut headers, &limits);
    Ok((headers, Done(granted)).into_response())
}

/// Draws for many who have nothing to do with each other: each is granted or refused by itself. None waits.
#[utoipa::path(post, path = "/v1/acquire/batch", request_body = Batch, responses(
    (status = 200, description = "One answer for each request.", body = BatchDone),
))]
pub(super) async fn batch(
    With(state): With<State>,
    caller: Caller,
    Sent(batch): Sent<Batch>,
) -> Result<Done<BatchDone>, Refusal> {
    let count = batch.requests.len();
    if count == 0 || count > BATCH_MAX {
        return Err(Refusal::invalid("requests", format!("{count} requests, outside 1..={BATCH_MAX}")));
    }
    if let Some(waits) = batch.requests.iter().position(|ask| ask.within.is_some()) {
        let detail = "no request of a batch waits: leave `within` out, or ask by itself";
        return Err(Refusal::invalid(format!("requests[{waits}].within"), detail));
    }
    let mut results = Vec::with_capacity(count);
    for ask in batch.requests {
        results.push(match draw(&state, &caller, ask).await {
            Ok((granted, _)) => BatchResult::Granted(granted),
            Err(refusal) => BatchResult::Refused(refusal.problem),
        });
    }
    Ok(Done(BatchDone { results }))
}

/// Draws and settles in one call: no lease is kept.
#[utoipa::path(post, path = "/v1/spend", request_body = Spend, responses(
    (status = 204, description = "Spent."),
    (status = 429, description = "A limit is used up for now.", body = Problem),
))]
pub(super) async fn spend(
    With(state): With<State>,
    _: Caller,
    Sent(ask): Sent<Spend>,
) -> Result<StatusCode, Refusal> {
    let cost = ask.cost.pairs();
    let limits = ask.limits.into_iter().map(|limit| limit.0);
    let subject = (ask.entity.0.as_str(), ask.resource.0.as_str());
    state.limiter().request(subject, &cost).limits(limits).spend().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Draws, and lets go of the lease: from here on its holder has it.
async fn draw(state: &State, caller: &Caller, ask: Acquire) -> Result<(Granted, Vec<LimitState>), Refusal> {
    let bounds = state.bounds();
    let deadline = match ask.deadline {
        Some(span) => at_most("deadline", span, bounds.lease_deadline_max)?,
        None => bounds.lease_deadline,
    };
    let within = ask.within.map(|span| at_most("within", span, bounds.within_max)).transpose()?;
    let cost = ask.cost.pairs();
    let limits = ask.limits.into_iter().map(|limit| limit.0);
    let subject = (ask.entity.0.as_str(), ask.resource.0.as_str());
    let request = state.limiter().request(subject, &cost).limits(limits).deadline(deadline);
    let lease = match within {
        Some(within) => request.acquire_within(within).await?,
        None => request.acquire().await?,
    };
    let limits = lease.balances().iter().map(|balance| LimitState::new(balance, None)).collect();
    let degraded = lease.degraded().map(|why| match why {
        tidegate::Degraded::LocalShare => Degraded::LocalShare,
        // That nobody keeps it is the most that can be said of a way we do not know.
        _ => Degraded::Allowed,
    });
    let lease = state.lease_key().name(lease.detach(), caller.token());
    Ok((Granted { lease, expires_in: deadline.into(), degraded }, limits))
}

/// A span that is within its bound.
pub(super) fn at_most(field: &str, span: Seconds, max: Duration) -> Result<Duration, Refusal> {
    if span.as_duration() <= max {
        return Ok(span.as_duration());
    }
    Err(Refusal::invalid(field, format!("a {field} of {span}, more than {max:?}")))
}
