//! The PostgreSQL store, against a plain `UPDATE … RETURNING` per acquire with the same client and number of
//! connections.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::{Context, Result};
use deadpool_postgres::{Manager, Pool};
use tidegate::{Limit, Limiter, Postgres, PostgresOptions};
use tidegate_bench::report::Row;
use tokio::runtime::Runtime;
use tokio_postgres::{Config, NoTls};

use crate::load::{ROUNDS_MAX, round, to_f64};

const PLENTY: u64 = 1 << 39;
const CONNECTIONS: usize = 8;
/// Rows that callers are spread over.
const SPREAD: usize = 1_024;
const TAKE: &str =
    "UPDATE bench_limits SET left_over = left_over - 1 WHERE id = $1 AND left_over >= 1 RETURNING left_over";

/// A limiter and a plain table on one server.
struct Sides {
    limiter: Limiter,
    store: Postgres,
    peer: Pool,
    runtime: Runtime,
}

pub(crate) fn spread(rounds: u32) -> Result<Vec<Row>> {
    let what =
        "acquires by 64 callers over 1,024 rows, lease included, vs a plain UPDATE … RETURNING for each";
    rows("postgres_spread", SPREAD, 1.0, what, rounds)
}

pub(crate) fn hot(rounds: u32) -> Result<Vec<Row>> {
    let what = "acquires by 64 callers of one row, lease included, vs a plain UPDATE … RETURNING for each";
    rows("postgres_hot", 1, 3.0, what, rounds)
}

fn rows(name: &str, count: usize, target: f64, what: &str, rounds: u32) -> Result<Vec<Row>> {
    let sides = Sides::open()?;
    let (mut ours, mut peer) = (0.0_f64, 0.0_f64);
    let before = sides.store.stats();
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        ours = ours.max(sides.ours(count)?);
        peer = peer.max(sides.peer(count)?);
    }
    let after = sides.store.stats();
    let per_statement = to_f64(after.calls - before.calls) / to_f64(after.batches - before.batches);
    let note = "acquires per statement, vs one";
    Ok(vec![
        Row::at_least(name, (ours, peer), Some(target), "acquires/s", what),
        Row::at_least(&format!("{name}_together"), (per_statement, 1.0), None, "acquires", note),
    ])
}

impl Sides {
    fn open() -> Result<Self> {
        let url = std::env::var("TIDEGATE_TEST_POSTGRES")
            .context("TIDEGATE_TEST_POSTGRES is not set: run it with `cargo xtask bench engines`")?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let schema = format!("bench_{}", std::process::id());
        let options = PostgresOptions::new(&url).schema(schema).connections(CONNECTIONS);
        let store = runtime.block_on(options.open())?;
        let limits = [Limit::per_minute("rpm", PLENTY)];
        let builder =
            Limiter::builder(store.clone()).defaults(limits).store_deadline(Duration::from_secs(30));
        let peer =
            Pool::builder(Manager::new(Config::from_str(&url)?, NoTls)).max_size(CONNECTIONS).build()?;
        runtime.block_on(async {
            let client = peer.get().await?;
            let table = "DROP TABLE IF EXISTS bench_limits;
                         CREATE TABLE bench_limits (id text PRIMARY KEY, left_over bigint NOT NULL) WITH (fillfactor = 70)";
            client.batch_execute(table).await?;
            let fill = "INSERT INTO bench_limits SELECT 'user-' || n, 1::bigint << 60 FROM generate_series(0, $1::int - 1) n";
            client.execute(fill, &[&i32::try_from(SPREAD)?]).await?;
            anyhow::Ok(())
        })?;
        Ok(Self { limiter: builder.build()?, store, peer, runtime })
    }

    /// Acquires per second of the store.
    fn ours(&self, count: usize) -> Result<f64> {
        let limiter = self.limiter.clone();
        round(&self.runtime, count, move |name| {
            let limiter = limiter.clone();
            async move {
                limiter.try_acquire((&*name, "gpt-4"), [("rpm", 1)]).await?.detach();
                Ok(())
            }
        })
    }

    /// Acquires per second of the peer.
    fn peer(&self, count: usize) -> Result<f64> {
        let pool = self.peer.clone();
        round(&self.runtime, count, move |name| {
            let pool = pool.clone();
            async move {
                let client = pool.get().await?;
                let take = client.prepare_cached(TAKE).await?;
                client.query_one(&take, &[&&*name]).await?;
                Ok(())
            }
        })
    }
}
