//! Tests of health and reflection, which need no token.

use std::time::Duration;

use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::Duration as Span;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use tidegate_server::ShutdownOutcome;
use tokio::time::advance;
use tokio_stream::StreamExt as _;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, TICK, settle_down};
use crate::kit::soon;
use crate::rls_kit::{Rls, descriptor, request};

/// The grace period of a stopping server.
const STOP_GRACE: Duration = Duration::from_millis(500);
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";

fn service(name: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: name.to_owned() }
}

#[tokio::test]
async fn health_reports_serving_and_then_not_serving() {
    let rls = Rls::new(json!({})).await;
    let mut health = HealthClient::new(rls.channel.clone());
    for name in ["", SERVICE] {
        let answer = async {
            loop {
                // The service responds once the server has started.
                if let Ok(answer) = health.check(service(name)).await {
                    return answer.into_inner();
                }
                tokio::task::yield_now().await;
            }
        };
        assert_eq!(soon("its health", answer).await.status(), ServingStatus::Serving);
    }
    assert_eq!(health.check(service("another")).await.unwrap_err().code(), tonic::Code::NotFound);
    let mut watched = health.watch(service(SERVICE)).await.unwrap().into_inner();
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let _frozen = Frozen::new();
    rls.kit.stopper.stop();
    let last = soon("the news", watched.next()).await.unwrap().unwrap();
    assert_eq!(last.status(), ServingStatus::NotServing);
    drop((health, rls.channel));
    // An open watch delays the shutdown by at most the grace period.
    settle_down().await;
    advance(STOP_GRACE + TICK).await;
    assert_eq!(soon("the end", rls.kit.stopped()).await, ShutdownOutcome::Drained);
    drop(watched);
}

async fn reflected(rls: &Rls, request: MessageRequest) -> MessageResponse {
    let mut client = ServerReflectionClient::new(rls.channel.clone());
    let ask = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let mut answers =
        client.server_reflection_info(tokio_stream::once(ask)).await.expect("connects").into_inner();
    let answer = answers.next().await.expect("an answer").expect("a good one");
    answer.message_response.expect("a message")
}

#[tokio::test]
async fn reflection_matches_wire_messages() {
    let rls = Rls::new(json!({})).await;
    let MessageResponse::ListServicesResponse(list) =
        reflected(&rls, MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list")
    };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&SERVICE) && names.contains(&"grpc.health.v1.Health"), "{names:?}");

    let mut pool = DescriptorPool::new();
    for file in [
        "google/protobuf/duration.proto",
        "google/protobuf/wrappers.proto",
        "envoy/type/v3/ratelimit_unit.proto",
        "envoy/config/core/v3/base.proto",
        "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
        "envoy/service/ratelimit/v3/rls.proto",
    ] {
        let MessageResponse::FileDescriptorResponse(files) =
            reflected(&rls, MessageRequest::FileByFilename(file.to_owned())).await
        else {
            panic!("no {file}")
        };
        for bytes in files.file_descriptor_proto {
            pool.decode_file_descriptor_proto(&*bytes).unwrap();
        }
    }
    let request_body = RateLimitRequest {
        descriptors: vec![descriptor(&[("user", "ada")], Some(3))],
        hits_addend: 2,
        ..request(&[])
    };
    let response = RateLimitResponse {
        overall_code: Code::OverLimit.into(),
        statuses: vec![DescriptorStatus {
            code: Code::Ok.into(),
            current_limit: Some(RateLimit { name: "requests".to_owned(), requests_per_unit: 5, unit: 2 }),
            limit_remaining: 4,
            duration_until_reset: Some(Span { seconds: 1, nanos: 2 }),
            ..DescriptorStatus::default()
        }],
        raw_body: b"why".to_vec(),
        ..RateLimitResponse::default()
    };
    for (name, bytes) in
        [("RateLimitRequest", request_body.encode_to_vec()), ("RateLimitResponse", response.encode_to_vec())]
    {
        let message = pool.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}")).unwrap();
        let read = DynamicMessage::decode(message, &*bytes).unwrap();
        assert_eq!(read.unknown_fields().count(), 0, "{read}");
        assert_eq!(read.encode_to_vec(), bytes);
        let text = read.to_string();
        let words =
            if name == "RateLimitRequest" { ["\"ada\"", "hits_addend"] } else { ["OVER_LIMIT", "MINUTE"] };
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[tokio::test]
async fn open_reflection_does_not_delay_shutdown() {
    let rls = Rls::new(json!({})).await;
    let mut client = ServerReflectionClient::new(rls.channel.clone());
    let mut held = client.server_reflection_info(tokio_stream::pending()).await.unwrap().into_inner();
    let _frozen = Frozen::new();
    rls.kit.stopper.stop();
    settle_down().await;
    advance(STOP_GRACE + TICK).await;
    assert!(!matches!(soon("the stream", held.next()).await, Some(Ok(_))));
    drop((client, rls.channel));
    assert_eq!(soon("the end", rls.kit.stopped()).await, ShutdownOutcome::Drained);
}

/// Idle watches took all places of calls without a token, so that health checks failed.
#[tokio::test]
async fn idle_streams_do_not_deny_health_checks() {
    let rls = Rls::new(json!({})).await;
    let mut health = HealthClient::new(rls.channel.clone());
    let mut watched = Vec::new();
    for _ in 0..120 {
        watched.push(health.watch(service("")).await.unwrap().into_inner());
    }
    assert!(health.check(service("")).await.is_ok());
    let error = health.watch(service("")).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (tonic::Code::ResourceExhausted, "too many calls without a token: 120 are in flight")
    );
    watched.clear();
    let admitted = async { while health.watch(service("")).await.is_err() {} };
    soon("a place", admitted).await;
}
