//! Many processes at one bucket: its item holds no more marks than one process alone would leave in it.
//!
//! Each of them saw its own marks and those that were there when it last read the item. Ten of them had ten times as many open
//! leases in it as there may be, and counted those that had ended ten times as late.

use std::time::Duration;

use tidegate_store::{Buckets as _, DynamoDb};

use super::ENGINE;
use crate::kit::dynamodb::{made, options};
use crate::kit::dynamodb_items::Hand;
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;
use crate::kit::words::{
    draw_of, eventually, granted, is_granted, own, settle_of, shows, until_answered, used,
};

async fn handles(count: usize) -> Vec<DynamoDb> {
    let options = options(ENGINE);
    let mut handles = vec![made(options.clone()).await];
    while handles.len() < count {
        handles.push(options.clone().open().await.expect("the table is there"));
    }
    handles
}

async fn marks(hand: &Hand, kind: &str) -> usize {
    hand.item("acme").await.into_keys().filter(|name| name.starts_with(kind)).count()
}

#[tokio::test]
async fn an_item_has_no_more_open_leases_than_it_may_whoever_draws_them() {
    skip_without!(ENGINE);
    let handles = handles(5).await;
    let (hand, levels) = (Hand::on(ENGINE, &handles[0]), own("acme", 1_000));
    let draws: Vec<_> = (0..150).map(|_| draw_of(&levels, 1)).collect();
    for (number, draw) in draws.iter().enumerate() {
        granted(handles[number % 5].draw(draw).await);
        assert!(marks(&hand, "o:").await <= 64, "after {number}");
    }
    assert_eq!(shows(&handles[0], "acme").await, Some((850, 150)));
    for (number, draw) in draws.iter().enumerate() {
        // By others than those who drew them.
        handles[(number + 1) % 5].settle(&settle_of(draw, 1)).await.expect("it is open");
    }
    assert_eq!(shows(&handles[0], "acme").await, Some((850, 150)));
    assert_eq!(used(&handles[0], "acme").await, 150);
    // What has ended leaves room.
    granted(handles[0].draw(&draw_of(&levels, 1)).await);
    granted(handles[0].draw(&draw_of(&levels, 1)).await);
    assert!(marks(&hand, "o:").await >= 1);
}

#[tokio::test]
async fn what_has_ended_is_counted_in_time_whoever_ended_it() {
    skip_without!(ENGINE);
    let handles = handles(4).await;
    let (hand, levels) = (Hand::on(ENGINE, &handles[0]), own("acme", 1_000));
    for number in 0..60 {
        let draw = draw_of(&levels, 1);
        granted(handles[number % 4].draw(&draw).await);
        handles[number % 4].settle(&settle_of(&draw, 1)).await.expect("it is open");
    }
    eventually("most of them are counted", async || marks(&hand, "e:").await < 48).await;
    assert_eq!(used(&handles[0], "acme").await, 60);
}

#[tokio::test]
async fn marks_that_nobody_can_count_are_no_more_than_an_item_holds() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = options(ENGINE).endpoint(proxy.url());
    let store = made(options.clone()).await;
    let hasty = options.timeout(Duration::from_secs(5));
    let hasty = until_answered(|| hasty.clone().open()).await.expect("the table is there");
    let (hand, levels) = (Hand::on(ENGINE, &store), own("acme", 1_000));
    proxy.plan(|asked| match asked {
        "TransactWriteItems" => Fault::Refused("ThrottlingException"),
        _ => Fault::None,
    });
    let mut spent = 0_u64;
    while is_granted(&hasty.spend(&draw_of(&levels, 1)).await) {
        spent += 1;
        assert!(spent <= 256, "no end of marks");
    }
    assert!(marks(&hand, "e:").await <= 256);
    proxy.plan(|_| Fault::None);
    granted(store.spend(&draw_of(&levels, 1)).await);
    assert!(used(&store, "acme").await > spent);
}
