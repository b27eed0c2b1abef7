//! Steps of many callers that go to the server in one call.

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
use tidegate_store::{Buckets as _, Draw, Drawn, Lookup, Moved, Redis, Settle, StoreError};
use tokio::task::{JoinHandle, yield_now};

use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{NEVER_SWEPT, ask, connect, draw, granted, levels, patient, settle, slow, subject};
use crate::kit::words::until_answered;

/// Calls under way at a time: who comes while there are as many waits, and goes with others.
const UNDER_WAY: u64 = 2;

/// A store behind a wire that can be held, and who keeps it busy meanwhile.
struct Held {
    server: Server,
    proxy: Proxy,
    store: Arc<Redis>,
    busy: Arc<Levels>,
}

impl Held {
    async fn open() -> Self {
        Self::on(Server::start(&[]).await).await
    }

    /// One whose server waits for no disk, for what has to be done while a clock stands still.
    async fn open_fast() -> Self {
        Self::on(Server::start_with(&[]).await).await
    }

    async fn on(server: Server) -> Self {
        let proxy = Proxy::to(local(server.port)).await;
        let opened = patient(&proxy.redis()).swept_every(NEVER_SWEPT).open().await;
        let store = Arc::new(opened.expect("the server is there"));
        let busy = levels(1, &[("busy", &[Limit::per_minute("rpm", 1_000_000)])]);
        let held = Self { server, proxy, store, busy };
        held.know(&[&held.busy]).await;
        held
    }

    /// Subjects that are known go at their first step, and a script that is there is not sent along.
    async fn know(&self, all: &[&Arc<Levels>]) {
        for levels in all {
            granted(self.store.spend(&nothing(levels)).await);
        }
    }

    async fn connection(&self) -> MultiplexedConnection {
        connect(&self.server.url()).await
    }

    /// Holds the wire, and has as many calls under way as there may be.
    async fn hold(&self) -> Vec<JoinHandle<Result<Drawn, StoreError>>> {
        self.proxy.hold(true);
        let busy = (0..UNDER_WAY).map(|_| self.spend(draw(&self.busy, &[("rpm", 1)]))).collect();
        settled().await;
        busy
    }

    fn spend(&self, asked: Draw) -> JoinHandle<Result<Drawn, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.spend(&asked).await })
    }

    fn draw(&self, asked: Draw) -> JoinHandle<Result<Drawn, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.draw(&asked).await })
    }

    fn settle(&self, asked: Settle) -> JoinHandle<Result<Drawn, StoreError>> {
        let store = Arc::clone(&self.store);
        tokio::spawn(async move { store.settle(&asked).await.map(Drawn::Granted) })
    }

    async fn consumed(&self, entity: &str) -> i64 {
        let seen = self.store.balances(&Lookup::Subjects(vec![subject(entity)])).await;
        seen.expect("balances are answered")
            .buckets
            .iter()
            .flat_map(|bucket| &bucket.meters)
            .map(Meter::consumed)
            .sum()
    }
}

/// Takes nothing of every limit, so that all of them are there.
fn nothing(levels: &Arc<Levels>) -> Draw {
    let none: Vec<_> = levels.names().iter().map(|name| (name.as_str(), 0)).collect();
    Draw { units: levels.amounts(&none).expect("valid amounts"), ..draw(levels, &[(none[0].0, 1)]) }
}

/// Lets everybody who was started come to where it waits: there is one thread.
async fn settled() {
    for _ in 0..20 {
        yield_now().await;
    }
}

async fn all<T>(calls: Vec<JoinHandle<T>>) -> Vec<T> {
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.expect("no caller panics"));
    }
    answers
}

async fn scripts(connection: &mut MultiplexedConnection) -> u64 {
    let stats: String = ask(connection, &["INFO", "commandstats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

#[tokio::test]
async fn sixty_four_at_once_are_four_calls() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000), slow("tpm", 1_000)])]);
    held.know(&[&levels]).await;
    let mut connection = held.connection().await;
    ask::<String>(&mut connection, &["CONFIG", "RESETSTAT"]).await;
    let mut calls = held.hold().await;
    calls.extend((0..62).map(|_| held.spend(draw(&levels, &[("rpm", 1), ("tpm", 7)]))));
    settled().await;
    held.proxy.hold(false);
    let mut at: Vec<Stamp> = all(calls).await.into_iter().map(granted).map(|moved| moved.at).collect();
    assert_eq!(scripts(&mut connection).await, 4, "two that found nobody, one of 32, and one of the rest");
    at.dedup();
    assert!(at.len() <= 4, "what goes together is decided at one time, and not at {at:?}");
    assert_eq!(held.consumed("acme").await, 62 * 8);
}

