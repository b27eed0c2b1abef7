//! The route table: every route with its scope and handler. The router and the OpenAPI document are built
//! from it.

mod acquire;
mod entity;
mod health;
mod inspect;
mod lease;
mod ledger;
mod policy;
mod status;
mod token;
mod upstream;
mod watch;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use tidegate::Paging;
use tidegate::store::Cursor;
use tidegate_core::limit::token::TokenScope;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::openapi::OpenApi;

use crate::auth::{RouteGuard, authorize};
use crate::refusal::Refusal;
use crate::state::State;

/// The access requirement of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Anyone, without a token.
    Public,
    /// Callers whose token has this scope.
    Scope(TokenScope),
}

/// A route and its access requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteInfo {
    /// The HTTP method.
    pub method: Method,
    /// The path template, with placeholders in braces.
    pub path: &'static str,
    /// The access requirement.
    pub access: Access,
}

impl RouteInfo {
    /// Whether its handler checks the entity of a request, so that a token bound to one may call it.
    pub(crate) fn is_of_one_entity(&self) -> bool {
        const PATHS: [&str; 12] = [
            "/v1/upstreams/{upstream}/acquire",
            // A permit belongs to the token that acquired it.
            "/v1/permits/{permit}/settle",
            "/v1/acquire",
            "/v1/acquire/batch",
            "/v1/spend",
            "/v1/balances",
            "/v1/explain",
            "/v1/entities/{entity}",
            "/v1/entities/{entity}/children",
            "/v1/policy",
            "/v1/usage",
            "/v1/usage/summary",
        ];
        // A lease belongs to the token that drew it.
        PATHS.contains(&self.path) || self.path.starts_with("/v1/leases/")
    }

    /// Whether it reads many records of the store.
    pub(crate) fn is_report(&self) -> bool {
        const PATHS: [&str; 9] = [
            "/v1/capacity",
            "/v1/entities",
            "/v1/entities/{entity}/children",
            "/v1/policies",
            "/v1/plan",
            "/v1/usage",
            "/v1/usage/summary",
            "/v1/audit",
            "/v1/tokens",
        ];
        (self.method == Method::GET || self.path == "/v1/plan") && PATHS.contains(&self.path)
    }

    /// Whether operators need the route while callers use all slots: to change something, or to see the state
    /// of the server.
    pub(crate) fn has_reserve(&self) -> bool {
        self.access == ADMIN || ["/metrics", "/v1/snapshot", "/v1/status"].contains(&self.path)
    }
}

struct Route {
    info: RouteInfo,
    filter: MethodFilter,
    handler: fn(MethodFilter) -> MethodRouter<State>,
    /// Returns its part of the OpenAPI document.
    describe: fn() -> OpenApi,
}

const ACQUIRE: Access = Access::Scope(TokenScope::Acquire);
const READ: Access = Access::Scope(TokenScope::Read);
const ADMIN: Access = Access::Scope(TokenScope::Admin);

/// An entry of the route table.
macro_rules! route {
    ($method:ident $path:literal, $access:expr, $module:ident :: $handler:ident) => {{
        #[derive(utoipa::OpenApi)]
        #[openapi(paths($module::$handler))]
        struct RouteDoc;
        Route {
            info: RouteInfo { method: Method::$method, path: $path, access: $access },
            filter: MethodFilter::$method,
            handler: |filter| route_of(filter, $module::$handler),
            describe: <RouteDoc as utoipa::OpenApi>::openapi,
        }
    }};
}

