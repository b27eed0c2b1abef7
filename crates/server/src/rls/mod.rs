//! Envoy's rate limit service, version 3, over gRPC: rules map descriptors to subjects, which spend from
//! their limits.
//!
//! `auth` admits calls, `rules` maps descriptors to draws, `decide` evaluates the limits, `response` converts
//! the verdicts for Envoy, `refunds` keeps the charges that can be returned, and `background` runs work that no response waits for. Health and reflection need
//! no token.

mod background;
mod config;
mod decide;
mod describe;
mod meters;
mod refunds;
mod refusal;
mod reports;
mod response;
mod rules;
mod service;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State as With;
use axum::http::{HeaderValue, Method, Request as HttpRequest, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response as HttpResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use futures_util::StreamExt as _;
use http_body_util::{BodyStream, StreamBody};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::codegen::Service as _;
use tonic::server::NamedService as _;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};
use tower_http::catch_panic::CatchPanicLayer;

pub use config::{Charge, EntryConfig, EnvoyConfig, RuleConfig, Unknown};
pub use rules::{EnvoyRules, InvalidRules};

use self::background::BackgroundTasks;
use self::decide::Decider;
use self::meters::RlsMeters;
use self::refunds::RefundableCharges;
use self::reports::REPORTS_MAX;
use self::service::{AuthenticatedService, GrpcResponse, InFlight, failed, is_grpc, respond_status};
use crate::connections::{Activity, Call};
use crate::guarded_body::GuardedBody;
use crate::io_timeout::within;
use crate::log_throttle::LogThrottle;
use crate::server::Shutdown;
use crate::slots::Slots;
use crate::state::State;

/// Maximum number of concurrent health checks.
const CHECKS_MAX: usize = 1_024;
/// Maximum number of concurrent streams without a token: watches of the health, and reflection.
const STREAMS_MAX: usize = 128;
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

type Service = RateLimitServiceServer<RateLimitServiceImpl>;

/// Adapts the service for tonic.
#[derive(Debug, Clone)]
struct RateLimitServiceImpl(Arc<Decider>);

#[tonic::async_trait]
impl RateLimitService for RateLimitServiceImpl {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.0.decide(request.get_ref()).await.map(Response::new)
    }
}

/// Reports the health of the services.
#[derive(Debug)]
pub(crate) struct Health(HealthReporter);

impl Health {
    /// Reports that the services stop, and closes the watches once the calls are drained.
    pub(crate) async fn until_stopped(self, mut shutdown: Shutdown, drained: impl Future<Output = ()>) {
        let Self(mut reporter) = self;
        reporter.set_serving::<Service>().await;
        shutdown.signaled(1).await;
        let names = ["", Service::NAME];
        for name in names {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
        drained.await;
        for name in names {
            reporter.clear_service_status(name).await;
        }
    }
}

/// All services. Clones share the same state.
#[derive(Debug, Clone)]
pub(crate) struct Services(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    authenticated: AuthenticatedService,
    unauthenticated: UnauthenticatedServices,
}

/// Health and reflection. Calls are shared by address, as these have no token.
#[derive(Debug)]
struct UnauthenticatedServices {
    router: Router,
    checks: Arc<Slots>,
    streams: Arc<Slots>,
    timeout: Duration,
}

impl Services {
    /// Waits until the store has recorded all reports.
    pub(crate) async fn reports_recorded(&self) {
        self.0.authenticated.decider.reports.idle().await;
    }

    /// Responds to a call.
    pub(crate) async fn respond(
        self,
        request: Box<HttpRequest<Incoming>>,
        activity: Arc<Activity>,
    ) -> GrpcResponse {
        let (Self(inner), call) = (&self, activity.begin());
        // A response to HEAD must have no body, and upgrades are not supported.
        if request.method() != Method::POST {
            let mut response = respond_status(StatusCode::METHOD_NOT_ALLOWED, call);
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
            return response;
        }
        if !is_grpc(request.headers()) {
            return respond_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, call);
        }
        if needs_token(request.uri().path()) {
            return inner.authenticated.respond(request, call).await;
        }
        // Boxed because it is rare: every call would reserve space for it.
        Box::pin(inner.unauthenticated.respond(*request, call, activity.address())).await
    }
}

