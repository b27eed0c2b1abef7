//! The way in: how many at once, who, and for how long. Before anything of a message is read.

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
use super::message::{Whole, answered, received};
use super::refusal::status;
use crate::gate::Caller;
use crate::patience::within;
use crate::refusal::Refusal;
use crate::state::State;

/// The one method that there is.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// The service behind its gate. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Gated {
    pub(super) decider: Arc<Decider>,
    pub(super) service: Service,
}

/// An answer: one message, or whatever else.
pub(super) type Answer = Response<Either<Whole, Body>>;

impl Gated {
    /// What a call is answered with.
    pub(super) async fn answer(&self, request: Box<Request<Incoming>>) -> Answer {
        let answer = AssertUnwindSafe(self.pass(request)).catch_unwind().await;
        // What it said may hold what was sent: it is not repeated.
        answer.unwrap_or_else(|_| panicked(&self.decider.state).map(Either::Right))
    }

    /// Lets a call through to the service, or says why not.
    async fn pass(&self, request: Box<Request<Incoming>>) -> Answer {
        let began = Instant::now();
        let decider = &*self.decider;
        let (state, bounds) = (&decider.state, decider.state.bounds());
        let Ok(_running) = decider.running.try_acquire() else {
            state.meters().busy();
            state.hub().busy(bounds.requests_max);
            return refused(decider, &Refusal::busy(bounds.requests_max));
        };
        if let Err(refusal) = who(state, request.headers(), request.extensions()).await {
            return refused(decider, &refusal);
        }
        let Ok(answer) = within(bounds.body_time, self.served(request)).await else {
            decider.meters.failed();
            let why = format!("it took longer than {:?} to arrive and to be decided", bounds.body_time);
            return Status::deadline_exceeded(why).into_http().map(Either::Right);
        };
        // Whatever tonic has said of a message that cannot be read is in it too.
        let is_decided = matches!(answer.body(), Either::Left(_));
        if !is_decided && answer.headers().get(Status::GRPC_STATUS).is_some_and(|status| status != "0") {
            decider.meters.failed();
        }
        decider.meters.took(began.elapsed());
        answer
    }

    /// What the service answers: without tonic where it would only be in the way.
    async fn served(&self, request: Box<Request<Incoming>>) -> Answer {
        if request.uri().path() != SHOULD_RATE_LIMIT {
            return self.served_by_tonic(*request).await;
        }
        match received(request, self.decider.state.bounds().body_max).await {
            Ok(message) => {
                let answer = self.decider.decide(&message).await;
                let answer = answer.and_then(|answer| answered(&answer));
                answer.map_or_else(failed, |answer| answer.map(Either::Left))
            }
            Err(request) => self.served_by_tonic(*request).await,
        }
    }

    /// In a box, as all that is rare: every call would make room for it.
    fn served_by_tonic<B>(&self, request: Request<B>) -> BoxFuture<'static, Answer>
    where
        B: hyper::body::Body<Data = Bytes, Error = hyper::Error> + Send + 'static,
    {
        let mut service = self.service.clone();
        Box::pin(async move {
            let Ok(answer) = service.call(request).await;
            answer.map(|body| Either::Right(Body::new(body)))
        })
    }
}

fn failed(status: Status) -> Answer {
    status.into_http().map(Either::Right)
}

/// Who calls: by the token in its metadata or its certificate, as over HTTP. This is the one place where callers are told apart.
async fn who(state: &State, metadata: &HeaderMap, extensions: &Extensions) -> Result<Caller, Refusal> {
    state.admit(metadata, extensions, TokenScope::Acquire).await
}

fn refused(decider: &Decider, refusal: &Refusal) -> Answer {
    decider.meters.refused();
    failed(status(refusal))
}

/// What a call is answered with that panicked.
pub(super) fn panicked(state: &State) -> Response<Body> {
    state.meters().panicked();
    tracing::error!("a call of Envoy's panicked");
    Status::internal("the server could not do this; its log says why").into_http()
}
