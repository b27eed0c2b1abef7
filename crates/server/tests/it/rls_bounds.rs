//! Tests of Envoy's service: authentication, bounds and arbitrary messages.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::Ok as Under;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use prost::Message as _;
use prost::bytes::{Buf, BufMut, Bytes};
use tidegate::store::ManualWall;
use tidegate::{Expect, Limiter, Memory, StoreError};
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Request, Status};

use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, ends_after};
use crate::kit::{NOW, bounds, make_token, soon};
use crate::rls_kit::{Rls, channel, descriptor, request};

fn config() -> Value {
    json!({"rules": [
        {"match": [{"key": "user"}], "entity": "{user}", "resource": "shop"},
        {"match": [{"key": "user"}, {"key": "path", "value": "/a*"}], "entity": "{user}", "resource": "{path}"},
        {"match": [{"key": "try"}], "entity": "{try}", "resource": "shop", "shadow": true},
        {"match": [{"key": "free"}], "unlimited": true},
    ]})
}

#[tokio::test]
async fn rls_requires_token_with_acquire_scope() -> Result<(), StoreError> {
    let rls = Rls::new(config()).await;
    let ada = || request(&[&[("user", "ada")]]);
    let elsewhere =
        make_token(rls.kit.limiter.store(), "else", TokenScopes::new(TokenScope::ALL), "another").await;
    let table = [
        (String::new(), Code::Unauthenticated, "this needs a token"),
        ("Basic dXNlcg==".to_owned(), Code::Unauthenticated, "the header holds no token"),
        (format!("Bearer {}x", rls.kit.token), Code::Unauthenticated, "no"),
        (format!("Bearer {}", rls.kit.other), Code::PermissionDenied, "lacks the scope `acquire`"),
        (format!("Bearer {elsewhere}"), Code::PermissionDenied, "namespace"),
    ];
    for (authorization, code, sentence) in table {
        let error = rls.call_as(&authorization, ada()).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(sentence), "{error}");
    }
    assert_eq!(rls.left("ada", "requests").await, 5, "nothing was drawn");
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"refused\"}").await, 5);
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    let id = TokenId::new("envoy").expect("an id");
    let all = make_token(rls.kit.limiter.store(), "all", TokenScopes::new(TokenScope::ALL), "default").await;
    rls.kit.limiter.store().revoke_token(&id, Expect::Any, "test").await?;
    assert_eq!(rls.call(ada()).await.unwrap_err().code(), Code::Unauthenticated);
    assert!(rls.call_as(&format!("bearer {all}"), ada()).await.is_ok());
    Ok(())
}

#[tokio::test]
async fn too_many_descriptors_are_refused() {
    let rls = Rls::new(config()).await;
    let many = |count: usize| RateLimitRequest {
        descriptors: vec![descriptor(&[("free", "x")], None); count],
        ..request(&[])
    };
    assert_eq!(rls.call(many(64)).await.unwrap().statuses.len(), 64);
    let entries = vec![("free", "x"); 17];
    let wide = RateLimitRequest { descriptors: vec![descriptor(&entries, None)], ..request(&[]) };
    let empty = RateLimitRequest { descriptors: vec![RateLimitDescriptor::default()], ..request(&[]) };
    let table = [
        (many(0), "0 descriptors, outside 1..=64"),
        (many(65), "65 descriptors, outside 1..=64"),
        (wide, "descriptor 1 has 17 entries, outside 1..=16"),
        (empty, "descriptor 1 has 0 entries, outside 1..=16"),
    ];
    for (request, sentence) in table {
        let error = rls.call(request).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::InvalidArgument, sentence));
    }
    // A message that is too long is not read.
    let long = RateLimitRequest { domain: "x".repeat(300 * 1_024), ..request(&[&[("user", "ada")]]) };
    let error = rls.call(long).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    assert!(error.message().contains("262144"), "{error}");
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"failed\"}").await, 5);
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
}

#[tokio::test]
async fn concurrent_rls_calls_are_bounded() {
    let clock = ManualWall::new(NOW);
    let limiter = Limiter::new(Memory::with_clock(clock.clone()));
    let rls = Rls::over(limiter, clock, bounds(|bounds| bounds.requests_max = 0), config()).await;
    let error = rls.call(request(&[&[("user", "ada")]])).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Unavailable, "too many requests: 0 are in flight"));
}

