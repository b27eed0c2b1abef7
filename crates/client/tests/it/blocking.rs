//! Tests of the blocking client.

use tidegate_client::blocking::Client;
use tidegate_client::{BalanceQuery, Changes, ClientError, PageQuery, PutEntity};
use tokio::runtime::Runtime;

use crate::kit::server::Kit;
use crate::kit::upstream::{cost, request};

/// Starts a server in its own runtime.
fn start_server() -> (Runtime, Kit) {
    let runtime = Runtime::new().expect("a runtime");
    let kit = runtime.block_on(Kit::new());
    (runtime, kit)
}

fn client(kit: &Kit) -> Client {
    let builder = tidegate_client::Client::builder(&format!("http://{}", kit.addr)).token(&kit.token);
    Client::new(builder).expect("a client")
}

fn left(client: &Client) -> i64 {
    let query = BalanceQuery { entity: "acme".parse().ok(), resource: "gpt-4".parse().ok() };
    let balances = client.balances(&query).expect("balances");
    balances.limits.iter().find(|limit| limit.limit == "tpm").expect("the limit exists").available
}

#[test]
fn blocking_lease_can_be_settled_and_cancelled() {
    let (_runtime, kit) = start_server();
    let client = client(&kit);
    let lease = client.acquire(&request(&[("tpm", 500)])).unwrap();
    lease.extend(cost(&[("tpm", 100)])).unwrap();
    lease.adjust(Changes::of([("tpm", -50)]).unwrap()).unwrap();
    assert_eq!(left(&client), 450);
    lease.settle(cost(&[("tpm", 300)])).unwrap();
    assert_eq!(left(&client), 700);
    let other = client.acquire(&request(&[("tpm", 500)])).unwrap();
    other.cancel().unwrap();
    assert!(matches!(other.extend(cost(&[("tpm", 1)])), Err(ClientError::Ended { .. })));
    assert_eq!(left(&client), 700);
}

#[test]
fn last_blocking_handle_waits_for_cancellation() {
    let (_runtime, kit) = start_server();
    let first = client(&kit);
    drop(first.acquire(&request(&[("tpm", 500)])).unwrap());
    first.drain();
    assert_eq!(left(&first), 1_000);
    let lease = first.acquire(&request(&[("tpm", 500)])).unwrap();
    assert_eq!(left(&first), 500);
    // The lease outlives its client and is the last handle.
    drop(first);
    drop(lease);
    assert_eq!(left(&client(&kit)), 1_000);
}

#[test]
fn listing_iterates_over_pages() {
    let (_runtime, kit) = start_server();
    let client = client(&kit);
    for number in 0..12 {
        client.put_entity(&format!("e{number:02}").parse().unwrap(), &PutEntity::default()).unwrap();
    }
    let query = PageQuery { after: None, max: Some(5) };
    let ids: Result<Vec<_>, _> =
        client.all_entities(query).map(|entity| entity.map(|entity| entity.id.to_string())).collect();
    assert_eq!(ids.unwrap(), (0..12).map(|number| format!("e{number:02}")).collect::<Vec<_>>());
    let mut bad = client.all_entities(PageQuery { after: None, max: Some(0) });
    assert!(matches!(bad.next(), Some(Err(ClientError::Problem { .. }))));
    assert!(bad.next().is_none());
}

#[test]
fn client_can_be_dropped_within_runtime() {
    let (runtime, kit) = start_server();
    let client = client(&kit);
    let lease = client.acquire(&request(&[("tpm", 500)])).unwrap();
    runtime.block_on(async move {
        drop(lease);
        drop(client);
    });
}
