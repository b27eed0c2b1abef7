//! The cost of calls, by the server's statistics.

use tidegate_store::Buckets as _;

use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::redis::{
    NEVER_SWEPT, ask, calls_in, connect, draw, granted, levels, options_at, settle, slow,
};

/// Leases per test.
const COUNT: u64 = 200;

/// The number of calls of a command, by the server's statistics.
async fn calls(connection: &mut redis::aio::MultiplexedConnection, command: &str) -> u64 {
    calls_in(&ask::<String>(connection, &["INFO", "commandstats"]).await, command)
}

#[tokio::test]
async fn acquire_and_settle_are_one_call_each() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let store = options_at(&server.url()).swept_every(NEVER_SWEPT).open().await.unwrap();
    let mut connection = connect(&server.url()).await;
    let limits = [slow("rpm", 10_000), slow("tpm", 20_000)];
    let levels = levels(1, &[("user", &limits), ("team", &limits), ("org", &limits)]);
    // The first draw of a process registers its subjects and loads the script.
    let first = draw(&levels, &[("rpm", 1), ("tpm", 10)]);
    granted(store.draw(&first).await);
    store.settle(&settle(&first, &[])).await.unwrap();

    ask::<String>(&mut connection, &["CONFIG", "RESETSTAT"]).await;
    let mut draws = Vec::new();
    for _ in 0..COUNT {
        let draw = draw(&levels, &[("rpm", 1), ("tpm", 10)]);
        granted(store.draw(&draw).await);
        draws.push(draw);
    }
    assert_eq!(
        calls(&mut connection, "evalsha").await,
        COUNT,
        "one script call for three levels of two limits"
    );
    for draw in &draws {
        store.settle(&settle(draw, &[("tpm", 7)])).await.unwrap();
    }
    assert_eq!(calls(&mut connection, "evalsha").await, 2 * COUNT);
    for _ in 0..COUNT {
        granted(store.spend(&draw(&levels, &[("rpm", 1), ("tpm", 10)])).await);
    }
    assert_eq!(calls(&mut connection, "evalsha").await, 3 * COUNT);
    for other in ["eval", "script|load", "multi"] {
        assert_eq!(calls(&mut connection, other).await, 0, "{other}: no other command is sent");
    }
}

#[tokio::test]
async fn lost_scripts_are_loaded_again() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let store = options_at(&server.url()).open().await.unwrap();
    let mut connection = connect(&server.url()).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    for left in [9, 8, 7] {
        ask::<String>(&mut connection, &["SCRIPT", "FLUSH"]).await;
        let moved = granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
        assert_eq!(moved.readings[0].meter(&levels).available(moved.at), left);
    }
}
