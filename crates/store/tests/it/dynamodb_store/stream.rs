//! What leases have used is counted by whoever follows the stream: once, in the hour of the draw, whatever comes in between.
//!
//! Whoever asks a store for usage has it counted. So these look at the items of usage themselves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use tidegate_store::lifecycle::Lifecycle as _;
use tidegate_store::{
    AggregateOptions, Aggregated, Aggregator, Buckets as _, DynamoDb, DynamoDbOptions, ManualWall, Since,
    Store as _, StoreError,
};
use tokio::sync::{Notify, oneshot};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, options};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::words::{draw_of, eventually, granted, own, settle_of};

/// A table with a stream.
fn streamed() -> (String, DynamoDbOptions) {
    let table = unique("s");
    let options = options(ENGINE).of_table(&table).stream(true);
    (table, options)
}

/// More than anybody spends here, however fast the engine is.
const PLENTY: u64 = 30_000;

/// Reads from the oldest record on, and counts at once.
const FROM_OLDEST: AggregateOptions =
    AggregateOptions { since: Since::Oldest, every: Duration::from_millis(20), linger: Duration::ZERO };
/// Reads from now on, and counts at once.
const FROM_NOW: AggregateOptions = AggregateOptions { since: Since::Now, ..FROM_OLDEST };

fn worker(store: &DynamoDb, options: AggregateOptions) -> Arc<dyn Aggregator> {
    store.aggregator(&options).expect("a store in a table has one")
}

/// Has everything counted, and tells what was done.
async fn caught_up(store: &DynamoDb, options: AggregateOptions) -> Aggregated {
    let worker = worker(store, options);
    worker.catch_up().await.expect("there is a stream");
    let stats = worker.stats();
    assert!(stats.is_caught_up && stats.lag.is_zero(), "{stats:?}");
    stats
}

/// Draws and settles so many leases of one request, each at another entity in turn.
async fn spend(store: &DynamoDb, leases: usize, entities: usize) {
    for number in 0..leases {
        let draw = draw_of(&own(&format!("e{}", number % entities), PLENTY), 1);
        granted(store.draw(&draw).await);
        store.settle(&settle_of(&draw, 1)).await.expect("an open lease is settled");
    }
}

/// The items of usage by the hour, as they are in the table: key and requests.
async fn hours(table: &str) -> BTreeMap<String, u64> {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("eu-central-1"))
        .endpoint_url(address(ENGINE))
        .credentials_provider(Credentials::new("tidegate", "tidegate", None, None, "given"))
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    let scan = aws_sdk_dynamodb::Client::from_conf(config).scan().table_name(table).consistent_read(true);
    let items = scan.send().await.expect("the table is there").items.unwrap_or_default();
    let text = |item: &std::collections::HashMap<_, aws_sdk_dynamodb::types::AttributeValue>, name: &str| {
        item.get(name).and_then(|value| value.as_s().ok().cloned()).unwrap_or_default()
    };
    let usage = items.iter().filter(|item| text(item, "SK").contains("#hour#"));
    usage
        .map(|item| {
            let units = item["u:rpm"].as_n().expect("a number").parse().expect("whole");
            (format!("{} {}", text(item, "PK"), text(item, "SK")), units)
        })
        .collect()
}

async fn total(table: &str) -> u64 {
    hours(table).await.values().sum()
}

#[tokio::test]
async fn a_stream_that_is_read_again_from_its_beginning_counts_nothing_twice() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let store = made(options).await;
    spend(&store, 20, 3).await;
    assert_eq!(total(&table).await, 0, "nobody has counted yet");
    let first = caught_up(&store, FROM_OLDEST).await;
    assert_eq!((first.counted, first.lost, first.errors), (20, 0, 0), "{first:?}");
    assert!(first.records >= 40, "each draw and each end is a record: {first:?}");
    assert_eq!(total(&table).await, 20);
    let again = caught_up(&store, FROM_OLDEST).await;
    assert_eq!(again.counted, 0, "{again:?}");
    assert!(again.records >= first.records, "it has read all of it again");
    assert_eq!(total(&table).await, 20);
    spend(&store, 1, 1).await;
    assert_eq!(caught_up(&store, FROM_OLDEST).await.counted, 1);
    assert_eq!(total(&table).await, 21);
}

#[tokio::test]
async fn one_that_begins_now_finds_what_was_there_before() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let store = made(options).await;
    spend(&store, 12, 2).await;
    let stats = caught_up(&store, FROM_NOW).await;
    assert_eq!((stats.counted, stats.records), (12, 0), "{stats:?}");
    assert_eq!(total(&table).await, 12);
}

