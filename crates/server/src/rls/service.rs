//! Admission of gRPC calls: concurrency limit, authentication and timeout, before the message is read.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::{Extensions, HeaderMap, Request, Response};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_body_util::Either;
use hyper::body::Incoming;
use prost::bytes::Bytes;
use tidegate_core::limit::token::TokenScope;
use tonic::Status;
use tonic::codegen::Service as _;

use super::Service;
use super::decide::Decider;
use super::grpc_frame::{MessageBody, encode_response, read_message};
use super::refusal::status;
use crate::auth::Caller;
use crate::io_timeout::within;
use crate::refusal::Refusal;
use crate::state::State;

/// The only method of the service.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// The service behind authentication. Clones share the same state.
#[derive(Debug, Clone)]
pub(super) struct AuthenticatedService {
    pub(super) decider: Arc<Decider>,
    pub(super) service: Service,
}

/// A response: one message, or any other body.
pub(super) type GrpcResponse = Response<Either<MessageBody, Body>>;

impl AuthenticatedService {
    /// Responds to a call.
    pub(super) async fn respond(&self, request: Box<Request<Incoming>>) -> GrpcResponse {
        let response = AssertUnwindSafe(self.authorize(request)).catch_unwind().await;
        // The panic message may quote the request: it is not logged.
        response.unwrap_or_else(|_| panicked(&self.decider.state).map(Either::Right))
    }

    /// Forwards an authenticated call to the service.
    async fn authorize(&self, request: Box<Request<Incoming>>) -> GrpcResponse {
        let began = Instant::now();
        let decider = &*self.decider;
        let (state, bounds) = (&decider.state, decider.state.bounds());
        let Ok(_running) = decider.running.try_acquire() else {
            state.meters().busy();
            state.events().busy(bounds.requests_max);
            return refused(decider, &Refusal::busy(bounds.requests_max));
        };
        if let Err(refusal) = authenticate(state, request.headers(), request.extensions()).await {
            return refused(decider, &refusal);
        }
        let Ok(response) = within(bounds.body_time, self.serve(request)).await else {
            decider.meters.failed();
            let why = format!("the request was not received and decided within {:?}", bounds.body_time);
            return Status::deadline_exceeded(why).into_http().map(Either::Right);
        };
        // This includes tonic's errors for invalid messages.
        let is_decided = matches!(response.body(), Either::Left(_));
        if !is_decided && response.headers().get(Status::GRPC_STATUS).is_some_and(|status| status != "0") {
            decider.meters.failed();
        }
        decider.meters.took(began.elapsed());
        response
    }

    /// Serves a call, bypassing tonic for plain messages.
    async fn serve(&self, request: Box<Request<Incoming>>) -> GrpcResponse {
        if request.uri().path() != SHOULD_RATE_LIMIT {
            return self.serve_with_tonic(*request).await;
        }
        match read_message(request, self.decider.state.bounds().body_max).await {
            Ok(message) => {
                let response = self.decider.decide(&message).await;
                let response = response.and_then(|response| encode_response(&response));
                response.map_or_else(failed, |response| response.map(Either::Left))
            }
            Err(request) => self.serve_with_tonic(*request).await,
        }
    }

    /// Boxed because it is rare: every call would reserve space for it.
    fn serve_with_tonic<B>(&self, request: Request<B>) -> BoxFuture<'static, GrpcResponse>
    where
        B: hyper::body::Body<Data = Bytes, Error = hyper::Error> + Send + 'static,
    {
        let mut service = self.service.clone();
        Box::pin(async move {
            let Ok(response) = service.call(request).await;
            response.map(|body| Either::Right(Body::new(body)))
        })
    }
}

fn failed(status: Status) -> GrpcResponse {
    status.into_http().map(Either::Right)
}

/// Authenticates a call by the token in its metadata or its certificate, as over HTTP.
async fn authenticate(
    state: &State,
    metadata: &HeaderMap,
    extensions: &Extensions,
) -> Result<Caller, Refusal> {
    state.authenticate(metadata, extensions, TokenScope::Acquire).await
}

fn refused(decider: &Decider, refusal: &Refusal) -> GrpcResponse {
    decider.meters.refused();
    failed(status(refusal))
}

/// The response to a call that panicked.
pub(super) fn panicked(state: &State) -> Response<Body> {
    state.meters().panicked();
    tracing::error!("an Envoy call panicked");
    Status::internal("internal error; see the server's log").into_http()
}
