//! Handlers of the routes of limits' states: balances, capacity and explain, and the repair of a bucket.

use axum::extract::State as With;
use tidegate::{BucketLimit, InvalidBucketLimit, LimitKey, LimitLine, Would as CoreForecast};
use tidegate_client::{
    Ask, BalanceQuery, Balances, BucketWritten, Capacities, Capacity, CapacityQuery, Explanation, Forecast,
    LimitState, PutBucket,
};

use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, QueryParams};
use crate::refusal::Refusal;
use crate::state::State;

/// Returns the limits of a subject and of the levels above it that it draws from.
///
/// Without a resource: all limits that the entity and its ancestors have used.
#[utoipa::path(get, path = "/v1/balances", params(BalanceQuery), responses(
    (status = 200, description = "The limits.", body = Balances),
))]
pub(super) async fn balances(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<BalanceQuery>,
) -> Result<OkJson<Balances>, Refusal> {
    let Some(entity) = query.entity else {
        return Err(Refusal::invalid("entity", "missing: specify `?entity=NAME`"));
    };
    caller.may_use(&state, &entity.0).await?;
    let limits = if let Some(resource) = query.resource {
        let subject = (entity.0.as_str(), resource.0.as_str());
        lines(&state.within(state.limiter().balances(subject)).await??)
    } else {
        // It reads all buckets of an entity.
        let _slot = state.enter_report(caller.token())?;
        let balances = state.within(state.limiter().balances_of_entity(entity.0.as_str())).await??;
        balances.iter().map(|balance| LimitState::new(balance, None)).collect()
    };
    Ok(OkJson(Balances { limits }))
}

/// Returns the utilization of a resource's limits, over all buckets. It reads every bucket of the resource.
#[utoipa::path(get, path = "/v1/capacity", params(CapacityQuery), responses(
    (status = 200, description = "The limits, by name.", body = Capacities),
))]
pub(super) async fn capacity(
    With(state): With<State>,
    QueryParams(query): QueryParams<CapacityQuery>,
) -> Result<OkJson<Capacities>, Refusal> {
    let Some(resource) = query.resource else {
        return Err(Refusal::invalid("resource", "missing: specify `?resource=NAME`"));
    };
    let sums = state.within(state.limiter().capacity(resource.0.as_str())).await??;
    let limit = |(limit, sum): (LimitKey, tidegate::Capacity)| Capacity {
        limit: limit.to_string(),
        buckets: sum.buckets,
        burst: sum.burst,
        available: sum.available,
        consumed: sum.consumed,
    };
    Ok(OkJson(Capacities { limits: sums.into_iter().map(limit).collect() }))
}

/// Explains what would happen to an acquire, without drawing.
#[utoipa::path(post, path = "/v1/explain", request_body = Ask, responses(
    (status = 200, description = "The predicted outcome.", body = Explanation),
))]
pub(super) async fn explain(
    With(state): With<State>,
    caller: Caller,
    JsonBody(body): JsonBody<Ask>,
) -> Result<OkJson<Explanation>, Refusal> {
    caller.may_use(&state, &body.entity.0).await?;
    let cost = body.cost.pairs();
    let limits = body.limits.into_iter().map(|limit| limit.0);
    let subject = (body.entity.0.as_str(), body.resource.0.as_str());
    let request = state.limiter().request(subject, &cost).limits(limits);
    let explained = state.within(request.explain()).await??;
    let (would, retry_after) = match explained.would {
        CoreForecast::Grant => (Forecast::Grant, None),
        CoreForecast::Wait(span) => (Forecast::Wait, Some(span.into())),
        _ => (Forecast::Never, None),
    };
    Ok(OkJson(Explanation {
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

/// Sets the units available in one bucket, after a wrong settlement put it into debt. Audited.
#[utoipa::path(put, path = "/v1/bucket", request_body = PutBucket, responses(
    (status = 200, description = "The bucket is set.", body = BucketWritten),
))]
pub(super) async fn put_bucket(
    With(state): With<State>,
    caller: Caller,
    JsonBody(put): JsonBody<PutBucket>,
) -> Result<OkJson<BucketWritten>, Refusal> {
    let limit: BucketLimit = put
        .limit
        .parse()
        .map_err(|error: InvalidBucketLimit| Refusal::invalid("limit", error.to_string()))?;
    let admin = state.limiter().admin(caller.actor());
    let subject = (put.entity.0.as_str(), put.resource.0.as_str());
    let set = state.within(admin.set_bucket(subject, limit, put.units)).await??;
    let version = state.changed(set.version, caller.actor()).version;
    Ok(OkJson(BucketWritten { version, limit: LimitState::new(&set.value, None) }))
}

fn lines(lines: &[LimitLine]) -> Vec<LimitState> {
    lines.iter().map(|line| LimitState::new(&line.balance, Some(&line.source))).collect()
}
