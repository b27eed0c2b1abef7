//! Batching: steps of many callers share one call to the server.

use std::collections::BTreeMap;
use std::future::Future as _;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets as _, Draw, DrawResult, Lookup, Movement, Redis, Settle, StoreError};
use tokio::task::{JoinHandle, yield_now};

use crate::kit::common::until_answered;
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{
    NEVER_SWEPT, ask, connect, draw, granted, levels, options_at, settle, slow, subject,
};

/// Concurrent calls: later steps queue and share a call.
const UNDER_WAY: u64 = 2;

/// A store behind a proxy that can stall, and limits that keep it busy.
struct Rig {
    server: Server,
    proxy: Proxy,
    store: Arc<Redis>,
    busy: Arc<Levels>,
}

impl Rig {
    async fn open() -> Self {
        Self::on(Server::start(&[]).await).await
    }

    /// A server without disk syncs, for tests with a frozen clock.
    async fn open_fast() -> Self {
        Self::on(Server::start_with(&[]).await).await
    }

    async fn on(server: Server) -> Self {
        let proxy = Proxy::to(local(server.port)).await;
        let opened = options_at(&proxy.redis()).swept_every(NEVER_SWEPT).open().await;
        let store = Arc::new(opened.expect("the server responds"));
        let busy = levels(1, &[("busy", &[Limit::per_minute("rpm", 1_000_000)])]);
        let rig = Self { server, proxy, store, busy };
        rig.warm_up(&[&rig.busy]).await;
        rig
    }

    /// Known subjects go with their first step, and a loaded script is not sent along.
    async fn warm_up(&self, all: &[&Arc<Levels>]) {
        for levels in all {
            granted(self.store.spend(&zero_draw(levels)).await);
        }
    }

    async fn connection(&self) -> MultiplexedConnection {
        connect(&self.server.url()).await
    }

    /// Stalls the proxy with the maximum of calls under way.
    async fn hold(&self) -> Vec<JoinHandle<Result<DrawResult, StoreError>>> {
        self.proxy.hold(true);
        let mut busy = Vec::new();
        for _ in 0..UNDER_WAY {
            busy.push(self.spend(draw(&self.busy, &[("rpm", 1)])));
            // Calls that come together would share a batch.
            yield_to_tasks().await;
        }
        busy
    }

    fn spend(&self, step: Draw) -> JoinHandle<Result<DrawResult, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.spend(&step).await })
    }

    fn draw(&self, step: Draw) -> JoinHandle<Result<DrawResult, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.draw(&step).await })
    }

    fn settle(&self, step: Settle) -> JoinHandle<Result<DrawResult, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.settle(&step).await.map(DrawResult::Granted) })
    }

    async fn consumed(&self, entity: &str) -> i64 {
        let seen = self.store.balances(&Lookup::Subjects(vec![subject(entity)])).await;
        seen.expect("balances are returned")
            .buckets
            .iter()
            .flat_map(|bucket| &bucket.meters)
            .map(Meter::consumed)
            .sum()
    }
}

/// Draws zero of every limit, so that all of them exist.
fn zero_draw(levels: &Arc<Levels>) -> Draw {
    let none: Vec<_> = levels.names().iter().map(|name| (name.as_str(), 0)).collect();
    Draw { units: levels.amounts(&none).expect("valid amounts"), ..draw(levels, &[(none[0].0, 1)]) }
}

/// Lets every started task run until it waits: the runtime has one thread.
async fn yield_to_tasks() {
    for _ in 0..20 {
        yield_now().await;
    }
}

async fn join_tasks<T>(calls: Vec<JoinHandle<T>>) -> Vec<T> {
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.expect("no caller panics"));
    }
    answers
}

async fn script_calls(connection: &mut MultiplexedConnection) -> u64 {
    let stats: String = ask(connection, &["INFO", "commandstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

#[tokio::test]
async fn sixty_four_concurrent_draws_are_four_calls() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000), slow("tpm", 1_000)])]);
    rig.warm_up(&[&levels]).await;
    let mut connection = rig.connection().await;
    ask::<String>(&mut connection, &["CONFIG", "RESETSTAT"]).await;
    let mut calls = rig.hold().await;
    calls.extend((0..62).map(|_| rig.spend(draw(&levels, &[("rpm", 1), ("tpm", 7)]))));
    yield_to_tasks().await;
    rig.proxy.hold(false);
    let mut at: Vec<Stamp> = join_tasks(calls).await.into_iter().map(granted).map(|moved| moved.at).collect();
    assert_eq!(
        script_calls(&mut connection).await,
        4,
        "two single calls, one batch of 32, and one of the rest"
    );
    at.dedup();
    assert!(at.len() <= 4, "a batch is decided at one time: {at:?}");
    assert_eq!(rig.consumed("acme").await, 62 * 8);
}

