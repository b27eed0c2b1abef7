//! Clock skew between callers: the engine has no clock of its own.

use std::time::Duration;

use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, DynamoDb, HostWall, ManualWall, WallClock};

use super::ENGINE;
use crate::kit::clock::grants_over_ten_flaps;
use crate::kit::common::{draw_of, is_granted, levels};
use crate::kit::dynamodb::{START, open_new, options};
use crate::kit::engine::skip_without;

/// Two handles of one table whose clocks are two seconds apart.
async fn two_seconds_apart() -> ([DynamoDb; 2], [ManualWall; 2]) {
    let clocks = [START, START + Duration::from_secs(2)].map(ManualWall::new);
    let options = options(ENGINE);
    let one = open_new(options.clone().clock(clocks[0].clone())).await;
    let other = options.clock(clocks[1].clone()).open().await.expect("the table exists");
    ([one, other], clocks)
}

#[tokio::test]
async fn clock_skew_admits_no_more_than_its_refill() {
    skip_without!(ENGINE);
    let (stores, clocks) = two_seconds_apart().await;
    // A burst of ten, and five per second.
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
    assert!(admitted <= exact + 5 * 2, "{admitted} of {exact}, plus ten for two seconds of skew");
    assert!(admitted >= exact, "{admitted} of {exact}: a slow clock denies only its own caller");
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
    let store = open_new(options(ENGINE)).await;
    let before = HostWall.now();
    let seen = store.balances(&tidegate_store::Lookup::Subjects(Vec::new())).await.unwrap().at;
    let after = HostWall.now();
    assert!(before <= seen && seen <= after, "the engine is on this machine: {before} {seen} {after}");
}

/// Buckets are points in time by the callers' clocks, so a slow clock refuses and never credits.
#[tokio::test]
async fn flapping_clock_credits_elapsed_time_only() {
    skip_without!(ENGINE);
    let clock = ManualWall::new(START);
    let store = open_new(options(ENGINE).clock(clock.clone())).await;
    assert_eq!(grants_over_ten_flaps(&store, &clock).await, 30);
}