#[tokio::test]
async fn callers_that_look_away_hold_up_nobody() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    held.know(&[&levels]).await;
    let asked: Vec<_> = (0..8).map(|_| draw(&levels, &[("rpm", 1)])).collect();
    let mut looking_away: Vec<_> = asked.iter().map(|asked| Box::pin(held.store.spend(asked))).collect();
    for call in &mut looking_away {
        // Each has gone as far as it does by itself, and is not looked at any more.
        assert!(std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await.is_pending());
    }
    granted(held.store.spend(&draw(&levels, &[("rpm", 1)])).await);
    for call in looking_away {
        granted(call.await);
    }
    assert_eq!(held.consumed("acme").await, 9);
}

#[test]
fn runtimes_that_nobody_is_in_hold_up_nobody() {
    skip_without!(REDIS_SERVER);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let opened = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = opened.block_on(Server::start(&[]));
    let store = opened.block_on(patient(&server.url()).open()).unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    opened.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    // Each is left as soon as its caller is answered, and stays there.
    let idle: Vec<_> = (0..5).map(|_| runtime()).collect();
    for idle in &idle {
        idle.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    }
    for _ in 0..5 {
        opened.block_on(async { granted(store.spend(&draw(&levels, &[("rpm", 1)])).await) });
    }
}

