//! The store in a PostgreSQL server passes the suite: on time that is set by hand and on the server's clock, with one handle and
//! with two that take turns. Each case has a schema of its own.

mod engine_kit;

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{ManualWall, Postgres, PostgresOptions};

/// 2027-01-15T08:00:00Z, so that no case begins near the end of an hour.
const START: Stamp = Stamp::from_secs(1_800_000_000);

fn options(namespace: &str) -> PostgresOptions {
    let url = engine_kit::address("TIDEGATE_TEST_POSTGRES");
    // Long enough for a machine that has much else to do.
    let patience = Duration::from_mins(1);
    let options = PostgresOptions::new(url).connected_within(patience).patience(patience);
    options.schema(engine_kit::unique("suite")).namespace(namespace).connections(4)
}

async fn opened(options: PostgresOptions) -> Postgres {
    options.open().await.expect("the server is there")
}

async fn open(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    Fixture::new(Arc::new(opened(options(namespace).clock(clock.clone())).await), Arc::new(clock))
}

async fn open_on_real_time(namespace: &str) -> Fixture {
    let store = Arc::new(opened(options(namespace)).await);
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}

conformance::suite!(postgres, open, jumps);
conformance::suite!(postgres_on_real_time, open_on_real_time);
