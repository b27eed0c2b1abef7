//! Handlers of the policy routes.

use axum::extract::State as With;
use tidegate::store::{Listing, PolicyChange};
use tidegate::{Policy, Scope, Undeclared};
use tidegate_client::{
    Apply, Declaration, PLAN_MAX, PolicyAt, PolicyChanges, PolicyPage, PolicyQuery, Problem, PutPolicy,
    ScopeQuery, Written,
};

use super::paging;
use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, QueryParams};
use crate::refusal::Refusal;
use crate::state::State;

/// Lists policies in the order of their scopes: system, resources, entities, entities with a resource.
#[utoipa::path(get, path = "/v1/policies", params(PolicyQuery), responses(
    (status = 200, description = "A page of policies.", body = PolicyPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    QueryParams(query): QueryParams<PolicyQuery>,
) -> Result<OkJson<PolicyPage>, Refusal> {
    let listing = match (query.entity, query.custom) {
        (None, None) => Listing::All,
        (Some(entity), None) => Listing::Entity(entity.0),
        (None, Some(resource)) => Listing::Custom(resource.0),
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid("custom", "`entity` and `custom` are mutually exclusive"));
        }
    };
    let page = state.query(state.store().list(&listing, &paging(query.after, query.max)?)).await?;
    let shown = |(scope, policy): &(Scope, tidegate::Versioned<_>)| {
        let policy: &tidegate::Versioned<std::sync::Arc<Policy>> = policy;
        PolicyAt::new(scope, policy.version, &policy.value)
    };
    let items = page.items.iter().map(shown).collect();
    Ok(OkJson(PolicyPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// Returns the policy at a scope.
#[utoipa::path(get, path = "/v1/policy", params(ScopeQuery), responses(
    (status = 200, description = "The policy.", body = PolicyAt),
    (status = 404, description = "There is no policy at this scope.", body = Problem),
))]
pub(super) async fn get(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<ScopeQuery>,
) -> Result<OkJson<PolicyAt>, Refusal> {
    caller.may_read(&state, query.entity.as_ref().map(|entity| &entity.0)).await?;
    if query.expect.is_some() {
        return Err(Refusal::invalid("expect", "`expect` is only allowed in writes"));
    }
    let scope = [scope_of(query)?];
    let written = state.query(state.store().read(&scope)).await?;
    let [scope] = scope;
    match written.policies.into_iter().next().flatten() {
        Some(policy) => Ok(OkJson(PolicyAt::new(&scope, policy.version, &policy.value))),
        None => Err(Refusal::not_found("no-policy", format!("there is no policy for {scope}"))),
    }
}

/// Creates or replaces the policy at a scope.
#[utoipa::path(put, path = "/v1/policy", params(ScopeQuery), request_body = PutPolicy, responses(
    (status = 200, description = "Written.", body = Written),
    (status = 409, description = "The expected state does not match.", body = Problem),
))]
pub(super) async fn put(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<ScopeQuery>,
    JsonBody(put): JsonBody<PutPolicy>,
) -> Result<OkJson<Written>, Refusal> {
    if query.expect.is_some() {
        return Err(Refusal::invalid("expect", "`expect` belongs in the body of this request"));
    }
    let (scope, expect) = (scope_of(query)?, put.expect.into());
    let policy = Policy::try_from(put.policy).and_then(|policy| policy.check_scope(&scope).map(|()| policy));
    let policy = policy.map_err(|error| Refusal::invalid("policy", error.to_string()))?;
    change(&state, &caller, vec![PolicyChange { scope, expect, policy: Some(policy) }]).await
}

/// Removes the policy at a scope, which must be named: `system=true` names the system policy. Removing a missing
/// policy succeeds unless the write is conditional.
#[utoipa::path(delete, path = "/v1/policy", params(ScopeQuery), responses(
    (status = 200, description = "Removed.", body = Written),
    (status = 409, description = "The expected state does not match.", body = Problem),
))]
pub(super) async fn delete(
    With(state): With<State>,
    caller: Caller,
    QueryParams(query): QueryParams<ScopeQuery>,
) -> Result<OkJson<Written>, Refusal> {
    let expect = query.expect.unwrap_or_default().into();
    if query.system != Some(true) && query.entity.is_none() && query.resource.is_none() {
        let detail = "no scope: pass `entity`, `resource` or both, or `system=true` for the system policy";
        return Err(Refusal::invalid("system", detail));
    }
    change(&state, &caller, vec![PolicyChange { scope: scope_of(query)?, expect, policy: None }]).await
}

