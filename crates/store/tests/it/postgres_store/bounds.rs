//! Bounds, and the errors when one is reached.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets, Draw, ManualWall, PostgresOptions, Retention, Store, StoreError};

use crate::kit::common::{
    OPEN, START, balance, draw_of, eventually, granted, is_granted, join_all, next_lease, own, until_answered,
};
use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, skip_without, unique};
use crate::kit::postgres::{open, options, options_at, outside, url};
use crate::kit::private_postgres::PrivatePostgres;

#[tokio::test]
async fn full_call_limits_free_space_in_a_subject() {
    skip_without!(POSTGRES);
    let clock = ManualWall::new(START);
    let store = open(options().clock(clock.clone())).await;
    let acme = own("acme", 1_000);
    let draw = |amount: u64| {
        let rule = Limit::per_second("rpm", amount).check().expect("a valid limit");
        let levels = Arc::new(acme.with_call_limits([rule]));
        let units = levels.amounts(&[("rpm", 1)]).expect("a valid cost");
        Draw { lease: next_lease(), levels, units, terms: OPEN, is_watched: true }
    };
    for amount in 1..=64 {
        granted(store.draw(&draw(amount)).await);
    }
    let answer = store.draw(&draw(65)).await;
    assert!(matches!(answer, Err(StoreError::Full { max: 64, .. })), "{answer:?}");
    clock.advance(Duration::from_secs(2));
    granted(store.draw(&draw(65)).await);
}

/// A sweep used to delete at most 1,000 ended leases, and 500 lines of usage per window: beyond that rate the
/// tables grew.
#[tokio::test]
async fn sweep_deletes_all_that_is_too_old() {
    skip_without!(POSTGRES);
    let (schema, clock, rows) = (unique("t"), ManualWall::new(START), 20_000_i64);
    let hour = Duration::from_secs(3_600);
    let kept = Retention { hours: Some(hour), audit: Some(hour), ..Retention::default() };
    let store =
        open(options_at(url()).schema(&schema).connections(4).clock(clock.clone()).retention(kept)).await;
    granted(store.draw(&draw_of(&own("acme", 10), 1)).await);
    let outside = outside(&url()).await;
    let at = START.as_micros();
    let fill = format!(
        "INSERT INTO {schema}.leases (namespace, id, key, step, drawn_at, stepped_at, deadline, on_expiry, how, ended_at, digest)
         SELECT namespace, int8send(i), 0, 1, {at}, {at}, {at}, 0, 0, {at}, 0
         FROM {schema}.meters, generate_series(1, {rows}) AS i;
         INSERT INTO {schema}.usage SELECT namespace, 'user-' || i, 'gpt', 'rpm', 0, {at} - {at} % 3600000000, 1, 1, 1
         FROM {schema}.meters, generate_series(1, {rows}) AS i;
         INSERT INTO {schema}.audit SELECT namespace, i, i, {at}, 'tests', '', ''
         FROM {schema}.meters, generate_series(1, {rows}) AS i"
    );
    outside.batch_execute(&fill).await.unwrap();
    let left = async || {
        let count = |of: &str| format!("(SELECT count(*) FROM {schema}.{of})");
        let counts = ["leases WHERE how IS NOT NULL", "usage", "audit"].map(count).join(" + ");
        outside.query_one(&format!("SELECT {counts}"), &[]).await.unwrap().get::<_, i64>(0)
    };
    store.sweep(100).await.unwrap();
    assert_eq!(left().await, 3 * rows, "nothing is too old yet");
    clock.advance(3 * hour);
    assert_eq!(store.sweep(100).await.unwrap().forgotten, rows.unsigned_abs());
    // The open lease has expired. It is remembered, and so is its usage but for that of the hour.
    assert_eq!(left().await, 4);
}

#[tokio::test]
async fn exhausted_read_connections_do_not_block_draws() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    // The timeout for a free connection is short, the one for a stuck connection long.
    let options = PostgresOptions::new(url()).timeout(Duration::from_secs(60)).schema(&schema).connections(2);
    let store = until_answered(|| options.clone().open()).await.unwrap();
    // A lock that every reader waits for blocks the only connection for readers.
    let outside = outside(&url()).await;
    outside
        .batch_execute(&format!("BEGIN; LOCK TABLE \"{schema}\".policies IN ACCESS EXCLUSIVE MODE"))
        .await
        .unwrap();
    let stuck = tokio::spawn({
        let store = store.clone();
        async move { tidegate_store::Policies::read(&store, &[tidegate_core::limit::policy::Scope::System]).await }
    });
    while !is_waiting(&schema).await {
        tokio::task::yield_now().await;
    }
    let error = version_error(&store).await;
    assert!(error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("all connections"), "{error}");
    let draw = draw_of(&own("acme", 5), 1);
    granted(until_answered(|| store.draw(&draw)).await);
    outside.batch_execute("COMMIT").await.unwrap();
    stuck.await.unwrap().unwrap();
    assert_eq!(balance(&store, "acme").await, Some((4, 1)));
}

