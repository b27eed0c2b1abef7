//! Entities.

use axum::extract::State as With;
use tidegate_client::{Entity, EntityId, EntityPage, PageQuery, Problem, PutEntity, RemoveQuery, Written};

use super::paging;
use crate::codec::{Asked, At, Done, Sent};
use crate::gate::Caller;
use crate::refusal::Refusal;
use crate::state::State;

/// All entities, by id.
#[utoipa::path(get, path = "/v1/entities", params(PageQuery), responses(
    (status = 200, description = "A page of them.", body = EntityPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    Asked(query): Asked<PageQuery>,
) -> Result<Done<EntityPage>, Refusal> {
    let page = state.ask(state.store().entities(&paging(query.after, query.max)?)).await?;
    Ok(shown(page))
}

/// An entity.
#[utoipa::path(get, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path)), responses(
    (status = 200, description = "The entity.", body = Entity),
    (status = 404, description = "There is none.", body = Problem),
))]
pub(super) async fn get(With(state): With<State>, At(id): At<EntityId>) -> Result<Done<Entity>, Refusal> {
    match state.ask(state.store().get(&id.0)).await? {
        Some(entity) => Ok(Done(Entity::new(&entity.value, Some(entity.version)))),
        None => Err(Refusal::not_found("no-entity", format!("there is no entity `{id}`"))),
    }
}

/// Writes an entity, in the place of what was there.
#[utoipa::path(put, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path)), request_body = PutEntity,
    responses(
        (status = 200, description = "Written.", body = Written),
        (status = 409, description = "It is not as expected.", body = Problem),
    ))]
pub(super) async fn put(
    With(state): With<State>,
    caller: Caller,
    At(id): At<EntityId>,
    Sent(put): Sent<PutEntity>,
) -> Result<Done<Written>, Refusal> {
    let expect = put.expect.into();
    let entity = put.entity(id.0);
    let version = state.limiter().admin(caller.actor()).put_entity(&entity, expect).await?;
    Ok(Done(state.changed(version, caller.actor())))
}

/// Removes an entity and its policies. One with others below it is refused.
#[utoipa::path(delete, path = "/v1/entities/{entity}", params(("entity" = EntityId, Path), RemoveQuery), responses(
    (status = 200, description = "Removed.", body = Written),
    (status = 404, description = "There is none.", body = Problem),
    (status = 409, description = "It is not as expected, or has others below it.", body = Problem),
))]
pub(super) async fn delete(
    With(state): With<State>,
    caller: Caller,
    At(id): At<EntityId>,
    Asked(query): Asked<RemoveQuery>,
) -> Result<Done<Written>, Refusal> {
    let expect = query.expect.unwrap_or_default().into();
    let version = state.limiter().admin(caller.actor()).remove_entity(&id.0, expect).await?;
    Ok(Done(state.changed(version, caller.actor())))
}

/// Those directly below an entity, by id.
#[utoipa::path(get, path = "/v1/entities/{entity}/children", params(("entity" = EntityId, Path), PageQuery),
    responses(
        (status = 200, description = "A page of them.", body = EntityPage),
        (status = 404, description = "There is no such entity.", body = Problem),
    ))]
pub(super) async fn children(
    With(state): With<State>,
    At(id): At<EntityId>,
    Asked(query): Asked<PageQuery>,
) -> Result<Done<EntityPage>, Refusal> {
    let page = state.ask(state.store().children(&id.0, &paging(query.after, query.max)?)).await?;
    if page.items.is_empty() {
        // Nothing below it, or nothing there at all.
        get(With(state), At(id)).await?;
    }
    Ok(shown(page))
}

fn shown(page: tidegate::store::Page<tidegate::Versioned<tidegate::Entity>>) -> Done<EntityPage> {
    let items = page.items.iter().map(|entity| Entity::new(&entity.value, Some(entity.version))).collect();
    Done(EntityPage { items, next: page.next.map(|next| next.as_str().to_owned()) })
}
