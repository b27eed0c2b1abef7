//! Admission of gRPC calls: concurrency limit, authentication and timeout, before the message is read.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Extensions, HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use futures_util::FutureExt as _;
use hyper::body::Incoming;
use tidegate_core::limit::token::TokenScope;
use tonic::Status;
use tonic::codegen::Service as _;

use super::Service;
use super::decide::Decider;
use super::refusal::status;
use crate::connections::Call;
use crate::guarded_body::GuardedBody;
use crate::io_timeout::within;
use crate::refusal::Refusal;
use crate::slots::Slot;
use crate::state::State;

/// The service behind authentication. Clones share the same state.
#[derive(Debug, Clone)]
pub(super) struct AuthenticatedService {
    pub(super) decider: Arc<Decider>,
    pub(super) service: Service,
}

/// A response whose call is in flight until it has been sent.
pub(super) type GrpcResponse = Response<GuardedBody<Body, InFlight>>;

/// What a call holds until its response has been sent, so that unread responses are bounded.
#[derive(Debug)]
pub(crate) struct InFlight {
    #[expect(dead_code, reason = "held until it is dropped")]
    pub(super) call: Option<Call>,
    pub(super) slot: Option<Slot>,
}

impl AuthenticatedService {
    /// Responds to a call.
    pub(super) async fn respond(&self, request: Box<Request<Incoming>>, call: Call) -> GrpcResponse {
        let mut in_flight = InFlight { call: Some(call), slot: None };
        let response = AssertUnwindSafe(self.authorize(request, &mut in_flight.slot)).catch_unwind().await;
        // The panic message may quote the request: it is not logged.
        let response = response.unwrap_or_else(|_| panicked(&self.decider.state));
        response.map(|body| GuardedBody::new(body, in_flight))
    }

    /// Forwards an authenticated call to the service.
    async fn authorize(&self, request: Box<Request<Incoming>>, slot: &mut Option<Slot>) -> Response<Body> {
        let began = Instant::now();
        let decider = &*self.decider;
        match decider.admit(request.headers(), request.extensions()).await {
            Ok(taken) => *slot = Some(taken),
            Err(refusal) => {
                decider.meters.refused();
                return failed(status(&refusal));
            }
        }
        let timeout = match call_timeout(request.headers(), decider.state.bounds().body_time) {
            Ok(timeout) => timeout,
            Err(status) => {
                decider.meters.failed();
                return failed(status);
            }
        };
        let Ok(response) = within(timeout, self.serve(request)).await else {
            decider.meters.failed();
            let why = format!("the request was not received and decided within {timeout:?}");
            return failed(Status::deadline_exceeded(why));
        };
        // This includes tonic's errors for invalid messages.
        if response.headers().get(Status::GRPC_STATUS).is_some_and(|status| status != "0") {
            decider.meters.failed();
        }
        decider.meters.took(began.elapsed());
        response
    }

    /// Lets tonic read the message, decide by it and write the response.
    async fn serve(&self, request: Box<Request<Incoming>>) -> Response<Body> {
        let Ok(response) = self.service.clone().call(*request).await;
        response.map(Body::new)
    }
}

impl Decider {
    /// Authenticates a call by the token in its metadata or its certificate, as over HTTP, and takes a slot.
    async fn admit(&self, metadata: &HeaderMap, extensions: &Extensions) -> Result<Slot, Refusal> {
        let caller = self.state.authenticate(metadata, extensions, TokenScope::Acquire).await?;
        // A rule may map a descriptor to any entity.
        if caller.bound_to().is_some() {
            return Err(caller.not_its_entity("and Envoy's rules concern others"));
        }
        let slot = self.running.take(caller.token());
        slot.map_err(|at| self.state.busy(at, (self.running.max(), "requests"), caller.token()))
    }
}

/// A failed call: one frame of headers with its status, which ends the stream.
pub(super) fn failed(status: Status) -> Response<Body> {
    status.into_http()
}

/// A response of plain HTTP to a request that is not gRPC.
pub(super) fn respond_status(status: StatusCode, call: Call) -> GrpcResponse {
    let in_flight = InFlight { call: Some(call), slot: None };
    let mut response = Response::new(GuardedBody::new(Body::empty(), in_flight));
    *response.status_mut() = status;
    response
}

/// Whether the content type is `application/grpc`, with or without a format or parameters.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    kind.strip_prefix(b"application/grpc")
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Returns the timeout that the caller set, at most `max`.
fn call_timeout(headers: &HeaderMap, max: Duration) -> Result<Duration, Status> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(max) };
    let parsed = value.to_str().ok().and_then(|text| {
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let is_count = (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
        let count: u64 = digits.parse().ok().filter(|_| is_count)?;
        Some(match unit {
            "H" => Duration::from_secs(count * 3_600),
            "M" => Duration::from_secs(count * 60),
            "S" => Duration::from_secs(count),
            "m" => Duration::from_millis(count),
            "u" => Duration::from_micros(count),
            "n" => Duration::from_nanos(count),
            _ => return None,
        })
    });
    let why = || format!("grpc-timeout {value:?}, which is not 1 to 8 digits and one of H, M, S, m, u and n");
    parsed.map(|timeout| timeout.min(max)).ok_or_else(|| Status::invalid_argument(why()))
}

/// The response to a call that panicked.
pub(super) fn panicked(state: &State) -> Response<Body> {
    state.meters().panicked();
    tracing::error!("an Envoy call panicked");
    Status::internal("internal error; see the server's log").into_http()
}
