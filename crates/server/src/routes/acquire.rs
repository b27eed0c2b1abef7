//! Handlers of the draw routes: acquire, batch and spend.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::extract::State as With;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tidegate::{Balance, LimitError, Subject, rate_limit_fields};
use tidegate_client::{
    Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, EntityId, Granted, LimitText, Problem,
    RequestId, ResourceName, Seconds, Spend,
};
use tidegate_core::limit::token::TokenScope;

use crate::auth::Caller;
use crate::codec::{self, JsonBody, OkJson};
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::state::State;

/// Draws units of every limit of a subject and of the levels above it, all or nothing.
///
/// With `within`, the request waits in a FIFO queue. A lease that is neither ended nor renewed in time
/// expires. With an `id`, the request is idempotent: retries return the same lease, which is charged once.
#[utoipa::path(post, path = "/v1/acquire", request_body = Acquire, responses(
    (status = 200, description = "Drawn.", body = Granted),
    (status = 409, description = "The id was used for another request.", body = Problem),
    (status = 410, description = "The lease of this id has ended.", body = Problem),
    (status = 429, description = "A limit is exceeded.", body = Problem),
))]
pub(super) async fn acquire(
    With(state): With<State>,
    caller: Caller,
    JsonBody(body): JsonBody<Acquire>,
) -> Result<Response, Refusal> {
    let (granted, balances) = draw(&state, &caller, body).await?;
    let mut headers = HeaderMap::new();
    rate_limit_fields(&mut headers, &balances);
    Ok((headers, OkJson(granted)).into_response())
}

/// Draws for independent requests: each is granted or refused by itself. None waits.
#[utoipa::path(post, path = "/v1/acquire/batch", request_body = Batch, responses(
    (status = 200, description = "One result for each request.", body = BatchDone),
))]
pub(super) async fn batch(
    With(state): With<State>,
    caller: Caller,
    JsonBody(batch): JsonBody<Batch>,
) -> Result<OkJson<BatchDone>, Refusal> {
    let count = batch.requests.len();
    if count == 0 || count > BATCH_MAX {
        return Err(Refusal::invalid("requests", format!("{count} requests, outside 1..={BATCH_MAX}")));
    }
    if let Some(index) = batch.requests.iter().position(|body| body.within.is_some()) {
        let detail = "requests of a batch cannot wait: remove `within`, or send the request by itself";
        return Err(Refusal::invalid(format!("requests[{index}].within"), detail));
    }
    let mut results = Vec::with_capacity(count);
    for body in batch.requests {
        results.push(match draw(&state, &caller, body).await {
            Ok((granted, _)) => BatchResult::Granted(granted),
            Err(refusal) => BatchResult::Refused(refusal.problem),
        });
    }
    Ok(OkJson(BatchDone { results }))
}

/// Draws and settles in one call, without a lease. With an `id`, the request is idempotent.
#[utoipa::path(post, path = "/v1/spend", request_body = Spend, responses(
    (status = 204, description = "Spent."),
    (status = 409, description = "The id was used for another request.", body = Problem),
    (status = 429, description = "A limit is exceeded.", body = Problem),
))]
pub(super) async fn spend(
    With(state): With<State>,
    caller: Caller,
    JsonBody(body): JsonBody<Spend>,
) -> Result<StatusCode, Refusal> {
    let cost = body.cost.pairs();
    let has_own_limits = !body.limits.is_empty();
    let limits = call_limits(&caller, body.limits)?;
    let subject = (&body.entity, &body.resource);
    caller.may_use(&state, &body.entity.0).await?;
    log_request(subject, &cost, has_own_limits);
    let request = request(&state, &caller, subject, &cost, body.id.as_ref()).limits(limits);
    let began = Instant::now();
    let spent = request.spend_with_balances().await;
    state.meters().decided(Decision::Spend, began.elapsed());
    let left = spent.inspect_err(|error| record_refusal(&state, error, subject))?;
    record_grant(&state, &left, subject);
    Ok(StatusCode::NO_CONTENT)
}

