//! Drawing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::extract::State as With;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tidegate::{Balance, LimitError, rate_limit_fields};
use tidegate_client::{
    Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, EntityId, Granted, LimitText, Problem,
    RequestId, ResourceName, Seconds, Spend,
};
use tidegate_core::limit::token::TokenScope;

use crate::codec::{self, Done, Sent};
use crate::gate::Caller;
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::state::State;

/// Draws units of every limit of a subject and of those above it, all or nothing.
///
/// With `within` it waits, in the order of asking. A lease that is neither ended nor renewed in its time ends by itself.
/// With an `id` it can be sent again until there is an answer: the lease is the same, and is charged once.
#[utoipa::path(post, path = "/v1/acquire", request_body = Acquire, responses(
    (status = 200, description = "Drawn.", body = Granted),
    (status = 409, description = "The id stands for another request.", body = Problem),
    (status = 410, description = "The lease of this id has ended.", body = Problem),
    (status = 429, description = "A limit is used up for now.", body = Problem),
))]
pub(super) async fn acquire(
    With(state): With<State>,
    caller: Caller,
    Sent(ask): Sent<Acquire>,
) -> Result<Response, Refusal> {
    let (granted, balances) = draw(&state, &caller, ask).await?;
    let mut headers = HeaderMap::new();
    rate_limit_fields(&mut headers, &balances);
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

/// Draws and settles in one call: no lease is kept. With an `id` it can be sent again until there is an answer.
#[utoipa::path(post, path = "/v1/spend", request_body = Spend, responses(
    (status = 204, description = "Spent."),
    (status = 409, description = "The id stands for another request.", body = Problem),
    (status = 429, description = "A limit is used up for now.", body = Problem),
))]
pub(super) async fn spend(
    With(state): With<State>,
    caller: Caller,
    Sent(ask): Sent<Spend>,
) -> Result<StatusCode, Refusal> {
    let cost = ask.cost.pairs();
    let has_own_limits = !ask.limits.is_empty();
    let limits = own(&caller, ask.limits)?;
    let subject = (&ask.entity, &ask.resource);
    asked(subject, &cost, has_own_limits);
    let request = request(&state, &caller, subject, &cost, ask.id.as_ref()).limits(limits);
    let began = Instant::now();
    let spent = request.spend_and_tell().await;
    state.meters().decided(Decision::Spend, began.elapsed());
    let left = spent.inspect_err(|error| refused(&state, error, subject))?;
    state.meters().granted(&left);
    Ok(StatusCode::NO_CONTENT)
}

/// Draws, and lets go of the lease: from here on its holder has it.
async fn draw(state: &State, caller: &Caller, ask: Acquire) -> Result<(Granted, Vec<Balance>), Refusal> {
    let bounds = state.bounds();
    let deadline = match ask.deadline {
        Some(span) => at_most("deadline", span, bounds.lease_deadline_max)?,
        None => bounds.lease_deadline,
    };
    let within = ask.within.map(|span| at_most("within", span, bounds.within_max)).transpose()?;
    let cost = ask.cost.pairs();
    let has_own_limits = !ask.limits.is_empty();
    let limits = own(caller, ask.limits)?;
    let subject = (&ask.entity, &ask.resource);
    asked(subject, &cost, has_own_limits);
    let request = request(state, caller, subject, &cost, ask.id.as_ref()).limits(limits).deadline(deadline);
    let began = Instant::now();
    let (lease, what) = match within {
        Some(within) => (request.acquire_within(within).await, Decision::AcquireWithin),
        None => (request.acquire().await, Decision::Acquire),
    };
    state.meters().decided(what, began.elapsed());
    let lease = lease.inspect_err(|error| refused(state, error, subject))?;
    let balances = lease.balances();
    state.meters().granted(&balances);
    let degraded = lease.degraded().map(|why| match why {
        tidegate::Degraded::LocalShare => Degraded::LocalShare,
        // That nobody keeps it is the most that can be said of a way we do not know.
        _ => Degraded::Allowed,
    });
    let before = lease.drawn_before();
    let (expires_in, is_repeat) = (before.unwrap_or(deadline).into(), before.is_some());
    // One that nobody keeps is never seen to end.
    if !is_repeat && degraded != Some(Degraded::Allowed) {
        state.meters().opened();
    }
    let lease = state.lease_key().name(lease.detach(), caller.token());
    Ok((Granted { lease, expires_in, is_repeat, degraded }, balances))
}

/// Tells those who watch of a refusal.
fn refused(state: &State, error: &LimitError, (entity, resource): (&EntityId, &ResourceName)) {
    state.meters().refused(error);
    state.hub().refused(error, entity, resource);
}

/// Limits of the call. They stand in the place of those that are written, so only who may write those may bring them.
fn own(caller: &Caller, limits: Vec<LimitText>) -> Result<impl Iterator<Item = tidegate::Limit>, Refusal> {
    if !limits.is_empty() {
        caller.needs(TokenScope::Admin, "a call with limits of its own")?;
    }
    Ok(limits.into_iter().map(|limit| limit.0))
}

/// Logs who asked for what, before it is judged: `tidegate explain --replay` reads it from a log of JSON. Nothing is made of it
/// where nobody logs it.
fn asked((entity, resource): (&EntityId, &ResourceName), cost: &[(&str, u64)], has_own_limits: bool) {
    let cost = || codec::text(&cost.iter().copied().collect::<BTreeMap<_, _>>());
    tracing::debug!(%entity, %resource, cost = cost(), has_own_limits, "asked");
}

/// A request for units, with the id that the caller has chosen for it.
fn request<'a>(
    state: &'a State,
    caller: &Caller,
    (entity, resource): (&'a EntityId, &'a ResourceName),
    cost: &'a [(&'a str, u64)],
    id: Option<&RequestId>,
) -> tidegate::Request<'a> {
    let request = state.limiter().request((entity.0.as_str(), resource.0.as_str()), cost);
    match id {
        Some(id) => request.id(state.lease_key().number(caller.token(), (entity, resource), id)),
        None => request,
    }
}

/// A span that is within its bound.
pub(super) fn at_most(field: &str, span: Seconds, max: Duration) -> Result<Duration, Refusal> {
    if span.as_duration() <= max {
        return Ok(span.as_duration());
    }
    Err(Refusal::invalid(field, format!("a {field} of {span}, more than {max:?}")))
}
