//! Handlers of the entity routes.

use axum::extract::State as With;
use tidegate_client::{Entity, EntityId, EntityPage, PageQuery, Problem, PutEntity, RemoveQuery, Written};

use super::paging;
use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, PathParam, QueryParams};
use crate::refusal::Refusal;
use crate::state::State;

/// Lists all entities, by id.
#[utoipa::path(get, path = "/v1/entities", params(PageQuery), responses(
    (status = 200, description = "A page of entities.", body = EntityPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<OkJson<EntityPage>, Refusal> {
    let page = state.query(state.store().entities(&paging(query.after, query.max)?)).await?;
    Ok(to_page(page))
}

/// Returns an entity.
#[utoipa::path(get, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path)), responses(
    (status = 200, description = "The entity.", body = Entity),
    (status = 404, description = "The entity does not exist.", body = Problem),
))]
pub(super) async fn get(
    With(state): With<State>,
    caller: Caller,
    PathParam(id): PathParam<EntityId>,
) -> Result<OkJson<Entity>, Refusal> {
    caller.may_use(&state, &id.0).await?;
    match state.query(state.store().get(&id.0)).await? {
        Some(entity) => Ok(OkJson(Entity::new(&entity.value, Some(entity.version)))),
        None => Err(Refusal::not_found("no-entity", format!("there is no entity `{id}`"))),
    }
}

/// Creates or replaces an entity.
#[utoipa::path(put, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path)), request_body = PutEntity,
    responses(
        (status = 200, description = "Written.", body = Written),
        (status = 409, description = "The expected state does not match.", body = Problem),
    ))]
pub(super) async fn put(
    With(state): With<State>,
    caller: Caller,
    PathParam(id): PathParam<EntityId>,
    JsonBody(put): JsonBody<PutEntity>,
) -> Result<OkJson<Written>, Refusal> {
    let expect = put.expect.into();
    let entity = put.entity(id.0);
    let version = state.limiter().admin(caller.actor()).put_entity(&entity, expect).await?;
    Ok(OkJson(state.changed(version, caller.actor())))
}

/// Removes an entity and its policies. Rejected if the entity has children.
#[utoipa::path(delete, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path), RemoveQuery), responses(
    (status = 200, description = "Removed.", body = Written),
    (status = 404, description = "The entity does not exist.", body = Problem),
    (status = 409, description = "The expected state does not match, or the entity has children.", body = Problem),
))]
pub(super) async fn delete(
    With(state): With<State>,
    caller: Caller,
    PathParam(id): PathParam<EntityId>,
    QueryParams(query): QueryParams<RemoveQuery>,
) -> Result<OkJson<Written>, Refusal> {
    let expect = query.expect.unwrap_or_default().into();
    let version = state.limiter().admin(caller.actor()).remove_entity(&id.0, expect).await?;
    Ok(OkJson(state.changed(version, caller.actor())))
}

/// Lists the children of an entity, by id.
#[utoipa::path(get, path = "/v1/entities/{entity}/children", params(("entity" = EntityId, Path), PageQuery),
    responses(
        (status = 200, description = "A page of entities.", body = EntityPage),
        (status = 404, description = "The entity does not exist.", body = Problem),
    ))]
pub(super) async fn children(
    With(state): With<State>,
    caller: Caller,
    PathParam(id): PathParam<EntityId>,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<OkJson<EntityPage>, Refusal> {
    caller.may_use(&state, &id.0).await?;
    let page = state.query(state.store().children(&id.0, &paging(query.after, query.max)?)).await?;
    if page.items.is_empty() {
        // Distinguish an entity without children from a missing one.
        get(With(state), caller, PathParam(id)).await?;
    }
    Ok(to_page(page))
}

fn to_page(page: tidegate::store::Page<tidegate::Versioned<tidegate::Entity>>) -> OkJson<EntityPage> {
    let items = page.items.iter().map(|entity| Entity::new(&entity.value, Some(entity.version))).collect();
    OkJson(EntityPage { items, next: page.next.map(|next| next.as_str().to_owned()) })
}