/// Draws a lease and detaches it: from here on its holder manages it.
async fn draw(state: &State, caller: &Caller, body: Acquire) -> Result<(Granted, Vec<Balance>), Refusal> {
    let bounds = state.bounds();
    let deadline = match body.deadline {
        Some(span) => at_most("deadline", span, bounds.lease_deadline_max)?,
        None => bounds.lease_deadline,
    };
    let within = body.within.map(|span| at_most("within", span, bounds.within_max)).transpose()?;
    let cost = body.cost.pairs();
    let has_own_limits = !body.limits.is_empty();
    let limits = call_limits(caller, body.limits)?;
    let subject = (&body.entity, &body.resource);
    caller.may_use(state, &body.entity.0).await?;
    log_request(subject, &cost, has_own_limits);
    let request = request(state, caller, subject, &cost, body.id.as_ref()).limits(limits).deadline(deadline);
    let began = Instant::now();
    let (lease, what) = match within {
        Some(within) => {
            let lease = tokio::select! {
                biased;
                lease = request.acquire_within(within) => lease,
                () = state.until_revoked(caller) => return Err(Refusal::bad_token("the token was revoked")),
            };
            (lease, Decision::AcquireWithin)
        }
        None => (request.try_acquire().await, Decision::Acquire),
    };
    state.meters().decided(what, began.elapsed());
    let lease = lease.inspect_err(|error| record_refusal(state, error, subject))?;
    let balances = lease.balances();
    record_grant(state, &balances, subject);
    let degraded = lease.degraded().map(|why| match why {
        tidegate::Degraded::LocalShare => Degraded::LocalShare,
        // Report an unknown kind of degradation as the weakest guarantee.
        _ => Degraded::Allowed,
    });
    let before = lease.drawn_before();
    let (expires_in, is_repeat) = (before.unwrap_or(deadline).into(), before.is_some());
    // A lease that is not stored never ends here.
    if !is_repeat && degraded != Some(Degraded::Allowed) {
        state.meters().opened();
    }
    let lease = state.lease_key().name(lease.detach(), caller.token());
    Ok((Granted { lease, expires_in, is_repeat, degraded }, balances))
}

/// Counts a grant.
fn record_grant(state: &State, left: &[Balance], (entity, resource): (&EntityId, &ResourceName)) {
    state.meters().granted(left);
    state.events().granted(|| Subject { entity: entity.0.clone(), resource: resource.0.clone() });
}

/// Counts and broadcasts a refusal.
fn record_refusal(state: &State, error: &LimitError, (entity, resource): (&EntityId, &ResourceName)) {
    state.meters().refused(error);
    state.events().refused(error, entity, resource);
}

/// Returns the limits of the call. They replace stored limits, so they require the scope to write those.
fn call_limits(
    caller: &Caller,
    limits: Vec<LimitText>,
) -> Result<impl Iterator<Item = tidegate::Limit>, Refusal> {
    if !limits.is_empty() {
        caller.needs(TokenScope::Admin, "a call with its own limits")?;
    }
    Ok(limits.into_iter().map(|limit| limit.0))
}

/// Logs the request before it is decided: `tidegate explain --replay` reads it from a JSON log. Without a
/// subscriber, nothing is formatted.
fn log_request((entity, resource): (&EntityId, &ResourceName), cost: &[(&str, u64)], has_own_limits: bool) {
    let cost = || codec::to_json(&cost.iter().copied().collect::<BTreeMap<_, _>>());
    tracing::debug!(%entity, %resource, cost = cost(), has_own_limits, "asked");
}

/// Builds a limiter request, with the caller's request id.
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

/// Checks a duration against its bound.
pub(super) fn at_most(field: &str, span: Seconds, max: Duration) -> Result<Duration, Refusal> {
    if span.as_duration() <= max {
        return Ok(span.as_duration());
    }
    Err(Refusal::invalid(field, format!("a {field} of {span}, more than {max:?}")))
}