#[tokio::test]
async fn unpolled_callers_do_not_block_others() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    rig.warm_up(&[&levels]).await;
    let steps: Vec<_> = (0..8).map(|_| draw(&levels, &[("rpm", 1)])).collect();
    let mut unpolled: Vec<_> = steps.iter().map(|step| Box::pin(rig.store.spend(step))).collect();
    for call in &mut unpolled {
        // Each call was polled once, and is not polled again.
        assert!(std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await.is_pending());
    }
    granted(rig.store.spend(&draw(&levels, &[("rpm", 1)])).await);
    for call in unpolled {
        granted(call.await);
    }
    assert_eq!(rig.consumed("acme").await, 9);
}

#[test]
fn idle_runtimes_do_not_block_calls() {
    skip_without!(REDIS_SERVER);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let opened = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = opened.block_on(Server::start(&[]));
    let store = opened.block_on(options_at(&server.url()).open()).unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    opened.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    // Each runtime stops being polled when its caller has an answer.
    let idle: Vec<_> = (0..5).map(|_| runtime()).collect();
    for idle in &idle {
        idle.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    }
    for _ in 0..5 {
        opened.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    }
}

#[tokio::test]
async fn failed_step_does_not_affect_its_batch() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let names: Vec<String> = (0..20).map(|number| format!("user-{number}")).collect();
    let limits = [slow("rpm", 5)];
    let all_levels: Vec<_> = names.iter().map(|name| levels(1, &[(name.as_str(), &limits)])).collect();
    rig.warm_up(&all_levels.iter().collect::<Vec<_>>()).await;
    let mut connection = rig.connection().await;
    ask::<i64>(&mut connection, &["DEL", "tidegate:{default}:b:user-7#gpt"]).await;
    ask::<i64>(&mut connection, &["LPUSH", "tidegate:{default}:b:user-7#gpt", "a list"]).await;
    ask::<String>(&mut connection, &["SET", "tidegate:{default}:b:user-8#gpt", "foreign"]).await;
    for is_watched in [true, false] {
        let busy = rig.hold().await;
        let cost = |number| if number == 3 { 6 } else { 1 };
        let calls = all_levels
            .iter()
            .enumerate()
            .map(|(number, levels)| rig.spend(Draw { is_watched, ..draw(levels, &[("rpm", cost(number))]) }));
        let calls: Vec<_> = calls.collect();
        yield_to_tasks().await;
        rig.proxy.hold(false);
        for (number, answer) in join_tasks(calls).await.into_iter().enumerate() {
            match number {
                3 => assert!(matches!(answer, Ok(DrawResult::Refused(_))), "{answer:?}"),
                7 | 8 => assert!(matches!(answer, Err(StoreError::Corrupt { .. })), "{number}: {answer:?}"),
                _ => assert_eq!(granted(answer).readings.len(), usize::from(is_watched), "{number}"),
            }
        }
        join_tasks(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
    assert_eq!((rig.consumed("user-3").await, rig.consumed("user-4").await), (0, 2));
}

#[tokio::test]
async fn batched_draws_take_exactly_the_limit() {
    skip_without!(REDIS_SERVER);
    for is_watched in [true, false] {
        let rig = Rig::open().await;
        let limits = [slow("rpm", 12)];
        let users = ["a", "b"].map(|user| levels(1, &[(user, &[slow("rpm", 100)]), ("team", &limits)]));
        rig.warm_up(&users.iter().collect::<Vec<_>>()).await;
        let busy = rig.hold().await;
        let step = |number: usize| Draw { is_watched, ..draw(&users[number % 2], &[("rpm", 1)]) };
        let calls: Vec<_> = (0..20)
            .map(|number| match number % 4 {
                0 | 1 => rig.spend(step(number)),
                _ => rig.draw(step(number)),
            })
            .collect();
        yield_to_tasks().await;
        rig.proxy.hold(false);
        let answers = join_tasks(calls).await;
        let count = answers.iter().filter(|answer| matches!(answer, Ok(DrawResult::Granted(_)))).count();
        assert_eq!(count, 12);
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(rig.consumed("team").await, 12);
        assert_eq!(rig.consumed("a").await + rig.consumed("b").await, 12);
        join_tasks(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
}

#[tokio::test]
async fn dropped_queued_call_is_not_charged() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    rig.warm_up(&[&levels]).await;
    let busy = rig.hold().await;
    let leaving: Vec<_> = (0..5).map(|_| rig.spend(draw(&levels, &[("rpm", 10)]))).collect();
    let staying: Vec<_> = (0..3).map(|_| rig.spend(draw(&levels, &[("rpm", 1)]))).collect();
    yield_to_tasks().await;
    // A queued caller leaves, and so does one whose call is under way.
    leaving.iter().chain(&busy[..1]).for_each(JoinHandle::abort);
    yield_to_tasks().await;
    rig.proxy.hold(false);
    join_tasks(staying).await.into_iter().for_each(|answer| drop(granted(answer)));
    assert_eq!(rig.consumed("acme").await, 3);
    granted(rig.store.spend(&draw(&levels, &[("rpm", 1)])).await);
    assert_eq!(rig.consumed("acme").await, 4);
}

#[tokio::test]
async fn duplicate_lease_in_a_batch_is_charged_once() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    rig.warm_up(&[&levels]).await;
    for is_watched in [true, false] {
        let busy = rig.hold().await;
        let step = Draw { is_watched, ..draw(&levels, &[("rpm", 10)]) };
        let spent = Draw { is_watched, ..draw(&levels, &[("rpm", 10)]) };
        let exact = Settle { is_watched, ..settle(&step, &[]) };
        let calls = vec![
            rig.draw(step.clone()),
            rig.draw(step.clone()),
            rig.spend(spent.clone()),
            rig.spend(spent),
            rig.settle(exact.clone()),
            rig.settle(exact),
        ];
        yield_to_tasks().await;
        rig.proxy.hold(false);
        let again: Vec<bool> =
            join_tasks(calls).await.into_iter().map(|answer| granted(answer).is_repeat).collect();
        assert_eq!(again.iter().filter(|again| **again).count(), 3, "{again:?}");
        join_tasks(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
    assert_eq!(rig.consumed("acme").await, 40);
    let open: u64 = ask(&mut rig.connection().await, &["ZCARD", "tidegate:{default}:open"]).await;
    assert_eq!(open, 0);
}

#[tokio::test]
async fn retried_batch_with_a_cut_reply_is_charged_once() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10_000)])]);
    rig.warm_up(&[&levels]).await;
    // Until enough replies were cut: which replies share a packet is up to the server.
    let (mut errors, mut rounds) = (0, 0);
    while rounds < 20 || errors < 10 {
        let busy = rig.hold().await;
        let steps: Vec<Draw> = (0..10).map(|_| draw(&levels, &[("rpm", 1)])).collect();
        let calls: Vec<_> = steps.iter().map(|step| rig.spend(step.clone())).collect();
        yield_to_tasks().await;
        // Cuts one of the earlier replies, or the reply of this batch.
        rig.proxy.cut_after(rounds % 20 * 90);
        rig.proxy.hold(false);
        for (answer, step) in join_tasks(calls).await.into_iter().zip(steps) {
            let mut answer = answer;
            while let Err(error) = &answer {
                assert!(error.is_transient(), "{error}");
                errors += 1;
                answer = rig.store.spend(&step).await;
            }
            granted(answer);
        }
        join_tasks(busy).await;
        rig.proxy.cut_after(u64::MAX);
        rounds += 1;
    }
    assert_eq!(rig.consumed("acme").await, i64::try_from(rounds * 10).unwrap());
}

