//! Many processes on one bucket: the bounds of its item hold for all of them together.

use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_store::{Buckets as _, DynamoDb, DynamoDbOptions, ManualWall, Terms};

use super::ENGINE;
use crate::kit::common::{
    balance, draw_of, draw_on, eventually, granted, is_granted, join_all, own, settle_of, until_answered,
    used,
};
use crate::kit::dynamodb::{START, open_new, options, unswept};
use crate::kit::dynamodb_items::RawTable;
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::{DYNAMODB, skip_without};

async fn handles(count: usize) -> Vec<DynamoDb> {
    let options = options(ENGINE);
    let mut handles = vec![open_new(options.clone()).await];
    while handles.len() < count {
        handles.push(options.clone().open().await.expect("the table exists"));
    }
    handles
}

async fn mark_count(raw: &RawTable, kind: &str) -> usize {
    raw.item("acme").await.into_keys().filter(|name| name.starts_with(kind)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn item_is_full_with_a_thousand_open_leases() {
    skip_without!(ENGINE);
    let handles = handles(4).await;
    let (raw, levels) = (RawTable::on(ENGINE, &handles[0]), own("acme", 2_000));
    let draws: Vec<_> = (0..1_010).map(|_| draw_of(&levels, 1)).collect();
    let (mut taken, mut full) = (Vec::new(), 0);
    for draws in draws.chunks(8) {
        let replies = draws.iter().zip(0..).map(|(draw, number)| handles[number % 4].draw(draw)).collect();
        for (draw, answer) in draws.iter().zip(join_all(replies).await) {
            match answer {
                Err(error) => {
                    let expected = "the store is full: 1000 open leases";
                    assert!(error.to_string().starts_with(expected), "{error}");
                    full += 1;
                }
                granted if is_granted(&granted) => taken.push(draw),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((taken.len(), full, mark_count(&raw, "o:").await), (1_000, 10, 1_000));
    assert_eq!(balance(&handles[0], "acme").await, Some((1_000, 1_000)), "a refused draw takes nothing");
    let bytes: usize = raw
        .item("acme")
        .await
        .iter()
        .map(|(name, value)| name.len() + value.as_s().map_or(20, String::len))
        .sum();
    assert!(bytes < 200_000, "{bytes} of the 400 KB that an item may have");
    // Settled by another process than the one that drew it.
    handles[1].settle(&settle_of(taken[0], 1)).await.expect("the lease is open");
    granted(handles[2].draw(&draw_of(&levels, 1)).await);
    assert_eq!(used(&handles[0], "acme").await, 1);
}

#[tokio::test]
async fn ends_by_all_processes_are_counted_in_time() {
    skip_without!(ENGINE);
    let handles = handles(4).await;
    let (raw, levels) = (RawTable::on(ENGINE, &handles[0]), own("acme", 1_000));
    for number in 0..60 {
        let draw = draw_of(&levels, 1);
        granted(handles[number % 4].draw(&draw).await);
        handles[number % 4].settle(&settle_of(&draw, 1)).await.expect("the lease is open");
    }
    eventually("most ends are counted", async || mark_count(&raw, "e:").await < 48).await;
    assert_eq!(used(&handles[0], "acme").await, 60);
}

#[tokio::test]
async fn item_holds_256_ends_that_cannot_be_counted() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = options(ENGINE).endpoint(proxy.url());
    let store = open_new(options.clone()).await;
    let impatient = options.timeout(Duration::from_secs(5));
    let impatient = until_answered(|| impatient.clone().open()).await.expect("the table exists");
    let (raw, levels) = (RawTable::on(ENGINE, &store), own("acme", 1_000));
    proxy.plan(|operation| match operation {
        "TransactWriteItems" => Fault::Refused("ThrottlingException"),
        _ => Fault::None,
    });
    let mut spent = 0_u64;
    while is_granted(&impatient.spend(&draw_of(&levels, 1)).await) {
        spent += 1;
        assert!(spent <= 256, "marks are not bounded");
    }
    assert!(mark_count(&raw, "e:").await <= 256);
    proxy.plan(|_| Fault::None);
    granted(store.spend(&draw_of(&levels, 1)).await);
    assert!(used(&store, "acme").await > spent);
}

/// Regression: each mark is a condition of the transaction that counts it, and a condition has at most 4 KB. Old
/// marks, which leave no tombstone, were all counted in one.
#[tokio::test]
async fn hundreds_of_old_ends_are_counted() {
    skip_without!(DYNAMODB);
    let clock = ManualWall::new(START);
    let store = open_new(options(DYNAMODB).clock(clock.clone())).await;
    let (raw, levels) = (RawTable::on(DYNAMODB, &store), own("acme", 1_000));
    granted(store.spend(&draw_of(&levels, 1)).await);
    let item = raw.item("acme").await;
    let mark = item.iter().find(|(name, _)| name.starts_with("e:")).expect("a mark").1;
    for number in 1..300 {
        let lease = LeaseId::new(START.as_micros() / 1_000, number);
        raw.set("acme", &format!("e:{lease}"), mark.clone()).await;
    }
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(used(&store, "acme").await, 300);
    assert_eq!(mark_count(&raw, "e:").await, 0);
}

/// An unswept store whose clock the test sets, and so many leases of a minute.
async fn with_leases(options: &DynamoDbOptions, entities: &[&str], count: usize) -> DynamoDb {
    let store = open_new(options.clone()).await;
    let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
    for entity in entities {
        let levels = own(entity, 2_000);
        let draws: Vec<_> = (0..count).map(|_| draw_on(terms, &levels, 1)).collect();
        for draws in draws.chunks(8) {
            for drawn in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
                granted(drawn);
            }
        }
    }
    store
}

/// Regression: a thousand leases past their deadline refused every draw until a sweep had ended them.
#[tokio::test(flavor = "multi_thread")]
async fn expired_leases_make_space_in_a_full_item() {
    skip_without!(ENGINE);
    let clock = ManualWall::new(START);
    let store = with_leases(&unswept(ENGINE).clock(clock.clone()), &["acme"], 1_000).await;
    let (raw, levels) = (RawTable::on(ENGINE, &store), own("acme", 2_000));
    let error = store.draw(&draw_of(&levels, 1)).await.expect_err("the item is full");
    assert!(error.to_string().starts_with("the store is full: 1000 open leases"), "{error}");
    clock.advance(Duration::from_secs(61));
    granted(store.draw(&draw_of(&levels, 1)).await);
    assert_eq!(mark_count(&raw, "o:").await, 1_000 - 16 + 1);
    assert_eq!(balance(&store, "acme").await, Some((2_000 - 984 - 1, 985)));
}

/// Regression: a sweep in the background ended at most 100 leases, and the next one began five seconds later.
#[tokio::test]
async fn one_sweep_ends_all_leases_that_are_due() {
    skip_without!(ENGINE);
    let clock = ManualWall::new(START);
    let options = unswept(ENGINE).clock(clock.clone());
    let store = with_leases(&options, &["acme", "globex", "initech"], 50).await;
    let raw = RawTable::on(ENGINE, &store);
    let sweeping = options.swept_every(Duration::ZERO).open().await.expect("the table exists");
    clock.advance(Duration::from_secs(61));
    // It starts one sweep.
    granted(sweeping.draw(&draw_of(&own("other", 10), 1)).await);
    let marks = async || {
        let items = raw.items("ENTITY#").await;
        items.iter().flat_map(|item| item.keys()).filter(|name| name.starts_with("o:")).count()
    };
    eventually("the sweep has ended them", async || marks().await == 1).await;
    for entity in ["acme", "globex", "initech"] {
        assert_eq!(balance(&store, entity).await, Some((2_000, 0)), "{entity}");
    }
}
