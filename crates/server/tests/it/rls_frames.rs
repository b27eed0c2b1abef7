//! Tests of gRPC framing: a message gets the same response in one frame or several, and each malformed
//! message its status.

use axum::http::{HeaderMap, Method, Request, StatusCode};
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::Ok as Under;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};
use tokio::net::TcpStream;
use tonic::Code;

use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, ends_after};
use crate::kit::soon;
use crate::rls_kit::{Rls, request};

const PATH: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

fn config() -> Value {
    json!({"rules": [{"match": [{"key": "user"}], "entity": "{user}", "resource": "shop"}]})
}

/// Frames a message: compression flag, length and content.
fn framed(flag: u8, length: usize, message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(flag);
    bytes.put_u32(u32::try_from(length).expect("it is short"));
    bytes.put_slice(message);
    bytes.freeze()
}

/// One hit of a user.
fn hit(user: &str) -> Bytes {
    let message = request(&[&[("user", user)]]).encode_to_vec();
    framed(0, message.len(), &message)
}

/// A raw HTTP/2 client.
struct RawClient {
    calls: SendRequest<Bytes>,
    authorization: String,
    at: String,
}

impl RawClient {
    async fn new(rls: &Rls) -> Self {
        let at = rls.kit.envoy.expect("it answers Envoy");
        let stream = TcpStream::connect(at).await.expect("connects");
        let (calls, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
        tokio::spawn(connection);
        Self { calls, authorization: format!("Bearer {}", rls.kit.token), at: format!("http://{at}") }
    }

    /// Starts a call and sends only its head.
    async fn call(&self, path: &str, encoding: Option<&str>) -> (ResponseFuture, SendStream<Bytes>) {
        let head = Request::post(format!("{}/{path}", self.at))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", &self.authorization);
        let head = match encoding {
            Some(encoding) => head.header("grpc-encoding", encoding),
            None => head,
        };
        let mut calls = self.calls.clone().ready().await.expect("it is open");
        calls.send_request(head.body(()).expect("a head"), false).expect("it is sent")
    }

    /// Sends these pieces, each as a frame, and returns the response.
    async fn answer(&self, pieces: &[Bytes]) -> RawResponse {
        let (answer, mut body) = self.call(PATH, None).await;
        for (place, piece) in pieces.iter().enumerate() {
            body.send_data(piece.clone(), place + 1 == pieces.len()).expect("it is sent");
        }
        RawResponse::of(answer).await
    }
}

/// A received response.
struct RawResponse {
    headers: HeaderMap,
    data: BytesMut,
    /// The trailers, or the headers of a trailers-only response.
    trailers: HeaderMap,
}

impl RawResponse {
    async fn of(answer: ResponseFuture) -> Self {
        let answer = soon("an answer", answer).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK);
        let (head, mut body): (_, RecvStream) = answer.into_parts();
        let mut data = BytesMut::new();
        while let Some(piece) = soon("a piece", body.data()).await {
            data.put(piece.expect("a piece"));
        }
        let trailers = body.trailers().await.expect("an end");
        Self { trailers: trailers.unwrap_or_else(|| head.headers.clone()), headers: head.headers, data }
    }

    fn code(&self) -> Code {
        Code::from_bytes(self.trailers["grpc-status"].as_bytes())
    }

    fn message(&self) -> RateLimitResponse {
        assert_eq!((self.code(), self.data[0]), (Code::Ok, 0));
        let length = u32::from_be_bytes(self.data[1..5].try_into().expect("four bytes"));
        assert_eq!(length as usize, self.data.len() - 5);
        RateLimitResponse::decode(&self.data[5..]).expect("a message")
    }
}

#[tokio::test]
async fn message_split_into_frames_gets_same_response() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let whole = hit("ada");
    let in_two = |cut: usize| vec![whole.slice(..cut), whole.slice(cut..)];
    let ways = [vec![whole.clone()], in_two(3), in_two(5), in_two(9), in_two(whole.len())];
    for (pieces, left) in ways.iter().zip((0..5).rev()) {
        let answer = client.answer(pieces).await;
        assert_eq!(answer.headers["content-type"], "application/grpc");
        assert!(!answer.headers.contains_key("grpc-status") && answer.trailers.len() == 1);
        let message = answer.message();
        assert_eq!((message.overall_code(), message.statuses[0].limit_remaining), (Under, left));
    }
    // Request trailers are ignored, and of several messages the first one counts.
    let (answer, mut body) = client.call(PATH, None).await;
    body.send_data(hit("bob"), false).unwrap();
    body.send_trailers(HeaderMap::from_iter([("x".parse().unwrap(), "y".parse().unwrap())])).unwrap();
    assert_eq!(RawResponse::of(answer).await.message().statuses[0].limit_remaining, 4);
    let twice = Bytes::from([hit("cyd"), hit("cyd")].concat());
    assert_eq!(client.answer(&[twice]).await.message().statuses[0].limit_remaining, 4);
    let answer = client.call(PATH, Some("identity")).await;
    let (answer, mut body) = answer;
    body.send_data(hit("bob"), true).unwrap();
    assert_eq!(RawResponse::of(answer).await.message().statuses[0].limit_remaining, 3);
}

