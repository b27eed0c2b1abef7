//! Middleware of every route: concurrency limit, authentication and authorization.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequestParts, Request, State as With};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::token::{Token, TokenId, TokenScope, TokenState};

use crate::meters::RouteMeters;
use crate::peer::PeerCertificate;
use crate::refusal::Refusal;
use crate::routes::{Access, RouteInfo};
use crate::slots::Slot;
use crate::state::State;
use crate::token::Secret;
use crate::token_cache::StoredToken;

/// The admission check of one route.
#[derive(Debug)]
pub(crate) struct RouteGuard {
    pub(crate) state: State,
    pub(crate) route: RouteInfo,
    pub(crate) meters: RouteMeters,
}

impl RouteGuard {
    /// Authenticates a request and takes a slot for it. Slots are shared by token, so they are taken
    /// afterwards.
    async fn admit(&self, request: &mut Request, scope: TokenScope) -> Result<Slot, Refusal> {
        let caller = self.state.authenticate(request.headers(), request.extensions(), scope).await?;
        if caller.bound_to().is_some() && !self.route.is_of_one_entity() {
            return Err(caller.not_its_entity("and this concerns others"));
        }
        let slot = self.state.enter(caller.token(), &self.route)?;
        request.extensions_mut().insert(caller);
        Ok(slot)
    }
}

/// An authenticated caller.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    stored: Arc<StoredToken>,
    /// The client certificate of the connection, if any, whether it maps to the token or not.
    peer: Option<PeerCertificate>,
}

impl Caller {
    /// The id of its token.
    pub(crate) fn token(&self) -> &TokenId {
        &self.stored.token.id
    }

    /// Fails unless the token has this scope.
    pub(crate) fn needs(&self, scope: TokenScope, what: &str) -> Result<(), Refusal> {
        let Token { id, scopes, .. } = &self.stored.token;
        if scopes.has(scope) {
            return Ok(());
        }
        let detail = format!("the token `{id}` lacks the scope `{scope}`, which {what} needs");
        Err(Refusal::new(StatusCode::FORBIDDEN, "scope", "Not allowed", detail))
    }

    /// The entity that its token is bound to, if any.
    pub(crate) fn bound_to(&self) -> Option<&EntityId> {
        self.stored.token.entity.as_ref()
    }

    /// Fails if the token is bound to another entity, and not to an ancestor of this one.
    pub(crate) async fn may_use(&self, state: &State, entity: &EntityId) -> Result<(), Refusal> {
        let Some(bound) = self.bound_to().filter(|bound| *bound != entity) else { return Ok(()) };
        let mut below = entity.clone();
        for _ in 0..LEVELS_MAX {
            let found = state.query(state.store().get(&below)).await?;
            match found.as_ref().and_then(|found| found.value.parent_id()) {
                Some(parent) if parent == bound => return Ok(()),
                Some(parent) => below = parent.clone(),
                None => break,
            }
        }
        Err(self.not_its_entity(&format!("not to `{entity}`")))
    }

    /// Fails if the token is bound to an entity, and the request names none of that entity's.
    pub(crate) async fn may_read(&self, state: &State, entity: Option<&EntityId>) -> Result<(), Refusal> {
        match entity {
            Some(entity) => self.may_use(state, entity).await,
            None if self.bound_to().is_none() => Ok(()),
            None => Err(self.not_its_entity("and the request names none")),
        }
    }

    pub(crate) fn not_its_entity(&self, why: &str) -> Refusal {
        let (id, bound) = (self.token(), self.bound_to().map_or("", EntityId::as_str));
        let detail = format!("the token `{id}` is bound to the entity `{bound}` and its descendants, {why}");
        Refusal::new(StatusCode::FORBIDDEN, "entity", "Not allowed", detail)
    }

    /// The caller's name in the audit log.
    pub(crate) fn actor(&self) -> String {
        format!("token:{}", self.stored.token.id)
    }
}

impl FromRequestParts<State> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &State) -> Result<Self, Refusal> {
        // A handler that extracts a caller on a route without authentication is a bug in this crate: fail
        // closed.
        parts.extensions.get::<Self>().cloned().ok_or_else(Refusal::internal)
    }
}

