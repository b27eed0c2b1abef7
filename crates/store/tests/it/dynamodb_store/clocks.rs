//! Clocks that are apart: the engine tells no time.

use std::time::Duration;

use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, DynamoDb, HostWall, ManualWall, WallClock};

use super::ENGINE;
use crate::kit::clock::granted_over_ten_flaps;
use crate::kit::dynamodb::{START, made, options};
use crate::kit::engine::skip_without;
use crate::kit::words::{draw_of, is_granted, levels};

/// Two callers whose clocks are two seconds apart, on one table.
async fn two_seconds_apart() -> ([DynamoDb; 2], [ManualWall; 2]) {
    let clocks = [START, START + Duration::from_secs(2)].map(ManualWall::new);
    let options = options(ENGINE);
    let one = made(options.clone().clock(clocks[0].clone())).await;
    let other = options.clock(clocks[1].clone()).open().await.expect("the table is there");
    ([one, other], clocks)
}

#[tokio::test]
async fn clock_skew_admits_no_more_than_its_refill() {
    skip_without!(ENGINE);
    let (stores, clocks) = two_seconds_apart().await;
    // Ten at once, and five a second.
    let levels = levels(&[("acme", &[Limit::per_second("rpm", 5).burst(10)])]);
    let mut admitted = 0;
    let rounds = 40_u64;
    for round in 0..rounds {
        for number in [round % 2, (round + 1) % 2] {
            let store = &stores[usize::try_from(number).unwrap()];
            while is_granted(&store.draw(&draw_of(&levels, 1)).await) {
                admitted += 1;
            }
        }
        for clock in &clocks {
            clock.advance(Duration::from_millis(100));
        }
    }
    // Four seconds passed, less the last tenth: burst + rate·(W + skew).
    let passed = 100 * (rounds - 1);
    let exact = 10 + 5 * passed / 1_000;
    assert!(admitted <= exact + 5 * 2, "{admitted} of {exact} and the ten that two seconds are worth");
    assert!(admitted >= exact, "{admitted} of {exact}: a clock that is behind denies for itself only");
}

#[tokio::test]
async fn clock_that_is_behind_only_denies() {
    skip_without!(ENGINE);
    let (stores, _) = two_seconds_apart().await;
    let levels = levels(&[("acme", &[Limit::per_second("rpm", 5).burst(10)])]);
    for _ in 0..10 {
        assert!(is_granted(&stores[1].draw(&draw_of(&levels, 1)).await));
    }
    for store in &stores {
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
    }
}

#[tokio::test]
async fn local_clock_is_used_within_the_engines_dates() {
    skip_without!(ENGINE);
    let store = made(options(ENGINE)).await;
    let before = HostWall.now();
    let seen = store.balances(&tidegate_store::Lookup::Subjects(Vec::new())).await.unwrap().at;
    let after = HostWall.now();
    assert!(before <= seen && seen <= after, "the engine is on this machine: {before} {seen} {after}");
}

/// Buckets are points in time by the callers' clocks, so a clock that is behind refuses and credits nothing.
#[tokio::test]
async fn flapping_clock_credits_elapsed_time_only() {
    skip_without!(ENGINE);
    let clock = ManualWall::new(START);
    let store = made(options(ENGINE).clock(clock.clone())).await;
    assert_eq!(granted_over_ten_flaps(&store, &clock).await, 30);
}
