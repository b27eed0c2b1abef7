//! Bounds, and names and numbers at their limits.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, OnExpiry};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{
    Buckets, DrawResult, EngineTime, Entities, Lookup, ManualWall, Paging, Store, StoreError, Terms,
};

use super::dropped_calls::{Gate, poll_once};
use crate::kit::common::{
    START, adjust_of, balance, draw_of, draw_on, error_text, eventually, granted, is_granted, join_all,
    levels, own, settle_of, used,
};
use crate::kit::sqlite::TempFile;

#[tokio::test]
async fn full_queue_refuses_and_drains() {
    let (place, gate) = (TempFile::new(), Gate::default());
    let store = tidegate_store::SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let draw = draw_of(&own("acme", 10), 1);
    gate.close();
    let mut first = store.spend(&draw);
    assert!(!poll_once(&mut first));
    gate.wait_until_blocked();
    let waiting: Vec<_> = (0..1 << 16)
        .map(|_| {
            let mut reply = store.draw(&draw);
            assert!(!poll_once(&mut reply));
            reply
        })
        .collect();
    let error = store.draw(&draw).await.unwrap_err();
    assert!(matches!(error, StoreError::Busy { waiting_max: 65_536, .. }), "{error}");
    assert!(error.is_transient() && !error.is_unavailable(), "{error}");
    drop(waiting);
    gate.open();
    granted(first.await);
    // Dropped calls leave the queue with the writer's next turns, possibly a moment after the first answer.
    let next = draw_of(&own("acme", 10), 1);
    eventually("the queue has space", async || is_granted(&store.draw(&next).await)).await;
    assert_eq!(balance(&store, "acme").await, Some((8, 2)));
}

/// The wait for one of the two readers counted as the engine's time: many reads made the store unavailable.
#[tokio::test]
async fn wait_for_a_reader_is_not_the_engines_time() {
    let (place, gate) = (TempFile::new(), Gate::default());
    let store = tidegate_store::SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let lookup = Lookup::Subjects(Vec::new());
    gate.close();
    let times: [EngineTime; 3] = std::array::from_fn(|_| EngineTime::default());
    let reads: Vec<_> = times.iter().map(|time| Box::pin(time.follow(store.balances(&lookup)))).collect();
    let reads = join_all(reads);
    let opened = eventually("both readers are busy, and a call waits", async || {
        times.iter().filter(|time| time.queued_for().is_some()).count() == 1
    });
    let (answers, ()) = tokio::join!(reads, async {
        opened.await;
        gate.open();
    });
    assert!(answers.iter().all(Result::is_ok));
    assert!(times.iter().all(|time| time.queue().is_some() && time.elapsed().is_some()));
}

#[tokio::test]
async fn names_are_never_interpreted_as_sql() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let names = [
        "o'brien",
        "\"quoted\"",
        "100%",
        "a_b",
        "aXb",
        "a%b",
        "ünïcødé-日本",
        "x'; DROP TABLE leases; --",
        "?1",
        ":id",
    ];
    for (number, name) in names.iter().enumerate() {
        let draw = draw_of(&own(name, 100), number as u64 + 1);
        granted(store.draw(&draw).await);
        store.settle(&settle_of(&draw, number as u64 + 1)).await.unwrap();
        store.put(&Entity::new(EntityId::new(name).unwrap()), Expect::Absent, name).await.unwrap();
    }
    for (number, name) in names.iter().enumerate() {
        let taken = i64::try_from(number).unwrap() + 1;
        assert_eq!(balance(&store, name).await, Some((100 - taken, taken)), "{name}");
        assert_eq!(used(&store, name).await, number as u64 + 1, "{name}");
        let lookup = Lookup::Entities(vec![EntityId::new(name).unwrap()]);
        assert_eq!(store.balances(&lookup).await.unwrap().buckets.len(), 1, "{name}");
    }
    let listed = store.entities(&Paging::default()).await.unwrap().items;
    let mut sorted = names.map(str::to_owned);
    sorted.sort();
    assert_eq!(listed.iter().map(|entity| entity.value.id().to_string()).collect::<Vec<_>>(), sorted);
    let other = store.namespace("it's 100%_").await.unwrap();
    assert_eq!(balance(&other, "a_b").await, None);
}

