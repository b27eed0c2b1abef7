//! Runs the suite on the SQLite store: with manual time and with the system clock, with one handle and with
//! two alternating handles of one file, and in memory.

use std::sync::Arc;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Expect;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{Entities as _, ManualWall, Paging, SqliteOptions};

use crate::kit::common::quick;
use crate::kit::round_robin::RoundRobin;

/// 2027-01-15T08:00:00Z, so that no case starts near the end of an hour.
const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = RoundRobin::open(1, namespace, |options| options.clock(clock.clone())).await;
    Fixture::new(Arc::new(store), Arc::new(clock))
}

/// Two handles with a cache each: a stale cache fails here.
async fn open_twice(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = RoundRobin::open(2, namespace, |options| options.clock(clock.clone())).await;
    quick(Fixture::new(Arc::new(store), Arc::new(clock)))
}

async fn open_on_real_time(namespace: &str) -> Fixture {
    let store = Arc::new(RoundRobin::open(1, namespace, |options| options).await);
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

/// Such a record made its whole page corrupt.
#[tokio::test]
async fn names_of_earlier_versions_are_listed() {
    let store = SqliteOptions::memory().open().await.unwrap();
    let names = ["a", "a\u{200c}b", "cafe\u{301}", "z"];
    for name in names {
        let entity = Entity::new(EntityId::stored(name).unwrap());
        store.put(&entity, Expect::Any, "test").await.unwrap();
    }
    let (mut paging, mut listed) = (Paging::first(1).unwrap(), Vec::new());
    loop {
        let page = store.entities(&paging).await.unwrap();
        listed.extend(page.items.iter().map(|entity| entity.value.id().to_string()));
        let Some(next) = page.next else { break };
        paging = paging.after(next);
    }
    assert_eq!(listed, names);
    for name in names {
        let id = EntityId::stored(name).unwrap();
        assert!(store.get(&id).await.unwrap().is_some(), "{name}");
        store.remove(&id, Expect::Any, "test").await.unwrap();
        assert!(store.get(&id).await.unwrap().is_none(), "{name}");
    }
}
