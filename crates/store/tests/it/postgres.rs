//! Runs the suite on the PostgreSQL store, with a manual clock and with the server's clock. Each case has its
//! own schema.

use std::sync::Arc;

use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{ManualWall, PostgresOptions};

use crate::kit::common::{START, quick};
use crate::kit::engine::{POSTGRES, is_available};
use crate::kit::postgres;

/// A schema for each case.
fn options(namespace: &str) -> PostgresOptions {
    postgres::options().namespace(namespace)
}

async fn open(namespace: &str) -> Option<Fixture> {
    if !is_available(POSTGRES) {
        return None;
    }
    let clock = ManualWall::new(START);
    let store = postgres::open(options(namespace).clock(clock.clone())).await;
    Some(quick(Fixture::new(Arc::new(store), Arc::new(clock))))
}

async fn open_on_real_time(namespace: &str) -> Option<Fixture> {
    if !is_available(POSTGRES) {
        return None;
    }
    let store = Arc::new(postgres::open(options(namespace)).await);
    Some(quick(Fixture::new(store.clone(), Arc::new(RealTime(store)))))
}

conformance::suite!(suite, open, jumps);
conformance::suite!(on_real_time, open_on_real_time);
