//! Handlers of the upstream routes: permits for calls, and how they went.

use axum::extract::State as With;
use axum::http::StatusCode;
use tidegate::{Class, Classes, Completion, CompletionClass, Cost, LeaseId, Outcome, Refused};
use tidegate_client::{
    AcquireCall, CallPermit, CallSettled, LeaseRef, Problem, ResourceName, RetryAdvice, SettleCall,
    UpstreamList, UpstreamState,
};
use tidegate_core::feedback::headers::read;
use tokio::time::Instant;

use super::acquire::at_most;
use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, PathParam};
use crate::refusal::Refusal;
use crate::state::State;
use crate::upstreams::{HeldCall, PERMITS_MAX};

/// Asks for a permit to call an upstream: its throttle learns how fast the upstream may be called. It is created
/// on first use, unless the server's configuration declares the upstreams. Name one for each quota, such as a provider with a key and a group of models.
///
/// With an entity, a resource and a cost, the limits of that subject are drawn too.
#[utoipa::path(post, path = "/v1/upstreams/{upstream}/acquire", params(("upstream" = ResourceName, Path)),
    request_body = AcquireCall, responses(
        (status = 200, description = "Make the call, and settle the permit.", body = CallPermit),
        (status = 404, description = "The configuration declares other upstreams.", body = Problem),
        (status = 429, description = "The upstream would not accept the call in time, or a limit is exceeded.", body = Problem),
        (status = 503, description = "The upstream fails, and its circuit stays open for longer than the call waits.", body = Problem),
    ))]
pub(super) async fn acquire(
    With(state): With<State>,
    caller: Caller,
    PathParam(upstream): PathParam<ResourceName>,
    JsonBody(body): JsonBody<AcquireCall>,
) -> Result<OkJson<CallPermit>, Refusal> {
    state.upstreams().check(upstream.0.as_str()).map_err(|known| {
        let detail = format!("the server has no upstream `{upstream}`; its configuration declares: {known}");
        Refusal::not_found("no-upstream", detail)
    })?;
    caller.may_read(&state, body.entity.as_ref().map(|entity| &entity.0)).await?;
    let bounds = state.bounds();
    let deadline = match body.deadline {
        Some(span) => at_most("deadline", span, bounds.lease_deadline_max)?,
        None => bounds.lease_deadline,
    };
    let within = body.within.map(|span| at_most("within", span, bounds.within_max)).transpose()?;
    let until = Instant::now() + within.unwrap_or_default();
    let at_capacity = |at| Refusal::busy(at, (PERMITS_MAX, "requests"), caller.token());
    let slot = state.upstreams().slot(caller.token()).map_err(at_capacity)?;
    let cost = body.cost.pairs();
    let revoked = || Refusal::bad_token("the token was revoked");
    let lease = match (&body.entity, &body.resource) {
        (Some(entity), Some(resource)) => {
            let request =
                state.limiter().request((entity.0.as_str(), resource.0.as_str()), &cost).deadline(deadline);
            Some(match within {
                Some(within) => tokio::select! {
                    biased;
                    lease = request.acquire_within(within) => lease?,
                    () = state.until_revoked(&caller) => return Err(revoked()),
                },
                None => request.try_acquire().await?,
            })
        }
        (None, None) if cost.is_empty() => None,
        _ => {
            let detail = "a draw needs `entity`, `resource` and `cost` together";
            return Err(Refusal::invalid("entity", detail));
        }
    };
    // The permit ends with its lease, however long it waits for the upstream.
    let expires_at = Instant::now() + deadline;
    let left = until.min(expires_at).saturating_duration_since(Instant::now());
    // A lease that is dropped is cancelled.
    let permit = tokio::select! {
        biased;
        permit = state.upstreams().acquire(upstream.0.as_str(), body.tokens, left) => permit,
        () = state.until_revoked(&caller) => return Err(revoked()),
    };
    let permit = permit.map_err(|refused| refusal(&upstream, refused))?;
    let number = state.upstreams().hold(HeldCall {
        upstream: upstream.0,
        permit,
        lease,
        attempt: body.attempt,
        expires_at,
        slot,
    });
    let permit = state.lease_key().name(LeaseId::from_number(number), caller.token());
    let expires_in = expires_at.saturating_duration_since(Instant::now()).into();
    Ok(OkJson(CallPermit { permit, expires_in }))
}

