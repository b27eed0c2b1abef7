//! What the tests of the layers need: bodies that come piece by piece, and a probe that stands for the client behind.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::{Body, Frame};
use tidegate::tower::{BoxError, ThrottleLayer, Throttled};
use tower_test::mock::{self, Handle, Mock, SendResponse, Spawn};

/// A body of pieces, the last of which may be that it breaks.
#[derive(Debug, Default)]
pub(crate) struct Pieces(VecDeque<Result<&'static [u8], io::Error>>);

impl Pieces {
    pub(crate) fn of(pieces: usize) -> Self {
        Self((0..pieces).map(|_| Ok(&b"piece"[..])).collect())
    }

    /// Breaks after so many pieces.
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

pub(crate) type Asked = Request<()>;
pub(crate) type Answer = Response<Pieces>;
pub(crate) type Probe = Mock<Asked, Answer>;
pub(crate) type Far = Handle<Asked, Answer>;

/// A probe behind `layer`, and the far side of it.
pub(crate) fn spawn(layer: ThrottleLayer) -> (Spawn<Throttled<Probe>>, Far) {
    mock::spawn_layer(layer)
}

pub(crate) fn request(address: &str) -> Asked {
    Request::get(address).body(()).expect("an address")
}

/// A request to somewhere.
pub(crate) fn get() -> Asked {
    request("https://far.example/")
}

pub(crate) fn answer(status: u16, pieces: usize) -> Answer {
    Response::builder().status(status).body(Pieces::of(pieces)).expect("a status")
}

/// What has reached the far side and waits for an answer.
pub(crate) fn next(far: &mut Far) -> SendResponse<Answer> {
    match far.poll_request() {
        Poll::Ready(Some((_, answer))) => answer,
        _ => panic!("nothing has reached the far side"),
    }
}

pub(crate) fn is_quiet(far: &mut Far) -> bool {
    far.poll_request().is_pending()
}

pub(crate) fn broken() -> BoxError {
    io::Error::from(io::ErrorKind::ConnectionReset).into()
}
