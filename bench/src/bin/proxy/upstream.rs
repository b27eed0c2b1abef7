//! The upstream: responds to calls with a small body, and streams bodies of any size. It does as little as
//! possible, so that the proxies before it are the bottleneck.

use std::convert::Infallible;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;

use anyhow::Result;
use futures_util::stream;
use http::{HeaderValue, Request, Response, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What every call gets.
const SMALL: &str =
    r#"{"id":"call-1","object":"response","model":"gpt-4","output":"a small body, as most are"}"#;
/// The size of a piece of a large body.
const PIECE: usize = 64 * 1_024;

/// Serves until the process is killed.
pub(crate) async fn serve(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).await?;
    writeln!(stdout(), "{}", json!({ "url": format!("http://{}", listener.local_addr()?) }))?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(respond));
        // A closed connection ends its own task only.
        tokio::spawn(async move { drop(connection.await) });
    }
}

/// `/bytes/N` streams N bytes without a length.
async fn respond(request: Request<Incoming>) -> Result<Response<Body>, hyper::Error> {
    let size = request.uri().path().rsplit_once("/bytes/").and_then(|(_, size)| size.parse().ok());
    request.into_body().collect().await?;
    let body = match size {
        Some(size) => large(size),
        None => Full::from(SMALL).boxed_unsync(),
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn large(size: usize) -> Body {
    let piece = Bytes::from(vec![b'.'; PIECE]);
    let pieces = stream::unfold(size, move |left| {
        let next = left.min(PIECE);
        let frame = (next > 0).then(|| (Ok(Frame::data(piece.slice(..next))), left - next));
        std::future::ready(frame)
    });
    StreamBody::new(pieces).boxed_unsync()
}
