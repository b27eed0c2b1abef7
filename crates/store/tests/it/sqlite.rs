//! The store in a file passes the suite: on time that is set by hand and on the machine's clock, with one handle and with
//! two on one file that take turns, and in memory.

use std::sync::Arc;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{ManualWall, SqliteOptions};

use crate::kit::turns::Turns;
use crate::kit::words::quick;

/// 2027-01-15T08:00:00Z, so that no case begins near the end of an hour.
const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = Turns::open(1, namespace, |options| options.clock(clock.clone())).await;
    Fixture::new(Arc::new(store), Arc::new(clock))
}

/// Two connections, each with a memory of its own: one that believes what it knew shows here.
async fn open_twice(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = Turns::open(2, namespace, |options| options.clock(clock.clone())).await;
    quick(Fixture::new(Arc::new(store), Arc::new(clock)))
}

async fn open_on_real_time(namespace: &str) -> Fixture {
    let store = Arc::new(Turns::open(1, namespace, |options| options).await);
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}

async fn open_in_memory(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = SqliteOptions::memory().clock(clock.clone()).namespace(namespace).open().await;
    Fixture::new(Arc::new(store.expect("a store in memory is opened")), Arc::new(clock))
}

conformance::suite!(suite, open, jumps);
conformance::suite!(by_two_handles, open_twice, jumps);
conformance::suite!(on_real_time, open_on_real_time);
conformance::suite!(in_memory, open_in_memory, jumps);