#[tokio::test]
async fn one_that_is_refused_or_fails_leaves_the_others_of_its_call_alone() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let names: Vec<String> = (0..20).map(|number| format!("user-{number}")).collect();
    let limits = [slow("rpm", 5)];
    let all_levels: Vec<_> = names.iter().map(|name| levels(1, &[(name.as_str(), &limits)])).collect();
    held.know(&all_levels.iter().collect::<Vec<_>>()).await;
    let mut connection = held.connection().await;
    ask::<i64>(&mut connection, &["DEL", "tidegate:{default}:b:user-7#gpt"]).await;
    ask::<i64>(&mut connection, &["LPUSH", "tidegate:{default}:b:user-7#gpt", "a list"]).await;
    ask::<String>(&mut connection, &["SET", "tidegate:{default}:b:user-8#gpt", "what is this?"]).await;
    for is_watched in [true, false] {
        let busy = held.hold().await;
        let cost = |number| if number == 3 { 6 } else { 1 };
        let calls = all_levels.iter().enumerate().map(|(number, levels)| {
            held.spend(Draw { is_watched, ..draw(levels, &[("rpm", cost(number))]) })
        });
        let calls: Vec<_> = calls.collect();
        settled().await;
        held.proxy.hold(false);
        for (number, answer) in all(calls).await.into_iter().enumerate() {
            match number {
                3 => assert!(matches!(answer, Ok(Drawn::Refused(_))), "{answer:?}"),
                7 | 8 => assert!(matches!(answer, Err(StoreError::Corrupt { .. })), "{number}: {answer:?}"),
                _ => assert_eq!(granted(answer).readings.len(), usize::from(is_watched), "{number}"),
            }
        }
        all(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
    assert_eq!((held.consumed("user-3").await, held.consumed("user-4").await), (0, 2));
}

#[tokio::test]
async fn those_of_one_call_on_one_bucket_take_what_there_is_and_no_more() {
    skip_without!(REDIS_SERVER);
    for is_watched in [true, false] {
        let held = Held::open().await;
        let limits = [slow("rpm", 12)];
        let users = ["a", "b"].map(|user| levels(1, &[(user, &[slow("rpm", 100)]), ("team", &limits)]));
        held.know(&users.iter().collect::<Vec<_>>()).await;
        let busy = held.hold().await;
        let asked = |number: usize| Draw { is_watched, ..draw(&users[number % 2], &[("rpm", 1)]) };
        let calls: Vec<_> = (0..20)
            .map(|number| match number % 4 {
                0 | 1 => held.spend(asked(number)),
                _ => held.draw(asked(number)),
            })
            .collect();
        settled().await;
        held.proxy.hold(false);
        let answers = all(calls).await;
        let count = answers.iter().filter(|answer| matches!(answer, Ok(Drawn::Granted(_)))).count();
        assert_eq!(count, 12);
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(held.consumed("team").await, 12);
        assert_eq!(held.consumed("a").await + held.consumed("b").await, 12);
        all(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
}

#[tokio::test]
async fn a_caller_that_leaves_before_its_call_goes_is_not_charged_and_holds_up_nobody() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    held.know(&[&levels]).await;
    let busy = held.hold().await;
    let leaving: Vec<_> = (0..5).map(|_| held.spend(draw(&levels, &[("rpm", 10)]))).collect();
    let staying: Vec<_> = (0..3).map(|_| held.spend(draw(&levels, &[("rpm", 1)]))).collect();
    settled().await;
    // One that waits leaves, and so does one that is under way.
    leaving.iter().chain(&busy[..1]).for_each(JoinHandle::abort);
    settled().await;
    held.proxy.hold(false);
    all(staying).await.into_iter().for_each(|answer| drop(granted(answer)));
    assert_eq!(held.consumed("acme").await, 3);
    granted(held.store.spend(&draw(&levels, &[("rpm", 1)])).await);
    assert_eq!(held.consumed("acme").await, 4);
}

#[tokio::test]
async fn the_same_lease_twice_in_one_call_is_charged_once() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    held.know(&[&levels]).await;
    for is_watched in [true, false] {
        let busy = held.hold().await;
        let asked = Draw { is_watched, ..draw(&levels, &[("rpm", 10)]) };
        let spent = Draw { is_watched, ..draw(&levels, &[("rpm", 10)]) };
        let exact = Settle { is_watched, ..settle(&asked, &[]) };
        let calls = vec![
            held.draw(asked.clone()),
            held.draw(asked.clone()),
            held.spend(spent.clone()),
            held.spend(spent),
            held.settle(exact.clone()),
            held.settle(exact),
        ];
        settled().await;
        held.proxy.hold(false);
        let again: Vec<bool> = all(calls).await.into_iter().map(|answer| granted(answer).is_repeat).collect();
        assert_eq!(again.iter().filter(|again| **again).count(), 3, "{again:?}");
        all(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
    }
    assert_eq!(held.consumed("acme").await, 40);
    let open: u64 = ask(&mut held.connection().await, &["ZCARD", "tidegate:{default}:open"]).await;
    assert_eq!(open, 0);
}

#[tokio::test]
async fn a_call_whose_answer_is_cut_off_is_charged_once_for_each_however_often_it_is_sent() {
    skip_without!(REDIS_SERVER);
    let held = Held::open().await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10_000)])]);
    held.know(&[&levels]).await;
    // Until enough was cut off: which answers come together is not for us to say.
    let (mut away, mut rounds) = (0, 0);
    while rounds < 20 || away < 10 {
        let busy = held.hold().await;
        let asked: Vec<Draw> = (0..10).map(|_| draw(&levels, &[("rpm", 1)])).collect();
        let calls: Vec<_> = asked.iter().map(|asked| held.spend(asked.clone())).collect();
        settled().await;
        // In one of the answers to those before, or in the answer to all of these.
        held.proxy.cut_after(rounds % 20 * 90);
        held.proxy.hold(false);
        for (answer, asked) in all(calls).await.into_iter().zip(asked) {
            let mut answer = answer;
            while let Err(error) = &answer {
                assert!(error.is_transient(), "{error}");
                away += 1;
                answer = held.store.spend(&asked).await;
            }
            granted(answer);
        }
        all(busy).await;
        held.proxy.cut_after(u64::MAX);
        rounds += 1;
    }
    assert_eq!(held.consumed("acme").await, i64::try_from(rounds * 10).unwrap());
}

