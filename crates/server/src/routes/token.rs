//! Handlers of the token routes.

use axum::extract::State as With;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate_client::{
    CreatedToken, PageQuery, Problem, PutToken, RemoveQuery, Token, TokenId, TokenPage, Written,
};
use tidegate_core::limit::token::NewToken;

use super::paging;
use crate::auth::Caller;
use crate::codec::{JsonBody, OkJson, PathParam, QueryParams};
use crate::refusal::Refusal;
use crate::state::State;
use crate::token::Secret;

/// Lists all tokens, by id, without secrets.
#[utoipa::path(get, path = "/v1/tokens", params(PageQuery), responses(
    (status = 200, description = "A page of tokens.", body = TokenPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    QueryParams(query): QueryParams<PageQuery>,
) -> Result<OkJson<TokenPage>, Refusal> {
    let page = state.query(state.store().tokens(&paging(query.after, query.max)?)).await?;
    let tokens = page.items.iter().filter(|token| !token.value.id.is_reserved());
    let items = tokens.map(Token::from).collect();
    Ok(OkJson(TokenPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// Creates a token. Its secret is returned only here.
#[utoipa::path(post, path = "/v1/tokens", request_body = PutToken, responses(
    (status = 200, description = "Created.", body = CreatedToken),
    (status = 409, description = "The id is taken.", body = Problem),
))]
pub(super) async fn create(
    With(state): With<State>,
    caller: Caller,
    JsonBody(put): JsonBody<PutToken>,
) -> Result<Response, Refusal> {
    check_not_reserved("id", &put.id)?;
    let new = NewToken {
        name: put.name.unwrap_or_else(|| put.id.to_string()),
        id: put.id.0,
        namespace: state.namespace().clone(),
        scopes: put.scopes.0,
        entity: put.entity.map(|entity| entity.0),
        expires_at: put.expires_at.map(|at| at.0),
    };
    let secret = Secret::generate(&new.id);
    let made = state.query(state.store().create_token(&new, secret.hash(), &caller.actor())).await?;
    // The id may be cached as unknown.
    state.token_cache().invalidate(&new.id);
    let Written { version } = state.changed(made.version, caller.actor());
    let created =
        CreatedToken { token: Token::from(&made.value), version, secret: secret.reveal().to_owned() };
    Ok(([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], OkJson(created)).into_response())
}

/// Revokes a token. Revoking it again has no effect. A token cannot revoke itself, which prevents an
/// accidental lockout.
#[utoipa::path(delete, path = "/v1/tokens/{token}", params(("token" = TokenId, Path), RemoveQuery), responses(
    (status = 200, description = "Revoked.", body = Written),
    (status = 404, description = "The token does not exist.", body = Problem),
    (status = 409, description = "The expected state does not match, or the token would revoke itself.", body = Problem),
))]
pub(super) async fn revoke(
    With(state): With<State>,
    caller: Caller,
    PathParam(id): PathParam<TokenId>,
    QueryParams(query): QueryParams<RemoveQuery>,
) -> Result<OkJson<Written>, Refusal> {
    check_not_reserved("token", &id)?;
    if id.0 == *caller.token() {
        let detail =
            format!("the token `{id}` cannot revoke itself: use another token, or revoke it at the store");
        return Err(Refusal::new(StatusCode::CONFLICT, "own-token", "Not as expected", detail));
    }
    let expect = query.expect.unwrap_or_default().into();
    let version = state.query(state.store().revoke_token(&id.0, expect, &caller.actor())).await?;
    state.revoked(&id.0);
    Ok(OkJson(state.changed(version, caller.actor())))
}

/// Rejects ids reserved for the server.
fn check_not_reserved(field: &str, id: &TokenId) -> Result<(), Refusal> {
    if id.0.is_reserved() {
        return Err(Refusal::invalid(
            field,
            format!("the id `{id}` begins with `.`, which is reserved for the server"),
        ));
    }
    Ok(())
}
