//! Clients that hold connections without using them: they send nothing, one byte at a time, or never read
//! their responses. The server closes their connections, and serves others until then.
//!
//! Time is paused and advanced by the tests: no call is late, however slow the machine is.

use std::time::{Duration, Instant};

use tidegate_server::Bounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{self, advance, timeout};

use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, TICK};
use crate::kit::{Kit, bounds, send, soon};

/// Connections of each kind.
const MANY: usize = 250;
/// The time between two bytes of a slow sender.
const DRIP_EVERY: Duration = Duration::from_millis(500);

/// Holds a connection until the server closes it, and sends the bytes of `drip` cyclically, one at a time.
async fn hold(mut stream: TcpStream, begin: String, drip: &'static [u8]) {
    stream.write_all(begin.as_bytes()).await.expect("it is sent");
    let mut drip = drip.iter().cycle();
    let mut buffer = [0; 1_024];
    loop {
        match timeout(DRIP_EVERY, stream.read(&mut buffer)).await {
            // A response may precede the end.
            Ok(Ok(0) | Err(_)) => return,
            Ok(Ok(_)) => {}
            Err(_) => {
                if let Some(byte) = drip.next()
                    && stream.write_all(&[*byte]).await.is_err()
                {
                    return;
                }
            }
        }
    }
}

async fn connect(kit: &Kit) -> TcpStream {
    TcpStream::connect(kit.addr).await.expect("it listens")
}

/// Asserts that a well-behaved client is served.
async fn assert_served(kit: &Kit, entity: usize) {
    let ask = json!({"entity": format!("good-{entity}"), "resource": "b", "cost": {"tpm": 1}});
    let granted = kit.post("/v1/acquire", ask).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    let lease = granted.body["lease"].as_str().expect("a lease").to_owned();
    let settled = kit.post(&format!("/v1/leases/{lease}/settle"), json!({"step": 1})).await;
    assert_eq!(settled.status, 200, "{}", settled.text);
}

/// Makes requests and advances the clock until the server has closed all slow connections. Returns the number
/// of requests served.
async fn serves_until_closed(kit: &Kit, mut slow: JoinSet<()>, idle_timeout: Duration) -> usize {
    let (began, began_really) = (time::Instant::now(), Instant::now());
    let mut served = 0;
    while !slow.is_empty() {
        assert!(began_really.elapsed() < Duration::from_mins(2), "{} connections stay open", slow.len());
        assert_served(kit, served).await;
        served += 1;
        while let Some(ended) = slow.try_join_next() {
            ended.expect("no panic");
            assert!(began.elapsed() >= idle_timeout, "closed after {:?}", began.elapsed());
        }
        advance(DRIP_EVERY).await;
    }
    served
}

#[tokio::test]
async fn slow_senders_are_closed_while_others_are_served() {
    let idle_timeout = Duration::from_secs(5);
    let kit = Kit::with(bounds(|bounds| {
        bounds.head_time = idle_timeout;
        bounds.body_time = idle_timeout;
        // An address may have 15 of 16 connections.
        bounds.connections_max = 4 * MANY + 100;
    }))
    .await;
    let _frozen = Frozen::new();
    let head = "POST /v1/acquire HTTP/1.1\r\nhost: x\r\n";
    let body = format!(
        "{head}authorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n{{",
        kit.token
    );
    let mut slow = JoinSet::new();
    for number in 0..2 * MANY {
        // No data, an endless head, and an endless body.
        let (begin, drip): (String, &'static [u8]) = match number % 4 {
            0 | 1 => (String::new(), b""),
            2 => (head.to_owned(), b"x-slow: 1\r\n"),
            _ => (body.clone(), b" "),
        };
        slow.spawn(hold(connect(&kit).await, begin, drip));
    }
    let served = serves_until_closed(&kit, slow, idle_timeout).await;
    assert!(served >= 10, "others are served while the connections are held: {served}");
    assert_served(&kit, served).await;
}

/// Idle connections are closed for new ones: no client waits for them to time out.
#[tokio::test]
async fn idle_connections_make_room_for_new_clients() {
    let kit = Kit::with(bounds(|bounds| bounds.connections_max = MANY)).await;
    let _frozen = Frozen::new();
    let mut slow = JoinSet::new();
    for _ in 0..MANY {
        slow.spawn(hold(connect(&kit).await, String::new(), b""));
    }
    soon("an answer", assert_served(&kit, 0)).await;
    advance(kit.state.bounds().head_time + TICK).await;
    soon("the end of the held connections", slow.join_all()).await;
}

/// The responses fill the buffers of both sides.
#[tokio::test]
async fn non_reading_clients_are_closed() {
    let idle_timeout = Bounds::default().body_time;
    let kit = Kit::new().await;
    let _frozen = Frozen::new();
    let ask = b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(200);
    let mut slow = JoinSet::new();
    for _ in 0..10 {
        let (mut stream, ask) = (connect(&kit).await, ask.clone());
        slow.spawn(async move {
            // Sends requests until the server closes the connection.
            while stream.write_all(&ask).await.is_ok() {}
        });
    }
    serves_until_closed(&kit, slow, idle_timeout).await;
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
}