#[tokio::test]
async fn nobody_waits_behind_others_for_longer_than_an_answer_is_waited_for() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let proxy = Proxy::to(local(server.port)).await;
    let hasty = patient(&proxy.redis()).timeout(Duration::from_millis(300));
    let store = Arc::new(until_answered(|| hasty.clone().open()).await.unwrap());
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    let first = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| store.spend(&first)).await);
    proxy.hold(true);
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let (store, asked) = (Arc::clone(&store), draw(&levels, &[("rpm", 1)]));
            tokio::spawn(async move { store.spend(&asked).await })
        })
        .collect();
    for answer in all(calls).await {
        let error = answer.expect_err("nothing passes");
        assert!(error.is_transient(), "{error}");
    }
    proxy.hold(false);
    let last = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| store.spend(&last)).await);
}

/// Everything that is kept of a namespace but its clock.
async fn kept(connection: &mut MultiplexedConnection, namespace: &str) -> BTreeMap<String, Vec<Vec<u8>>> {
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
            // Each by itself: which moment it is of is told by its id.
            for ended in values.chunks(2) {
                found.insert(format!("l:{}", String::from_utf8_lossy(&ended[0])), ended[1..].to_vec());
            }
        } else {
            found.insert(name, values);
        }
    }
    found
}

/// A time that is a little ahead of the server's is waited out: all that is asked meanwhile is asked at that time. Set forth
/// and back by the same second, it is told by the long way.
async fn stop_the_clock(connection: &mut MultiplexedConnection, at: Stamp, namespace: &str, is_long: bool) {
    let (ahead, back) = if is_long { (-1.0, 1_000_000.0) } else { (0.0, 0.0) };
    let seconds = f64::from(u32::try_from(at.as_micros() / 1_000_000).expect("a time of ours"));
    let micros = f64::from(u32::try_from(at.as_micros() % 1_000_000).expect("below a million"));
    let kept: Vec<u8> = [seconds, micros, ahead, back].into_iter().flat_map(f64::to_le_bytes).collect();
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(connection).await.expect("the server is there");
}