#[tokio::test]
async fn malformed_messages_get_grpc_status() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let message = request(&[&[("user", "ada")]]).encode_to_vec();
    let length = message.len();
    let table = [
        (Bytes::new(), Code::Internal),
        (Bytes::from_static(&[0, 0]), Code::Internal),
        (framed(1, length, &message), Code::Internal),
        (framed(2, length, &message), Code::Internal),
        (framed(0, length + 1, &message), Code::Internal),
        (framed(0, length - 1, &message), Code::Internal),
        (framed(0, 3, b"\xff\xff\xff"), Code::Internal),
        (framed(0, 0, b""), Code::InvalidArgument),
        (framed(0, 300 * 1_024, b"x"), Code::OutOfRange),
    ];
    let count = table.len() as u64;
    for (bytes, code) in table {
        let answer = client.answer(std::slice::from_ref(&bytes)).await;
        assert_eq!((answer.code(), answer.data.len()), (code, 0), "{bytes:?}");
    }
    for (path, encoding) in
        [(PATH, Some("gzip")), ("envoy.service.ratelimit.v3.RateLimitService/Another", None)]
    {
        let (answer, mut body) = client.call(path, encoding).await;
        body.send_data(hit("ada"), true).unwrap();
        assert_eq!(RawResponse::of(answer).await.code(), Code::Unimplemented, "{path} {encoding:?}");
    }
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"failed\"}").await, count + 2);
    assert_eq!(rls.left("ada", "requests").await, 5, "nothing was drawn");
    assert_eq!(client.answer(&[hit("ada")]).await.message().overall_code(), Under);
}

#[tokio::test]
async fn malformed_message_is_refused_before_its_end() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let message = request(&[&[("user", "ada")]]).encode_to_vec();
    for (bytes, code) in [
        (framed(0, 300 * 1_024, b"x"), Code::OutOfRange),
        (framed(2, message.len(), &message), Code::Internal),
        (framed(0, 3, b"\xff\xff\xff"), Code::Internal),
    ] {
        let (answer, mut body) = client.call(PATH, None).await;
        body.send_data(bytes.clone(), false).unwrap();
        assert_eq!(RawResponse::of(answer).await.code(), code, "{bytes:?}");
    }
}

#[tokio::test]
async fn only_post_is_accepted() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let path = format!("{}/{PATH}", client.at);
    let health = format!("{}/grpc.health.v1.Health/Check", client.at);
    for (method, target) in [
        (Method::GET, &*path),
        (Method::HEAD, &path),
        (Method::PUT, &path),
        (Method::GET, &health),
        (Method::CONNECT, "far.example:443"),
    ] {
        let head = Request::builder().method(&method).uri(target);
        let head = head.header("authorization", &client.authorization).body(()).unwrap();
        let mut calls = client.calls.clone().ready().await.unwrap();
        let (answer, _) = calls.send_request(head, true).unwrap();
        let answer = soon("an answer", answer).await.unwrap();
        assert_eq!(
            (answer.status(), &answer.headers()["allow"]),
            (StatusCode::METHOD_NOT_ALLOWED, &"POST".parse().unwrap())
        );
        assert!(soon("its end", answer.into_body().data()).await.is_none(), "{method}");
    }
    assert_eq!(client.answer(&[hit("ada")]).await.message().overall_code(), Under);
}

#[tokio::test]
async fn late_message_does_not_block_other_streams() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let (answer, mut body) = client.call(PATH, None).await;
    for left in [4, 3] {
        assert_eq!(client.answer(&[hit("ada")]).await.message().statuses[0].limit_remaining, left);
    }
    body.send_data(hit("ada").slice(..4), false).unwrap();
    assert_eq!(client.answer(&[hit("ada")]).await.message().statuses[0].limit_remaining, 2);
    body.send_data(hit("ada").slice(4..), true).unwrap();
    assert_eq!(RawResponse::of(answer).await.message().statuses[0].limit_remaining, 1);
}

#[tokio::test]
async fn message_that_never_arrives_times_out() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let body_time = rls.kit.state.bounds().body_time;
    let _frozen = Frozen::new();
    // No message, and a message without its end.
    for message in [None, Some(hit("ada"))] {
        let (answer, mut body) = client.call(PATH, None).await;
        if let Some(message) = message {
            body.send_data(message, false).unwrap();
        }
        // Calls of a connection start in order: once a later one is answered, the server waits for this one.
        assert_eq!(client.answer(&[hit("bob")]).await.message().overall_code(), Under);
        assert_eq!(ends_after(body_time, RawResponse::of(answer)).await.code(), Code::DeadlineExceeded);
    }
    assert_eq!(rls.left("ada", "requests").await, 5);
}
