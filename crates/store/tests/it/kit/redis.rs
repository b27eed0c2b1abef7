//! Namespaces on a Redis server, and short constructors for calls.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Limit;
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{Draw, RedisOptions, Settle};

use crate::kit::common::OPEN;
use crate::kit::engine::{address, is_available, unique};

pub(crate) use crate::kit::common::{granted, levels_of_version as levels, next_lease, subject};
pub(crate) use crate::kit::connect_redis::connect;
pub(crate) use crate::kit::engine::REDIS;

/// For tests that count requests: draws do not sweep.
pub(crate) const NEVER_SWEPT: Duration = Duration::from_secs(86_400);

/// Options with a timeout that only a hang exceeds.
pub(crate) fn options_at(url: &str) -> RedisOptions {
    RedisOptions::new(url).timeout(Duration::from_secs(60))
}

/// An empty namespace, named after a case of the suite. `None` without the engine.
pub(crate) async fn open(variable: &str, name: &str) -> Option<Fixture> {
    if !is_available(variable) {
        return None;
    }
    let opened = options_at(&address(variable)).namespace(unique(name)).open().await;
    let store = Arc::new(opened.unwrap_or_else(|error| panic!("{variable}: {error}")));
    Some(Fixture::new(store.clone(), Arc::new(RealTime(store))))
}

/// A limit that refills one unit a day.
pub(crate) fn slow(name: &str, burst: u64) -> Limit {
    Limit::per_day(name, 1).burst(burst)
}

pub(crate) fn draw(levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Draw {
    Draw {
        lease: next_lease(),
        levels: Arc::clone(levels),
        units: levels.units(cost).expect("a valid cost"),
        terms: OPEN,
        is_watched: true,
    }
}

pub(crate) fn settle(draw: &Draw, actual: &[(&str, u64)]) -> Settle {
    let actual = draw.levels.amounts(actual).expect("valid amounts");
    Settle { lease: draw.lease, step: 1, levels: Arc::clone(&draw.levels), actual, is_watched: true }
}

pub(crate) async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, call: &[&str]) -> T {
    let mut command = Cmd::new();
    for part in call {
        command.arg(*part);
    }
    command.query_async(connection).await.unwrap_or_else(|error| panic!("{call:?}: {error}"))
}

/// The keys of a namespace with this prefix.
pub(crate) async fn keys(
    connection: &mut MultiplexedConnection,
    namespace: &str,
    prefix: &str,
) -> Vec<String> {
    ask(connection, &["KEYS", &format!("tidegate:{{{namespace}}}:{prefix}*")]).await
}

/// The number of calls of a command, by the server's statistics.
pub(crate) fn calls_in(stats: &str, command: &str) -> u64 {
    let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
    let calls = line.and_then(|line| line.split(['=', ',']).nth(1)).and_then(|calls| calls.parse().ok());
    calls.unwrap_or(0)
}