#[tokio::test]
async fn usage_is_in_the_hour_of_the_draw_and_not_of_the_counting() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let clock = ManualWall::new(START);
    let store = made(options.clock(clock.clone())).await;
    let draw = draw_of(&own("acme", 10), 3);
    granted(store.draw(&draw).await);
    clock.advance(Duration::from_secs(3_000));
    store.settle(&settle_of(&draw, 2)).await.unwrap();
    clock.advance(Duration::from_secs(18_000));
    assert_eq!(caught_up(&store, FROM_OLDEST).await.counted, 1);
    let expected = [("ENTITY#acme #USAGE#gpt#hour#2027-01-15T08:00:00Z".to_owned(), 2)];
    assert_eq!(hours(&table).await, BTreeMap::from(expected));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_at_once_and_those_who_draw_count_each_lease_once() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let stores = [made(options.clone()).await, options.open().await.unwrap()];
    spend(&stores[0], 10, 2).await;
    let workers: Vec<_> = stores.iter().map(|store| worker(store, FROM_OLDEST)).collect();
    let mut stops = Vec::new();
    let running = workers.iter().map(|worker| {
        let (stop, stopped) = oneshot::channel::<()>();
        stops.push(stop);
        let worker = Arc::clone(worker);
        tokio::spawn(async move { worker.run(Box::pin(async { drop(stopped.await) })).await })
    });
    let running: Vec<_> = running.collect();
    // While they count; of one entity, so that they meet.
    spend(&stores[1], 60, 2).await;
    eventually("all of it is counted", async || total(&table).await == 70).await;
    drop(stops);
    for run in running {
        run.await.unwrap().expect("a worker that is stopped ends well");
    }
    assert_eq!(total(&table).await, 70);
    let counted: u64 = workers.iter().map(|worker| worker.stats().counted).sum();
    assert!(counted <= 70, "{counted} of seventy");
    assert_eq!(caught_up(&stores[0], FROM_OLDEST).await.counted, 0);
    assert_eq!(total(&table).await, 70);
}

#[tokio::test]
async fn one_that_is_stopped_at_any_request_is_gone_on_with_and_nothing_is_lost_or_counted_twice() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options.endpoint(proxy.url())).await;
    let (mut spent, mut stopped_at) = (0, 0);
    for place in (0..).step_by(2) {
        spend(&store, 6, 3).await;
        spent += 6;
        let (notify, number) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let tell = Arc::clone(&notify);
        // It is done, and whoever asked does not live to hear of it.
        proxy.plan(move |_| {
            if number.fetch_add(1, Ordering::Relaxed) < place {
                return Fault::None;
            }
            tell.notify_one();
            Fault::Lost
        });
        let worker = worker(&store, FROM_OLDEST);
        let is_done = tokio::select! {
            biased;
            () = notify.notified() => false,
            answer = worker.catch_up() => answer.is_ok(),
        };
        proxy.plan(|_| Fault::None);
        assert!(total(&table).await <= spent, "stopped at request {place}");
        if is_done {
            break;
        }
        stopped_at = place;
    }
    assert!(stopped_at >= 10, "it was stopped on its way: {stopped_at}");
    caught_up(&store, FROM_OLDEST).await;
    assert_eq!(total(&table).await, spent);
}

#[tokio::test]
async fn an_engine_that_throttles_breaks_and_forgets_is_asked_again() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options.endpoint(proxy.url())).await;
    for code in [
        "LimitExceededException",
        "ThrottlingException",
        "InternalServerError",
        "ExpiredIteratorException",
        "TrimmedDataAccessException",
        "ResourceNotFoundException",
    ] {
        spend(&store, 4, 2).await;
        let mut reads = 0;
        proxy.plan(move |asked| {
            reads += u32::from(asked == "GetRecords");
            if asked == "GetRecords" && reads <= 2 { Fault::Refused(code) } else { Fault::None }
        });
        let stats = caught_up(&store, FROM_OLDEST).await;
        assert_eq!(stats.counted, 4, "{code}: {stats:?}");
        let is_tried_again = !code.starts_with(['E', 'R']) && !code.starts_with("Tri");
        assert_eq!(stats.errors > 0, is_tried_again, "{code}: {stats:?}");
    }
    proxy.plan(|_| Fault::None);
    assert_eq!(total(&table).await, 24);
}

#[tokio::test]
async fn what_does_not_pass_by_itself_ends_it_with_an_error() {
    skip_without!(ENGINE);
    let (_, options) = streamed();
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options.endpoint(proxy.url())).await;
    proxy.plan(|asked| match asked {
        "GetRecords" => Fault::Refused("AccessDeniedException"),
        _ => Fault::None,
    });
    let worker = worker(&store, FROM_NOW);
    let error = worker.run(Box::pin(std::future::pending())).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
    // And one that is away for good is not waited for by whoever wants to be done.
    proxy.plan(|_| Fault::Refused("ThrottlingException"));
    assert!(worker.catch_up().await.unwrap_err().is_transient());
}

