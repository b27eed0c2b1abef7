//! Tests of leases against a real server, with manual clocks on both sides.

use std::sync::Arc;
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::{Limiter, Memory, Store};
use tidegate_client::{
    Acquire, BalanceQuery, Batch, Changes, Client, ClientError, Cost, Degraded, Spend, UsageQuery,
};
use tidegate_server::Bounds;
use tokio::time::advance;

use crate::kit::frozen::{Frozen, settle_down, until};
use crate::kit::server::{Kit, NOW};
use crate::kit::upstream::{Reply, Upstream, cost, request};

const MINUTE: Duration = Duration::from_secs(60);

fn client(kit: &Kit) -> Client {
    Client::builder(&format!("http://{}", kit.addr)).token(&kit.token).build().expect("a client")
}

fn for_a_minute(amounts: &[(&str, u64)]) -> Acquire {
    Acquire { deadline: Some(MINUTE.into()), ..request(amounts) }
}

/// Returns the settled tokens.
async fn settled(client: &Client) -> u64 {
    let query = UsageQuery { entity: "acme".parse().ok(), ..UsageQuery::default() };
    client.usage_summary(&query).await.expect("usage").limits.get("tpm").map_or(0, |sum| sum.units)
}

/// Advances the clocks of the client and the server.
async fn pass(kit: &Kit, span: Duration) {
    kit.clock.advance(span);
    advance(span).await;
}

#[tokio::test]
async fn held_lease_is_renewed_past_its_deadline() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&for_a_minute(&[("tpm", 500)])).await.unwrap();
    let left = client.acquire(&for_a_minute(&[("tpm", 100)])).await.unwrap().detach();
    let _frozen = Frozen::new();
    settle_down().await;
    for renewals in 1..=12 {
        pass(&kit, Duration::from_secs(21)).await;
        until("a renewal", || client.stats().renewals == renewals).await;
        assert!(lease.expires_in() > Duration::from_secs(50), "{:?}", lease.expires_in());
    }
    let open = client.open_lease(lease.name()).await.unwrap();
    assert_eq!((open.held.get("tpm"), open.step), (Some(500), 12));
    // Steps of the holder are numbered after those of the renewals.
    lease.extend(cost(&[("tpm", 10)])).await.unwrap();
    lease.settle(cost(&[("tpm", 400)])).await.unwrap();
    // The detached lease has expired, settled at what it drew.
    assert!(matches!(client.open_lease(&left).await, Err(ClientError::Ended { .. })));
    assert_eq!(settled(&client).await, 500);
}

#[tokio::test]
async fn ended_lease_is_not_renewed() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let settled = client.acquire(&for_a_minute(&[("tpm", 5)])).await.unwrap();
    settled.settle(Cost::default()).await.unwrap();
    drop(client.acquire(&for_a_minute(&[("tpm", 5)])).await.unwrap());
    let detached = client.acquire(&for_a_minute(&[("tpm", 5)])).await.unwrap().detach();
    client.drain().await;
    let _frozen = Frozen::new();
    for _ in 0..5 {
        settle_down().await;
        advance(Duration::from_secs(21)).await;
    }
    settle_down().await;
    assert_eq!((client.stats().renewals, client.stats().leases_lost), (0, 0));
    assert_eq!(client.open_lease(&detached).await.unwrap().step, 0);
}

#[tokio::test]
async fn lost_lease_is_reported_by_next_call() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&for_a_minute(&[("tpm", 500)])).await.unwrap();
    let _frozen = Frozen::new();
    settle_down().await;
    // The server's time passes while the client sleeps.
    kit.clock.advance(2 * MINUTE);
    kit.limiter.store().sweep(10).await.unwrap();
    assert!(!lease.is_lost());
    advance(Duration::from_secs(21)).await;
    until("the loss", || lease.is_lost()).await;
    let error = lease.extend(cost(&[("tpm", 1)])).await.unwrap_err();
    assert!(matches!(error, ClientError::Ended { .. }), "{error}");
    assert!(lease.settle(Cost::default()).await.is_err());
    drop(lease);
    let stats = client.stats();
    assert_eq!((stats.leases_lost, stats.endings_pending, stats.endings_lost), (1, 0, 0));
}