#[tokio::test]
async fn queued_calls_time_out() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let proxy = Proxy::to(local(server.port)).await;
    let impatient = options_at(&proxy.redis()).timeout(Duration::from_millis(300));
    let store = Arc::new(until_answered(|| impatient.clone().open()).await.unwrap());
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    let first = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| store.spend(&first)).await);
    proxy.hold(true);
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let (store, step) = (Arc::clone(&store), draw(&levels, &[("rpm", 1)]));
            tokio::spawn(async move { store.spend(&step).await })
        })
        .collect();
    for answer in join_tasks(calls).await {
        let error = answer.expect_err("the proxy is stalled");
        assert!(error.is_transient(), "{error}");
    }
    proxy.hold(false);
    let last = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| store.spend(&last)).await);
}

/// All keys of a namespace except its clock.
async fn stored_keys(
    connection: &mut MultiplexedConnection,
    namespace: &str,
) -> BTreeMap<String, Vec<Vec<u8>>> {
    let prefix = format!("tidegate:{{{namespace}}}:");
    let keys: Vec<String> = ask(connection, &["KEYS", &format!("{prefix}[beluo]*")]).await;
    let mut found = BTreeMap::new();
    for key in keys {
        let name = key[prefix.len()..].to_owned();
        let call: &[&str] = match name.as_bytes()[0] {
            b'e' | b'u' => &["HGETALL", &key],
            b'o' => &["ZRANGE", &key, "0", "-1", "WITHSCORES"],
            _ => &["MGET", &key],
        };
        let values: Vec<Vec<u8>> = ask(connection, call).await;
        if name.starts_with("e:") {
            // Each separately: the id determines its key.
            for ended in values.chunks(2) {
                found.insert(format!("l:{}", String::from_utf8_lossy(&ended[0])), ended[1..].to_vec());
            }
        } else {
            found.insert(name, values);
        }
    }
    found
}

