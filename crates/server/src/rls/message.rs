//! The one message that a call nearly always sends, and the one that answers it.
//!
//! A message that is here as a whole needs none of what makes tonic general. Whatever is not as plain as that is left to tonic,
//! with all that was read of it, so that there is one answer to it and not two.

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

/// What stands before a message: whether it is compressed, and how long it is.
const HEAD: usize = 5;
/// How a message is compressed, where it is.
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const DONE: HeaderValue = HeaderValue::from_static("0");

/// What was read of a body: data in one piece, and what came behind it and should not.
#[derive(Debug, Default)]
struct Read {
    data: Option<Bytes>,
    behind: Option<Result<Frame<Bytes>, hyper::Error>>,
}

/// The message of a call, of at most so many bytes; or the call, where it is not one plain message.
pub(super) async fn received(
    mut request: Box<Request<Incoming>>,
    message_max: usize,
) -> Result<RateLimitRequest, Box<Request<Resumed>>> {
    let mut read = Read::default();
    if !request.headers().contains_key(ENCODING) {
        read = first(request.body_mut()).await;
        // Only behind what is good is an end waited for: tonic refuses what is not as soon as it sees it.
        if let Some(message) = read.data.as_ref().and_then(|data| decoded(data.clone(), message_max)) {
            read.behind = something(request.body_mut()).await;
            if read.behind.is_none() {
                return Ok(message);
            }
        }
    }
    Err(Box::new(request.map(|rest| Resumed { read, rest })))
}

/// The first data of a body, or what came in its place.
async fn first(body: &mut Incoming) -> Read {
    let frame = something(body).await;
    match frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
        Some(data) => Read { data: Some(data.clone()), behind: None },
        None => Read { data: None, behind: frame },
    }
}

/// What comes next that is not nothing: some end with a piece of that.
async fn something(body: &mut Incoming) -> Option<Result<Frame<Bytes>, hyper::Error>> {
    while !body.is_end_stream()
        && let Some(frame) = body.frame().await
    {
        if frame.as_ref().ok().and_then(Frame::data_ref).is_none_or(|data| !data.is_empty()) {
            return Some(frame);
        }
    }
    None
}

/// What a message says, if it is plain and there is nothing behind it.
fn decoded(mut data: Bytes, message_max: usize) -> Option<RateLimitRequest> {
    let is_compressed = data.try_get_u8().ok()? != 0;
    let length = usize::try_from(data.try_get_u32().ok()?).ok()?;
    if is_compressed || length != data.len() || length > message_max {
        return None;
    }
    RateLimitRequest::decode(data).ok()
}

/// A body of which some was read before.
#[derive(Debug)]
pub(super) struct Resumed {
    read: Read,
    rest: Incoming,
}

impl Body for Resumed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { read, rest } = self.get_mut();
        let before = read.data.take().map(|data| Ok(Frame::data(data))).or_else(|| read.behind.take());
        match before {
            Some(frame) => Poll::Ready(Some(frame)),
            None => Pin::new(rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.data.is_none() && self.read.behind.is_none() && self.rest.is_end_stream()
    }
}

/// What a call is answered with that was decided.
pub(super) fn answered(answer: &RateLimitResponse) -> Result<Response<Whole>, Status> {
    let too_long = |_| Status::resource_exhausted("the answer is longer than can be told");
    let length = answer.encoded_len();
    let mut message = BytesMut::with_capacity(HEAD + length);
    message.put_u8(0);
    message.put_u32(u32::try_from(length).map_err(too_long)?);
    answer.encode(&mut message).map_err(|_| Status::internal("the answer could not be written"))?;
    let mut response = Response::new(Whole { message: Some(message.freeze()), is_done: false });
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    Ok(response)
}

/// A message, and that all went well.
#[derive(Debug)]
pub(crate) struct Whole {
    message: Option<Bytes>,
    is_done: bool,
}

impl Body for Whole {
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
        trailers.insert(Status::GRPC_STATUS, DONE);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}
