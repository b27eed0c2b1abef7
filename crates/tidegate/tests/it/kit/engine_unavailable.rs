//! A limiter over a real server behind a proxy: what callers get while the proxy delays, drops or cuts
//! replies or refuses connections, and what is settled after recovery.
//!
//! Time over sockets is real, so no test asserts a duration: a proxy that never replies shows that callers do
//! not wait for it, and connections are counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::{Lookup, Store};
use tidegate::{
    Degraded, Lease, Limit, LimitError, Limiter, OnUnavailable, Paging, Share, Stamp, StoreError, Subject,
    UsageOf, UsageQuery, Window,
};
use tokio::task::JoinSet;

use crate::kit::proxy::Proxy;

const ACME: (&str, &str) = ("acme", "gpt");
const CALLERS: usize = 32;
/// Acquires per caller while the store is unavailable.
const CALLS: usize = 8;
/// Long enough for a server on a busy machine to reply mostly in time; callers retry otherwise.
const DEADLINE: Duration = Duration::from_millis(400);
/// A caller without a result by then is waiting for the proxy.
const WATCHDOG: Duration = Duration::from_secs(120);
/// The delay between two attempts against a server that does not reply yet.
const PAUSE: Duration = Duration::from_millis(20);
/// The bound for all callers together, however many calls they make: a few for each probe of the server.
pub(crate) const CONNECTIONS_MAX: u64 = 64;

/// A store behind a proxy, and the same store without it.
pub(crate) struct Rig {
    pub(crate) proxy: Proxy,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) direct: Arc<dyn Store>,
    /// New connections from when it becomes unavailable until it is available again.
    pub(crate) connections_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outage {
    /// Every reply is delayed by a second.
    Late,
    /// Nothing is forwarded, and no error is reported.
    Hole,
    /// Every reply is cut in the middle.
    Cut,
    /// Connections are refused.
    Down,
}

impl Outage {
    fn start(self, proxy: &Proxy) {
        match self {
            Self::Late => proxy.delay(Duration::from_secs(1)),
            Self::Hole => proxy.hold(true),
            Self::Cut => proxy.cut(u32::MAX),
            Self::Down => proxy.take_down(true),
        }
    }

    fn stop(self, proxy: &Proxy) {
        match self {
            Self::Late => proxy.delay(Duration::ZERO),
            Self::Hole => proxy.hold(false),
            Self::Cut => proxy.cut(0),
            Self::Down => proxy.take_down(false),
        }
    }
}

/// Results of the callers of a limiter.
#[derive(Debug, Default)]
struct CallerStats {
    /// Leases of the store that were settled, or will be.
    settled: u64,
    degraded: u64,
    unavailable: u64,
}

impl CallerStats {
    fn add(&mut self, other: &Self) {
        self.settled += other.settled;
        self.degraded += other.degraded;
        self.unavailable += other.unavailable;
    }
}

/// Checks every `OnUnavailable` policy during one kind of outage.
pub(crate) async fn check_outage(rig: &Rig, outage: Outage) {
    let share = OnUnavailable::LocalShare(Share::new(0.5).expect("a share"));
    let mut settled = consumed(&*rig.direct).await;
    for (mode, expected) in [
        (OnUnavailable::Block, None),
        (OnUnavailable::Allow, Some(Degraded::Allowed)),
        (share, Some(Degraded::LocalShare)),
    ] {
        let limiter = Limiter::over(Arc::clone(&rig.store))
            .defaults([Limit::per_day("rpm", 100_000)])
            .on_unavailable(mode)
            .store_deadline(DEADLINE)
            .build()
            .expect("a limiter");
        let mut stats = acquire_until_available(&limiter, expected).await;
        let (before, since) = (rig.proxy.connections(), Instant::now());
        outage.start(&rig.proxy);
        let results = tokio::time::timeout(WATCHDOG, acquire_concurrently(&limiter, expected)).await;
        stats.add(
            &results.unwrap_or_else(|_| panic!("{outage:?}: callers wait for a proxy that never replies")),
        );
        assert!(stats.unavailable + stats.degraded > 0, "{outage:?}: no caller noticed");
        outage.stop(&rig.proxy);
        stats.add(&acquire_until_available(&limiter, expected).await);
        let connections = rig.proxy.connections() - before;
        // Listeners for changes and probes of the server connect again by time, and not by the number of
        // callers.
        let connections_max = rig.connections_max + 8 * since.elapsed().as_secs();
        assert!(connections <= connections_max, "{outage:?}: {connections} connections for {stats:?}");
        tokio::time::timeout(WATCHDOG, limiter.drain()).await.expect("every settle reaches the store");
        settled += i64::try_from(stats.settled).expect("it is small");
    }
    // Draws whose replies were lost have been cancelled, and retried calls were charged once.
    assert_eq!(consumed(&*rig.direct).await, settled, "{outage:?}");
    assert_eq!(used(&*rig.direct).await, u64::try_from(settled).expect("it is small"), "{outage:?}");
}