#[tokio::test]
async fn concurrent_steps_are_serialized() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = Arc::new(client.acquire(&request(&[("tpm", 100)])).await.unwrap());
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            tokio::spawn({
                let lease = Arc::clone(&lease);
                async move { lease.extend(cost(&[("tpm", 3)])).await }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let open = client.open_lease(lease.name()).await.unwrap();
    assert_eq!((open.held.get("tpm"), open.step), (Some(160), 20));
}

#[tokio::test]
async fn lost_responses_never_charge_twice() {
    let kit = Kit::new().await;
    // Every second response of the server is truncated after the call was executed.
    let script = (0..400).map(|number| if number % 2 == 0 { Reply::Cut } else { Reply::Pass });
    let upstream = Upstream::new(Some(kit.addr), []).await;
    let lossy = upstream.builder().token(&kit.token).build().unwrap();
    let lease = lossy.acquire(&request(&[("tpm", 100)])).await.unwrap();
    upstream.then(script);
    for _ in 0..20 {
        lease.extend(cost(&[("tpm", 5)])).await.unwrap();
        lease.adjust(Changes::of([("tpm", 2)]).unwrap()).await.unwrap();
    }
    let client = client(&kit);
    let open = client.open_lease(lease.name()).await.unwrap();
    assert_eq!((open.held.get("tpm"), open.step), (Some(240), 40));
    lease.settle(cost(&[("tpm", 200)])).await.unwrap();
    assert_eq!((settled(&client).await, upstream.count()), (200, 1 + 2 * 41));
}

#[tokio::test]
async fn draws_with_lost_responses_are_charged_once() {
    let kit = Kit::new().await;
    let upstream = Upstream::new(
        Some(kit.addr),
        (0..100).map(|number| if number % 2 == 0 { Reply::Cut } else { Reply::Pass }),
    )
    .await;
    let lossy = upstream.builder().token(&kit.token).build().unwrap();
    let client = client(&kit);
    for _ in 0..5 {
        let lease = lossy.acquire(&request(&[("tpm", 100)])).await.unwrap();
        lease.settle(cost(&[("tpm", 60)])).await.unwrap();
        let spend = Spend::new("acme".parse().unwrap(), "gpt-4".parse().unwrap(), cost(&[("tpm", 30)]));
        lossy.spend(&spend).await.unwrap();
    }
    let batch = Batch { requests: vec![request(&[("tpm", 10)]), request(&[("tpm", 10)])] };
    for lease in lossy.acquire_batch(&batch).await.unwrap() {
        lease.unwrap().settle(Cost::default()).await.unwrap();
    }
    // The in-memory store counts usage exactly: the rest of 1,000 is available.
    assert_eq!((settled(&client).await, upstream.count()), (5 * 90 + 20, 2 * 18));
    let query = BalanceQuery { entity: "acme".parse().ok(), resource: "gpt-4".parse().ok() };
    let balances = client.balances(&query).await.unwrap();
    assert_eq!(balances.limits.iter().find(|limit| limit.limit == "tpm").unwrap().available, 530);
}

#[tokio::test]
async fn degraded_lease_sends_no_ending() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).on_unavailable(tidegate::OnUnavailable::Allow).build().unwrap();
    let kit = Kit::over(limiter, clock, Bounds::default()).await;
    let upstream = Upstream::new(Some(kit.addr), []).await;
    let client = upstream.builder().token(&kit.token).build().unwrap();
    client.acquire(&request(&[("tpm", 1)])).await.unwrap().cancel().await.unwrap();
    store.go_away();
    let (settled, dropped) = (
        client.acquire(&request(&[("tpm", 1)])).await.unwrap(),
        client.acquire(&request(&[("tpm", 1)])).await,
    );
    assert_eq!(settled.degraded(), Some(Degraded::Allowed));
    let sent = upstream.count();
    settled.extend(cost(&[("tpm", 1)])).await.unwrap();
    settled.settle(cost(&[("tpm", 1)])).await.unwrap();
    assert!(settled.cancel().await.is_err(), "it was settled");
    drop((settled, dropped));
    client.drain().await;
    assert_eq!((upstream.count(), client.stats().endings_lost), (sent, 0));
}

#[tokio::test]
async fn detached_lease_can_be_resumed() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&for_a_minute(&[("tpm", 100)])).await.unwrap();
    lease.extend(cost(&[("tpm", 5)])).await.unwrap();
    let name = lease.detach();
    let again = client.resume(&name, MINUTE).await.unwrap();
    again.extend(cost(&[("tpm", 5)])).await.unwrap();
    again.settle(cost(&[("tpm", 110)])).await.unwrap();
    assert_eq!(settled(&client).await, 110);
    assert!(matches!(client.resume(&name, MINUTE).await, Err(ClientError::Ended { .. })));
    let other = Client::new(client.url()).unwrap().token(&kit.other).unwrap();
    assert!(matches!(other.resume(&name, MINUTE).await, Err(ClientError::Forbidden { .. })));
}

#[tokio::test]
async fn unconfirmed_extend_is_resolved_before_renewal() {
    let kit = Kit::new().await;
    let upstream = Upstream::new(Some(kit.addr), []).await;
    let client = upstream.builder().token(&kit.token).build().unwrap();
    let lease = client.acquire(&for_a_minute(&[("tpm", 100)])).await.unwrap();
    upstream.then(std::iter::repeat_n(Reply::Cut, 3));
    assert!(lease.extend(cost(&[("tpm", 5)])).await.unwrap_err().may_be_done());
    let _frozen = Frozen::new();
    settle_down().await;
    pass(&kit, Duration::from_secs(21)).await;
    until("a renewal", || client.stats().renewals == 1).await;
    // The holder's retry returns the recovered result and is not executed twice.
    lease.extend(cost(&[("tpm", 5)])).await.unwrap();
    assert_eq!(client.open_lease(lease.name()).await.unwrap().held.get("tpm"), Some(105));
    lease.extend(cost(&[("tpm", 5)])).await.unwrap();
    assert_eq!(client.open_lease(lease.name()).await.unwrap().held.get("tpm"), Some(110));
}
