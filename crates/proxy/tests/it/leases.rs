//! Leases of tenants: renewed while a call lives, and booked as held after a proxy was killed.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tidegate::Stamp;
use tidegate::store::ManualWall;
use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::{Proxy, ProxyBounds};
use tokio::time::advance;

use crate::kit::client::{Caller, eventually, mock, start, upstream};
use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, advance_until, settle_down};
use crate::kit::raw::{self, Seen};
use crate::kit::tenants::Store;

const LEASE: Duration = Duration::from_mins(15);
const MINUTE: Duration = Duration::from_mins(1);

/// Its lease ended after 15 minutes, and it was booked at its estimate.
#[tokio::test]
async fn long_call_is_booked_at_its_usage() {
    let _frozen = Frozen::new();
    let wall = ManualWall::new(Stamp::from_secs(1_000_000_000));
    let store = Store::with_clock(wall.clone(), &["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let addr = mock("openai", |options| options.latency = 3 * LEASE).await;
    let mut bounds = ProxyBounds::default();
    (bounds.response_time, bounds.lease_time) = (5 * LEASE, LEASE);
    let builder = Proxy::builder().upstream(upstream("openai", addr).key("k")).unwrap();
    let through = start(builder.tenants(store.tenants()).bounds(bounds).build().unwrap()).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let call = tokio::spawn(async move {
        caller.post("/openai/v1/responses", &json!({"model": "gpt-4", "input": "hello"})).await
    });
    let totals = Caller::new(addr);
    let arrived = async || totals.get("/mock/totals").await.json()["calls"] == 1;
    advance_until(Duration::from_millis(10), eventually("the call arrives", arrived)).await;
    while !call.is_finished() {
        wall.advance(MINUTE);
        advance(MINUTE).await;
        settle_down().await;
        store.limiter.store().sweep(100).await.unwrap();
    }
    assert_eq!(call.await.unwrap().status, 200);
    let used = async |limit: &str| store.used("acme", "gpt-4", limit).await;
    let booked = async || used("requests").await == 1;
    advance_until(Duration::from_millis(10), eventually("the call is booked", booked)).await;
    assert_eq!((used("output_tokens").await, used("estimated").await), (16, 0));
}

#[tokio::test]
async fn call_of_a_killed_proxy_is_booked_as_held() {
    let wall = ManualWall::new(Stamp::from_secs(1_000_000_000));
    let store = Store::with_clock(wall.clone(), &["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let (addr, mut seen) = raw::upstream("").await;
    let (started, address) = mpsc::channel();
    let (kill, killed) = tokio::sync::oneshot::channel::<()>();
    let tenants = store.tenants();
    let process = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut bounds = ProxyBounds::default();
            bounds.lease_time = LEASE;
            let builder = Proxy::builder().upstream(upstream("openai", addr).key("k")).unwrap();
            let proxy = builder.tenants(tenants).bounds(bounds).build().unwrap();
            started.send(start(proxy).await).unwrap();
            killed.await.unwrap();
        });
        // Nothing of it runs again, not even a destructor.
        std::mem::forget(runtime);
    });
    let through = tokio::task::spawn_blocking(move || address.recv().unwrap()).await.unwrap();
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let call = tokio::spawn(async move {
        caller.post("/openai/v1/responses", &json!({"model": "gpt-4", "input": "hello"})).await
    });
    assert!(matches!(seen.recv().await, Some(Seen::Request(_))));
    kill.send(()).unwrap();
    tokio::task::spawn_blocking(move || process.join().unwrap()).await.unwrap();
    let held = 1_000_000 - store.available("acme", "gpt-4", "tokens").await;
    assert!(held > 0, "it holds an estimate");
    let used = async |limit: &str| store.used("acme", "gpt-4", limit).await;
    for (passes, requests) in [(LEASE / 2, 0), (LEASE, 1)] {
        wall.advance(passes);
        store.limiter.store().sweep(100).await.unwrap();
        assert_eq!((used("requests").await, used("estimated").await), (requests, requests));
    }
    assert_eq!(i64::try_from(used("tokens").await), Ok(held));
    call.abort();
}