/// Acquires until the store itself grants a lease.
pub(crate) async fn acquire_from_store(limiter: &Limiter) -> Lease {
    let attempts = async {
        loop {
            match limiter.try_acquire(ACME, [("rpm", 1)]).await {
                Ok(lease) if lease.degraded().is_none() => return lease,
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    };
    tokio::time::timeout(WATCHDOG, attempts).await.expect("the store is available again")
}

/// Acquires until the policy grants a degraded lease. PostgreSQL backends outlive their killed postmaster
/// briefly.
pub(crate) async fn acquire_until_degraded(limiter: &Limiter) {
    let attempts = async {
        while limiter
            .try_acquire(ACME, [("rpm", 1)])
            .await
            .expect("the policy allows it")
            .degraded()
            .is_none()
        {
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(WATCHDOG, attempts).await.expect("the store becomes unavailable");
}

/// Acquires until the store itself grants a lease, and counts all results.
async fn acquire_until_available(limiter: &Limiter, expected: Option<Degraded>) -> CallerStats {
    let mut stats = CallerStats::default();
    let attempts = async {
        loop {
            let lease = limiter.try_acquire(ACME, [("rpm", 1)]).await;
            let is_from_store = lease.as_ref().is_ok_and(|lease| lease.degraded().is_none());
            end(lease, &mut stats, expected).await;
            if is_from_store {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(WATCHDOG, attempts).await.expect("the store is available again");
    stats
}

async fn acquire_concurrently(limiter: &Limiter, expected: Option<Degraded>) -> CallerStats {
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let limiter = limiter.clone();
        callers.spawn(async move {
            let mut stats = CallerStats::default();
            for _ in 0..CALLS {
                end(limiter.try_acquire(ACME, [("rpm", 1)]).await, &mut stats, expected).await;
            }
            stats
        });
    }
    let mut stats = CallerStats::default();
    while let Some(caller) = callers.join_next().await {
        stats.add(&caller.expect("no panic"));
    }
    stats
}

/// Settles a lease and counts it. While the store is unavailable, leases are degraded as `expected`; with
/// `None`, callers are refused.
async fn end(lease: Result<Lease, LimitError>, stats: &mut CallerStats, expected: Option<Degraded>) {
    match lease {
        Ok(mut lease) => {
            match lease.degraded() {
                None => stats.settled += 1,
                degraded => {
                    stats.degraded += 1;
                    assert_eq!(degraded, expected);
                }
            }
            lease.settle_full().await.expect("a settle is accepted, now or later");
        }
        Err(LimitError::Unavailable { .. }) => {
            stats.unavailable += 1;
            assert_eq!(expected, None, "no caller is to be refused");
        }
        Err(error) => panic!("an unavailable store is reported as {error:?}"),
    }
}

/// Retries transient errors, which a busy machine causes even while the server is available.
pub(crate) async fn retry<T>(call: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let attempts = async {
        loop {
            match call().await {
                Err(error) if error.is_transient() => tokio::time::sleep(PAUSE).await,
                result => return result.expect("no permanent error"),
            }
        }
    };
    tokio::time::timeout(WATCHDOG, attempts).await.expect("the server replies")
}

async fn consumed(store: &dyn Store) -> i64 {
    let subject = Subject::new(ACME.0, ACME.1).expect("valid names");
    let seen = retry(async || store.balances(&Lookup::Subjects(vec![subject.clone()])).await).await;
    let mut consumed = 0;
    for meter in seen.buckets.iter().flat_map(|bucket| &bucket.meters) {
        consumed += meter.consumed();
    }
    consumed
}

async fn used(store: &dyn Store) -> u64 {
    let of = UsageOf::Resource(Subject::new(ACME.0, ACME.1).expect("valid names").resource);
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let page = retry(async || store.usage(&query, &Paging::default()).await).await;
    page.items.iter().map(|line| line.tally.units).sum()
}