#[tokio::test]
async fn what_goes_together_is_answered_and_written_as_one_after_the_other_the_long_way() {
    skip_without!(REDIS_SERVER);
    let held = Held::open_fast().await;
    let alone = patient(&held.server.url()).namespace("alone").open().await.unwrap();
    let mut connection = held.connection().await;
    let mut random = Random::seeded(0x7060);
    let limits = [slow("rpm", 9_000), Limit::per_minute("tpm", 7_000).burst(900_000), slow("usd", 3_000)];
    let rows: [(&str, &[Limit]); 3] = [("user", &limits), ("team", &limits[..2]), ("org", &limits[1..])];
    let all_levels: Vec<_> = (1..=3).map(|count| levels(1, &rows[..count])).collect();
    held.know(&all_levels.iter().collect::<Vec<_>>()).await;
    for levels in &all_levels {
        granted(alone.spend(&nothing(levels)).await);
    }
    let mut compared = 0;
    while compared < 12 {
        ask::<String>(&mut connection, &["FLUSHALL"]).await;
        let seconds: Vec<u64> = ask(&mut connection, &["TIME"]).await;
        let at = Stamp::from_micros(seconds[0] * 1_000_000 + seconds[1] + 950_000);
        stop_the_clock(&mut connection, at, "default", false).await;
        stop_the_clock(&mut connection, at, "alone", true).await;
        // Rows are made in one order.
        let first = draw(&all_levels[2], &[("rpm", 1), ("tpm", 3), ("usd", 2)]);
        let held_units = draw(&all_levels[1], &[("rpm", 2), ("tpm", 5)]);
        for store in [&*held.store, &alone] {
            granted(store.spend(&first).await);
            granted(store.draw(&held_units).await);
        }
        let busy = held.hold().await;
        let (mut calls, mut answers) = (Vec::new(), Vec::new());
        calls.push(held.settle(Settle { is_watched: false, ..settle(&held_units, &[]) }));
        answers.push(alone.settle(&settle(&held_units, &[])).await.map(Drawn::Granted));
        for number in 0..24 {
            let levels = &all_levels[usize::try_from(random.below(3)).unwrap()];
            // Many are the same.
            let cost = [("rpm", 1), ("tpm", 700 * random.below(2)), ("usd", random.below(2))];
            // A few are more than there ever is.
            let cost = if random.below(6) == 0 { [("rpm", 9_500), cost[1], cost[2]] } else { cost };
            let named = 1 + usize::try_from(random.below(3)).unwrap();
            let named = named.min(levels.names().len());
            let asked = Draw { is_watched: random.below(2) == 0, ..draw(levels, &cost[..named]) };
            if number % 2 == 0 {
                answers.push(alone.draw(&asked).await);
                calls.push(held.draw(asked));
            } else {
                answers.push(alone.spend(&asked).await);
                calls.push(held.spend(asked));
            }
        }
        settled().await;
        held.proxy.hold(false);
        let together = all(calls).await;
        all(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
        let (one, other) = (kept(&mut connection, "alone").await, kept(&mut connection, "default").await);
        let mut times = Vec::new();
        for (one, other) in answers.iter().zip(&together) {
            let (one, other) = match (one, other) {
                (Ok(Drawn::Granted(one)), Ok(Drawn::Granted(other)))
                | (Ok(Drawn::Refused(one)), Ok(Drawn::Refused(other))) => (one, other),
                other => panic!("{other:?}"),
            };
            times.extend([one.at, other.at]);
        }
        // On a machine with much else to do the clock has gone on meanwhile: once more.
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
async fn draws_that_are_the_same_take_together_what_each_takes_by_itself() {
    skip_without!(REDIS_SERVER);
    let held = Held::open_fast().await;
    let alone = patient(&held.server.url()).namespace("alone").open().await.unwrap();
    let mut connection = held.connection().await;
    let limits = [slow("rpm", 900), Limit::per_minute("tpm", 7_000).burst(900_000)];
    let levels = levels(1, &[("user", &limits), ("team", &limits[1..])]);
    for store in [&*held.store, &alone] {
        granted(store.spend(&nothing(&levels)).await);
    }
    let mut compared = 0;
    while compared < 4 {
        let seconds: Vec<u64> = ask(&mut connection, &["TIME"]).await;
        let at = Stamp::from_micros(seconds[0] * 1_000_000 + seconds[1] + 950_000);
        for namespace in ["default", "alone"] {
            ask::<i64>(&mut connection, &["DEL", &format!("tidegate:{{{namespace}}}:b:user#gpt")]).await;
            ask::<i64>(&mut connection, &["DEL", &format!("tidegate:{{{namespace}}}:b:team#gpt")]).await;
            stop_the_clock(&mut connection, at, namespace, namespace == "alone").await;
        }
        // Of 900 there are 899 then, which is enough for 24 of 37 and for all of 29.
        let units = if compared % 2 == 0 { 37 } else { 29 };
        let asked = || draw(&levels, &[("rpm", units), ("tpm", 1_234)]);
        for store in [&*held.store, &alone] {
            granted(store.spend(&draw(&levels, &[("rpm", 1), ("tpm", 1)])).await);
        }
        let busy = held.hold().await;
        let calls = (0..30).map(|number| match compared {
            0 | 1 => held.spend(asked()),
            _ if number % 3 > 0 => held.draw(asked()),
            _ => held.spend(asked()),
        });
        let calls: Vec<_> = calls.collect();
        settled().await;
        held.proxy.hold(false);
        let told = |answer: &Drawn| match answer {
            Drawn::Granted(moved) => (true, moved.clone()),
            Drawn::Refused(moved) => (false, moved.clone()),
        };
        let mut one = Vec::new();
        for _ in 0..30 {
            one.push(told(&alone.spend(&asked()).await.expect("an answer")));
        }
        let other: Vec<_> = all(calls).await.into_iter().map(|answer| told(&answer.unwrap())).collect();
        all(busy).await.into_iter().for_each(|answer| drop(granted(answer)));
        if one.iter().chain(&other).all(|(_, moved)| moved.at == at) {
            compared += 1;
            let granted = one.iter().filter(|(is_granted, _)| *is_granted).count();
            assert_eq!(granted, if units == 37 { 24 } else { 30 });
            let taken = |all: &[(bool, Moved)]| {
                let told = all.iter().map(|(is_granted, moved)| {
                    let meters = moved.readings.iter().map(|reading| reading.meter(&levels));
                    (*is_granted, meters.map(|meter| (meter.consumed(), *meter.bucket())).collect::<Vec<_>>())
                });
                let mut told: Vec<_> = told.collect();
                told.sort_by_key(|(is_granted, meters)| (!is_granted, meters[0].0));
                told
            };
            // Those that go together have no order of their own.
            assert_eq!(taken(&one), taken(&other));
        }
    }
}
