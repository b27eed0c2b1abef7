//! Bodies of any size pass in bounded memory, also to a caller that does not read. A separate program, because it
//! counts the allocations of the whole process: of the caller, the proxy and the upstream.

#[path = "../it/kit/mod.rs"]
mod kit;

use std::alloc::System;
use std::convert::Infallible;

use futures_util::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::Request;
use hyper::body::{Bytes, Frame};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::Mutex;
use tokio::task::yield_now;

use kit::client::{Caller, mock, proxy, start, upstream};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by each test while it runs: concurrent tests would distort the count.
static ALONE: Mutex<()> = Mutex::const_new(());

const MIB: usize = 1 << 20;
/// Far more than may be in memory.
const SIZE: usize = 96 * MIB;
/// The most bytes that the caller, the proxy and the upstream may hold in addition to those at the start.
const HELD_MAX: usize = 12 * MIB;

fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

#[tokio::test]
async fn large_responses_pass_in_bounded_memory() {
    let _alone = ALONE.lock().await;
    let through = start(proxy(&[upstream("generic", mock("generic", |_| {}).await)], None)).await;
    let before = in_use();
    let response = Caller::new(through).begin("GET", &format!("/generic/bytes/{SIZE}"), "").await;
    // The caller does not read for a while: the upstream has to stop sending.
    for _ in 0..50_000 {
        yield_now().await;
    }
    assert!(
        in_use() < before + HELD_MAX,
        "{} bytes are held for a caller that does not read",
        in_use() - before
    );
    let (mut body, mut size) = (response.into_body(), 0);
    while let Some(frame) = body.frame().await {
        size += frame.expect("a frame").data_ref().map_or(0, Bytes::len);
        assert!(in_use() < before + HELD_MAX, "{} bytes are held after {size}", in_use() - before);
    }
    assert_eq!(size, SIZE);
}

#[tokio::test]
async fn large_requests_pass_in_bounded_memory() {
    let _alone = ALONE.lock().await;
    // Both profiles read the beginning of a body, and one of them its model.
    for (profile, path) in [("generic", "/generic/upload"), ("openai", "/openai/v1/files")] {
        let through = start(proxy(&[upstream(profile, mock(profile, |_| {}).await)], None)).await;
        let piece = Bytes::from(vec![b'x'; 64 * 1_024]);
        let before = in_use();
        let pieces = stream::unfold(SIZE, move |left| {
            assert!(
                in_use() < before + HELD_MAX,
                "{} bytes are held before the last {left}",
                in_use() - before
            );
            let next =
                (left > 0).then(|| (Ok::<_, Infallible>(Frame::data(piece.clone())), left - piece.len()));
            std::future::ready(next)
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        let request =
            Request::post(format!("http://{through}{path}")).body(StreamBody::new(Box::pin(pieces)));
        let response = client.request(request.expect("a request")).await.expect("a response");
        assert_eq!(response.status(), 200, "{profile}");
    }
}
