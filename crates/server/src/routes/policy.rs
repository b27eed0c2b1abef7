//! Policies, one by one and as declared.

use axum::extract::State as With;
use tidegate::store::{Listing, PolicyChange};
use tidegate::{Extra, Policy, Scope};
use tidegate_client::{
    Apply, Declaration, PLAN_MAX, Plan, PolicyAt, PolicyPage, PolicyQuery, Problem, PutPolicy, ScopeQuery,
    Written,
};

use super::paging;
use crate::codec::{Asked, Done, Sent};
use crate::gate::Caller;
use crate::refusal::Refusal;
use crate::state::State;

/// Policies in the order of their scopes: system, resources, entities, entities with a resource.
#[utoipa::path(get, path = "/v1/policies", params(PolicyQuery), responses(
    (status = 200, description = "A page of them.", body = PolicyPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    Asked(query): Asked<PolicyQuery>,
) -> Result<Done<PolicyPage>, Refusal> {
    let listing = match (query.entity, query.custom) {
        (None, None) => Listing::All,
        (Some(entity), None) => Listing::Entity(entity.0),
        (None, Some(resource)) => Listing::Custom(resource.0),
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid("custom", "`entity` and `custom` are two listings: ask for one"));
        }
    };
    let page = state.ask(state.store().list(&listing, &paging(query.after, query.max)?)).await?;
    let shown = |(scope, policy): &(Scope, tidegate::Versioned<_>)| {
        let policy: &tidegate::Versioned<std::sync::Arc<Policy>> = policy;
        PolicyAt::new(scope, policy.version, &policy.value)
    };
    let items = page.items.iter().map(shown).collect();
    Ok(Done(PolicyPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// The policy at a scope.
#[utoipa::path(get, path = "/v1/policy", params(ScopeQuery), responses(
    (status = 200, description = "The policy.", body = PolicyAt),
    (status = 404, description = "There is none.", body = Problem),
))]
pub(super) async fn get(
    With(state): With<State>,
    Asked(query): Asked<ScopeQuery>,
) -> Result<Done<PolicyAt>, Refusal> {
    if query.expect.is_some() {
        return Err(Refusal::invalid("expect", "only a change expects something"));
    }
    let scope = [Scope::from(query)];
    let written = state.ask(state.store().read(&scope)).await?;
    let [scope] = scope;
    match written.policies.into_iter().next().flatten() {
        Some(policy) => Ok(Done(PolicyAt::new(&scope, policy.version, &policy.value))),
        None => Err(Refusal::not_found("no-policy", format!("there is no policy for {scope}"))),
    }
}

/// Writes the policy at a scope, in the place of what was there.
#[utoipa::path(put, path = "/v1/policy", params(ScopeQuery), request_body = PutPolicy, responses(
    (status = 200, description = "Written.", body = Written),
    (status = 409, description = "It is not as expected.", body = Problem),
))]
pub(super) async fn put(
    With(state): With<State>,
    caller: Caller,
    Asked(query): Asked<ScopeQuery>,
    Sent(put): Sent<PutPolicy>,
) -> Result<Done<Written>, Refusal> {
    if query.expect.is_some() {
        return Err(Refusal::invalid("expect", "what a write expects is said in its body"));
    }
    let policy =
        Policy::try_from(put.policy).map_err(|error| Refusal::invalid("policy", error.to_string()))?;
    change(
        &state,
        &caller,
        vec![PolicyChange { scope: query.into(), expect: put.expect.into(), policy: Some(policy) }],
    )
    .await
}

/// Removes the policy at a scope. To remove what is not there is no error, unless something was expected.
#[utoipa::path(delete, path = "/v1/policy", params(ScopeQuery), responses(
    (status = 200, description = "Removed.", body = Written),
    (status = 409, description = "It is not as expected.", body = Problem),
))]
pub(super) async fn delete(
    With(state): With<State>,
    caller: Caller,
    Asked(query): Asked<ScopeQuery>,
) -> Result<Done<Written>, Refusal> {
    let expect = query.expect.unwrap_or_default().into();
    change(&state, &caller, vec![PolicyChange { scope: query.into(), expect, policy: None }]).await
}

/// What has to change so that what is written is what is declared. Nothing is changed: show it, and apply its changes.
#[utoipa::path(post, path = "/v1/plan", request_body = Declaration, responses(
    (status = 200, description = "The plan.", body = Plan),
))]
pub(super) async fn plan(
    With(state): With<State>,
    caller: Caller,
    Sent(declaration): Sent<Declaration>,
) -> Result<Done<Plan>, Refusal> {
    check_count("policies", declaration.policies.len())?;
    let mut declared = Vec::with_capacity(declaration.policies.len());
    for (number, policy) in declaration.policies.into_iter().enumerate() {
        let invalid = |error: tidegate::InvalidPolicy| {
            Refusal::invalid(format!("policies[{number}].policy"), error.to_string())
        };
        declared.push(policy.check().map_err(invalid)?);
    }
    let extra = if declaration.prune { Extra::Prune } else { Extra::Keep };
    let admin = state.limiter().admin(caller.actor());
    Ok(Done(Plan::from(&state.within(admin.plan(&declared, extra)).await??)))
}

/// Makes all of these changes, or none. If one of the policies has changed since the plan was made, none is.
#[utoipa::path(post, path = "/v1/apply", request_body = Apply, responses(
    (status = 200, description = "Made.", body = Written),
    (status = 409, description = "A policy is not as expected.", body = Problem),
))]
pub(super) async fn apply(
    With(state): With<State>,
    caller: Caller,
    Sent(apply): Sent<Apply>,
) -> Result<Done<Written>, Refusal> {
    check_count("changes", apply.changes.len())?;
    let mut changes = Vec::with_capacity(apply.changes.len());
    for (number, wire) in apply.changes.into_iter().enumerate() {
        let (scope, expect) = (wire.scope(), wire.expect.into());
        let policy = wire.policy.map(Policy::try_from).transpose();
        let invalid = |error: tidegate::InvalidPolicy| {
            Refusal::invalid(format!("changes[{number}].policy"), error.to_string())
        };
        changes.push(PolicyChange { scope, expect, policy: policy.map_err(invalid)? });
    }
    if changes.is_empty() {
        let version = state.ask(state.store().version()).await?;
        return Ok(Done(Written { version: version.number() }));
    }
    change(&state, &caller, changes).await
}

async fn change(
    state: &State,
    caller: &Caller,
    changes: Vec<PolicyChange>,
) -> Result<Done<Written>, Refusal> {
    let version = state.limiter().admin(caller.actor()).change(changes).await?;
    Ok(Done(state.changed(version, caller.actor())))
}

fn check_count(field: &str, count: usize) -> Result<(), Refusal> {
    if count <= PLAN_MAX {
        return Ok(());
    }
    Err(Refusal::invalid(field, format!("{count} {field}, more than {PLAN_MAX}")))
}