/// Compares the stored policies with a declaration and returns the changes that it needs. Nothing is changed:
/// review the changes, then apply them.
#[utoipa::path(post, path = "/v1/plan", request_body = Declaration, responses(
    (status = 200, description = "The changes.", body = PolicyChanges),
))]
pub(super) async fn plan(
    With(state): With<State>,
    caller: Caller,
    JsonBody(declaration): JsonBody<Declaration>,
) -> Result<OkJson<PolicyChanges>, Refusal> {
    check_count("policies", declaration.policies.len())?;
    let mut declared = Vec::with_capacity(declaration.policies.len());
    for (number, policy) in declaration.policies.into_iter().enumerate() {
        let invalid = |error: tidegate::InvalidPolicy| {
            Refusal::invalid(format!("policies[{number}].policy"), error.to_string())
        };
        let (scope, policy) = policy.check().map_err(invalid)?;
        policy.check_scope(&scope).map_err(invalid)?;
        declared.push((scope, policy));
    }
    let extra = if declaration.prune { Undeclared::Prune } else { Undeclared::Keep };
    let admin = state.limiter().admin(caller.actor());
    Ok(OkJson(PolicyChanges::from(&state.within(admin.plan(&declared, extra)).await??)))
}

/// Applies all changes, or none: if a policy has changed since the plan, nothing is applied.
#[utoipa::path(post, path = "/v1/apply", request_body = Apply, responses(
    (status = 200, description = "Applied.", body = Written),
    (status = 409, description = "The expected state of a policy does not match.", body = Problem),
))]
pub(super) async fn apply(
    With(state): With<State>,
    caller: Caller,
    JsonBody(apply): JsonBody<Apply>,
) -> Result<OkJson<Written>, Refusal> {
    check_count("changes", apply.changes.len())?;
    let mut changes = Vec::with_capacity(apply.changes.len());
    for (number, wire) in apply.changes.into_iter().enumerate() {
        let (scope, expect) = (wire.scope(), wire.expect.into());
        let policy = wire.policy.map(Policy::try_from).transpose();
        let policy = policy.and_then(|policy| match policy {
            Some(policy) => policy.check_scope(&scope).map(|()| Some(policy)),
            None => Ok(None),
        });
        let invalid = |error: tidegate::InvalidPolicy| {
            Refusal::invalid(format!("changes[{number}].policy"), error.to_string())
        };
        changes.push(PolicyChange { scope, expect, policy: policy.map_err(invalid)? });
    }
    if changes.is_empty() {
        let version = state.query(state.store().version()).await?;
        return Ok(OkJson(Written { version: version.number() }));
    }
    change(&state, &caller, changes).await
}

/// Returns the scope that a query names.
fn scope_of(query: ScopeQuery) -> Result<Scope, Refusal> {
    let is_system = query.entity.is_none() && query.resource.is_none();
    match query.system {
        Some(system) if system != is_system => {
            let detail = format!("`system={system}` contradicts `entity` and `resource`");
            Err(Refusal::invalid("system", detail))
        }
        _ => Ok(query.into()),
    }
}

async fn change(
    state: &State,
    caller: &Caller,
    changes: Vec<PolicyChange>,
) -> Result<OkJson<Written>, Refusal> {
    let version = state.limiter().admin(caller.actor()).change(changes).await?;
    Ok(OkJson(state.changed(version, caller.actor())))
}

fn check_count(field: &str, count: usize) -> Result<(), Refusal> {
    if count <= PLAN_MAX {
        return Ok(());
    }
    Err(Refusal::invalid(field, format!("{count} {field}, more than {PLAN_MAX}")))
}
