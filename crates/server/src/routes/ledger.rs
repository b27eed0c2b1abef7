//! Handlers of usage reports and the audit log.

use axum::extract::State as With;
use tidegate::store::AuditQuery as StoreAuditQuery;
use tidegate::{Scope, Stamp, UsageOf, UsageQuery as StoreUsageQuery};
use tidegate_client::{
    AuditEntry, AuditPage, AuditQuery, Time, UsageLine, UsagePage, UsageQuery, UsageSum, UsageSummary,
};
use tidegate_core::limit::audit::AuditKey;

use super::paging;
use crate::auth::Caller;
use crate::codec::{OkJson, QueryParams};
use crate::refusal::Refusal;
use crate::state::State;

/// Lists the usage of an entity, a resource or of limits across all resources, by subject, then limit, then window.
#[utoipa::path(get, path = "/v1/usage", params(UsageQuery), responses(
    (status = 200, description = "A page of usage.", body = UsagePage),
))]
pub(super) async fn usage(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<UsageQuery>,
) -> Result<OkJson<UsagePage>, Refusal> {
    caller.may_read(&state, query.entity.as_ref().map(|entity| &entity.0)).await?;
    let (store_query, paging) = (usage_query(&query)?, paging(query.after, query.max)?);
    let page = state.query(state.store().usage(&store_query, &paging)).await?;
    let items = page.items.iter().map(UsageLine::from).collect();
    Ok(OkJson(UsagePage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// Returns usage summed by limit.
#[utoipa::path(get, path = "/v1/usage/summary", params(UsageQuery), responses(
    (status = 200, description = "The sums.", body = UsageSummary),
))]
pub(super) async fn summary(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<UsageQuery>,
) -> Result<OkJson<UsageSummary>, Refusal> {
    caller.may_read(&state, query.entity.as_ref().map(|entity| &entity.0)).await?;
    let store_query = usage_query(&query)?;
    if query.after.is_some() || query.max.is_some() {
        return Err(Refusal::invalid("after", "a summary has no pages"));
    }
    let sum = state.within(state.limiter().usage_sum(&store_query)).await??;
    let limits =
        sum.limits.into_iter().map(|(name, tally)| (name.to_string(), UsageSum::from(tally))).collect();
    Ok(OkJson(UsageSummary { limits, windows: sum.windows }))
}

/// Lists administrative changes, oldest first.
#[utoipa::path(get, path = "/v1/audit", params(AuditQuery), responses(
    (status = 200, description = "A page of changes.", body = AuditPage),
))]
pub(super) async fn audit(
    With(state): With<State>,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<OkJson<AuditPage>, Refusal> {
    let entity = query.entity.map(|entity| AuditKey::entity(&entity.0));
    let resource = query.resource.map(|resource| AuditKey::scope(&Scope::Resource(resource.0)));
    let system = query.system.then(|| AuditKey::scope(&Scope::System));
    let token = query.token.map(|token| AuditKey::token(&token.0));
    let mut filed = [entity, resource, system, token].into_iter().flatten();
    let store_query = StoreAuditQuery { filed: filed.next(), range: range(query.from, query.to) };
    if filed.next().is_some() {
        return Err(Refusal::invalid(
            "entity",
            "specify at most one of `entity`, `resource`, `system` and `token`",
        ));
    }
    let page = state.query(state.store().audit(&store_query, &paging(query.after, query.max)?)).await?;
    let items = page.items.iter().map(AuditEntry::from).collect();
    Ok(OkJson(AuditPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

fn usage_query(query: &UsageQuery) -> Result<StoreUsageQuery, Refusal> {
    let of = match (&query.entity, &query.resource, query.system) {
        (Some(entity), None, false) => UsageOf::Entity(entity.0.clone()),
        (None, Some(resource), false) => UsageOf::Resource(resource.0.clone()),
        (None, None, true) => UsageOf::all_resources(),
        _ => return Err(Refusal::invalid("entity", "specify one of `entity`, `resource` and `system`")),
    };
    let range = range(query.from.clone(), query.to.clone());
    Ok(StoreUsageQuery { of, window: query.window.into(), range })
}

fn range(from: Option<Time>, to: Option<Time>) -> std::ops::Range<Stamp> {
    from.map_or(Stamp::ZERO, |from| from.0)..to.map_or(Stamp::MAX, |to| to.0)
}
