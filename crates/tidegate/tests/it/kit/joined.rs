//! What the tests of joined throttles share: throttles with slots, limiters with one limit, and who got in when.

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

/// A limiter in memory with `rpm` and nothing else.
pub(crate) fn limiter(limit: Limit) -> Limiter {
    Limiter::builder(Memory::new()).defaults([limit]).build().expect("within the bounds")
}

/// One unit a second, and one at once.
pub(crate) fn rps() -> Limit {
    Limit::per_second("rpm", 1)
}

pub(crate) async fn spend(limiter: &Limiter, subject: (&str, &str), units: u64) {
    limiter.spend(subject, [("rpm", units)]).await.expect("there is enough");
}

/// Who got in, and when.
#[derive(Clone, Default)]
pub(crate) struct Entered(Arc<Mutex<Vec<(String, Duration)>>>);

impl Entered {
    pub(crate) fn note(&self, name: &str, start: Instant) {
        self.0.lock().expect("no panic").push((name.to_owned(), start.elapsed()));
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().expect("no panic").iter().map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn times(&self) -> Vec<Duration> {
        self.0.lock().expect("no panic").iter().map(|(_, at)| *at).collect()
    }
}

/// One who waits in a task of its own, notes when it gets in, and is done at once.
pub(crate) fn wait(
    joined: &Joined,
    subject: (&'static str, &'static str),
    name: &str,
    entered: &Entered,
) -> JoinHandle<()> {
    let (joined, name, entered, start) = (joined.clone(), name.to_owned(), entered.clone(), Instant::now());
    tokio::spawn(async move {
        let permit = joined.acquire(subject, one()).await.expect("it is served");
        entered.note(&name, start);
        permit.settle(Outcome::success()).await.expect("it is told");
    })
}
