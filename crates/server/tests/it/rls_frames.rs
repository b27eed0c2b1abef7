//! Tests of gRPC framing: a message gets the same response in one frame or several, and each malformed
//! message its status.

use std::time::Duration;

use axum::http::{HeaderMap, Method, Request, StatusCode};
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::Ok as Under;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};
use tidegate::store::ManualWall;
use tidegate::{Limiter, Memory};
use tidegate_server::ShutdownOutcome;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;

use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, advance_until, ends_after};
use crate::kit::{NOW, bounds, soon};
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
        Self::with(rls, &h2::client::Builder::new()).await
    }

    async fn with(rls: &Rls, options: &h2::client::Builder) -> Self {
        let at = rls.kit.envoy.expect("it answers Envoy");
        let stream = TcpStream::connect(at).await.expect("connects");
        let (calls, connection) = options.handshake(stream).await.expect("it speaks HTTP/2");
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

/// A failed call has only headers, which must end the stream: grpcio reported UNKNOWN otherwise.
#[tokio::test]
async fn failed_calls_end_with_their_headers() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let unknown = HealthCheckRequest { service: "unknown".to_owned() }.encode_to_vec();
    let table = [
        ("grpc.health.v1.Health/Check", framed(0, unknown.len(), &unknown), Code::NotFound),
        ("grpc.health.v1.Health/Unknown", Bytes::new(), Code::Unimplemented),
        ("grpc.reflection.v1.ServerReflection/Unknown", Bytes::new(), Code::Unimplemented),
        ("no.such.Service/Method", Bytes::new(), Code::Unimplemented),
        ("envoy.service.ratelimit.v3.RateLimitService/Unknown", hit("ada"), Code::Unimplemented),
        (PATH, framed(0, 9, b"xy"), Code::Internal),
    ];
    for (path, message, code) in table {
        let (answer, mut body) = client.call(path, None).await;
        body.send_data(message, true).unwrap();
        let answer = soon("an answer", answer).await.unwrap();
        assert_eq!(Code::from_bytes(answer.headers()["grpc-status"].as_bytes()), code, "{path}");
        assert!(answer.body().is_end_stream(), "{path}");
    }
    let anonymous = RawClient { authorization: String::new(), ..client };
    let (answer, _body) = anonymous.call(PATH, None).await;
    let answer = soon("an answer", answer).await.unwrap();
    assert!(answer.body().is_end_stream() && answer.headers()["grpc-status"] == "16");
}

#[tokio::test]
async fn other_content_types_are_rejected() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    for (kind, status) in [
        (None, StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("application/json"), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("application/grpc-web"), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("application/grpc+proto"), StatusCode::OK),
        (Some("application/grpc; x=y"), StatusCode::OK),
    ] {
        let head =
            Request::post(format!("{}/{PATH}", client.at)).header("authorization", &client.authorization);
        let head = kind.into_iter().fold(head, |head, kind| head.header("content-type", kind));
        let mut calls = client.calls.clone().ready().await.unwrap();
        let (answer, mut body) = calls.send_request(head.body(()).unwrap(), false).unwrap();
        body.send_data(hit("ada"), true).unwrap();
        assert_eq!(soon("an answer", answer).await.unwrap().status(), status, "{kind:?}");
    }
}

#[tokio::test]
async fn grpc_timeout_of_caller_is_honoured() {
    let rls = Rls::new(config()).await;
    let client = RawClient::new(&rls).await;
    let call = async |timeout: &str| {
        let head = Request::post(format!("{}/{PATH}", client.at))
            .header("content-type", "application/grpc")
            .header("authorization", &client.authorization)
            .header("grpc-timeout", timeout);
        let mut calls = client.calls.clone().ready().await.unwrap();
        // The message never arrives.
        calls.send_request(head.body(()).unwrap(), false).unwrap()
    };
    let _frozen = Frozen::new();
    for (timeout, span) in [
        ("250m", Duration::from_millis(250)),
        ("2S", Duration::from_secs(2)),
        ("99999999H", rls.kit.state.bounds().body_time),
    ] {
        let (answer, _body) = call(timeout).await;
        assert_eq!(client.answer(&[hit("bob")]).await.message().overall_code(), Under);
        assert_eq!(
            ends_after(span, RawResponse::of(answer)).await.code(),
            Code::DeadlineExceeded,
            "{timeout}"
        );
    }
    for timeout in ["", "5", "S", "123456789S", "-1S", "1.5S", "5s"] {
        let (answer, _body) = call(timeout).await;
        assert_eq!(RawResponse::of(answer).await.code(), Code::InvalidArgument, "{timeout:?}");
    }
}

