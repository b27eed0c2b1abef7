//! The way in: how many at once, who, and for how long. Before anything of a message is read.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{Extensions, HeaderMap};
use axum::response::Response;
use futures_util::FutureExt as _;
use tidegate_core::limit::token::TokenScope;
use tokio::time::timeout;
use tonic::Status;
use tonic::codegen::{BoxFuture, Service as _};

use super::Service;
use super::decide::Decider;
use super::refusal::status;
use crate::gate::Caller;
use crate::refusal::Refusal;
use crate::state::State;

/// The service behind its gate: one future for both, since every call makes one.
#[derive(Debug, Clone)]
pub(super) struct Gated {
    pub(super) decider: Arc<Decider>,
    pub(super) service: Service,
}

impl tonic::codegen::Service<Request> for Gated {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let (decider, service) = (Arc::clone(&self.decider), self.service.clone());
        Box::pin(async move {
            let answer = AssertUnwindSafe(pass(&decider, service, request)).catch_unwind().await;
            // What it said may hold what was sent: it is not repeated.
            Ok(answer.unwrap_or_else(|_| panicked(&decider.state)))
        })
    }
}

/// Lets a call through to the service, or says why not.
async fn pass(decider: &Decider, mut service: Service, request: Request) -> Response {
    let began = Instant::now();
    let state = &decider.state;
    let bounds = state.bounds();
    let Ok(_running) = decider.running.try_acquire() else {
        state.meters().busy();
        state.hub().busy(bounds.requests_max);
        return refused(decider, &Refusal::busy(bounds.requests_max));
    };
    if let Err(refusal) = who(state, request.headers(), request.extensions()).await {
        return refused(decider, &refusal);
    }
    let Ok(Ok(response)) = timeout(bounds.body_time, service.call(request)).await else {
        decider.meters.failed();
        let why = format!("it took longer than {:?} to arrive and to be decided", bounds.body_time);
        return Status::deadline_exceeded(why).into_http();
    };
    // Whatever tonic has said of a message that cannot be read is in it too.
    if response.headers().get(Status::GRPC_STATUS).is_some_and(|status| status != "0") {
        decider.meters.failed();
    }
    decider.meters.took(began.elapsed());
    response.map(Body::new)
}

/// Who calls: by the token in its metadata or its certificate, as over HTTP. This is the one place where callers are told apart.
async fn who(state: &State, metadata: &HeaderMap, extensions: &Extensions) -> Result<Caller, Refusal> {
    state.admit(metadata, extensions, TokenScope::Acquire).await
}

fn refused(decider: &Decider, refusal: &Refusal) -> Response {
    decider.meters.refused();
    status(refusal).into_http::<Body>()
}

/// What a call is answered with that panicked.
pub(super) fn panicked(state: &State) -> Response {
    state.meters().panicked();
    tracing::error!("a call of Envoy's panicked");
    Status::internal("the server could not do this; its log says why").into_http()
}
