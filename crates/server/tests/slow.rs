//! Clients that hold connections and do not use them: some say nothing, some a byte now and then, some never read what they
//! asked for. Others are served meanwhile, and those are let go.

mod kit;

use std::net::SocketAddr;
use std::time::Duration;

use kit::codec::json;
use kit::{Kit, send, soon};
use tidegate_server::Bounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Connections of each kind.
const MANY: usize = 250;
/// How long a byte comes after another.
const NOW_AND_THEN: Duration = Duration::from_millis(50);

fn bounds(change: impl FnOnce(&mut Bounds)) -> Bounds {
    let mut bounds = Bounds::default();
    change(&mut bounds);
    bounds
}

/// Holds a connection until the server ends it, and sends a byte of `drip` now and then.
async fn hold(addr: SocketAddr, begin: String, drip: &'static [u8]) {
    let mut stream = TcpStream::connect(addr).await.expect("it listens");
    stream.write_all(begin.as_bytes()).await.expect("it is sent");
    let mut drip = drip.iter().cycle();
    let mut room = [0; 1_024];
    loop {
        match timeout(NOW_AND_THEN, stream.read(&mut room)).await {
            // It says why, or nothing.
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

/// Somebody who uses the server as it is meant to be.
async fn is_served(kit: &Kit, entity: usize) {
    let ask = json!({"entity": format!("good-{entity}"), "resource": "b", "cost": {"tpm": 1}});
    let granted = kit.post("/v1/acquire", ask).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    let lease = granted.body["lease"].as_str().expect("a lease").to_owned();
    let settled = kit.post(&format!("/v1/leases/{lease}/settle"), json!({"step": 1})).await;
    assert_eq!(settled.status, 200, "{}", settled.text);
}

/// Serves others until all who are slow are let go, and answers how many.
async fn serves_until_gone(kit: &Kit, mut slow: JoinSet<()>) -> usize {
    let mut served = 0;
    let all = async {
        while !slow.is_empty() {
            is_served(kit, served).await;
            served += 1;
            while let Some(ended) = slow.try_join_next() {
                ended.expect("it is let go");
            }
        }
    };
    soon("the patience with those who are slow", all).await;
    served
}

#[tokio::test]
async fn five_hundred_that_send_nothing_or_a_byte_now_and_then_are_let_go_and_others_are_served() {
    let kit = Kit::with(bounds(|bounds| {
        // As long as nobody takes for one call, on a busy machine too.
        bounds.head_time = Duration::from_secs(5);
        bounds.body_time = Duration::from_secs(5);
        bounds.connections_max = 2 * MANY + 50;
    }))
    .await;
    let head = "POST /v1/acquire HTTP/1.1\r\nhost: x\r\n";
    let body = format!(
        "{head}authorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n{{",
        kit.token
    );
    let mut slow = JoinSet::new();
    for number in 0..2 * MANY {
        // Nothing at all, a head that never ends, and a body that never ends.
        let (begin, drip): (String, &'static [u8]) = match number % 4 {
            0 | 1 => (String::new(), b""),
            2 => (head.to_owned(), b"x-slow: 1\r\n"),
            _ => (body.clone(), b" "),
        };
        slow.spawn(hold(kit.addr, begin, drip));
        if number.is_multiple_of(50) {
            // The system forgets whoever comes while too many wait to be accepted, and does not say so.
            is_served(&kit, number).await;
        }
    }
    let served = serves_until_gone(&kit, slow).await;
    assert!(served > 1, "others are served while they hold their connections");
    is_served(&kit, served).await;
}

#[tokio::test]
async fn whoever_comes_while_all_connections_are_held_is_served_when_those_are_let_go() {
    let kit = Kit::with(bounds(|bounds| {
        bounds.head_time = Duration::from_secs(1);
        bounds.connections_max = MANY;
    }))
    .await;
    let mut slow = JoinSet::new();
    for _ in 0..MANY {
        slow.spawn(hold(kit.addr, String::new(), b""));
        tokio::task::yield_now().await;
    }
    soon("an answer", is_served(&kit, 0)).await;
    soon("the end of those who hold", slow.join_all()).await;
}

/// What a connection asks for and never reads fills the buffers of both sides, and no more.
#[tokio::test]
async fn whoever_never_reads_the_answers_is_let_go_and_others_are_served() {
    let kit = Kit::with(bounds(|bounds| bounds.body_time = Duration::from_secs(1))).await;
    let ask = b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(200);
    let mut slow = JoinSet::new();
    for _ in 0..10 {
        let (addr, ask) = (kit.addr, ask.clone());
        slow.spawn(async move {
            let mut stream = TcpStream::connect(addr).await.expect("it listens");
            // It goes on asking until the server ends the connection.
            while stream.write_all(&ask).await.is_ok() {}
        });
    }
    serves_until_gone(&kit, slow).await;
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
}
