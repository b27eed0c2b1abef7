//! Stand-in for `rls` in builds without the feature `envoy`. `EnvoyRules` has no values, so the service never
//! runs.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;

use crate::connections::Activity;
use crate::server::Shutdown;
use crate::state::State;

/// Uninhabited: the feature `envoy` is disabled.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_enums, reason = "it has no variants")]
pub enum EnvoyRules {}

#[derive(Debug)]
pub(crate) struct Health;

impl Health {
    #[expect(clippy::unused_async, reason = "same signature as in `rls`")]
    pub(crate) async fn until_stopped(self, _: Shutdown, _: impl Future<Output = ()>) {}
}

/// Uninhabited: the feature `envoy` is disabled.
#[derive(Debug, Clone)]
pub(crate) struct Services(Infallible);

impl Services {
    #[expect(clippy::unused_async, reason = "same signature as in `rls`")]
    pub(crate) async fn respond(self, _: Box<Request<Incoming>>, _: Arc<Activity>) -> Response<Body> {
        match self.0 {}
    }

    #[expect(clippy::unused_async, reason = "same signature as in `rls`")]
    pub(crate) async fn reports_recorded(&self) {
        match self.0 {}
    }
}

#[expect(clippy::needless_pass_by_value, reason = "same signature as in `rls`")]
pub(crate) fn services(_: State, rules: EnvoyRules, _: Shutdown) -> (Services, Health) {
    match rules {}
}