/// Responses that the peer did not take were kept without a bound: 7 KB each, for as long as it liked.
#[tokio::test]
async fn unread_responses_are_bounded() {
    let clock = ManualWall::new(NOW);
    let limiter = Limiter::new(Memory::with_clock(clock.clone()));
    let limits = bounds(|bounds| bounds.requests_max = 16);
    let rls = Rls::over(limiter, clock, limits, config()).await;
    // Its window has no space for a response.
    let client = RawClient::with(&rls, h2::client::Builder::new().initial_window_size(0)).await;
    let mut unread = Vec::new();
    for number in 0..16 {
        let (answer, mut body) = client.call(PATH, None).await;
        body.send_data(hit(&format!("user-{number}")), true).unwrap();
        let answer = soon("an answer", answer).await.unwrap();
        if let Some(status) = answer.headers().get("grpc-status") {
            assert_eq!((status.as_bytes(), number), (&b"14"[..], 15), "a token leaves a slot to others");
            break;
        }
        unread.push(answer);
    }
    assert_eq!(unread.len(), 15);
    let _frozen = Frozen::new();
    let closed = async {
        while client.calls.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    let ((), took) = advance_until(Duration::from_secs(1), closed).await;
    let body_time = rls.kit.state.bounds().body_time;
    assert!(took >= 2 * body_time, "{took:?}");
    let reason = "{listener=\"envoy\",reason=\"stalled\"}";
    assert_eq!(rls.counted(&format!("tidegate_connections_closed_total{reason}")).await, 1);
    let client = RawClient::new(&rls).await;
    assert_eq!(client.answer(&[hit("ada")]).await.message().overall_code(), Under);
}

/// PING, SETTINGS and PRIORITY frames kept a core busy for as long as the peer sent them.
#[tokio::test]
async fn control_frame_flood_is_closed() {
    let rls = Rls::new(config()).await;
    let ping: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let settings: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    let priority: &[u8] = &[0, 0, 5, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 10];
    for frame in [ping, settings, priority] {
        let mut stream = TcpStream::connect(rls.kit.envoy.unwrap()).await.unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        stream.write_all(settings).await.unwrap();
        let (mut reads, mut writes) = stream.split();
        let flood = frame.repeat(1_000);
        let sends = async { while writes.write_all(&flood).await.is_ok() {} };
        let mut answer = [0; 4_096];
        let receives = async { while reads.read(&mut answer).await.is_ok_and(|read| read > 0) {} };
        soon("the end of the connection", async { tokio::join!(sends, receives) }).await;
    }
    let reason = "{listener=\"envoy\",reason=\"flooded\"}";
    assert_eq!(rls.counted(&format!("tidegate_connections_closed_total{reason}")).await, 3);
}

/// A silent connection, an idle one that answers nothing, and an unread watch: the server took as long
/// as its drain time.
#[tokio::test]
async fn unresponsive_peers_do_not_delay_shutdown() {
    let rls = Rls::new(config()).await;
    let addr = rls.kit.envoy.unwrap();
    let _silent = TcpStream::connect(addr).await.unwrap();
    let mut idle = TcpStream::connect(addr).await.unwrap();
    idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut half_a_head = TcpStream::connect(rls.kit.addr).await.unwrap();
    half_a_head.write_all(b"GET / HTTP/1.1\r\nhost: x").await.unwrap();
    let client = RawClient::with(&rls, h2::client::Builder::new().initial_window_size(0)).await;
    let (watch, mut body) = client.call("grpc.health.v1.Health/Watch", None).await;
    body.send_data(framed(0, 0, b""), true).unwrap();
    let _watch = soon("an answer", watch).await.unwrap();
    let drain_time = rls.kit.state.bounds().drain_time;
    let _frozen = Frozen::new();
    rls.kit.stopper.stop();
    let Rls { kit, channel } = rls;
    drop(channel);
    let (stopped, took) = advance_until(Duration::from_millis(100), kit.stopped()).await;
    assert_eq!(stopped, ShutdownOutcome::Drained);
    assert!(took < drain_time / 3, "{took:?}");
}
