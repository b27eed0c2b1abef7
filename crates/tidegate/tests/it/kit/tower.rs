//! Helpers for layer tests: bodies that arrive in pieces, and a mock of the inner service.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::{Body, Frame};
use tidegate::tower::{BoxError, ThrottleLayer, ThrottleService};
use tower_test::mock::{self, Handle, Mock, SendResponse, Spawn};

/// A body of pieces that may end with an error.
#[derive(Debug, Default)]
pub(crate) struct Pieces(VecDeque<Result<&'static [u8], io::Error>>);

impl Pieces {
    pub(crate) fn of(pieces: usize) -> Self {
        Self((0..pieces).map(|_| Ok(&b"piece"[..])).collect())
    }

    /// A body that fails after this many pieces.
    pub(crate) fn broken_after(pieces: usize) -> Self {
        let mut body = Self::of(pieces);
        body.0.push_back(Err(io::ErrorKind::ConnectionReset.into()));
        body
    }
}

impl Body for Pieces {
    type Data = &'static [u8];
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, io::Error>>> {
        Poll::Ready(self.0.pop_front().map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }
}

pub(crate) type MockRequest = Request<()>;
pub(crate) type MockResponse = Response<Pieces>;
pub(crate) type MockService = Mock<MockRequest, MockResponse>;
pub(crate) type MockHandle = Handle<MockRequest, MockResponse>;

/// A mock service behind `layer`, and its handle.
pub(crate) fn spawn(layer: ThrottleLayer) -> (Spawn<ThrottleService<MockService>>, MockHandle) {
    mock::spawn_layer(layer)
}

pub(crate) fn request(address: &str) -> MockRequest {
    Request::get(address).body(()).expect("an address")
}

/// A request to an arbitrary host.
pub(crate) fn get() -> MockRequest {
    request("https://far.example/")
}

pub(crate) fn mock_response(status: u16, pieces: usize) -> MockResponse {
    Response::builder().status(status).body(Pieces::of(pieces)).expect("a status")
}

/// The next request that has reached the mock service and awaits a response.
pub(crate) fn next(handle: &mut MockHandle) -> SendResponse<MockResponse> {
    match handle.poll_request() {
        Poll::Ready(Some((_, response))) => response,
        _ => panic!("no request has reached the mock service"),
    }
}

pub(crate) fn is_idle(handle: &mut MockHandle) -> bool {
    handle.poll_request().is_pending()
}

pub(crate) fn broken() -> BoxError {
    io::Error::from(io::ErrorKind::ConnectionReset).into()
}
