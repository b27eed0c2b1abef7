//! Bounds, and names and numbers at the edge of what may be.

use std::time::Duration;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, OnExpiry};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets, Drawn, Entities, Lookup, ManualWall, Paging, Store, StoreError, Terms};

use super::gone::{Gate, begin};
use crate::kit::sqlite::Place;
use crate::kit::words::{
    START, adjust_of, draw_of, draw_on, eventually, granted, is_granted, join_all, levels, own, said,
    settle_of, shows, used,
};

#[tokio::test]
async fn a_queue_that_is_full_refuses_and_is_emptied() {
    let (place, gate) = (Place::new(), Gate::default());
    let store = tidegate_store::SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let draw = draw_of(&own("acme", 10), 1);
    gate.close();
    let mut first = store.spend(&draw);
    assert!(!begin(&mut first));
    gate.holds_somebody();
    let waiting: Vec<_> = (0..1 << 16)
        .map(|_| {
            let mut reply = store.draw(&draw);
            assert!(!begin(&mut reply));
            reply
        })
        .collect();
    let error = store.draw(&draw).await.unwrap_err();
    assert!(matches!(error, StoreError::Busy { waiting_max: 65_536, .. }), "{error}");
    assert!(error.is_transient() && !error.is_unavailable(), "{error}");
    drop(waiting);
    gate.open();
    granted(first.await);
    // Those who have gone leave with the writer's next turns, which may be a moment after the first was answered.
    let next = draw_of(&own("acme", 10), 1);
    eventually("there is room again", async || is_granted(&store.draw(&next).await)).await;
    assert_eq!(shows(&store, "acme").await, Some((8, 2)));
}

#[tokio::test]
async fn names_are_never_taken_for_anything_else() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
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
        assert_eq!(shows(&store, name).await, Some((100 - taken, taken)), "{name}");
        assert_eq!(used(&store, name).await, number as u64 + 1, "{name}");
        let lookup = Lookup::Entities(vec![EntityId::new(name).unwrap()]);
        assert_eq!(store.balances(&lookup).await.unwrap().buckets.len(), 1, "{name}");
    }
    let listed = store.entities(&Paging::default()).await.unwrap().items;
    let mut sorted = names.map(str::to_owned);
    sorted.sort();
    assert_eq!(listed.iter().map(|entity| entity.value.id().to_string()).collect::<Vec<_>>(), sorted);
    let other = store.namespace("it's 100%_").await.unwrap();
    assert_eq!(shows(&other, "a_b").await, None);
}

/// What is taken and given back is the same however large, before a restart and after.
#[tokio::test]
async fn the_largest_numbers_come_back_as_they_were() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let limits = [Limit::per_second("rpm", 1 << 40).burst(1 << 40)];
    let levels = levels(&[("acme", &limits)]);
    let mut store = place.open(&clock).await;
    let draw = draw_of(&levels, 1 << 40);
    granted(store.draw(&draw).await);
    for step in 1..40 {
        store.adjust(&adjust_of(&draw, step, 1 << 40)).await.unwrap();
        store.close().await;
        store = place.open(&clock).await;
        let taken = (i64::from(step) + 1) << 40;
        assert_eq!(shows(&store, "acme").await, Some(((1 << 40) - taken, taken)));
    }
    for step in 40..79 {
        store.adjust(&adjust_of(&draw, step, -(1 << 40))).await.unwrap();
    }
    assert_eq!(shows(&store, "acme").await, Some((0, 1 << 40)));
    // Whatever numbers come, nothing overflows, and others are not touched.
    let mut most = settle_of(&draw, 0);
    (most.step, most.actual[0]) = (100, Some(u64::MAX));
    store.settle(&most).await.unwrap();
    store.close().await;
    let store = place.open(&clock).await;
    let (left, consumed) = shows(&store, "acme").await.unwrap();
    assert!(left < -(1 << 60) && consumed == i64::MAX, "{left} left, {consumed} consumed");
    for _ in 0..3 {
        let mut spend = draw_of(&own("other", 10), 1);
        granted(store.spend(&spend).await);
        spend.lease = crate::kit::words::next_lease();
        spend.units[0] = Some(u64::MAX);
        assert!(matches!(store.spend(&spend).await, Ok(Drawn::Refused(_))));
    }
    assert_eq!(shows(&store, "other").await, Some((7, 3)));
    assert_eq!(used(&store, "acme").await, i64::MAX.unsigned_abs(), "a sum stops at what a column holds");
}

#[tokio::test]
async fn ten_thousand_leases_expire_at_once() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let levels = own("acme", 30_000);
    let ways = [OnExpiry::Settle, OnExpiry::Return];
    let draws: Vec<_> = (0..10_000)
        .map(|number| {
            let terms = Terms { deadline: Duration::from_secs(1), on_expiry: ways[number % 2] };
            draw_on(terms, &levels, 3)
        })
        .collect();
    for draws in draws.chunks(500) {
        for answer in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
            granted(answer);
        }
    }
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(Drawn::Refused(_))));
    clock.advance(Duration::from_secs(2));
    // A few go with every call, the rest before anything is read.
    assert!(store.draw(&draw_of(&levels, 1)).await.is_ok());
    let (left, consumed) = shows(&store, "acme").await.unwrap();
    assert_eq!((left + consumed, used(&store, "acme").await), (30_000, 15_000));
    assert!((15_000..=15_001).contains(&consumed), "{consumed}");
    let error = said(store.settle(&settle_of(&draws[9_999], 1)).await);
    assert!(error.contains("it was expired"), "{error}");
    clock.advance(Duration::from_secs(660));
    while store.sweep(2_000).await.unwrap().forgotten > 0 {}
    let open = "SELECT COUNT(*) FROM leases WHERE how IS NOT NULL";
    assert_eq!(place.outside().query_row(open, [], |row| row.get::<_, i64>(0)), Ok(0));
}

/// What is kept in memory of a file has a bound over all namespaces: all of it is written, and is loaded again.
#[tokio::test]
async fn many_namespaces_are_used_one_after_the_other() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let mut spaces = Vec::new();
    for number in 0..150 {
        spaces.push(store.namespace(&format!("namespace-{number}")).await.unwrap());
    }
    for round in 1..=3 {
        for (number, space) in spaces.iter().enumerate() {
            granted(space.spend(&draw_of(&own("acme", 100), number as u64 % 7)).await);
            let taken = round * (i64::try_from(number).unwrap() % 7);
            assert_eq!(shows(space, "acme").await, Some((100 - taken, taken)));
        }
    }
}

/// A transaction let fewer leases expire than it drew: under load those that nobody ended were ever more.
#[tokio::test]
async fn leases_past_their_deadline_do_not_pile_up_under_load() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
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