#[tokio::test]
async fn http_requests_do_not_use_rls_slots() {
    let clock = ManualWall::new(NOW);
    let limiter = Limiter::new(Memory::with_clock(clock.clone()));
    let rls = Rls::over(limiter, clock, bounds(|bounds| bounds.requests_max = 1), config()).await;
    assert_eq!(rls.codes(&[&[("user", "bob")]]).await.0, Under);
    let all = json!({"entity": "bob", "resource": "shop", "cost": {"requests": 5}, "within": 30});
    let asked = async {
        while rls.kit.limiter.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        rls.codes(&[&[("user", "ada")]]).await.0
    };
    tokio::select! {
        answer = rls.kit.post("/v1/acquire", all) => panic!("{}", answer.text),
        code = soon("an answer", asked) => assert_eq!(code, Under),
    }
}

#[tokio::test]
async fn silent_connection_is_closed() {
    let rls = Rls::new(config()).await;
    let _frozen = Frozen::new();
    let mut silent = TcpStream::connect(rls.kit.envoy.unwrap()).await.unwrap();
    // Connections are accepted in order: once a later one is served, the server waits for the silent one.
    let rls = Rls { channel: channel(&rls.kit).await, ..rls };
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    let mut all = Vec::new();
    let ended = async { while silent.read_buf(&mut all).await.is_ok_and(|read| read > 0) {} };
    ends_after(2 * rls.kit.state.bounds().head_time, ended).await;
}

#[tokio::test]
async fn other_protocols_are_disconnected() {
    let rls = Rls::new(config()).await;
    for bytes in [
        &b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        &[0; 64],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff",
    ] {
        let mut stream = TcpStream::connect(rls.kit.envoy.unwrap()).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut all = Vec::new();
        let ended = async { while stream.read_buf(&mut all).await.is_ok_and(|read| read > 0) {} };
        soon("the connection", ended).await;
    }
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
}

/// A codec that sends raw bytes.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, bytes: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&bytes);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

async fn send(rls: &Rls, bytes: Vec<u8>) -> Result<Bytes, Status> {
    let mut client = Grpc::new(rls.channel.clone());
    client.ready().await.expect("connects");
    let mut request = Request::new(bytes);
    let value = format!("Bearer {}", rls.kit.token).parse().expect("a value");
    request.metadata_mut().insert("authorization", value);
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    client.unary(request, path.parse().expect("a path"), Raw).await.map(tonic::Response::into_inner)
}

/// Keys and values of the rules, and arbitrary text.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("user".to_owned()),
        Just("path".to_owned()),
        Just("try".to_owned()),
        Just("free".to_owned()),
        Just("/a".to_owned()),
        any::<String>(),
        "[a-z#$*{}\\x00-\\x1f]{0,300}",
    ]
}

fn descriptors() -> impl Strategy<Value = Vec<RateLimitDescriptor>> {
    let entries = prop::collection::vec((word(), word()), 0..4);
    let hits = prop::option::of(prop_oneof![0..8_u64, any::<u64>()]);
    let one = (entries, hits).prop_map(|(entries, hits)| {
        let entries: Vec<_> = entries.iter().map(|(key, value)| (&**key, &**value)).collect();
        descriptor(&entries, hits)
    });
    prop::collection::vec(one, 0..6)
}

/// Random bytes, random requests, and requests with one changed byte.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let asked = (word(), descriptors(), any::<u32>()).prop_map(|(domain, descriptors, hits_addend)| {
        RateLimitRequest { domain, descriptors, hits_addend }.encode_to_vec()
    });
    let mutated =
        (asked, any::<prop::sample::Index>(), any::<Option<u8>>()).prop_map(|(mut bytes, place, byte)| {
            if let (Some(byte), false) = (byte, bytes.is_empty()) {
                let place = place.index(bytes.len());
                bytes[place] = byte;
            }
            bytes
        });
    prop_oneof![1 => prop::collection::vec(any::<u8>(), 0..200), 4 => mutated]
}

/// Every message gets a response: a verdict for each descriptor, or an error.
#[test]
fn arbitrary_messages_get_response_without_panic() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let rls = runtime.block_on(Rls::new(config()));
    let is_expected = |error: &Status| {
        // tonic reports undecodable messages as internal errors.
        let is_undecoded = error.code() == Code::Internal && error.message().contains("decode");
        let is_known = [Code::InvalidArgument, Code::Unimplemented, Code::FailedPrecondition];
        is_undecoded || is_known.contains(&error.code())
    };
    let outcome = TestRunner::default().run(&message(), |bytes| {
        let asked = RateLimitRequest::decode(&*bytes).ok();
        match runtime.block_on(send(&rls, bytes)) {
            Ok(answer) => {
                let answer =
                    envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse::decode(answer)
                        .map_err(|error| TestCaseError::fail(error.to_string()))?;
                prop_assert_eq!(Some(answer.statuses.len()), asked.map(|asked| asked.descriptors.len()));
            }
            Err(error) => prop_assert!(is_expected(&error), "{}", error),
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    assert_eq!(runtime.block_on(rls.counted("tidegate_http_panics_total")), 0);
}