#[tokio::test]
async fn stuck_draw_connection_fails_calls_and_recovers() {
    skip_without!(POSTGRES);
    let schema = unique("stuck");
    let options = PostgresOptions::new(url()).schema(&schema).connections(2);
    let store = until_answered(|| options.clone().open()).await.unwrap();
    let (levels, draw) = (own("acme", 100), draw_of(&own("acme", 100), 1));
    granted(until_answered(|| store.draw(&draw)).await);
    let outside = outside(&url()).await;
    let held = format!("BEGIN; LOCK TABLE \"{schema}\".meters IN ACCESS EXCLUSIVE MODE");
    outside.batch_execute(&held).await.unwrap();
    // All draws, of the locked subject and of another, wait for the same connection. Each gets an answer in
    // the end.
    let other = own("globex", 100);
    let draws: Vec<_> =
        (0..40).map(|number| draw_of(if number % 2 == 0 { &levels } else { &other }, 1)).collect();
    let first = join_all(draws[..20].iter().map(|draw| store.draw(draw)).collect()).await;
    for answer in first {
        let error = answer.expect_err("the table is locked");
        assert!(error.is_transient(), "{error:?}");
    }
    outside.batch_execute("COMMIT").await.unwrap();
    // Retried, each draw is charged once, whether or not its first attempt was applied.
    for draw in &draws {
        granted(until_answered(|| store.draw(draw)).await);
    }
    assert_eq!(balance(&store, "acme").await, Some((79, 21)));
    assert_eq!(balance(&store, "globex").await, Some((80, 20)));
}

/// A batch whose limits were evicted was retried without a bound.
#[tokio::test]
async fn eviction_of_each_retry_fails_the_draw() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let store = open(options_at(url()).schema(&schema).connections(4)).await;
    // As if each new limit was evicted before it is read.
    let evict = format!(
        "CREATE FUNCTION {schema}.evict() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER evict BEFORE INSERT ON {schema}.meters FOR EACH ROW EXECUTE FUNCTION {schema}.evict()"
    );
    outside(&url()).await.batch_execute(&evict).await.unwrap();
    let error = store.draw(&draw_of(&own("acme", 5), 1)).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("after 5 conflicts"), "{error}");
}

#[test]
fn store_whose_runtime_has_ended_reports_it() {
    skip_without!(POSTGRES);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let store = first.block_on(open(options()));
    drop(first);
    for _ in 0..3 {
        let error = runtime().block_on(store.draw(&draw_of(&own("acme", 5), 1))).unwrap_err();
        assert!(error.to_string().contains("has shut down"), "{error}");
    }
}

#[tokio::test]
async fn corrupt_limit_fails_only_its_own_draws() {
    skip_without!(POSTGRES);
    let schema = unique("corrupt");
    let store = open(options_at(url()).schema(&schema).connections(4)).await;
    let (corrupt, intact) = (own("corrupt", 100), own("intact", 100));
    for levels in [&corrupt, &intact] {
        granted(store.draw(&draw_of(levels, 1)).await);
    }
    let outside = outside(&url()).await;
    outside
        .batch_execute(&format!("UPDATE \"{schema}\".meters SET period = 0 WHERE entity = 'corrupt'"))
        .await
        .unwrap();
    let draws: Vec<_> =
        (0..20).map(|number| draw_of(if number == 7 { &corrupt } else { &intact }, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
    for (number, answer) in answers.into_iter().enumerate() {
        assert_eq!(is_granted(&answer), number != 7, "{answer:?}");
    }
    assert_eq!(balance(&store, "intact").await, Some((80, 20)));
}

#[tokio::test]
async fn server_without_free_connections_is_unavailable() {
    skip_without!(POSTGRES_SERVER);
    let settings = "max_connections = 5\nsuperuser_reserved_connections = 0\nmax_wal_senders = 0\n\
                    autovacuum = off\n";
    let server = PrivatePostgres::start_with(|data| {
        let file = std::fs::OpenOptions::new().append(true).open(data.join("postgresql.conf"));
        file.and_then(|mut file| file.write_all(settings.as_bytes())).expect("the settings are written");
    });
    let mut others = Vec::new();
    while let Ok((client, connection)) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await {
        tokio::spawn(connection);
        others.push(client);
    }
    assert_eq!(others.len(), 5);
    let error = options_at(server.url()).connections(2).open().await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("too many clients"), "{error}");
    // One client leaves: enough to open a store, but fewer connections than it may use.
    others.pop();
    let opened = |url: String| options_at(url).connections(2).open();
    eventually("a connection is free", async || opened(server.url()).await.is_ok()).await;
    others.clear();
    // Closed connections take a moment to disappear from the server.
    let mut store = None;
    eventually("all connections are free", async || {
        store = opened(server.url()).await.ok();
        store.is_some()
    })
    .await;
    let store = store.unwrap();
    eventually("it draws", async || is_granted(&store.draw(&draw_of(&own("acme", 50), 1)).await)).await;
}

async fn is_waiting(schema: &str) -> bool {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND position($1 IN query) > 0)";
    outside(&url()).await.query_one(sql, &[&schema]).await.expect("the server responds").get(0)
}

async fn version_error(store: &tidegate_store::Postgres) -> StoreError {
    tidegate_store::Policies::version(store).await.expect_err("no connection is free")
}
