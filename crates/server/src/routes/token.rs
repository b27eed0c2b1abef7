//! Tokens: made, listed and revoked.

use axum::extract::State as With;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate_client::{
    CreatedToken, PageQuery, Problem, PutToken, RemoveQuery, Token, TokenId, TokenPage, Written,
};
use tidegate_core::limit::token::NewToken;

use super::paging;
use crate::codec::{Asked, At, Done, Sent};
use crate::gate::Caller;
use crate::refusal::Refusal;
use crate::state::State;
use crate::token::Secret;

/// All tokens, by id. Their secrets are nowhere.
#[utoipa::path(get, path = "/v1/tokens", params(PageQuery), responses(
    (status = 200, description = "A page of them.", body = TokenPage),
))]
pub(super) async fn list(
    With(state): With<State>,
    Asked(query): Asked<PageQuery>,
) -> Result<Done<TokenPage>, Refusal> {
    let page = state.ask(state.store().tokens(&paging(query.after, query.max)?)).await?;
    let tokens = page.items.iter().filter(|token| !token.value.id.is_reserved());
    let items = tokens.map(Token::from).collect();
    Ok(Done(TokenPage { items, next: page.next.map(|next| next.as_str().to_owned()) }))
}

/// Makes a token. Its secret is in this answer, and never told again.
#[utoipa::path(post, path = "/v1/tokens", request_body = PutToken, responses(
    (status = 200, description = "Made.", body = CreatedToken),
    (status = 409, description = "The id is taken.", body = Problem),
))]
pub(super) async fn create(
    With(state): With<State>,
    caller: Caller,
    Sent(put): Sent<PutToken>,
) -> Result<Response, Refusal> {
    check_free("id", &put.id)?;
    let new = NewToken {
        name: put.name.unwrap_or_else(|| put.id.to_string()),
        id: put.id.0,
        namespace: state.namespace().clone(),
        scopes: put.scopes.0,
        expires_at: put.expires_at.map(|at| at.0),
    };
    let secret = Secret::generate(&new.id);
    let made = state.ask(state.store().create_token(&new, secret.hash(), &caller.actor())).await?;
    let Written { version } = state.changed(made.version, caller.actor());
    let created =
        CreatedToken { token: Token::from(&made.value), version, secret: secret.reveal().to_owned() };
    Ok(([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], Done(created)).into_response())
}

/// Makes a token good no more. To revoke it again changes nothing. None revokes itself, so that nobody is locked out by a slip.
#[utoipa::path(delete, path = "/v1/tokens/{token}", params(("token" = TokenId, Path), RemoveQuery), responses(
    (status = 200, description = "Revoked.", body = Written),
    (status = 404, description = "There is none.", body = Problem),
    (status = 409, description = "It is not as expected, or the one that this is asked with.", body = Problem),
))]
pub(super) async fn revoke(
    With(state): With<State>,
    caller: Caller,
    At(id): At<TokenId>,
    Asked(query): Asked<RemoveQuery>,
) -> Result<Done<Written>, Refusal> {
    check_free("token", &id)?;
    if id.0 == *caller.token() {
        let detail = format!(
            "`{id}` is the token that this is asked with: revoke it with another one, or at the store"
        );
        return Err(Refusal::new(StatusCode::CONFLICT, "own-token", "Not as expected", detail));
    }
    let expect = query.expect.unwrap_or_default().into();
    let version = state.ask(state.store().revoke_token(&id.0, expect, &caller.actor())).await?;
    Ok(Done(state.changed(version, caller.actor())))
}

/// Refuses ids that the server keeps for itself.
fn check_free(field: &str, id: &TokenId) -> Result<(), Refusal> {
    if id.0.is_reserved() {
        return Err(Refusal::invalid(
            field,
            format!("the id `{id}` begins with `.`: such ids are the server's own"),
        ));
    }
    Ok(())
}