/// Reports how a call went: the throttle of its upstream learns, and the limits are settled. A permit is settled
/// once, by the token that acquired it. The answer says whether the call may be repeated, and when.
#[utoipa::path(post, path = "/v1/permits/{permit}/settle", params(("permit" = LeaseRef, Path)),
    request_body = SettleCall, responses(
        (status = 200, description = "Settled.", body = CallSettled),
        (status = 404, description = "The permit was settled before, or has expired.", body = Problem),
        (status = 410, description = "The lease of its limits has ended before.", body = Problem),
    ))]
pub(super) async fn settle(
    With(state): With<State>,
    caller: Caller,
    PathParam(permit): PathParam<LeaseRef>,
    JsonBody(body): JsonBody<SettleCall>,
) -> Result<OkJson<CallSettled>, Refusal> {
    let number = state.lease_key().open(&permit, caller.token()).ok_or_else(|| {
        let detail = format!("the token `{}` holds no permit with this name", caller.token());
        Refusal::new(StatusCode::FORBIDDEN, "not-your-permit", "Not allowed", detail)
    })?;
    let gone = || Refusal::not_found("no-permit", "the permit was settled before, or has expired");
    let HeldCall { upstream, permit, mut lease, attempt, .. } =
        state.upstreams().take(number.number()).ok_or_else(gone)?;
    let (class, mut outcome) = outcome(&state, &body);
    if let Some(tokens) = body.tokens {
        outcome = outcome.spent(Cost::request().tokens(tokens));
    }
    if let Some(latency) = body.latency {
        outcome = outcome.took(latency.as_duration());
    }
    state.meters().call_settled(upstream.as_str(), &outcome);
    if let Some(lease) = &mut lease
        && let Err(error) = lease.check_units(body.actual.pairs())
    {
        // The call was made: returning all units would be worse than keeping the estimate. The error has no advice
        // on a retry, so that the retry budget pays for none.
        permit.settle(outcome);
        lease.settle_full().await?;
        return Err(error.into());
    }
    let after = permit.settle_attempt(attempt, Class::new(class, outcome));
    if let Some(mut lease) = lease {
        lease.settle(body.actual.pairs()).await?;
    }
    let retry = RetryAdvice { allowed: after.is_some(), after: after.map(Into::into) };
    Ok(OkJson(CallSettled { retry }))
}

/// Lists the upstreams that were called recently.
#[utoipa::path(get, path = "/v1/upstreams", responses(
    (status = 200, description = "The upstreams.", body = UpstreamList),
))]
pub(super) async fn list(With(state): With<State>) -> OkJson<UpstreamList> {
    let view = |view: tidegate::KeyView<String>| {
        let name = view.key.parse().ok()?;
        let (throttle, control) = (&view.throttle, view.throttle.control.as_ref());
        Some(UpstreamState {
            name,
            in_flight: throttle.in_flight,
            waiting: throttle.waiting,
            admitted: throttle.admitted,
            rate: throttle.rate.map(tidegate::PerSecond::as_f64),
            slots: throttle.slots,
            quota: control.and_then(|control| control.requests.quota).map(tidegate::PerSecond::as_f64),
            reason: control.map(|control| control.reason.to_string()),
        })
    };
    let upstreams = state.upstreams().snapshot().top.into_iter().filter_map(view).collect();
    OkJson(UpstreamList { upstreams })
}

/// The outcome of a call, by its status, its headers, and the body of a rejection.
fn outcome(state: &State, call: &SettleCall) -> (CompletionClass, Outcome) {
    const CLASSES: &Classes = &Classes::new();
    let completion = call.status.map_or(Completion::Connection, Completion::Status);
    let signals = read(&call.headers, state.clock().now());
    let outcome = CLASSES.outcome_with(completion, &signals);
    let body = call.body.as_deref().unwrap_or_default();
    (CLASSES.classify_with(completion, &signals), outcome.exceeded_in(body.as_bytes()))
}

fn refusal(upstream: &ResourceName, refused: Refused) -> Refusal {
    let detail = format!("upstream `{upstream}`: {refused}");
    let refusal = match refused {
        Refused::Closed => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "Stopping", detail),
        Refused::CircuitOpen { .. } => {
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "circuit-open", "The upstream fails", detail)
        }
        _ => Refusal::new(
            StatusCode::TOO_MANY_REQUESTS,
            "upstream-limited",
            "The upstream is at its limit",
            detail,
        ),
    };
    match refused.retry_after() {
        Some(wait) => refusal.with_retry_after(wait),
        None => refusal,
    }
}
