//! Floods of subjects and endless bodies: memory stays bounded, and other clients are served.

use tidegate::store::ManualWall;
use tidegate::{Limit, Limiter, Memory, MemoryOptions};
use tidegate_server::Bounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, NOW, soon};
use crate::{ALONE, in_use};

const MIB: usize = 1 << 20;
/// Capacity of the store in subjects.
const SUBJECTS_MAX: usize = 5_000;

/// Returns the peak memory of the process in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1_024
}

fn is_deep() -> bool {
    std::env::var_os("TIDEGATE_DEEP").is_some()
}

fn store() -> (Memory, ManualWall) {
    let clock = ManualWall::new(NOW);
    let options = MemoryOptions::new().clock(clock.clone()).subjects_max(SUBJECTS_MAX);
    (Memory::with(options).expect("a valid bound"), clock)
}

/// Asserts that a request of a known entity succeeds.
async fn assert_served(kit: &Kit, entity: usize) {
    let ask = json!({"entity": format!("good-{entity}"), "resource": "b", "cost": {"tpm": 1}});
    let spent = kit.post("/v1/spend", ask).await;
    assert_eq!(spent.status, 204, "{}", spent.text);
}

#[tokio::test]
async fn subjects_beyond_bound_are_refused_over_http() {
    let _alone = ALONE.lock().await;
    let (store, clock) = store();
    let limiter = Limiter::builder(store.clone()).cache_max(1_000).build().expect("within the bounds");
    let kit = Kit::over(limiter, clock, Bounds::default()).await;
    for entity in 0..100 {
        assert_served(&kit, entity).await;
    }
    let (batches, mut before) = (if is_deep() { 10_000 } else { 300 }, 0);
    let (mut granted, mut refused) = (0, 0);
    for batch in 0..batches {
        let ask = |number: usize| {
            let entity = format!("flood-{}", batch * 100 + number);
            json!({"entity": entity, "resource": "b", "cost": {"tpm": 1}, "deadline": 3600})
        };
        let requests: Vec<Value> = (0..100).map(ask).collect();
        let answer = kit.post("/v1/acquire/batch", json!({"requests": requests})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        granted += answer.text.matches("\"lease\"").count();
        refused += answer.text.matches("/problems/store-full").count();
        assert_served(&kit, batch % 100).await;
        if batch == batches / 2 {
            before = in_use();
        }
    }
    let stats = store.stats();
    assert_eq!((granted, granted + refused), (SUBJECTS_MAX - 100, batches * 100));
    assert_eq!((stats.subjects, stats.subjects_refused), (SUBJECTS_MAX as u64, refused as u64));
    let more = in_use().saturating_sub(before);
    assert!(more < MIB, "the second half of the flood takes {more} bytes");
    let late = kit.post("/v1/spend", json!({"entity": "late", "resource": "b", "cost": {"tpm": 1}})).await;
    late.is_problem(507, "store-full", "");
    assert!(late.text.contains("5000 subjects"), "{}", late.text);
}

/// Uses a million one-time names with `TIDEGATE_DEEP`.
#[tokio::test]
async fn subjects_that_return_units_never_fill_store() {
    let _alone = ALONE.lock().await;
    let (store, _) = store();
    let limits = [Limit::per_minute("rpm", 10)];
    let limiter = Limiter::builder(store.clone()).defaults(limits).cache_max(1_000).build();
    let limiter = limiter.expect("within the bounds");
    let (count, mut before) = (if is_deep() { 1_000_000 } else { 100_000 }, 0);
    for number in 0..count {
        let name = format!("flood-{number}");
        drop(limiter.try_acquire((name.as_str(), "b"), [("rpm", 1)]).await.expect("the store has capacity"));
        if number == count / 2 {
            before = in_use();
        }
    }
    limiter.drain().await;
    let stats = store.stats();
    assert_eq!(stats.subjects_refused, 0, "{stats:?}");
    assert!(stats.subjects < 1_000, "{stats:?}");
    // Records of ended leases have their own bound, and live longer than this test.
    let more = in_use().saturating_sub(before);
    let records = usize::try_from(stats.leases_ended).expect("it fits") * 128;
    assert!(more < MIB + records, "the second half of the flood takes {more} bytes: {stats:?}");
}

/// Sends a chunked body of a gigabyte until the server closes the connection. Returns the number of bytes
/// sent and the response.
async fn stream(kit: &Kit) -> (usize, String) {
    let mut stream = TcpStream::connect(kit.addr).await.expect("it listens");
    let head = format!(
        "POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
         transfer-encoding: chunked\r\n\r\n",
        kit.token
    );
    stream.write_all(head.as_bytes()).await.expect("it is sent");
    let (mut reads, mut writes) = stream.split();
    let sends = async {
        let chunk = [b"10000\r\n".as_slice(), &vec![b' '; 0x1_0000], b"\r\n"].concat();
        let mut sent = 0;
        while sent < 1_000_000_000 && writes.write_all(&chunk).await.is_ok() {
            sent += 0x1_0000;
        }
        sent
    };
    let mut answer = Vec::new();
    let receives = async {
        // The connection may be reset while data is in flight.
        let _ = reads.read_to_end(&mut answer).await;
    };
    let (sent, ()) = tokio::join!(sends, receives);
    (sent, String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn oversized_chunked_bodies_take_no_memory() {
    let _alone = ALONE.lock().await;
    let kit = std::sync::Arc::new(Kit::new().await);
    assert_served(&kit, 0).await;
    // Resets the peak. On systems that refuse this, the peak of earlier tests remains.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = peak();
    let mut streams = JoinSet::new();
    for _ in 0..20 {
        let kit = kit.clone();
        streams.spawn(async move { stream(&kit).await });
    }
    assert_served(&kit, 1).await;
    for (sent, answer) in soon("the end of all bodies", streams.join_all()).await {
        assert!(sent < 64 * MIB, "{sent} bytes were taken");
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413 "), "{answer}");
    }
    let more = peak() - before;
    assert!(more < 64 * MIB, "twenty gigabytes that were announced took {more} bytes");
    assert_served(&kit, 2).await;
}