impl UnauthenticatedServices {
    /// Responds to a call. Its slot is held until the response has been sent.
    async fn respond(&self, request: HttpRequest<Incoming>, call: Call, address: IpAddr) -> GrpcResponse {
        let is_check = request.uri().path() == HEALTH_CHECK;
        let slots = if is_check { &self.checks } else { &self.streams };
        // A stream may last as long as its caller likes, and delays no shutdown.
        let mut in_flight = InFlight { call: is_check.then_some(call), slot: None };
        let response = if let Ok(slot) = slots.take(&address) {
            in_flight.slot = Some(slot);
            match within(self.timeout, self.router.clone().call(request)).await {
                Ok(Ok(response)) => response,
                Err(_) => {
                    let why = format!("the request was not received within {:?}", self.timeout);
                    failed(Status::deadline_exceeded(why))
                }
            }
        } else {
            let why = format!("too many calls without a token: {} are in flight", slots.used());
            failed(Status::resource_exhausted(why))
        };
        response.map(|body| GuardedBody::new(body, in_flight))
    }
}

/// Whether the path belongs to the service that needs a token. It is checked first, because nearly all calls
/// do.
fn needs_token(path: &str) -> bool {
    path.strip_prefix('/')
        .and_then(|path| path.strip_prefix(Service::NAME))
        .is_some_and(|method| method.starts_with('/'))
}

/// Creates all services and their health reporter.
pub(crate) fn services(state: State, rules: EnvoyRules, shutdown: Shutdown) -> (Services, Health) {
    if rules.allows_all() {
        tracing::warn!("no Envoy rules, and unknown descriptors are allowed: every request is allowed");
    }
    let message_max = state.bounds().body_max;
    let meters = RlsMeters::new(state.meters());
    let requests_max = state.bounds().requests_max;
    let decider = Arc::new(Decider {
        state: state.clone(),
        rules,
        meters,
        running: Slots::new(requests_max),
        background: BackgroundTasks::new(requests_max.min(Semaphore::MAX_PERMITS)),
        reports: BackgroundTasks::new(REPORTS_MAX),
        log_throttle: LogThrottle::new(),
        refundable: RefundableCharges::default(),
    });
    let service =
        Service::new(RateLimitServiceImpl(Arc::clone(&decider))).max_decoding_message_size(message_max);
    let (reporter, health) = health_reporter();
    let (v1, v1alpha) = describe::reflection();
    let reflection = Routes::new(v1)
        .add_service(v1alpha)
        .into_axum_router()
        .layer(from_fn_with_state(shutdown, until_stop));
    let timeout = state.bounds().body_time;
    let health_path = format!("/{}/{{*method}}", tonic_health::pb::health_server::HealthServer::<()>::NAME);
    let router = reflection
        .route_service(&health_path, health)
        .layer(CatchPanicLayer::custom(move |_| service::panicked(&state)));
    (
        Services(Arc::new(Inner {
            authenticated: AuthenticatedService { decider, service },
            unauthenticated: UnauthenticatedServices {
                router,
                checks: Slots::new(CHECKS_MAX),
                streams: Slots::new(STREAMS_MAX),
                timeout,
            },
        })),
        Health(reporter),
    )
}

/// Ends the request of a stream that its caller could keep open when the server stops; its response ends with
/// it.
async fn until_stop(With(shutdown): With<Shutdown>, request: HttpRequest<Body>, next: Next) -> HttpResponse {
    let mut shutdown = shutdown.clone();
    let stopped = Box::pin(async move { shutdown.signaled(1).await });
    let until = |body| Body::new(StreamBody::new(BodyStream::new(body).take_until(stopped)));
    next.run(request.map(until)).await
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;

    #[tokio::test]
    async fn health_is_not_serving_while_calls_drain() {
        let (reporter, server) = health_reporter();
        let (stopper, shutdown) = Shutdown::new();
        let (drained, last) = oneshot::channel::<()>();
        let mut health = pin!(Health(reporter).until_stopped(shutdown, last.map(drop)));
        let mut client = HealthClient::new(server);
        let mut ask = async || {
            let asked = HealthCheckRequest { service: Service::NAME.to_owned() };
            client.check(asked).await.map(|response| response.into_inner().status)
        };
        assert!((&mut health).now_or_never().is_none());
        assert_eq!(ask().await.unwrap(), ServingStatus::Serving as i32);
        stopper.stop();
        assert!((&mut health).now_or_never().is_none());
        assert_eq!(ask().await.unwrap(), 2, "not serving");
        drop(drained);
        health.await;
        assert_eq!(ask().await.unwrap_err().code(), tonic::Code::NotFound);
    }
}
