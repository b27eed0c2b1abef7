//! Going on with a lease, by its name and its next step.

use std::time::Instant;

use axum::extract::State as With;
use axum::http::StatusCode;
use tidegate::{LeaseId, LeaseStep, LimitError};
use tidegate_client::{
    Adjust, Amounts, Cancel, Extend, LeaseRef, LimitState, OpenLease, Problem, Renew, Renewed, Settle,
    StepDone,
};

use super::acquire::at_most;
use crate::codec::{At, Done, Sent};
use crate::gate::Caller;
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::state::State;

/// An open lease: what it holds, its last step, and how long it has.
#[utoipa::path(get, path = "/v1/leases/{lease}", params(("lease" = LeaseRef, Path)), responses(
    (status = 200, description = "The lease.", body = OpenLease),
    (status = 410, description = "It has ended.", body = Problem),
))]
pub(super) async fn show(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
) -> Result<Done<OpenLease>, Refusal> {
    let lease = state.limiter().find_lease(own(&state, &caller, &lease)?).await?;
    Ok(Done(OpenLease {
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

/// Draws more for a lease, all or nothing. Refused, it stays as it is.
#[utoipa::path(post, path = "/v1/leases/{lease}/extend", params(("lease" = LeaseRef, Path)), request_body = Extend,
    responses(
        (status = 200, description = "Drawn.", body = StepDone),
        (status = 410, description = "The lease has ended.", body = Problem),
        (status = 429, description = "A limit is used up for now.", body = Problem),
    ))]
pub(super) async fn extend(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
    Sent(extend): Sent<Extend>,
) -> Result<Done<StepDone>, Refusal> {
    let (id, step) = (own(&state, &caller, &lease)?, step(extend.step)?);
    let step =
        decided(&state, Decision::Extend, state.limiter().extend_lease(id, step, extend.cost.pairs())).await;
    let step = step.inspect_err(|error| state.meters().refused(error))?;
    state.meters().granted(&step.balances);
    Ok(done(&step))
}

/// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt.
#[utoipa::path(post, path = "/v1/leases/{lease}/adjust", params(("lease" = LeaseRef, Path)), request_body = Adjust,
    responses(
        (status = 200, description = "Changed.", body = StepDone),
        (status = 410, description = "The lease has ended.", body = Problem),
    ))]
pub(super) async fn adjust(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
    Sent(adjust): Sent<Adjust>,
) -> Result<Done<StepDone>, Refusal> {
    let (id, step) = (own(&state, &caller, &lease)?, step(adjust.step)?);
    Ok(done(
        &decided(&state, Decision::Adjust, state.limiter().adjust_lease(id, step, adjust.changes.pairs()))
            .await?,
    ))
}

/// Gives a lease more time from now on; one that has more is left with it.
#[utoipa::path(post, path = "/v1/leases/{lease}/renew", params(("lease" = LeaseRef, Path)), request_body = Renew,
    responses(
        (status = 200, description = "Renewed.", body = Renewed),
        (status = 410, description = "The lease has ended.", body = Problem),
    ))]
pub(super) async fn renew(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
    Sent(renew): Sent<Renew>,
) -> Result<Done<Renewed>, Refusal> {
    let (id, step) = (own(&state, &caller, &lease)?, step(renew.step)?);
    let span = at_most("expires_in", renew.expires_in, state.bounds().lease_deadline_max)?;
    let renewed = decided(&state, Decision::Renew, state.limiter().renew_lease(id, step, span)).await?;
    Ok(Done(Renewed {
        at: renewed.at.into(),
        is_repeat: renewed.is_repeat,
        deadline: renewed.deadline.into(),
        expires_in: renewed.deadline.since(renewed.at).into(),
    }))
}

/// Ends a lease at what was used of the limits named, and at what it holds of the others.
///
/// The same again is answered as the first time, for ten minutes.
#[utoipa::path(post, path = "/v1/leases/{lease}/settle", params(("lease" = LeaseRef, Path)), request_body = Settle,
    responses(
        (status = 200, description = "Settled.", body = StepDone),
        (status = 410, description = "It has ended otherwise.", body = Problem),
    ))]
pub(super) async fn settle(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
    Sent(settle): Sent<Settle>,
) -> Result<Done<StepDone>, Refusal> {
    let (id, step) = (own(&state, &caller, &lease)?, step(settle.step)?);
    let step =
        decided(&state, Decision::Settle, state.limiter().settle_lease(id, step, settle.actual.pairs()))
            .await?;
    if !step.is_repeat {
        state.meters().ended(Decision::Settle);
    }
    Ok(done(&step))
}

/// Ends a lease as if it had never been: all of it returns.
#[utoipa::path(post, path = "/v1/leases/{lease}/cancel", params(("lease" = LeaseRef, Path)), request_body = Cancel,
    responses(
        (status = 200, description = "Cancelled.", body = StepDone),
        (status = 410, description = "It has ended otherwise.", body = Problem),
    ))]
pub(super) async fn cancel(
    With(state): With<State>,
    caller: Caller,
    At(lease): At<LeaseRef>,
    Sent(cancel): Sent<Cancel>,
) -> Result<Done<StepDone>, Refusal> {
    let (id, step) = (own(&state, &caller, &lease)?, step(cancel.step)?);
    let step = decided(&state, Decision::Cancel, state.limiter().cancel_lease(id, step)).await?;
    if !step.is_repeat {
        state.meters().ended(Decision::Cancel);
    }
    Ok(done(&step))
}

/// What the limiter decides, timed.
async fn decided<T>(
    state: &State,
    what: Decision,
    deciding: impl Future<Output = Result<T, LimitError>>,
) -> Result<T, LimitError> {
    let began = Instant::now();
    let answer = deciding.await;
    state.meters().decided(what, began.elapsed());
    answer
}

/// The lease, if it is the caller's. Whether another has it, or nobody, is not told.
fn own(state: &State, caller: &Caller, lease: &LeaseRef) -> Result<LeaseId, Refusal> {
    state.lease_key().open(lease, caller.token()).ok_or_else(|| {
        let detail = format!("no lease of this name was given to the token `{}`", caller.token());
        Refusal::new(StatusCode::FORBIDDEN, "not-your-lease", "Not allowed", detail)
    })
}

/// A step after the draw.
fn step(step: u32) -> Result<u32, Refusal> {
    // The last number is the store's own, for leases that it ends by itself.
    if (1..u32::MAX).contains(&step) {
        return Ok(step);
    }
    Err(Refusal::invalid("step", format!("step {step}, outside 1..={}: step 0 was the draw", u32::MAX - 1)))
}

fn done(step: &LeaseStep) -> Done<StepDone> {
    let limits = step.balances.iter().map(|balance| LimitState::new(balance, None)).collect();
    Done(StepDone { at: step.at.into(), is_repeat: step.is_repeat, limits })
}