/// The script waits out a time slightly ahead of the server's: every call until then happens at that time. An
/// offset that is set and reset selects the slow path.
async fn freeze_clock(
    connection: &mut MultiplexedConnection,
    at: Stamp,
    namespace: &str,
    is_slow_path: bool,
) {
    let (ahead, back) = if is_slow_path { (-1.0, 1_000_000.0) } else { (0.0, 0.0) };
    let seconds = f64::from(u32::try_from(at.as_micros() / 1_000_000).expect("a second that fits"));
    let micros = f64::from(u32::try_from(at.as_micros() % 1_000_000).expect("below a million"));
    let kept: Vec<u8> = [seconds, micros, ahead, back].into_iter().flat_map(f64::to_le_bytes).collect();
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(connection).await.expect("the server responds");
}

#[tokio::test]
async fn batch_matches_sequential_slow_path() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open_fast().await;
    let sequential = options_at(&rig.server.url()).namespace("sequential").open().await.unwrap();
    let mut connection = rig.connection().await;
    let mut random = Random::seeded(0x7060);
    let limits = [slow("rpm", 9_000), Limit::per_minute("tpm", 7_000).burst(900_000), slow("usd", 3_000)];
    let rows: [(&str, &[Limit]); 3] = [("user", &limits), ("team", &limits[..2]), ("org", &limits[1..])];
    let all_levels: Vec<_> = (1..=3).map(|count| levels(1, &rows[..count])).collect();
    rig.warm_up(&all_levels.iter().collect::<Vec<_>>()).await;
    for levels in &all_levels {
        granted(sequential.spend(&zero_draw(levels)).await);
    }
    let mut compared = 0;
    while compared < 12 {
        ask::<String>(&mut connection, &["FLUSHALL"]).await;
        let seconds: Vec<u64> = ask(&mut connection, &["TIME"]).await;
        let at = Stamp::from_micros(seconds[0] * 1_000_000 + seconds[1] + 950_000);
        freeze_clock(&mut connection, at, "default", false).await;
        freeze_clock(&mut connection, at, "sequential", true).await;
        // Creates the rows in one order.
        let first = draw(&all_levels[2], &[("rpm", 1), ("tpm", 3), ("usd", 2)]);
        let drawn_first = draw(&all_levels[1], &[("rpm", 2), ("tpm", 5)]);
        for store in [&*rig.store, &sequential] {
            granted(store.spend(&first).await);
            granted(store.draw(&drawn_first).await);
        }
        let busy = rig.hold().await;
        let (mut calls, mut answers) = (Vec::new(), Vec::new());
        calls.push(rig.settle(Settle { is_watched: false, ..settle(&drawn_first, &[]) }));
        answers.push(sequential.settle(&settle(&drawn_first, &[])).await.map(DrawResult::Granted));
        for number in 0..24 {
            let levels = &all_levels[usize::try_from(random.below(3)).unwrap()];
            // Many costs are equal.
            let cost = [("rpm", 1), ("tpm", 700 * random.below(2)), ("usd", random.below(2))];
            // A few exceed the burst.
            let cost = if random.below(6) == 0 { [("rpm", 9_500), cost[1], cost[2]] } else { cost };
            let named = 1 + usize::try_from(random.below(3)).unwrap();
            let named = named.min(levels.names().len());
            let step = Draw { is_watched: random.below(2) == 0, ..draw(levels, &cost[..named]) };
            if number % 2 == 0 {
                answers.push(sequential.draw(&step).await);
                calls.push(rig.draw(step));
            } else {
                answers.push(sequential.spend(&step).await);
                calls.push(rig.spend(step));
            }
        }
        yield_to_tasks().await;
        rig.proxy.hold(false);
        let together = join_tasks(calls).await;
        join_tasks(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
        let (one, other) =
            (stored_keys(&mut connection, "sequential").await, stored_keys(&mut connection, "default").await);
        let mut times = Vec::new();
        for (one, other) in answers.iter().zip(&together) {
            let (one, other) = match (one, other) {
                (Ok(DrawResult::Granted(one)), Ok(DrawResult::Granted(other)))
                | (Ok(DrawResult::Refused(one)), Ok(DrawResult::Refused(other))) => (one, other),
                other => panic!("{other:?}"),
            };
            times.extend([one.at, other.at]);
        }
        // On a busy machine the clock may have moved on: try again.
        if times.iter().all(|time| *time == at) {
            compared += 1;
            let mut other = other;
            other.retain(|key, _| !key.contains("busy"));
            let leases =
                |all: &BTreeMap<String, Vec<Vec<u8>>>| all.keys().filter(|key| key.starts_with("l:")).count();
            assert_eq!(leases(&other), leases(&one) + usize::try_from(UNDER_WAY).unwrap());
            other.retain(|key, _| !key.starts_with("l:") || one.contains_key(key));
            assert_eq!(one, other);
        }
    }
}

