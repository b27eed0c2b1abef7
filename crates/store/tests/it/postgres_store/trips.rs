//! How little is asked of the server: one statement for an acquire and one for its settle, by the server's own count, and one for
//! many who come at once.

use std::io::Write as _;

use tidegate_store::Buckets;

use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, skip_without, unique};
use crate::kit::postgres::{by_way_of, open, outside, patient, url};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::Proxy;
use crate::kit::words::{draw_of, granted, is_granted, join_all, own, settle_of};

/// Statements that name the schema, as the server has counted them. Those that only the server itself runs are not counted.
async fn statements(outside: &tokio_postgres::Client, schema: &str) -> i64 {
    let sql = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements WHERE position($1 IN query) > 0 AND toplevel";
    outside.query_one(sql, &[&schema]).await.expect("the server counts").get(0)
}

#[tokio::test]
async fn an_acquire_is_one_round_trip_and_so_is_its_settle() {
    skip_without!(POSTGRES_SERVER);
    // A server of its own: one that many tests share drops counts, for it has room for 5,000 statements.
    let server = PrivatePostgres::start_with(|data| {
        let file = std::fs::OpenOptions::new().append(true).open(data.join("postgresql.conf"));
        let setting = b"shared_preload_libraries = 'pg_stat_statements'\n";
        file.and_then(|mut file| file.write_all(setting)).expect("the settings are written");
    });
    let (schema, outside) = ("trips", outside(&server.url()).await);
    outside.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    let wire = Proxy::to(server.address()).await;
    let options = patient(by_way_of(&server.url(), wire.address)).schema(schema).connections(2);
    // By a clock of ours: nothing is tidied in the background then.
    let store = open(options.clock(tidegate_store::HostWall)).await;
    let levels = own("acme", 1_000);
    // The first prepares the statement.
    granted(store.draw(&draw_of(&levels, 1)).await);
    // Whoever listens for changes asks on the same wire, a few times when it begins and then seldom: most show nothing of it.
    let mut asked = Vec::new();
    for _ in 0..20 {
        let (before, replies) = (statements(&outside, schema).await, wire.replies());
        let more = async || (statements(&outside, schema).await - before, wire.replies() - replies);
        let draw = draw_of(&levels, 3);
        granted(store.draw(&draw).await);
        let drawn = more().await;
        store.settle(&settle_of(&draw, 2)).await.unwrap();
        asked.push((drawn, more().await));
    }
    let exact = asked.iter().filter(|asked| **asked == ((1, 1), (2, 2))).count();
    assert!(exact > 10, "{asked:?}");
}

#[tokio::test]
async fn those_who_come_at_once_go_together() {
    skip_without!(POSTGRES);
    let schema = unique("trips");
    let store = open(patient(url()).schema(&schema).connections(2)).await;
    let levels = own("acme", 100);
    let draws: Vec<_> = (0..120).map(|_| draw_of(&levels, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
    assert_eq!(answers.iter().filter(|answer| is_granted(answer)).count(), 100);
    let stats = store.stats();
    assert_eq!(stats.calls, 120);
    assert!(stats.batches <= 3, "{stats:?}");
}