/// The route table.
fn table() -> Vec<Route> {
    vec![
        route!(POST "/v1/acquire", ACQUIRE, acquire::acquire),
        route!(POST "/v1/acquire/batch", ACQUIRE, acquire::batch),
        route!(POST "/v1/spend", ACQUIRE, acquire::spend),
        route!(GET "/v1/leases/{lease}", ACQUIRE, lease::show),
        route!(POST "/v1/leases/{lease}/extend", ACQUIRE, lease::extend),
        route!(POST "/v1/leases/{lease}/adjust", ACQUIRE, lease::adjust),
        route!(POST "/v1/leases/{lease}/renew", ACQUIRE, lease::renew),
        route!(POST "/v1/leases/{lease}/settle", ACQUIRE, lease::settle),
        route!(POST "/v1/leases/{lease}/cancel", ACQUIRE, lease::cancel),
        route!(GET "/v1/upstreams", READ, upstream::list),
        route!(POST "/v1/upstreams/{upstream}/acquire", ACQUIRE, upstream::acquire),
        route!(POST "/v1/permits/{permit}/settle", ACQUIRE, upstream::settle),
        route!(GET "/v1/balances", READ, inspect::balances),
        route!(GET "/v1/capacity", READ, inspect::capacity),
        route!(POST "/v1/explain", READ, inspect::explain),
        route!(PUT "/v1/bucket", ADMIN, inspect::put_bucket),
        route!(GET "/v1/entities", READ, entity::list),
        route!(GET "/v1/entities/{entity}", READ, entity::get),
        route!(PUT "/v1/entities/{entity}", ADMIN, entity::put),
        route!(DELETE "/v1/entities/{entity}", ADMIN, entity::delete),
        route!(GET "/v1/entities/{entity}/children", READ, entity::children),
        route!(GET "/v1/policies", READ, policy::list),
        route!(GET "/v1/policy", READ, policy::get),
        route!(PUT "/v1/policy", ADMIN, policy::put),
        route!(DELETE "/v1/policy", ADMIN, policy::delete),
        route!(POST "/v1/plan", READ, policy::plan),
        route!(POST "/v1/apply", ADMIN, policy::apply),
        route!(GET "/v1/usage", READ, ledger::usage),
        route!(GET "/v1/usage/summary", READ, ledger::summary),
        route!(GET "/v1/audit", READ, ledger::audit),
        route!(GET "/v1/snapshot", READ, watch::snapshot),
        route!(GET "/v1/events", READ, watch::events),
        route!(GET "/v1/tokens", ADMIN, token::list),
        route!(POST "/v1/tokens", ADMIN, token::create),
        route!(DELETE "/v1/tokens/{token}", ADMIN, token::revoke),
        route!(GET "/v1/status", READ, status::show),
        route!(GET "/v1/openapi.json", Access::Public, health::openapi),
        route!(GET "/health/live", Access::Public, health::live),
        route!(GET "/health/ready", Access::Public, health::ready),
        route!(GET "/metrics", READ, health::metrics),
    ]
}

/// A route with a single method.
fn route_of<H: Handler<T, State>, T: 'static>(filter: MethodFilter, handler: H) -> MethodRouter<State> {
    on(filter, handler)
}

/// Returns all routes, in table order.
pub fn routes() -> Vec<RouteInfo> {
    table().into_iter().map(|route| route.info).collect()
}

/// Merges the OpenAPI descriptions of all routes.
pub(crate) fn described() -> OpenApi {
    let mut parts = table().into_iter().map(|route| (route.describe)());
    let first = parts.next().unwrap_or_default();
    parts.fold(first, |mut all, part| {
        all.merge(part);
        all
    })
}

/// Builds the router of the API.
pub fn app(state: State) -> Router {
    let mut router = Router::new();
    for Route { info, filter, handler, .. } in table() {
        let (path, meters) = (info.path, state.meters().route(info.method.as_str(), info.path));
        let guard = Arc::new(RouteGuard { state: state.clone(), route: info, meters });
        router = router.route(path, handler(filter).layer(from_fn_with_state(guard, authorize)));
    }
    finish(router, state)
}

/// Builds the router of `/metrics` and the health checks, without tokens, for a separate listener that only
/// monitoring can reach.
pub fn metrics_app(state: State) -> Router {
    let router = Router::new()
        .route("/metrics", on(MethodFilter::GET, health::metrics))
        .route("/health/live", on(MethodFilter::GET, health::live))
        .route("/health/ready", on(MethodFilter::GET, health::ready));
    finish(router, state)
}

fn finish(router: Router<State>, state: State) -> Router {
    let panicking = state.clone();
    let body_max = state.bounds().body_max;
    router
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(body_max))
        // The panic message may quote the request: it is not logged.
        .layer(CatchPanicLayer::custom(move |_| {
            panicking.meters().panicked();
            tracing::error!("a request panicked");
            Refusal::internal().into_response()
        }))
        .with_state(state)
}

async fn no_route(uri: Uri) -> Response {
    let path: String = uri.path().chars().take(200).collect();
    Refusal::not_found("no-route", format!("unknown path `{path}`; see /v1/openapi.json")).into_response()
}

async fn no_method(method: Method, uri: Uri) -> Response {
    let path: String = uri.path().chars().take(200).collect();
    let method: String = method.as_str().chars().take(20).collect();
    let detail = format!("`{path}` does not support {method}; see the `Allow` header and /v1/openapi.json");
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "no-method", "Method not allowed", detail).into_response()
}

/// Validates paging parameters.
fn paging(after: Option<String>, max: Option<u32>) -> Result<Paging, Refusal> {
    let paging = match max {
        Some(max) => Paging::first(max).map_err(|error| Refusal::invalid("max", error.to_string()))?,
        None => Paging::default(),
    };
    Ok(match after {
        Some(after) => paging.after(Cursor::new(after)),
        None => paging,
    })
}
