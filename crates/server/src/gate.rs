//! The way in: how many at once, and who.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequestParts, Request, State as With};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tidegate_core::limit::token::{Token, TokenId, TokenScope, TokenState};

use crate::keyring::Key;
use crate::meters::RouteMeters;
use crate::peer::PeerCertificate;
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
    /// The certificate of its connection, where there is one, whether it stands for the token or not.
    peer: Option<PeerCertificate>,
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
            Ok(_running) => match gate.state.admit(request.headers(), request.extensions(), scope).await {
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
    /// Who sends these headers, over a connection that has these extensions, if they may do what `scope` says. A token that is
    /// sent counts before the one that a client's certificate stands for.
    pub(crate) async fn admit(
        &self,
        headers: &HeaderMap,
        extensions: &Extensions,
        scope: TokenScope,
    ) -> Result<Caller, Refusal> {
        let peer = extensions.get::<PeerCertificate>();
        // A connection may last longer than what let it in.
        if let Some(trouble) = peer.and_then(|peer| peer.trouble(self.clock().now())) {
            return Err(Refusal::bad_token(trouble));
        }
        let key = match (headers.get(header::AUTHORIZATION), peer) {
            (Some(value), _) => self.by_secret(value).await?,
            (None, Some(peer)) => self.by_certificate(peer).await?,
            (None, None) => {
                return Err(Refusal::no_token("this needs a token: send it as `Authorization: Bearer tg_…`"));
            }
        };
        let caller = Caller { key, peer: peer.cloned() };
        let Token { id, namespace, .. } = &caller.key.token;
        match caller.key.token.state(self.clock().now()) {
            TokenState::Good => {}
            TokenState::Expired => return Err(Refusal::bad_token("the token has expired")),
            TokenState::Revoked => return Err(Refusal::bad_token("the token was revoked")),
        }
        if namespace != self.namespace() {
            let detail =
                format!("the token `{id}` is good for the namespace `{namespace}`, and not for this one");
            return Err(Refusal::new(StatusCode::FORBIDDEN, "namespace", "Not allowed", detail));
        }
        caller.needs(scope, "this")?;
        Ok(caller)
    }

    async fn by_secret(&self, value: &HeaderValue) -> Result<Arc<Key>, Refusal> {
        let secret: Option<Secret> = value.to_str().ok().and_then(bearer).and_then(|text| text.parse().ok());
        let Some(secret) = secret else {
            return Err(Refusal::bad_token("what was sent is no token: it is `Bearer tg_ID_SECRET`"));
        };
        let key = self.ask(self.keyring().key(secret.id())).await?;
        // An id that is not there and a secret that is wrong are answered alike.
        let Some(key) = key.filter(|key| key.fits(&secret)) else {
            return Err(Refusal::bad_token("there is no such token"));
        };
        Ok(key)
    }

    async fn by_certificate(&self, peer: &PeerCertificate) -> Result<Arc<Key>, Refusal> {
        let Some(id) = peer.token() else {
            return Err(Refusal::no_token(
                "the client's certificate stands for no token: send one as `Authorization: Bearer tg_…`",
            ));
        };
        let Some(key) = self.ask(self.keyring().key(id)).await? else {
            return Err(Refusal::bad_token("there is no token that the client's certificate stands for"));
        };
        Ok(key)
    }
}

impl State {
    /// Whether a caller who was let in would be again. While it cannot be found out, they would not.
    pub(crate) async fn is_still_good(&self, caller: &Caller) -> bool {
        if caller.peer.as_ref().is_some_and(|peer| peer.trouble(self.clock().now()).is_some()) {
            return false;
        }
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
