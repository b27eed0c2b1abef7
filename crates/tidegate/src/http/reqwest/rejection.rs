//! Reads the beginning of a rejection's body, which names the quota that was exceeded, and puts it back.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::response::Parts;
use ::reqwest::{Body, Response, ResponseBuilderExt as _};
use http_body::{Body as _, Frame, SizeHint};
use tidegate_core::outcome::Outcome;

use crate::clock::Clock;

/// Timeout for the beginning.
const REJECTION_TIME: Duration = Duration::from_secs(1);

type Piece = Option<Result<Frame<<Body as http_body::Body>::Data>, <Body as http_body::Body>::Error>>;

/// The outcome of a rejection with the quota that its body names, and the same response.
pub(super) async fn with_body(
    clock: &dyn Clock,
    outcome: Outcome,
    response: Response,
) -> (Outcome, Response) {
    let (parts, mut rest) = into_parts(response);
    let mut late = clock.sleep_until(clock.now() + REJECTION_TIME);
    let first: Piece = poll_fn(|context| match Pin::new(&mut rest).poll_frame(context) {
        Poll::Ready(first) => Poll::Ready(first),
        Poll::Pending => late.as_mut().poll(context).map(|()| None),
    })
    .await;
    let data = first.as_ref().and_then(|first| first.as_ref().ok()).and_then(Frame::data_ref);
    let outcome = data.map_or(outcome, |data| outcome.exceeded_in(data));
    (outcome, from_parts(parts, Body::wrap(PrefixedBody { first, rest })))
}

/// Takes a response apart, with its URL as one of the extensions.
pub(super) fn into_parts(response: Response) -> (Parts, Body) {
    let url = response.url().clone();
    let (mut parts, body) = ::http::Response::<Body>::from(response).into_parts();
    // Only this builder can set a response's URL.
    if let Ok(url_source) = ::http::Response::builder().url(url).body(()) {
        parts.extensions.extend(url_source.into_parts().0.extensions);
    }
    (parts, body)
}

pub(super) fn from_parts(parts: Parts, body: Body) -> Response {
    ::http::Response::from_parts(parts, body).into()
}

/// A body whose first piece was read.
struct PrefixedBody {
    /// The piece, or the error in its place. `None` once it was passed on.
    first: Piece,
    rest: Body,
}

impl PrefixedBody {
    /// Bytes of the first piece.
    fn prefix(&self) -> u64 {
        let data = self.first.as_ref().and_then(|first| first.as_ref().ok()).and_then(Frame::data_ref);
        data.map_or(0, |data| data.len() as u64)
    }
}

impl http_body::Body for PrefixedBody {
    type Data = <Body as http_body::Body>::Data;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Piece> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (prefix, rest) = (self.prefix(), self.rest.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(prefix.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(prefix.saturating_add(upper));
        }
        hint
    }
}
