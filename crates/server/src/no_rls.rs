//! A server that was built without Envoy's rate limit service: there are no rules, so none is ever served.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;

use crate::server::Shutdown;
use crate::state::State;

/// Rules of a service that is not there.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_enums, reason = "there is none")]
pub enum EnvoyRules {}

#[derive(Debug)]
pub(crate) struct Health;

impl Health {
    #[expect(clippy::unused_async, reason = "as the real one")]
    pub(crate) async fn until_stopped(self, _: Shutdown, _: impl Future<Output = ()>) {}
}

/// Services that are not there.
#[derive(Debug, Clone)]
pub(crate) struct Services(Infallible);

impl Services {
    #[expect(clippy::unused_async, reason = "as the real one")]
    pub(crate) async fn answer(self, _: Box<Request<Incoming>>) -> Response<Body> {
        match self.0 {}
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as the real one")]
pub(crate) fn services(_: State, rules: EnvoyRules, _: Shutdown) -> (Services, Health) {
    match rules {}
}
