//! The way in: how many at once, and who.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequestParts, Request, State as With};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use tidegate_core::limit::token::{Token, TokenId, TokenScope, TokenState};

use crate::keyring::Key;
use crate::meters::RouteMeters;
use crate::refusal::Refusal;
use crate::routes::{Access, RouteInfo};
use crate::state::State;
use crate::token::Secret;

/// What stands before one route.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) state: State,
    pub(crate) route: RouteInfo,
    pub(crate) meters: RouteMeters,
}

/// Who asks.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    key: Arc<Key>,
}

impl Caller {
    /// The id of its token.
    pub(crate) fn token(&self) -> &TokenId {
        &self.key.token.id
    }

    /// Lets nobody on whose token lacks this scope.
    pub(crate) fn needs(&self, scope: TokenScope, what: &str) -> Result<(), Refusal> {
        let Token { id, scopes, .. } = &self.key.token;
        if scopes.has(scope) {
            return Ok(());
        }
        let detail = format!("the token `{id}` lacks the scope `{scope}`, which {what} needs");
        Err(Refusal::new(StatusCode::FORBIDDEN, "scope", "Not allowed", detail))
    }

    /// Its name in the audit.
    pub(crate) fn actor(&self) -> String {
        format!("token:{}", self.key.token.id)
    }
}

impl FromRequestParts<State> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &State) -> Result<Self, Refusal> {
        // A route that asks for a caller and lets everybody in is a mistake of ours: nobody enters.
        parts.extensions.get::<Self>().cloned().ok_or_else(Refusal::internal)
    }
}

/// Lets a request through to its route, or says why not.
pub(crate) async fn pass(With(gate): With<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let response = match gate.route.access {
        Access::Everybody => next.run(request).await,
        Access::Scope(scope) => match gate.state.running().try_acquire() {
            Err(_) => {
                gate.state.meters().busy();
                gate.state.hub().busy(gate.state.bounds().requests_max);
                Refusal::busy(gate.state.bounds().requests_max).into_response()
            }
            Ok(_running) => match gate.state.admit(request.headers(), scope).await {
                Ok(caller) => {
                    request.extensions_mut().insert(caller);
                    next.run(request).await
                }
                Err(refusal) => refusal.into_response(),
            },
        },
    };
    let (status, took) = (response.status().as_u16(), began.elapsed());
    gate.meters.answered(status, took);
    // The route, and not the address: that may name a lease.
    tracing::debug!(method = %gate.route.method, route = gate.route.path, status, ?took, "answered");
    response
}

impl State {
    /// Who sends these headers, if they may do what `scope` says.
    async fn admit(&self, headers: &HeaderMap, scope: TokenScope) -> Result<Caller, Refusal> {
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return Err(Refusal::no_token("this needs a token: send it as `Authorization: Bearer tg_…`"));
        };
        let secret: Option<Secret> = value.to_str().ok().and_then(bearer).and_then(|text| text.parse().ok());
        let Some(secret) = secret else {
            return Err(Refusal::bad_token("what was sent is no token: it is `Bearer tg_ID_SECRET`"));
        };
        let key = self.ask(self.keyring().key(secret.id())).await?;
        // An id that is not there and a secret that is wrong are answered alike.
        let Some(key) = key.filter(|key| key.fits(&secret)) else {
            return Err(Refusal::bad_token("there is no such token"));
        };
        match key.token.state(self.clock().now()) {
            TokenState::Good => {}
            TokenState::Expired => return Err(Refusal::bad_token("the token has expired")),
            TokenState::Revoked => return Err(Refusal::bad_token("the token was revoked")),
        }
        let Token { id, namespace, .. } = &key.token;
        if namespace != self.namespace() {
            let detail =
                format!("the token `{id}` is good for the namespace `{namespace}`, and not for this one");
            return Err(Refusal::new(StatusCode::FORBIDDEN, "namespace", "Not allowed", detail));
        }
        let caller = Caller { key };
        caller.needs(scope, "this")?;
        Ok(caller)
    }
}

impl State {
    /// Whether a caller who was let in would be again. While it cannot be found out, they would not.
    pub(crate) async fn is_still_good(&self, caller: &Caller) -> bool {
        match self.ask(self.keyring().key(caller.token())).await {
            Ok(Some(key)) => {
                key.hash == caller.key.hash && key.token.state(self.clock().now()) == TokenState::Good
            }
            Ok(None) | Err(_) => false,
        }
    }
}

/// What is behind `Bearer`, in whatever case.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
