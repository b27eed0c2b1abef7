//! What these tests are written with.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Draw, Drawn, Moved, RedisOptions, Settle, StoreError, Terms};

pub(crate) use crate::connect_redis::connect;

pub(crate) const REDIS: &str = "TIDEGATE_TEST_REDIS";

/// Nobody looks for leases that are past their deadline meanwhile: for tests that count what is asked.
pub(crate) const NEVER_SWEPT: Duration = Duration::from_hours(24);

/// Long enough for a machine that has much else to do.
pub(crate) fn patient(url: &str) -> RedisOptions {
    RedisOptions::new(url).timeout(Duration::from_secs(20))
}

pub(crate) fn subject(entity: &str) -> Subject {
    Subject::new(entity, "gpt").expect("a valid name")
}

/// Levels of these entities, the drawing one first.
pub(crate) fn levels(version: u64, rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    let row = |(entity, limits): &(&str, &[Limit])| {
        let policy = Policy::new(limits.iter().cloned()).expect("valid limits");
        let subject = subject(entity);
        let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
        (subject, resolved)
    };
    Arc::new(Levels::new(Version::new(version), rows.iter().map(row).collect()))
}

/// A limit that gains one a day.
pub(crate) fn slow(name: &str, burst: u64) -> Limit {
    Limit::per_day(name, 1).burst(burst)
}

pub(crate) fn next_lease() -> LeaseId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    LeaseId::new(1_800_000_000_000 + number, u128::from(std::process::id()) << 32 | u128::from(number))
}

pub(crate) fn draw(levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Draw {
    Draw {
        lease: next_lease(),
        levels: Arc::clone(levels),
        units: levels.units(cost).expect("a valid cost"),
        terms: Terms { deadline: Duration::from_hours(1), on_expiry: OnExpiry::Settle },
        is_watched: true,
    }
}

pub(crate) fn settle(draw: &Draw, actual: &[(&str, u64)]) -> Settle {
    let actual = draw.levels.amounts(actual).expect("valid amounts");
    Settle { lease: draw.lease, step: 1, levels: Arc::clone(&draw.levels), actual, is_watched: true }
}

pub(crate) fn granted(answer: Result<Drawn, StoreError>) -> Moved {
    match answer {
        Ok(Drawn::Granted(moved)) => moved,
        other => panic!("what is there answers {other:?}"),
    }
}

pub(crate) async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, call: &[&str]) -> T {
    let mut command = Cmd::new();
    for part in call {
        command.arg(*part);
    }
    command.query_async(connection).await.unwrap_or_else(|error| panic!("{call:?}: {error}"))
}

/// The keys of a namespace with this in them.
pub(crate) async fn keys(connection: &mut MultiplexedConnection, namespace: &str, with: &str) -> Vec<String> {
    ask(connection, &["KEYS", &format!("tidegate:{{{namespace}}}:{with}*")]).await
}
