//! Handlers of the lease routes: each step is addressed by the lease's name and its number.

use std::time::Instant;

use axum::extract::State as With;
use axum::http::StatusCode;
use tidegate::{LeaseId, LeaseStep, LimitError};
use tidegate_client::{
    Adjust, Amounts, Cancel, Extend, LeaseRef, LimitState, OpenLease, Problem, Renew, Renewed, Settle,
    StepDone,
};

use super::acquire::at_most;
use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, PathParam};
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::state::State;

/// Returns an open lease: held units, last step and remaining time.
#[utoipa::path(get, path = "/v1/leases/{lease}", params(("lease" = LeaseRef, Path)), responses(
    (status = 200, description = "The lease.", body = OpenLease),
    (status = 410, description = "The lease has ended.", body = Problem),
))]
pub(super) async fn show(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
) -> Result<OkJson<OpenLease>, Refusal> {
    let lease = state.limiter().find_lease(open_name(&state, &caller, &lease)?).await?;
    Ok(OkJson(OpenLease {
        entity: lease.subject.entity.into(),
        resource: lease.subject.resource.into(),
        held: Amounts::new(lease.held),
        step: lease.step,
        drawn_at: lease.drawn_at.into(),
        deadline: lease.deadline.into(),
        expires_in: lease.deadline.since(lease.at).into(),
        on_expiry: lease.on_expiry.into(),
    }))
}

/// Draws more units for a lease, all or nothing. On refusal the lease is unchanged.
#[utoipa::path(post, path = "/v1/leases/{lease}/extend", params(("lease" = LeaseRef, Path)), request_body = Extend,
    responses(
        (status = 200, description = "Drawn.", body = StepDone),
        (status = 410, description = "The lease has ended.", body = Problem),
        (status = 429, description = "A limit is exceeded.", body = Problem),
    ))]
pub(super) async fn extend(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
    JsonBody(extend): JsonBody<Extend>,
) -> Result<OkJson<StepDone>, Refusal> {
    let (id, step) = (open_name(&state, &caller, &lease)?, check_step(extend.step)?);
    let step =
        timed(&state, Decision::Extend, state.limiter().extend_lease(id, step, extend.cost.pairs())).await;
    let step = step.inspect_err(|error| state.meters().refused(error))?;
    state.meters().granted(&step.balances);
    Ok(step_response(&step))
}

/// Adjusts the units of a lease, up or down. Never refused: units beyond the limit become debt.
#[utoipa::path(post, path = "/v1/leases/{lease}/adjust", params(("lease" = LeaseRef, Path)), request_body = Adjust,
    responses(
        (status = 200, description = "Changed.", body = StepDone),
        (status = 410, description = "The lease has ended.", body = Problem),
    ))]
pub(super) async fn adjust(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
    JsonBody(adjust): JsonBody<Adjust>,
) -> Result<OkJson<StepDone>, Refusal> {
    let (id, step) = (open_name(&state, &caller, &lease)?, check_step(adjust.step)?);
    Ok(step_response(
        &timed(&state, Decision::Adjust, state.limiter().adjust_lease(id, step, adjust.changes.pairs()))
            .await?,
    ))
}

/// Extends the deadline of a lease, counted from now; a later deadline is kept.
#[utoipa::path(post, path = "/v1/leases/{lease}/renew", params(("lease" = LeaseRef, Path)), request_body = Renew,
    responses(
        (status = 200, description = "Renewed.", body = Renewed),
        (status = 410, description = "The lease has ended.", body = Problem),
    ))]
pub(super) async fn renew(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
    JsonBody(renew): JsonBody<Renew>,
) -> Result<OkJson<Renewed>, Refusal> {
    let (id, step) = (open_name(&state, &caller, &lease)?, check_step(renew.step)?);
    let span = at_most("expires_in", renew.expires_in, state.bounds().lease_deadline_max)?;
    let renewed = timed(&state, Decision::Renew, state.limiter().renew_lease(id, step, span)).await?;
    Ok(OkJson(Renewed {
        at: renewed.at.into(),
        is_repeat: renewed.is_repeat,
        deadline: renewed.deadline.into(),
        expires_in: renewed.deadline.since(renewed.at).into(),
    }))
}

/// Ends a lease. Limits that `actual` names are settled at that amount, all others at what the lease holds.
///
/// Repeating the request returns the first result, for ten minutes.
#[utoipa::path(post, path = "/v1/leases/{lease}/settle", params(("lease" = LeaseRef, Path)), request_body = Settle,
    responses(
        (status = 200, description = "Settled.", body = StepDone),
        (status = 410, description = "The lease has ended otherwise.", body = Problem),
    ))]
pub(super) async fn settle(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
    JsonBody(settle): JsonBody<Settle>,
) -> Result<OkJson<StepDone>, Refusal> {
    let (id, step) = (open_name(&state, &caller, &lease)?, check_step(settle.step)?);
    let step = timed(&state, Decision::Settle, state.limiter().settle_lease(id, step, settle.actual.pairs()))
        .await?;
    if !step.is_repeat {
        state.meters().ended(Decision::Settle);
    }
    Ok(step_response(&step))
}

/// Ends a lease and returns all its units.
#[utoipa::path(post, path = "/v1/leases/{lease}/cancel", params(("lease" = LeaseRef, Path)), request_body = Cancel,
    responses(
        (status = 200, description = "Cancelled.", body = StepDone),
        (status = 410, description = "The lease has ended otherwise.", body = Problem),
    ))]
pub(super) async fn cancel(
    With(state): With<State>,
    caller: Caller,
    PathParam(lease): PathParam<LeaseRef>,
    JsonBody(cancel): JsonBody<Cancel>,
) -> Result<OkJson<StepDone>, Refusal> {
    let (id, step) = (open_name(&state, &caller, &lease)?, check_step(cancel.step)?);
    let step = timed(&state, Decision::Cancel, state.limiter().cancel_lease(id, step)).await?;
    if !step.is_repeat {
        state.meters().ended(Decision::Cancel);
    }
    Ok(step_response(&step))
}

/// Awaits a decision and records its latency.
async fn timed<T>(
    state: &State,
    what: Decision,
    decision: impl Future<Output = Result<T, LimitError>>,
) -> Result<T, LimitError> {
    let began = Instant::now();
    let answer = decision.await;
    state.meters().decided(what, began.elapsed());
    answer
}

/// Returns the lease if it belongs to the caller. The error does not reveal whether the lease exists.
fn open_name(state: &State, caller: &Caller, lease: &LeaseRef) -> Result<LeaseId, Refusal> {
    state.lease_key().open(lease, caller.token()).ok_or_else(|| {
        let detail = format!("the token `{}` holds no lease with this name", caller.token());
        Refusal::new(StatusCode::FORBIDDEN, "not-your-lease", "Not allowed", detail)
    })
}

/// Checks the number of a step after the draw.
fn check_step(step: u32) -> Result<u32, Refusal> {
    // The last number is reserved for leases that the store ends.
    if (1..u32::MAX).contains(&step) {
        return Ok(step);
    }
    Err(Refusal::invalid("step", format!("step {step}, outside 1..={}: step 0 was the draw", u32::MAX - 1)))
}

fn step_response(step: &LeaseStep) -> OkJson<StepDone> {
    let limits = step.balances.iter().map(|balance| LimitState::new(balance, None)).collect();
    OkJson(StepDone { at: step.at.into(), is_repeat: step.is_repeat, limits })
}
