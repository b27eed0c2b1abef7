//! Fast path for calls with a single plain message.
//!
//! A message that arrives whole needs none of tonic's generality. Everything else is passed to tonic,
//! including the part already read, so that tonic alone defines the behavior.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming};
use prost::Message as _;
use prost::bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tonic::Status;

/// Length of the gRPC message header: the compression flag and the message length.
const HEADER_LEN: usize = 5;
/// The header that names the compression.
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS_OK: HeaderValue = HeaderValue::from_static("0");

/// The part of a body that was already read: data in one piece, and an unexpected frame after it.
#[derive(Debug, Default)]
struct BodyPrefix {
    data: Option<Bytes>,
    trailing: Option<Result<Frame<Bytes>, hyper::Error>>,
}

/// Reads a plain message of at most `message_max` bytes. Returns the call with the data read so far if it is
/// anything else.
pub(super) async fn read_message(
    mut request: Box<Request<Incoming>>,
    message_max: usize,
) -> Result<RateLimitRequest, Box<Request<ReplayBody>>> {
    let mut prefix = BodyPrefix::default();
    if !request.headers().contains_key(ENCODING) {
        prefix = first_data(request.body_mut()).await;
        // Wait for the end only after a valid message: tonic rejects an invalid one at once.
        if let Some(message) = prefix.data.as_ref().and_then(|data| decode(data.clone(), message_max)) {
            prefix.trailing = next_nonempty_frame(request.body_mut()).await;
            if prefix.trailing.is_none() {
                return Ok(message);
            }
        }
    }
    Err(Box::new(request.map(|rest| ReplayBody { prefix, rest })))
}

/// Reads the first data frame of a body.
async fn first_data(body: &mut Incoming) -> BodyPrefix {
    let frame = next_nonempty_frame(body).await;
    match frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
        Some(data) => BodyPrefix { data: Some(data.clone()), trailing: None },
        None => BodyPrefix { data: None, trailing: frame },
    }
}

/// Returns the next non-empty frame. Some clients send an empty data frame at the end.
async fn next_nonempty_frame(body: &mut Incoming) -> Option<Result<Frame<Bytes>, hyper::Error>> {
    while !body.is_end_stream()
        && let Some(frame) = body.frame().await
    {
        if frame.as_ref().ok().and_then(Frame::data_ref).is_none_or(|data| !data.is_empty()) {
            return Some(frame);
        }
    }
    None
}

/// Decodes a message if it is uncompressed and complete, with nothing after it.
fn decode(mut data: Bytes, message_max: usize) -> Option<RateLimitRequest> {
    let is_compressed = data.try_get_u8().ok()? != 0;
    let length = usize::try_from(data.try_get_u32().ok()?).ok()?;
    if is_compressed || length != data.len() || length > message_max {
        return None;
    }
    RateLimitRequest::decode(data).ok()
}

/// A body that replays the part already read.
#[derive(Debug)]
pub(super) struct ReplayBody {
    prefix: BodyPrefix,
    rest: Incoming,
}

impl Body for ReplayBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { prefix, rest } = self.get_mut();
        let before = prefix.data.take().map(|data| Ok(Frame::data(data))).or_else(|| prefix.trailing.take());
        match before {
            Some(frame) => Poll::Ready(Some(frame)),
            None => Pin::new(rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.prefix.data.is_none() && self.prefix.trailing.is_none() && self.rest.is_end_stream()
    }
}

/// Encodes the response to a decided call.
pub(super) fn encode_response(decided: &RateLimitResponse) -> Result<Response<MessageBody>, Status> {
    let too_long = |_| Status::resource_exhausted("the response is too long");
    let length = decided.encoded_len();
    let mut message = BytesMut::with_capacity(HEADER_LEN + length);
    message.put_u8(0);
    message.put_u32(u32::try_from(length).map_err(too_long)?);
    decided.encode(&mut message).map_err(|_| Status::internal("failed to encode the response"))?;
    let mut response = Response::new(MessageBody { message: Some(message.freeze()), is_done: false });
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    Ok(response)
}

/// A body with one message and the trailer for success.
#[derive(Debug)]
pub(crate) struct MessageBody {
    message: Option<Bytes>,
    is_done: bool,
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if let Some(message) = this.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        if this.is_done {
            return Poll::Ready(None);
        }
        this.is_done = true;
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(Status::GRPC_STATUS, STATUS_OK);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}
