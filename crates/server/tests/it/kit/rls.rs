//! A server with Envoy's service, and a gRPC client for it.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use tidegate::store::ManualWall;
use tidegate::{Limit, Limiter, Memory, Policy, Scope};
use tidegate_core::limit::token::{TokenScope, TokenScopes};
use tidegate_server::{Bounds, EnvoyConfig, EnvoyRules, ServerOptions};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::kit::codec::Value;
use crate::kit::{Kit, NOW, any_port, make_token};

/// A server and a connection to it.
pub(crate) struct Rls {
    pub(crate) kit: Kit,
    pub(crate) channel: Channel,
}

/// Parses rules.
pub(crate) fn rules(config: Value) -> EnvoyRules {
    EnvoyConfig::read(config).expect("it is well-formed").rules().expect("valid rules")
}

impl Rls {
    /// Starts a server over an in-memory store, with 5 requests and 100 tokens a minute for each entity.
    pub(crate) async fn new(config: Value) -> Self {
        let clock = ManualWall::new(NOW);
        let limiter = Limiter::new(Memory::with_clock(clock.clone()));
        Self::over(limiter, clock, Bounds::default(), config).await
    }

    pub(crate) async fn over(limiter: Limiter, clock: ManualWall, bounds: Bounds, config: Value) -> Self {
        let limits = [Limit::per_minute("requests", 5), Limit::per_minute("tokens", 100)];
        let policy = Policy::new(limits).expect("a policy");
        limiter.admin("test").set_policy(Scope::System, policy).await.expect("written");
        let every = TokenScopes::new(TokenScope::ALL);
        let token = make_token(limiter.store(), "envoy", every, "default").await;
        let reads = TokenScopes::new([TokenScope::Read]);
        let other = make_token(limiter.store(), "reader", reads, "default").await;
        let state = Kit::state(limiter, &clock, bounds).await;
        let options = ServerOptions::new(any_port()).envoy(any_port(), rules(config));
        let kit = Kit::serving_at(&options, state, (token, other)).await.with_clock(clock);
        let channel = channel(&kit).await;
        Self { kit, channel }
    }

    /// Makes a call.
    pub(crate) async fn call(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.call_as(&format!("Bearer {}", self.kit.token), request).await
    }

    pub(crate) async fn call_as(
        &self,
        authorization: &str,
        request: RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        let mut request = Request::new(request);
        if !authorization.is_empty() {
            let value = authorization.parse().expect("a value");
            request.metadata_mut().insert("authorization", value);
        }
        let mut client = RateLimitServiceClient::new(self.channel.clone());
        client.should_rate_limit(request).await.map(tonic::Response::into_inner)
    }

    /// Makes a call with one hit, and returns the overall code and one for each descriptor.
    pub(crate) async fn codes(&self, descriptors: &[&[(&str, &str)]]) -> (Code, Vec<Code>) {
        codes(&self.call(request(descriptors)).await.expect("an answer"))
    }

    /// Returns the available units of an entity on `shop`.
    pub(crate) async fn left(&self, entity: &str, limit: &str) -> i64 {
        let lines = self.kit.limiter.balances((entity, "shop")).await.expect("an answer");
        lines
            .iter()
            .find(|line| line.balance.limit.as_str() == limit)
            .expect("the limit exists")
            .balance
            .available
    }

    /// Returns the value of a counter.
    pub(crate) async fn counted(&self, name: &str) -> u64 {
        let text = self.kit.get("/metrics").await.text;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).parse().expect("a number")
    }
}

pub(crate) async fn channel(kit: &Kit) -> Channel {
    let addr = kit.envoy.expect("it answers Envoy");
    Endpoint::from_shared(format!("http://{addr}")).expect("an address").connect().await.expect("it answers")
}

pub(crate) fn codes(answer: &RateLimitResponse) -> (Code, Vec<Code>) {
    (answer.overall_code(), answer.statuses.iter().map(DescriptorStatus::code).collect())
}

pub(crate) fn request(descriptors: &[&[(&str, &str)]]) -> RateLimitRequest {
    RateLimitRequest {
        domain: "web".to_owned(),
        descriptors: descriptors.iter().map(|entries| descriptor(entries, None)).collect(),
        hits_addend: 0,
    }
}

pub(crate) fn descriptor(entries: &[(&str, &str)], hits: Option<u64>) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        hits_addend: hits.map(|value| UInt64Value { value }),
        ..RateLimitDescriptor::default()
    }
}

/// Returns the value of a response header.
pub(crate) fn header<'a>(answer: &'a RateLimitResponse, name: &str) -> Option<&'a str> {
    let found = answer.response_headers_to_add.iter().find(|header| header.key == name);
    found.map(|header| header.value.as_str())
}