#[tokio::test]
async fn equal_draws_in_a_batch_match_sequential_draws() {
    skip_without!(REDIS_SERVER);
    let rig = Rig::open_fast().await;
    let sequential = options_at(&rig.server.url()).namespace("sequential").open().await.unwrap();
    let mut connection = rig.connection().await;
    let limits = [slow("rpm", 900), Limit::per_minute("tpm", 7_000).burst(900_000)];
    let levels = levels(1, &[("user", &limits), ("team", &limits[1..])]);
    for store in [&*rig.store, &sequential] {
        granted(store.spend(&zero_draw(&levels)).await);
    }
    let mut compared = 0;
    while compared < 4 {
        let seconds: Vec<u64> = ask(&mut connection, &["TIME"]).await;
        let at = Stamp::from_micros(seconds[0] * 1_000_000 + seconds[1] + 950_000);
        for namespace in ["default", "sequential"] {
            ask::<i64>(&mut connection, &["DEL", &format!("tidegate:{{{namespace}}}:b:user#gpt")]).await;
            ask::<i64>(&mut connection, &["DEL", &format!("tidegate:{{{namespace}}}:b:team#gpt")]).await;
            freeze_clock(&mut connection, at, namespace, namespace == "sequential").await;
        }
        // 899 of 900 are left: enough for 24 draws of 37, and for all of 29.
        let units = if compared % 2 == 0 { 37 } else { 29 };
        let step = || draw(&levels, &[("rpm", units), ("tpm", 1_234)]);
        for store in [&*rig.store, &sequential] {
            granted(store.spend(&draw(&levels, &[("rpm", 1), ("tpm", 1)])).await);
        }
        let busy = rig.hold().await;
        let calls = (0..30).map(|number| match compared {
            0 | 1 => rig.spend(step()),
            _ if number % 3 > 0 => rig.draw(step()),
            _ => rig.spend(step()),
        });
        let calls: Vec<_> = calls.collect();
        yield_to_tasks().await;
        rig.proxy.hold(false);
        let outcome = |answer: &DrawResult| match answer {
            DrawResult::Granted(moved) => (true, moved.clone()),
            DrawResult::Refused(moved) => (false, moved.clone()),
        };
        let mut one = Vec::new();
        for _ in 0..30 {
            one.push(outcome(&sequential.spend(&step()).await.expect("an answer")));
        }
        let other: Vec<_> =
            join_tasks(calls).await.into_iter().map(|answer| outcome(&answer.unwrap())).collect();
        join_tasks(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
        if one.iter().chain(&other).all(|(_, moved)| moved.at == at) {
            compared += 1;
            let granted = one.iter().filter(|(is_granted, _)| *is_granted).count();
            assert_eq!(granted, if units == 37 { 24 } else { 30 });
            let taken = |all: &[(bool, Movement)]| {
                let states = all.iter().map(|(is_granted, moved)| {
                    let meters = moved.readings.iter().map(|reading| reading.meter(&levels));
                    (*is_granted, meters.map(|meter| (meter.consumed(), *meter.bucket())).collect::<Vec<_>>())
                });
                let mut states: Vec<_> = states.collect();
                states.sort_by_key(|(is_granted, meters)| (!is_granted, meters[0].0));
                states
            };
            // Draws of one batch have no order of their own.
            assert_eq!(taken(&one), taken(&other));
        }
    }
}
