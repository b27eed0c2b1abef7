//! A clock that steps back: nothing refills for it, nothing stands still for long, and the file remembers the
//! offset.

use std::time::Duration;

use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Durability, LeaseStatus, Lookup, ManualWall, Renew, Sqlite, Store};

use crate::kit::clock::{assert_books_at_wall_clock, assert_follows_vectors, grants_over_ten_flaps, pass};
use crate::kit::common::{START, balance, draw_of, granted, is_granted, levels};
use crate::kit::sqlite::TempFile;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// One request a second, with a burst of ten.
fn steady() -> Limit {
    Limit::per_second("rpm", 1).burst(10)
}

async fn drains(store: &Sqlite) {
    granted(store.spend(&draw_of(&levels(&[("acme", &[steady()])]), 10)).await);
    assert_eq!(balance(store, "acme").await, Some((0, 10)));
}

async fn takes(store: &Sqlite, requests: u64) -> bool {
    is_granted(&store.spend(&draw_of(&levels(&[("acme", &[steady()])]), requests)).await)
}

async fn reads(store: &Sqlite) -> Stamp {
    store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are returned").at
}

fn set_back(clock: &ManualWall, span: Duration) {
    use tidegate_store::WallClock;
    let now = clock.now().as_micros() - u64::try_from(span.as_micros()).expect("an hour or so");
    clock.set(Stamp::from_micros(now));
}

#[tokio::test]
async fn hour_back_refills_nothing_and_time_continues() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    drains(&store).await;
    set_back(&clock, HOUR);
    assert!(!takes(&store, 1).await);
    pass(&store, &clock, 3).await;
    assert!(takes(&store, 3).await, "three seconds refill three");
    assert!(!takes(&store, 1).await, "and no more");
    assert_eq!(reads(&store).await, START + 3 * SECOND);
}

#[tokio::test]
async fn hour_back_across_a_restart_refills_nothing() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    drains(&store).await;
    store.close().await;
    set_back(&clock, HOUR);
    let store = place.open(&clock).await;
    assert!(!takes(&store, 1).await);
    pass(&store, &clock, 2).await;
    assert!(takes(&store, 2).await);
    store.close().await;
    // The clock is corrected: the hour is not credited twice.
    clock.advance(HOUR);
    let store = place.open(&clock).await;
    assert!(!takes(&store, 1).await);
    clock.advance(10 * SECOND);
    assert!(takes(&store, 10).await);
}

#[tokio::test]
async fn handles_agree_after_the_clock_steps_back() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let stores = [place.open(&clock).await, place.open(&clock).await];
    drains(&stores[0]).await;
    assert!(!takes(&stores[1], 1).await);
    set_back(&clock, HOUR);
    let mut taken = 0;
    for second in 0..20 {
        // The first handle to see the step stores it; neither credits the hour.
        for store in [&stores[second % 2], &stores[(second + 1) % 2]] {
            while takes(store, 1).await {
                taken += 1;
            }
        }
        assert_eq!(taken, second, "a second is worth one");
        clock.advance(SECOND);
    }
}

/// The step used to be written with the next grant only: readers stood still until then, and so did due
/// leases.
#[tokio::test]
async fn hour_back_reaches_read_only_callers() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    // With durable=commit a refusal does not write again what is already on disk.
    let (store, other) = (
        place.options(&clock).durable(Durability::Commit).open().await.unwrap(),
        place.options(&clock).durable(Durability::Commit).open().await.unwrap(),
    );
    drains(&store).await;
    set_back(&clock, HOUR);
    assert!(!takes(&store, 10).await, "a refusal");
    for second in 1..5 {
        pass(&store, &clock, 1).await;
        for store in [&store, &other] {
            assert_eq!(reads(store).await, START + second * SECOND);
        }
        let expected = Some((i64::from(second), 10));
        assert_eq!((balance(&store, "acme").await, balance(&other, "acme").await), (expected, expected));
    }
}

#[tokio::test]
async fn small_step_back_stands_still_until_caught_up() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    drains(&store).await;
    set_back(&clock, Duration::from_millis(900));
    assert_eq!(reads(&store).await, START);
    clock.advance(SECOND);
    assert!(!takes(&store, 1).await, "a tenth of a second refills nothing");
    assert_eq!(reads(&store).await, START + SECOND / 10);
    clock.advance(SECOND * 9 / 10);
    assert!(takes(&store, 1).await);
    assert!(!takes(&store, 1).await);
}

#[tokio::test]
async fn lease_keeps_its_duration_when_clock_steps_back() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let draw = draw_of(&levels(&[("acme", &[steady()])]), 10);
    granted(store.draw(&draw).await);
    set_back(&clock, HOUR);
    for passed in [0, 3_540] {
        pass(&store, &clock, passed).await;
        assert_eq!(store.sweep(10).await.unwrap().settled, 0, "after {passed} s");
    }
    pass(&store, &clock, 60).await;
    assert_eq!(store.sweep(10).await.unwrap().settled, 1);
}

#[tokio::test]
async fn renewed_deadline_survives_step_back_and_restart() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let draw = draw_of(&levels(&[("acme", &[steady()])]), 4);
    granted(store.draw(&draw).await);
    let renew = |step| Renew { lease: draw.lease, step, levels: draw.levels.clone(), span: HOUR };
    clock.advance(HOUR / 2);
    let first = store.renew(&renew(1)).await.unwrap();
    assert_eq!(first.deadline, START + HOUR / 2 + HOUR);
    store.close().await;
    set_back(&clock, 2 * HOUR);
    let store = place.open(&clock).await;
    let again = store.renew(&renew(2)).await.unwrap();
    assert_eq!((again.at, again.deadline), (first.at, first.deadline));
    pass(&store, &clock, 3_599).await;
    assert!(matches!(store.lease(draw.lease).await.unwrap(), LeaseStatus::Open(_)));
    pass(&store, &clock, 1).await;
    assert!(matches!(store.lease(draw.lease).await.unwrap(), LeaseStatus::Ended(_)));
}

#[tokio::test]
async fn clock_follows_the_vectors() {
    let places = std::cell::RefCell::new(Vec::new());
    assert_follows_vectors(async |clock| {
        let place = TempFile::new();
        let store = place.open(clock).await;
        places.borrow_mut().push(place);
        store
    })
    .await;
}

#[tokio::test]
async fn flapping_clock_credits_elapsed_time_only() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    assert_eq!(grants_over_ten_flaps(&store, &clock).await, 30);
}

#[tokio::test]
async fn usage_is_booked_at_the_wall_clock() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    assert_books_at_wall_clock(&store, &clock).await;
}
