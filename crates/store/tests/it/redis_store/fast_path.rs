//! The fast path that most steps take matches the slow path. The suite watches every call, which takes the
//! slow path.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Buckets as _, Cancel, Draw, DrawResult, Extend, LeaseStatus, Ledger as _, Lookup, Paging, Redis, Settle,
    StoreError, UsageOf, UsageQuery,
};

use crate::kit::engine::{REDIS_SERVER, address, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::redis::{
    NEVER_SWEPT, REDIS, ask, connect, draw, granted, levels, options_at, settle, slow, subject,
};

/// The visible state of a namespace: available and consumed units of each limit, and the lines of usage.
async fn visible_state(store: &Redis) -> Vec<String> {
    let mut lines = Vec::new();
    let subjects = ["user", "team", "org"].map(subject).to_vec();
    let found = store.balances(&Lookup::Subjects(subjects)).await.expect("balances are returned");
    for bucket in &found.buckets {
        for meter in &bucket.meters {
            let (row, left) = (meter.rule().row(), meter.available(found.at));
            lines.push(format!("{} {row} {left} {} {}", bucket.subject, meter.consumed(), meter.version()));
        }
    }
    let query = UsageQuery {
        of: UsageOf::Resource(subject("any").resource),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    for line in store.usage(&query, &Paging::default()).await.expect("usage is listed").items {
        lines.push(format!("{} {} {:?}", line.subject, line.limit, line.tally));
    }
    lines
}

fn outcome(answer: Result<DrawResult, StoreError>) -> &'static str {
    match answer {
        Ok(DrawResult::Granted(moved)) if moved.is_repeat => "again",
        Ok(DrawResult::Granted(_)) => "granted",
        Ok(DrawResult::Refused(_)) => "refused",
        Err(StoreError::Ended { .. }) => "ended",
        Err(StoreError::Late { .. }) => "late",
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn fast_path_matches_slow_path() {
    skip_without!(REDIS);
    let mut random = Random::seeded(0xFA57);
    for round in 0..12_u64 {
        let mut stores = Vec::new();
        for _ in 0..2 {
            let options = options_at(&address(REDIS)).namespace(unique(&format!("fast-{round}")));
            stores.push(options.open().await.unwrap());
        }
        let limits = [slow("rpm", 40), slow("tpm", 400), slow("usd", 30)];
        let rows: [(&str, &[Limit]); 3] = [("user", &limits), ("team", &limits[..2]), ("org", &limits[1..])];
        let mut version = 1;
        let mut drawn: Vec<(Draw, u32)> = Vec::new();
        for _ in 0..60 {
            if random.below(15) == 0 {
                version += 1;
            }
            let levels = levels(version, &rows[..=usize::try_from(round % 3).unwrap()]);
            let cost = [("rpm", 1), ("tpm", random.below(20)), ("usd", random.below(3))];
            let named = 1 + usize::try_from(random.below(3)).unwrap();
            let choice = random.below(6);
            let index = usize::try_from(random.below(drawn.len().max(1) as u64)).unwrap();
            let new = draw(&levels, &cost[..named]);
            let mut answers = Vec::new();
            for (store, is_watched) in stores.iter().zip([true, false]) {
                answers.push(match (choice, drawn.get(index)) {
                    (0 | 1, _) => outcome(store.draw(&Draw { is_watched, ..new.clone() }).await),
                    (2, _) | (_, None) => outcome(store.spend(&Draw { is_watched, ..new.clone() }).await),
                    (3, Some((old, step))) => {
                        // Settling the exact units by name or by default is the same.
                        let mut exact = Settle { step: step + 1, is_watched, ..settle(old, &[]) };
                        if round % 2 == 0 {
                            exact.actual.clone_from(&old.units);
                        }
                        outcome(store.settle(&exact).await.map(DrawResult::Granted))
                    }
                    (4, Some((old, step))) => {
                        let (lease, levels) = (old.lease, Arc::clone(&old.levels));
                        let units = levels.amounts(&[("tpm", 1)]).unwrap();
                        outcome(store.extend(&Extend { lease, step: step + 1, levels, units }).await)
                    }
                    (_, Some((old, step))) => {
                        let (lease, levels) = (old.lease, Arc::clone(&old.levels));
                        let cancel = Cancel { lease, step: step + 1, levels, is_watched };
                        outcome(store.cancel(&cancel).await.map(DrawResult::Granted))
                    }
                });
            }
            assert_eq!(answers[0], answers[1], "round {round}");
            match (choice, answers[0]) {
                (0 | 1, "granted") => drawn.push((new, 0)),
                (4, "granted") => drawn.iter_mut().skip(index).take(1).for_each(|(_, step)| *step += 1),
                _ => {}
            }
            assert_eq!(visible_state(&stores[0]).await, visible_state(&stores[1]).await, "round {round}");
        }
        for (old, _) in &drawn {
            let mut standings = Vec::new();
            for store in &stores {
                standings.push(match store.lease(old.lease).await.unwrap() {
                    LeaseStatus::Open(held) => format!("{} {:?}", held.record.step(), held.record.held()),
                    LeaseStatus::Ended(ended) => format!("{:?} {} {}", ended.how, ended.step, ended.digest),
                });
            }
            assert_eq!(standings[0], standings[1]);
        }
    }
}

#[tokio::test]
async fn unwatched_steps_take_the_fast_path() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let store = options_at(&server.url()).swept_every(NEVER_SWEPT).open().await.unwrap();
    let limits = [slow("rpm", 10_000), slow("tpm", 20_000)];
    let levels = levels(1, &[("user", &limits), ("org", &limits)]);
    let unwatched = |draw: Draw| Draw { is_watched: false, ..draw };
    let cost = [("rpm", 1), ("tpm", 5)];
    // The first spend creates the buckets.
    granted(store.spend(&unwatched(draw(&levels, &cost))).await);
    let mut connection = connect(&server.url()).await;
    ask::<String>(&mut connection, &["CONFIG", "RESETSTAT"]).await;
    for _ in 0..50 {
        granted(store.spend(&unwatched(draw(&levels, &cost))).await);
        let lease = unwatched(draw(&levels, &cost));
        granted(store.draw(&lease).await);
        store.settle(&Settle { is_watched: false, ..settle(&lease, &[]) }).await.unwrap();
    }
    let stats: String = ask(&mut connection, &["INFO", "commandstats"]).await;
    assert!(stats.contains("cmdstat_mget:calls=15"), "{stats}");
    // The slow path reads one bucket after the other.
    let gets = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls="));
    let gets: u64 = gets.and_then(|gets| gets.split(',').next()).map_or(0, |gets| gets.parse().unwrap());
    assert!(gets <= 6, "{gets} of 150 steps took the slow path:\n{stats}");
}

/// One batch settles leases drawn in several minutes: each counts in its own.
#[tokio::test]
async fn batch_counts_in_the_minutes_of_its_draws() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let store = options_at(&server.url()).swept_every(NEVER_SWEPT).open().await.unwrap();
    let mut connection = connect(&server.url()).await;
    let limits = [slow("rpm", 10_000), slow("tpm", 20_000)];
    let levels = levels(1, &[("user", &limits), ("org", &limits)]);
    let mut leases = Vec::new();
    for minutes_ago in [0, 0, 1, 1, 1, 2, 90] {
        let lease = Draw { is_watched: false, ..draw(&levels, &[("rpm", 1), ("tpm", 5)]) };
        let at = granted(store.draw(&lease).await).at;
        let drawn = u32::try_from(at.as_micros() / 1_000_000).unwrap() - 60 * minutes_ago;
        // As if it had been drawn earlier: its record begins with a byte, a step and the second of the draw.
        let key = format!("tidegate:{{default}}:l:{}", lease.lease);
        let mut set = redis::cmd("SETRANGE");
        let set = set.arg(&key).arg(5).arg(f64::from(drawn).to_le_bytes().as_slice());
        set.exec_async(&mut connection).await.unwrap();
        leases.push((lease, Stamp::from_secs(drawn.into())));
    }
    ask::<String>(&mut connection, &["CONFIG", "RESETSTAT"]).await;
    let settles = leases.iter().map(|(lease, _)| {
        let settle = Settle { is_watched: false, ..settle(lease, &[]) };
        let store = &store;
        async move { store.settle(&settle).await.unwrap() }
    });
    futures_util::future::join_all(settles).await;
    for (entity, own) in [("user", 5), ("org", 0)] {
        let mut expected: BTreeMap<Stamp, Tally> = BTreeMap::new();
        for (_, drawn) in &leases {
            let line = expected.entry(Window::Minute.around(*drawn).start).or_default();
            line.add(Tally { units: 5, own, leases: 1 });
        }
        let of = UsageOf::Entity(subject(entity).entity);
        let query = UsageQuery { of, window: Window::Minute, range: Stamp::ZERO..Stamp::MAX };
        let lines = store.usage(&query, &Paging::default()).await.unwrap().items;
        let lines = lines.iter().filter(|line| line.limit.as_str() == "tpm");
        assert_eq!(lines.map(|line| (line.start, line.tally)).collect::<BTreeMap<_, _>>(), expected);
    }
    // The slow path reads one bucket after the other.
    let stats: String = ask(&mut connection, &["INFO", "commandstats"]).await;
    assert!(!stats.contains("cmdstat_get:"), "a step took the slow path:\n{stats}");
}
