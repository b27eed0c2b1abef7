//! Envoy's rate limit service, version 3, over gRPC: descriptors are mapped to subjects by rules, and spend of their limits.
//!
//! `gate` says who may, `rules` what a descriptor asks for, `decide` asks the limits, `answer` says it as Envoy understands it, and
//! `afterwards` is what no answer waits for.
//! Health and reflection are answered without a token.

mod afterwards;
mod answer;
mod config;
mod decide;
mod describe;
mod gate;
mod message;
mod meters;
mod refusal;
mod rules;
mod seldom;

use std::sync::Arc;

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
use http_body_util::{BodyStream, Either, StreamBody};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::codegen::Service as _;
use tonic::server::NamedService as _;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};
use tower_http::catch_panic::CatchPanicLayer;

pub use config::{EntryConfig, EnvoyConfig, RuleConfig, Unknown};
pub use rules::{EnvoyRules, InvalidRules};

use self::afterwards::Afterwards;
use self::decide::Decider;
use self::gate::{Answer, Gated};
use self::meters::RlsMeters;
use self::seldom::Seldom;
use crate::server::Shutdown;
use crate::state::State;

/// Calls of health and reflection, which need no token, that are under way at the same time.
const OPEN_MAX: usize = 64;

type Service = RateLimitServiceServer<Decisions>;

/// The service, as tonic calls it.
#[derive(Debug, Clone)]
struct Decisions(Arc<Decider>);

#[tonic::async_trait]
impl RateLimitService for Decisions {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.0.decide(request.get_ref()).await.map(Response::new)
    }
}

/// Says whether the services are there.
#[derive(Debug)]
pub(crate) struct Health(HealthReporter);

impl Health {
    /// Tells those who ask, and those who watch, that it stops. When their calls are answered, whoever watches need not any
    /// longer.
    pub(crate) async fn until_stopped(self, mut shutdown: Shutdown, answered: impl Future<Output = ()>) {
        let Self(mut reporter) = self;
        reporter.set_serving::<Service>().await;
        shutdown.said(1).await;
        let names = ["", Service::NAME];
        for name in names {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
        answered.await;
        for name in names {
            reporter.clear_service_status(name).await;
        }
    }
}

/// All services. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Services(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gated: Gated,
    /// Those that need no token.
    open: Router,
}

impl Services {
    /// What a call is answered with.
    pub(crate) async fn answer(self, request: Box<HttpRequest<Incoming>>) -> Answer {
        let Self(inner) = &self;
        if request.method() != Method::POST {
            return not_post();
        }
        if is_gated(request.uri().path()) {
            return inner.gated.answer(request).await;
        }
        // In a box, as all that is rare: every call would make room for it.
        let Ok(answer) = Box::pin(inner.open.clone().call(*request)).await;
        answer.map(Either::Right)
    }
}

/// gRPC is spoken by POST alone. A HEAD must have no body, and an upgrade would be hyper's.
fn not_post() -> Answer {
    let mut answer = HttpResponse::new(Either::Right(Body::empty()));
    *answer.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
    answer
}

/// Whether this is of the service that needs a token. It is asked first, and by itself: there are hundreds of these for each other.
fn is_gated(path: &str) -> bool {
    path.strip_prefix('/')
        .and_then(|path| path.strip_prefix(Service::NAME))
        .is_some_and(|method| method.starts_with('/'))
}

/// All services, and what tells of their health.
pub(crate) fn services(state: State, rules: EnvoyRules, shutdown: Shutdown) -> (Services, Health) {
    if rules.let_all_pass() {
        tracing::warn!("there is no rule for Envoy's descriptors, and unknown ones are allowed: all pass");
    }
    let message_max = state.bounds().body_max;
    let meters = RlsMeters::new(state.meters());
    let requests_max = state.bounds().requests_max.min(Semaphore::MAX_PERMITS);
    let decider = Arc::new(Decider {
        state: state.clone(),
        rules,
        meters,
        running: Semaphore::new(requests_max),
        afterwards: Afterwards::new(requests_max),
        seldom: Seldom::default(),
    });
    let service = Service::new(Decisions(Arc::clone(&decider))).max_decoding_message_size(message_max);
    let (reporter, health) = health_reporter();
    let (v1, v1alpha) = describe::reflection();
    let reflection = Routes::new(v1)
        .add_service(v1alpha)
        .into_axum_router()
        .layer(from_fn_with_state(shutdown, until_stop));
    let places = Arc::new(Semaphore::new(OPEN_MAX));
    let health_path = format!("/{}/{{*method}}", tonic_health::pb::health_server::HealthServer::<()>::NAME);
    let open = reflection
        .route_service(&health_path, health)
        .layer(from_fn_with_state(places, open))
        .layer(CatchPanicLayer::custom(move |_| gate::panicked(&state)));
    (Services(Arc::new(Inner { gated: Gated { decider, service }, open })), Health(reporter))
}

/// Lets in as many as may be without a token, each for as long as its answer takes.
async fn open(With(places): With<Arc<Semaphore>>, request: HttpRequest<Body>, next: Next) -> HttpResponse {
    let Ok(place) = places.try_acquire_owned() else {
        let why = format!("{OPEN_MAX} calls without a token are under way, as many as may");
        return Status::resource_exhausted(why).into_http();
    };
    next.run(request).await.map(|body| {
        let held = BodyStream::new(body).inspect(move |_| {
            let _held = &place;
        });
        Body::new(StreamBody::new(held))
    })
}

/// Ends what would be open for as long as its caller likes, on both sides.
async fn until_stop(With(shutdown): With<Shutdown>, request: HttpRequest<Body>, next: Next) -> HttpResponse {
    let until = |body: Body| {
        let mut shutdown = shutdown.clone();
        let stopped = Box::pin(async move { shutdown.said(1).await });
        Body::new(StreamBody::new(BodyStream::new(body).take_until(stopped)))
    };
    next.run(request.map(until)).await.map(until)
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
    async fn who_asks_while_calls_are_still_answered_hears_that_it_stops() {
        let (reporter, server) = health_reporter();
        let (stopper, shutdown) = Shutdown::new();
        let (answered, last) = oneshot::channel::<()>();
        let mut health = pin!(Health(reporter).until_stopped(shutdown, last.map(drop)));
        let mut client = HealthClient::new(server);
        let mut ask = async || {
            let asked = HealthCheckRequest { service: Service::NAME.to_owned() };
            client.check(asked).await.map(|answer| answer.into_inner().status)
        };
        assert!((&mut health).now_or_never().is_none());
        assert_eq!(ask().await.unwrap(), ServingStatus::Serving as i32);
        stopper.stop();
        assert!((&mut health).now_or_never().is_none());
        assert_eq!(ask().await.unwrap(), 2, "not serving");
        drop(answered);
        health.await;
        assert_eq!(ask().await.unwrap_err().code(), tonic::Code::NotFound);
    }
}