/// Large amounts that are taken and returned are exact, before and after a restart.
#[tokio::test]
async fn largest_numbers_round_trip() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let limits = [Limit::per_second("rpm", 1 << 40).burst(1 << 40)];
    let levels = Arc::new(Levels::clone(&levels(&[("acme", &limits)])).with_debt_max(|_, _| None));
    let mut store = place.open(&clock).await;
    let draw = draw_of(&levels, 1 << 40);
    granted(store.draw(&draw).await);
    for step in 1..40 {
        store.adjust(&adjust_of(&draw, step, 1 << 40)).await.unwrap();
        store.close().await;
        store = place.open(&clock).await;
        let taken = (i64::from(step) + 1) << 40;
        assert_eq!(balance(&store, "acme").await, Some(((1 << 40) - taken, taken)));
    }
    for step in 40..79 {
        store.adjust(&adjust_of(&draw, step, -(1 << 40))).await.unwrap();
    }
    assert_eq!(balance(&store, "acme").await, Some((0, 1 << 40)));
    // Whatever the numbers, nothing overflows, and other subjects are not affected.
    let mut most = settle_of(&draw, 0);
    (most.step, most.actual[0]) = (100, Some(u64::MAX));
    store.settle(&most).await.unwrap();
    store.close().await;
    let store = place.open(&clock).await;
    let (left, consumed) = balance(&store, "acme").await.unwrap();
    assert!(left < -(1 << 60) && consumed == i64::MAX, "{left} left, {consumed} consumed");
    for _ in 0..3 {
        let mut spend = draw_of(&own("other", 10), 1);
        granted(store.spend(&spend).await);
        spend.lease = crate::kit::common::next_lease();
        spend.units[0] = Some(u64::MAX);
        assert!(matches!(store.spend(&spend).await, Ok(DrawResult::Refused(_))));
    }
    assert_eq!(balance(&store, "other").await, Some((7, 3)));
    assert_eq!(
        used(&store, "acme").await,
        i64::MAX.unsigned_abs(),
        "a sum saturates at the maximum of a column"
    );
}

#[tokio::test]
async fn ten_thousand_leases_expire_at_once() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let levels = own("acme", 30_000);
    let expiries = [OnExpiry::Settle, OnExpiry::Return];
    let draws: Vec<_> = (0..10_000)
        .map(|number| {
            let terms = Terms { deadline: Duration::from_secs(1), on_expiry: expiries[number % 2] };
            draw_on(terms, &levels, 3)
        })
        .collect();
    for draws in draws.chunks(500) {
        for answer in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
            granted(answer);
        }
    }
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(DrawResult::Refused(_))));
    clock.advance(Duration::from_secs(2));
    // Every call ends a few leases, and the rest end before the next read.
    assert!(store.draw(&draw_of(&levels, 1)).await.is_ok());
    let (left, consumed) = balance(&store, "acme").await.unwrap();
    assert_eq!((left + consumed, used(&store, "acme").await), (30_000, 15_000));
    assert!((15_000..=15_001).contains(&consumed), "{consumed}");
    let error = error_text(store.settle(&settle_of(&draws[9_999], 1)).await);
    assert!(error.contains("it was expired"), "{error}");
    clock.advance(Duration::from_secs(660));
    while store.sweep(2_000).await.unwrap().forgotten > 0 {}
    let open = "SELECT COUNT(*) FROM leases WHERE how IS NOT NULL";
    assert_eq!(place.outside().query_row(open, [], |row| row.get::<_, i64>(0)), Ok(0));
}

/// The cache has a bound over all namespaces: evicted state is written and loaded again.
#[tokio::test]
async fn many_namespaces_are_evicted_from_the_cache() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let mut spaces = Vec::new();
    for number in 0..150 {
        spaces.push(store.namespace(&format!("namespace-{number}")).await.unwrap());
    }
    for round in 1..=3 {
        for (number, space) in spaces.iter().enumerate() {
            granted(space.spend(&draw_of(&own("acme", 100), number as u64 % 7)).await);
            let taken = round * (i64::try_from(number).unwrap() % 7);
            assert_eq!(balance(space, "acme").await, Some((100 - taken, taken)));
        }
    }
}

/// A transaction used to expire fewer leases than it drew: under load abandoned leases accumulated.
#[tokio::test]
async fn due_leases_do_not_pile_up_under_load() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let levels = own("acme", 30_000);
    let terms = Terms { deadline: Duration::from_secs(1), on_expiry: OnExpiry::Return };
    for round in 0..12 {
        let draws: Vec<_> = (0..500).map(|_| draw_on(terms, &levels, 1)).collect();
        for answer in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
            granted(answer);
        }
        clock.advance(Duration::from_secs(2));
        let open = "SELECT COUNT(*) FROM leases WHERE how IS NULL";
        let count: i64 = place.outside().query_row(open, [], |row| row.get(0)).unwrap();
        assert!(count <= 1_000, "{count} leases are open after round {round}, and 500 are not due");
    }
}
