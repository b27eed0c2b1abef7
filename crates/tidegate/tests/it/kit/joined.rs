//! Shared by the tests of joined throttles: throttles with slots, limiters with one limit, and a log of
//! admissions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{Cost, Joined, Limit, Limiter, Memory, Outcome, Slots, Throttle};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub(crate) const BETA: (&str, &str) = ("beta", "gpt");

pub(crate) fn one() -> Cost {
    Cost::request()
}

pub(crate) fn slots(slots: u32) -> Throttle {
    Throttle::builder().slots(Slots::fixed(slots)).build().expect("within the bounds")
}

/// A limiter on the memory store with this limit alone.
pub(crate) fn limiter(limit: Limit) -> Limiter {
    Limiter::builder(Memory::new()).defaults([limit]).build().expect("within the bounds")
}

/// One unit per second, with a burst of one.
pub(crate) fn rps() -> Limit {
    Limit::per_second("rpm", 1)
}

pub(crate) async fn spend(limiter: &Limiter, subject: (&str, &str), units: u64) {
    limiter.spend(subject, [("rpm", units)]).await.expect("enough units");
}

/// Admitted callers, with the time of each admission.
#[derive(Clone, Default)]
pub(crate) struct EntryLog(Arc<Mutex<Vec<(String, Duration)>>>);

impl EntryLog {
    pub(crate) fn record(&self, name: &str, start: Instant) {
        self.0.lock().expect("no panic").push((name.to_owned(), start.elapsed()));
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().expect("no panic").iter().map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn times(&self) -> Vec<Duration> {
        self.0.lock().expect("no panic").iter().map(|(_, at)| *at).collect()
    }
}

/// Spawns a caller that waits, records its admission, and settles at once.
pub(crate) fn wait(
    joined: &Joined,
    subject: (&'static str, &'static str),
    name: &str,
    entries: &EntryLog,
) -> JoinHandle<()> {
    let (joined, name, entries, start) = (joined.clone(), name.to_owned(), entries.clone(), Instant::now());
    tokio::spawn(async move {
        let permit = joined.acquire(subject, one()).await.expect("the caller is admitted");
        entries.record(&name, start);
        permit.settle(Outcome::success()).await.expect("the settle succeeds");
    })
}
