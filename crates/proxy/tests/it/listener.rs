//! The bounds of a listener, and what it counts.

use std::sync::Arc;
use std::time::Duration;

use tidegate::StoreError;
use tidegate::store::Reply;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{TokenId, TokenScope};
use tidegate_proxy::{ListenBounds, Tenants, serve};
use tidegate_server::{StoredToken, TokenCache};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::kit::client::{Caller, listen, mock, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::tenants::Store;

/// New connections waited for one to be closed, however long others were idle.
#[tokio::test]
async fn idle_connections_make_room_for_new_ones() {
    let listener = listen();
    let addr = listener.local_addr();
    let mut bounds = ListenBounds::default();
    (bounds.connections_max, bounds.head_time) = (4, Duration::from_hours(1));
    let service = proxy(&[upstream("openai", mock("openai", |_| {}).await)], None);
    tokio::spawn(serve(listener, service, None, bounds, std::future::pending()));
    let mut idle = Vec::new();
    for _ in 0..16 {
        idle.push(TcpStream::connect(addr).await.unwrap());
    }
    let caller = Caller::new(addr);
    let served = async { caller.get("/tidegate/metrics").await.text };
    let metrics = timeout(Duration::from_mins(1), served).await.expect("an idle connection is closed");
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("the metric");
        line.trim().parse::<u64>().expect("a number")
    };
    let open = value("tidegate_proxy_connections_open ");
    assert!((1..=4).contains(&open), "{metrics}");
    assert_eq!(value("tidegate_proxy_connections_evicted_total ") + open, 17, "{metrics}");
    assert_eq!(value("tidegate_proxy_connections_refused_total "), 0, "{metrics}");
}

/// Tokens of a store that is unavailable.
#[derive(Debug)]
struct UnavailableTokens;

impl TokenCache for UnavailableTokens {
    fn get<'a>(&'a self, _: &'a TokenId) -> Reply<'a, Option<Arc<StoredToken>>> {
        Reply::ready(Err(StoreError::unavailable("it is down")))
    }
}

#[tokio::test]
async fn calls_refused_by_the_store_are_counted() {
    let store = Store::new(&[]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let namespace = Namespace::new("default").unwrap();
    let tenants = Tenants::new(store.limiter.clone(), Arc::new(UnavailableTokens), namespace);
    let through = start(proxy(&[upstream], Some(tenants))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    for _ in 0..3 {
        let refused = caller.post("/openai/v1/responses", &json!({"model": "m"})).await;
        assert_eq!(refused.status, 503, "{}", refused.text);
    }
    let metrics = caller.get("/tidegate/metrics").await.text;
    assert!(metrics.contains("tidegate_proxy_refused_by_store_total 3\n"), "{metrics}");
    assert!(metrics.contains("tidegate_proxy_refused_by_limits_total 0\n"), "{metrics}");
}
