//! What was used, and who changed what.

use axum::extract::State as With;
use tidegate::store::AuditQuery as StoreAuditQuery;
use tidegate::{Scope, Stamp, UsageOf, UsageQuery as StoreUsageQuery};
use tidegate_client::{
    AuditEntry, AuditPage, AuditQuery, Time, UsageLine, UsagePage, UsageQuery, UsageSum, UsageSummary,
};
use tidegate_core::limit::audit::Filed;

use super::paging;
use crate::codec::{Asked, Done};
use crate::refusal::Refusal;
use crate::state::State;

/// Usage of an entity or of a resource, by subject, then limit, then window.
#[utoipa::path(get, path = "/v1/usage", params(UsageQuery), responses(
    (status = 200, description = "A page of it.", body = UsagePage),
))]
pub(super) async fn usage(
    With(state): With<State>,
    Asked(query): Asked<UsageQuery>,
) -> Result<Done<UsagePage>, Refusal> {
    let (asked, paging) = (of(&query)?, paging(query.after, query.max)?);
    let page = state.ask(state.store().usage(&asked, &paging)).await?;
    let items = page.items.iter().map(UsageLine::from).collect();
    Ok(Done(UsagePage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// The same, summed per limit name.
#[utoipa::path(get, path = "/v1/usage/summary", params(UsageQuery), responses(
    (status = 200, description = "The sums.", body = UsageSummary),
))]
pub(super) async fn summary(
    With(state): With<State>,
    Asked(query): Asked<UsageQuery>,
) -> Result<Done<UsageSummary>, Refusal> {
    let asked = of(&query)?;
    if query.after.is_some() || query.max.is_some() {
        return Err(Refusal::invalid("after", "a sum has no pages"));
    }
    let sum = state.within(state.limiter().usage_sum(&asked)).await??;
    let limits =
        sum.limits.into_iter().map(|(name, tally)| (name.to_string(), UsageSum::from(tally))).collect();
    Ok(Done(UsageSummary { limits, windows: sum.windows }))
}

/// Administrative changes, in the order they were made in.
#[utoipa::path(get, path = "/v1/audit", params(AuditQuery), responses(
    (status = 200, description = "A page of them.", body = AuditPage),
))]
pub(super) async fn audit(
    With(state): With<State>,
    Asked(query): Asked<AuditQuery>,
) -> Result<Done<AuditPage>, Refusal> {
    let entity = query.entity.map(|entity| Filed::entity(&entity.0));
    let resource = query.resource.map(|resource| Filed::scope(&Scope::Resource(resource.0)));
    let system = query.system.then(|| Filed::scope(&Scope::System));
    let token = query.token.map(|token| Filed::token(&token.0));
    let mut filed = [entity, resource, system, token].into_iter().flatten();
    let asked = StoreAuditQuery { filed: filed.next(), range: range(query.from, query.to) };
    if filed.next().is_some() {
        return Err(Refusal::invalid(
            "entity",
            "ask for one of `entity`, `resource`, `system` and `token`, or for none",
        ));
    }
    let page = state.ask(state.store().audit(&asked, &paging(query.after, query.max)?)).await?;
    let items = page.items.iter().map(AuditEntry::from).collect();
    Ok(Done(AuditPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

fn of(query: &UsageQuery) -> Result<StoreUsageQuery, Refusal> {
    let of = match (&query.entity, &query.resource) {
        (Some(entity), None) => UsageOf::Entity(entity.0.clone()),
        (None, Some(resource)) => UsageOf::Resource(resource.0.clone()),
        _ => return Err(Refusal::invalid("entity", "say whose usage: one of `entity` and `resource`")),
    };
    let range = range(query.from.clone(), query.to.clone());
    Ok(StoreUsageQuery { of, window: query.window.into(), range })
}

fn range(from: Option<Time>, to: Option<Time>) -> std::ops::Range<Stamp> {
    from.map_or(Stamp::ZERO, |from| from.0)..to.map_or(Stamp::MAX, |to| to.0)
}
