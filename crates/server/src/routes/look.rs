//! Looking without taking.

use axum::extract::State as With;
use tidegate::{LimitLine, LimitName, Would as Will};
use tidegate_client::{
    Ask, BalanceQuery, Balances, Capacities, Capacity, CapacityQuery, Explanation, LimitState, Would,
};

use crate::codec::{Asked, Done, Sent};
use crate::refusal::Refusal;
use crate::state::State;

/// The limits of a subject and of those above it that it draws from, as they are.
///
/// Without a resource: everything that the entity, and those it draws from, have used.
#[utoipa::path(get, path = "/v1/balances", params(BalanceQuery), responses(
    (status = 200, description = "The limits.", body = Balances),
))]
pub(super) async fn balances(
    With(state): With<State>,
    Asked(query): Asked<BalanceQuery>,
) -> Result<Done<Balances>, Refusal> {
    let Some(entity) = query.entity else {
        return Err(Refusal::invalid("entity", "say whose balances: `?entity=NAME`"));
    };
    let limits = if let Some(resource) = query.resource {
        let subject = (entity.0.as_str(), resource.0.as_str());
        lines(&state.within(state.limiter().balances(subject)).await??)
    } else {
        let balances = state.within(state.limiter().balances_of_entity(entity.0.as_str())).await??;
        balances.iter().map(|balance| LimitState::new(balance, None)).collect()
    };
    Ok(Done(Balances { limits }))
}

/// How much of a resource's limits is in use, over all buckets. It reads every bucket of the resource.
#[utoipa::path(get, path = "/v1/capacity", params(CapacityQuery), responses(
    (status = 200, description = "The limits, by name.", body = Capacities),
))]
pub(super) async fn capacity(
    With(state): With<State>,
    Asked(query): Asked<CapacityQuery>,
) -> Result<Done<Capacities>, Refusal> {
    let Some(resource) = query.resource else {
        return Err(Refusal::invalid("resource", "say of which resource: `?resource=NAME`"));
    };
    let sums = state.within(state.limiter().capacity(resource.0.as_str())).await??;
    let limit = |(limit, sum): (LimitName, tidegate::Capacity)| Capacity {
        limit: limit.to_string(),
        buckets: sum.buckets,
        burst: sum.burst,
        available: sum.available,
        consumed: sum.consumed,
    };
    Ok(Done(Capacities { limits: sums.into_iter().map(limit).collect() }))
}

/// What would happen to an acquire, and why: nothing is taken.
#[utoipa::path(post, path = "/v1/explain", request_body = Ask, responses(
    (status = 200, description = "What would happen.", body = Explanation),
))]
pub(super) async fn explain(
    With(state): With<State>,
    Sent(ask): Sent<Ask>,
) -> Result<Done<Explanation>, Refusal> {
    let cost = ask.cost.pairs();
    let limits = ask.limits.into_iter().map(|limit| limit.0);
    let subject = (ask.entity.0.as_str(), ask.resource.0.as_str());
    let request = state.limiter().request(subject, &cost).limits(limits);
    let explained = state.within(request.explain()).await??;
    let (would, retry_after) = match explained.would {
        Will::Grant => (Would::Grant, None),
        Will::Wait(span) => (Would::Wait, Some(span.into())),
        _ => (Would::Never, None),
    };
    Ok(Done(Explanation {
        would,
        retry_after,
        limits: lines(&explained.lines),
        on_unavailable: explained.on_unavailable.0.into(),
        on_unavailable_source: explained.on_unavailable.1.to_string(),
        on_expiry: explained.on_expiry.0.into(),
        on_expiry_source: explained.on_expiry.1.to_string(),
        version: explained.version.number(),
    }))
}

fn lines(lines: &[LimitLine]) -> Vec<LimitState> {
    lines.iter().map(|line| LimitState::new(&line.balance, Some(&line.source))).collect()
}