#[tokio::test]
async fn the_lag_is_that_of_the_oldest_change_that_is_not_counted_and_goes_to_zero() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    // Callers that sweep would count leases before the worker does.
    let store = made(options.swept_every(Duration::from_secs(86_400))).await;
    let worker = worker(&store, AggregateOptions { linger: Duration::from_secs(3_600), ..FROM_NOW });
    let (stop, stopped) = oneshot::channel::<()>();
    let runs = Arc::clone(&worker);
    let run = tokio::spawn(async move { runs.run(Box::pin(async { drop(stopped.await) })).await });
    eventually("it follows", async || worker.stats().is_caught_up).await;
    let (mut spent, mut behind) = (0, None);
    // An engine may forget what was not read yet; then all is counted at once, and there is nothing to be behind with.
    eventually("it is behind", async || {
        spend(&store, 1, 1).await;
        spent += 1;
        behind = Some(worker.stats()).filter(|stats| stats.lag > Duration::ZERO);
        behind.is_some()
    })
    .await;
    let behind = behind.unwrap();
    assert!(!behind.is_caught_up && behind.newest.is_some(), "{behind:?}");
    stop.send(()).unwrap();
    run.await.unwrap().unwrap();
    // With as many marks in a bucket whoever spends counts them too, and may have been faster.
    assert!(worker.stats().counted > 0 || spent >= 48, "stopped, it counts what it has heard of");
    worker.catch_up().await.unwrap();
    assert!(worker.stats().lag.is_zero() && worker.stats().is_caught_up, "{:?}", worker.stats());
    assert_eq!(total(&table).await, spent);
}

#[tokio::test]
async fn it_follows_and_counts_as_changes_come_while_the_engine_is_away_now_and_then() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options.clone()).await;
    let watched = options.endpoint(proxy.url()).open().await.unwrap();
    let is_away = Arc::new(AtomicBool::new(false));
    let plan = Arc::clone(&is_away);
    proxy.plan(move |_| {
        if plan.load(Ordering::Relaxed) { Fault::Refused("InternalServerError") } else { Fault::None }
    });
    let worker = worker(&watched, FROM_NOW);
    let (stop, stopped) = oneshot::channel::<()>();
    let runs = Arc::clone(&worker);
    let run = tokio::spawn(async move { runs.run(Box::pin(async { drop(stopped.await) })).await });
    for round in 1..=3 {
        eventually("it follows", async || worker.stats().is_caught_up).await;
        assert_eq!(worker.stats().lag, Duration::ZERO);
        let errors = worker.stats().errors;
        is_away.store(true, Ordering::Relaxed);
        spend(&store, 5, 2).await;
        eventually("it fails, and what it cannot read it does not know", async || {
            let stats = worker.stats();
            stats.errors > errors && !stats.is_caught_up
        })
        .await;
        is_away.store(false, Ordering::Relaxed);
        eventually("it is counted", async || total(&table).await == 5 * round).await;
    }
    drop(stop);
    run.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_table_without_a_stream_is_an_error_that_says_how_to_get_one() {
    skip_without!(ENGINE);
    let table = unique("s");
    let options = options(ENGINE).of_table(&table).stream(false);
    let store = made(options.clone()).await;
    let worker = worker(&store, FROM_NOW);
    for answer in [worker.catch_up().await, worker.run(Box::pin(std::future::pending())).await] {
        let error = answer.unwrap_err();
        assert!(matches!(error, StoreError::Invalid { .. }) && !error.is_transient(), "{error}");
        assert!(error.to_string().contains("`tidegate store init` adds one"), "{error}");
    }
    spend(&store, 2, 1).await;
    // As it says.
    options.stream(true).lifecycle().unwrap().init().await.unwrap();
    assert_eq!(caught_up(&store, FROM_NOW).await.counted, 2);
    assert_eq!(total(&table).await, 2);
}

#[tokio::test]
async fn a_worker_counts_its_own_namespace_and_leaves_others_alone() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let store = made(options.clone()).await;
    let other = options.namespace("prod").open().await.unwrap();
    spend(&store, 3, 1).await;
    spend(&other, 4, 1).await;
    assert_eq!(caught_up(&other, FROM_OLDEST).await.counted, 4);
    let there: Vec<u64> = hours(&table).await.into_values().collect();
    assert_eq!(there, [4], "one item, of the other namespace");
    assert_eq!(caught_up(&store, FROM_OLDEST).await.counted, 3);
    assert_eq!(total(&table).await, 7);
}

#[tokio::test]
async fn a_bucket_that_many_leases_end_in_is_counted_in_few_writes() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options.endpoint(proxy.url())).await;
    spend(&store, 40, 1).await;
    proxy.asked();
    assert_eq!(caught_up(&store, FROM_OLDEST).await.counted, 40);
    let writes = proxy.asked().iter().filter(|asked| *asked == "TransactWriteItems").count();
    assert!((1..=2).contains(&writes), "{writes} transactions for forty leases of one bucket");
    assert_eq!(total(&table).await, 40);
}

#[tokio::test]
async fn whoever_wants_to_be_done_is_done_though_records_come_all_the_time() {
    skip_without!(ENGINE);
    let (table, options) = streamed();
    let store = made(options).await;
    spend(&store, 10, 2).await;
    // More than one for each look of the worker.
    let busy = async {
        loop {
            spend(&store, 1, 1).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let worker = worker(&store, FROM_OLDEST);
    tokio::select! {
        () = busy => {}
        // Amazon dates records to the second, and its local server to the minute.
        done = tokio::time::timeout(Duration::from_secs(300), worker.catch_up()) => {
            done.expect("it ends").expect("there is a stream");
        }
    }
    assert!(total(&table).await >= 10);
}
