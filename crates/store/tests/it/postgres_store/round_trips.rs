//! Round trips: one statement for an acquire and one for its settle, by the server's statistics, and one for
//! many concurrent draws.

use std::io::Write as _;

use tidegate_store::Buckets;

use crate::kit::common::{draw_of, granted, is_granted, join_all, own, settle_of};
use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, skip_without, unique};
use crate::kit::postgres::{open, options_at, outside, url, url_via};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::Proxy;

/// Statements that name the schema, by the server's statistics. Nested statements are not counted.
async fn statements(outside: &tokio_postgres::Client, schema: &str) -> i64 {
    let sql = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements WHERE position($1 IN query) > 0 AND toplevel";
    outside.query_one(sql, &[&schema]).await.expect("the server counts statements").get(0)
}

#[tokio::test]
async fn acquire_and_settle_are_one_round_trip_each() {
    skip_without!(POSTGRES_SERVER);
    // A server of its own: a shared one drops counts, because it keeps only 5,000 statements.
    let server = PrivatePostgres::start_with(|data| {
        let file = std::fs::OpenOptions::new().append(true).open(data.join("postgresql.conf"));
        let setting = b"shared_preload_libraries = 'pg_stat_statements'\n";
        file.and_then(|mut file| file.write_all(setting)).expect("the settings are written");
    });
    let (schema, outside) = ("trips", outside(&server.url()).await);
    outside.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    let wire = Proxy::to(server.address()).await;
    let options = options_at(url_via(&server.url(), wire.address)).schema(schema).connections(2);
    // With the host clock, no background task sends statements.
    let store = open(options.clock(tidegate_store::HostWall)).await;
    let levels = own("acme", 1_000);
    // The first draw prepares the statement.
    granted(store.draw(&draw_of(&levels, 1)).await);
    // The change listener uses the same connection, a few times at the start and rarely later: most rounds
    // are exact.
    let mut rounds = Vec::new();
    for _ in 0..20 {
        let (before, replies) = (statements(&outside, schema).await, wire.replies());
        let more = async || (statements(&outside, schema).await - before, wire.replies() - replies);
        let draw = draw_of(&levels, 3);
        granted(store.draw(&draw).await);
        let drawn = more().await;
        store.settle(&settle_of(&draw, 2)).await.unwrap();
        rounds.push((drawn, more().await));
    }
    let exact = rounds.iter().filter(|round| **round == ((1, 1), (2, 2))).count();
    assert!(exact > 10, "{rounds:?}");
}

#[tokio::test]
async fn concurrent_draws_share_a_statement() {
    skip_without!(POSTGRES);
    let schema = unique("trips");
    let store = open(options_at(url()).schema(&schema).connections(2)).await;
    let levels = own("acme", 100);
    let draws: Vec<_> = (0..120).map(|_| draw_of(&levels, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
    assert_eq!(answers.iter().filter(|answer| is_granted(answer)).count(), 100);
    let stats = store.stats();
    assert_eq!(stats.calls, 120);
    assert!(stats.batches <= 3, "{stats:?}");
}