/// Forwards an admitted request to its route, or responds with the refusal.
pub(crate) async fn authorize(
    With(guard): With<Arc<RouteGuard>>,
    mut request: Request,
    next: Next,
) -> Response {
    let began = Instant::now();
    let response = match guard.route.access {
        Access::Public => next.run(request).await,
        Access::Scope(scope) => match guard.admit(&mut request, scope).await {
            Ok(_slot) => next.run(request).await,
            Err(refusal) => refusal.into_response(),
        },
    };
    let (status, took) = (response.status().as_u16(), began.elapsed());
    guard.meters.answered(status, took);
    // Logs the route, not the URI: the URI may contain a lease id.
    tracing::debug!(method = %guard.route.method, route = guard.route.path, status, ?took, "answered");
    response
}

impl State {
    /// Authenticates a request by its headers and the extensions of its connection, and checks that the
    /// caller has `scope`. An `Authorization` header takes precedence over the token that the client
    /// certificate maps to.
    pub(crate) async fn authenticate(
        &self,
        headers: &HeaderMap,
        extensions: &Extensions,
        scope: TokenScope,
    ) -> Result<Caller, Refusal> {
        let peer = extensions.get::<PeerCertificate>();
        // A connection may outlive the validity of its certificate.
        if let Some(rejection) = peer.and_then(|peer| peer.rejection(self.clock().now())) {
            return Err(Refusal::bad_token(rejection));
        }
        let stored = match (headers.get(header::AUTHORIZATION), peer) {
            (Some(value), _) => self.find_by_secret(value).await?,
            (None, Some(peer)) => self.find_by_certificate(peer).await?,
            (None, None) => {
                return Err(Refusal::no_token("this needs a token: send it as `Authorization: Bearer tg_…`"));
            }
        };
        let caller = Caller { stored, peer: peer.cloned() };
        let Token { id, namespace, .. } = &caller.stored.token;
        match caller.stored.token.state(self.clock().now()) {
            TokenState::Good => {}
            TokenState::Expired => return Err(Refusal::bad_token("the token has expired")),
            TokenState::Revoked => return Err(Refusal::bad_token("the token was revoked")),
        }
        if namespace != self.namespace() {
            let detail = format!("the token `{id}` is for the namespace `{namespace}`, not for this one");
            return Err(Refusal::new(StatusCode::FORBIDDEN, "namespace", "Not allowed", detail));
        }
        caller.needs(scope, "this")?;
        Ok(caller)
    }

    async fn find_by_secret(&self, value: &HeaderValue) -> Result<Arc<StoredToken>, Refusal> {
        let secret: Option<Secret> = value.to_str().ok().and_then(bearer).and_then(|text| text.parse().ok());
        let Some(secret) = secret else {
            return Err(Refusal::bad_token("the header holds no token: expected `Bearer tg_ID_SECRET`"));
        };
        let stored = self.query(self.token_cache().get(secret.id())).await?;
        // An unknown id and a wrong secret get the same response.
        let Some(stored) = stored.filter(|stored| stored.matches(&secret)) else {
            return Err(Refusal::bad_token("unknown token"));
        };
        Ok(stored)
    }

    async fn find_by_certificate(&self, peer: &PeerCertificate) -> Result<Arc<StoredToken>, Refusal> {
        let Some(id) = peer.token() else {
            return Err(Refusal::no_token(
                "the client's certificate maps to no token: send one as `Authorization: Bearer tg_…`",
            ));
        };
        let Some(stored) = self.query(self.token_cache().get(id)).await? else {
            return Err(Refusal::bad_token("the token that the client's certificate maps to does not exist"));
        };
        Ok(stored)
    }
}

impl State {
    /// Whether an admitted caller would be admitted again. Returns `false` if the store cannot be reached.
    pub(crate) async fn is_still_valid(&self, caller: &Caller) -> bool {
        if caller.peer.as_ref().is_some_and(|peer| peer.rejection(self.clock().now()).is_some()) {
            return false;
        }
        match self.query(self.token_cache().get(caller.token())).await {
            Ok(Some(stored)) => {
                stored.hash == caller.stored.hash
                    && stored.token.state(self.clock().now()) == TokenState::Good
            }
            Ok(None) | Err(_) => false,
        }
    }
}

/// The credentials after the `Bearer` scheme, which is case-insensitive.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
