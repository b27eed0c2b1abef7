//! A clock that steps back gives no credit and blocks no call, as in the SQLite store.

use std::time::Duration;

use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, ManualWall};

use crate::kit::clock::{assert_books_at_wall_clock, assert_follows_vectors, grants_over_ten_flaps, pass};
use crate::kit::common::{START, balance, draw_of, granted, is_granted, levels};
use crate::kit::engine::{POSTGRES, skip_without};
use crate::kit::postgres::{open, options, outside, url};

fn before(span: Duration) -> Stamp {
    Stamp::from_micros(START.as_micros() - u64::try_from(span.as_micros()).expect("a short time"))
}

#[tokio::test]
async fn large_step_back_re_anchors_without_credit() {
    skip_without!(POSTGRES);
    let clock = ManualWall::new(START);
    let options = options().clock(clock.clone());
    let store = open(options.clone()).await;
    let acme = levels(&[("acme", &[Limit::per_second("rpm", 1).burst(10)])]);
    let first = granted(store.draw(&draw_of(&acme, 10)).await).at;
    assert_eq!(first, START);
    clock.set(before(Duration::from_secs(3_600)));
    assert!(!is_granted(&store.draw(&draw_of(&acme, 1)).await), "a step back gives no credit");
    pass(&store, &clock, 3).await;
    // Another process uses the same time.
    let other = open(options).await;
    let later = granted(other.draw(&draw_of(&acme, 3)).await).at;
    assert_eq!(later, START + Duration::from_secs(3));
    assert_eq!(balance(&store, "acme").await, Some((0, 13)));
}

#[tokio::test]
async fn small_step_back_is_waited_out() {
    skip_without!(POSTGRES);
    let clock = ManualWall::new(START);
    let store = open(options().clock(clock.clone())).await;
    let acme = levels(&[("acme", &[Limit::per_second("rpm", 10).burst(10)])]);
    granted(store.draw(&draw_of(&acme, 10)).await);
    clock.set(before(Duration::from_millis(500)));
    let answer = store.draw(&draw_of(&acme, 1)).await;
    assert!(!is_granted(&answer));
    clock.set(START + Duration::from_millis(100));
    assert_eq!(granted(store.draw(&draw_of(&acme, 1)).await).at, START + Duration::from_millis(100));
}

#[tokio::test]
async fn server_clock_decides() {
    skip_without!(POSTGRES);
    let store = open(options()).await;
    let acme = levels(&[("acme", &[Limit::per_second("rpm", 10).burst(10)])]);
    let at = granted(store.draw(&draw_of(&acme, 1)).await).at;
    let outside = outside(&url()).await;
    let row =
        outside.query_one("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint", &[]).await;
    let now = Stamp::from_micros(row.unwrap().get::<_, i64>(0).unsigned_abs());
    assert!(at <= now && now.since(at) < Duration::from_secs(60));
}

#[tokio::test]
async fn clock_follows_the_vectors() {
    skip_without!(POSTGRES);
    assert_follows_vectors(async |clock| open(options().clock(clock.clone())).await).await;
}

#[tokio::test]
async fn flapping_clock_credits_elapsed_time_only() {
    skip_without!(POSTGRES);
    let clock = ManualWall::new(START);
    let store = open(options().clock(clock.clone())).await;
    assert_eq!(grants_over_ten_flaps(&store, &clock).await, 30);
}

#[tokio::test]
async fn usage_is_booked_at_the_wall_clock() {
    skip_without!(POSTGRES);
    let clock = ManualWall::new(START);
    let store = open(options().clock(clock.clone())).await;
    assert_books_at_wall_clock(&store, &clock).await;
}
