//! The blocking client: the same functions, for a thread that waits.

use tidegate_client::blocking::Client;
use tidegate_client::{BalanceQuery, Changes, ClientError, PageQuery, PutEntity};
use tokio::runtime::Runtime;

use crate::kit::server::Kit;
use crate::kit::upstream::{cost, request};

/// A server in a runtime of its own.
fn served() -> (Runtime, Kit) {
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
    balances.limits.iter().find(|limit| limit.limit == "tpm").expect("it is there").available
}

#[test]
fn a_thread_draws_extends_settles_and_cancels() {
    let (_runtime, kit) = served();
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
fn a_lease_that_is_dropped_is_cancelled_and_the_last_who_leaves_waits_for_it() {
    let (_runtime, kit) = served();
    let first = client(&kit);
    drop(first.acquire(&request(&[("tpm", 500)])).unwrap());
    first.drain();
    assert_eq!(left(&first), 1_000);
    let lease = first.acquire(&request(&[("tpm", 500)])).unwrap();
    assert_eq!(left(&first), 500);
    // The lease outlives its client, and is the last.
    drop(first);
    drop(lease);
    assert_eq!(left(&client(&kit)), 1_000);
}

#[test]
fn a_listing_is_an_iterator_over_its_pages() {
    let (_runtime, kit) = served();
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
fn a_client_may_be_dropped_within_a_runtime() {
    let (runtime, kit) = served();
    let client = client(&kit);
    let lease = client.acquire(&request(&[("tpm", 500)])).unwrap();
    runtime.block_on(async move {
        drop(lease);
        drop(client);
    });
}
