//! A limiter over a real server behind a wire: what callers are answered while the wire is slow, a black hole, cut in every
//! reply or down, and what is made good when it works again.
//!
//! Time over sockets is real, so no test asserts how long something took: a wire that never answers at all shows that
//! callers do not wait for it, and connections are counted.

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
/// Each caller asks so often while the store is unavailable.
const TIMES: usize = 8;
/// Long enough that a server on a busy machine mostly answers; where it does not, callers ask again.
const DEADLINE: Duration = Duration::from_millis(400);
/// A caller that is not answered by then waits for the wire.
const NEVER: Duration = Duration::from_secs(120);
/// Between two questions to a server that does not answer yet.
const PAUSE: Duration = Duration::from_millis(20);
/// For all callers together, however often they ask: a few for each probe of the server.
pub(crate) const FEW: u64 = 64;

/// A store by way of a wire, and the same directly.
pub(crate) struct Rig {
    pub(crate) wire: Proxy,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) near: Arc<dyn Store>,
    /// New connections from when it becomes unavailable until it is available again.
    pub(crate) connections_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Every reply comes a second late.
    Late,
    /// Nothing comes through, and no error is reported.
    Hole,
    /// Every reply is cut in the middle.
    Cut,
    /// Connections are refused.
    Down,
}

impl Trouble {
    fn begins(self, wire: &Proxy) {
        match self {
            Self::Late => wire.delay(Duration::from_secs(1)),
            Self::Hole => wire.hold(true),
            Self::Cut => wire.cut(u32::MAX),
            Self::Down => wire.take_down(true),
        }
    }

    fn ends(self, wire: &Proxy) {
        match self {
            Self::Late => wire.delay(Duration::ZERO),
            Self::Hole => wire.hold(false),
            Self::Cut => wire.cut(0),
            Self::Down => wire.take_down(false),
        }
    }
}

/// What callers of a limiter have had.
#[derive(Debug, Default)]
struct Had {
    /// Leases of the store that were settled, or will be.
    settled: u64,
    degraded: u64,
    unavailable: u64,
}

impl Had {
    fn add(&mut self, other: &Self) {
        self.settled += other.settled;
        self.degraded += other.degraded;
        self.unavailable += other.unavailable;
    }
}

/// Shows all of it for one kind of trouble.
pub(crate) async fn is_answered(rig: &Rig, trouble: Trouble) {
    let share = OnUnavailable::LocalShare(Share::new(0.5).expect("a share"));
    let mut settled = consumed(&*rig.near).await;
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
        let mut had = is_there(&limiter, expected).await;
        let (before, since) = (rig.wire.connections(), Instant::now());
        trouble.begins(&rig.wire);
        let answers = tokio::time::timeout(NEVER, all_ask(&limiter, expected)).await;
        had.add(
            &answers.unwrap_or_else(|_| panic!("{trouble:?}: callers wait for a wire that never answers")),
        );
        assert!(had.unavailable + had.degraded > 0, "{trouble:?}: no caller noticed");
        trouble.ends(&rig.wire);
        had.add(&is_there(&limiter, expected).await);
        let connections = rig.wire.connections() - before;
        // Listeners for changes and probes of the server connect again by time, and not by the number of callers.
        let connections_max = rig.connections_max + 8 * since.elapsed().as_secs();
        assert!(connections <= connections_max, "{trouble:?}: {connections} connections for {had:?}");
        tokio::time::timeout(NEVER, limiter.drain()).await.expect("all endings reach the store");
        settled += i64::try_from(had.settled).expect("it is small");
    }
    // What was drawn without an answer has been returned, and what was asked again was charged once.
    assert_eq!(consumed(&*rig.near).await, settled, "{trouble:?}");
    assert_eq!(used(&*rig.near).await, u64::try_from(settled).expect("it is small"), "{trouble:?}");
}

/// A lease of the store itself, as soon as it is available.
pub(crate) async fn from_the_store(limiter: &Limiter) -> Lease {
    let asked = async {
        loop {
            match limiter.acquire(ACME, [("rpm", 1)]).await {
                Ok(lease) if lease.degraded().is_none() => return lease,
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    };
    tokio::time::timeout(NEVER, asked).await.expect("the store is available again")
}

/// Asks until the policy answers for the store. The backends of PostgreSQL outlive their killed postmaster for a moment.
pub(crate) async fn until_degraded(limiter: &Limiter) {
    let asked = async {
        while limiter.acquire(ACME, [("rpm", 1)]).await.expect("the policy allows it").degraded().is_none() {
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(NEVER, asked).await.expect("the store becomes unavailable");
}

/// Asks until the store itself answers.
async fn is_there(limiter: &Limiter, expected: Option<Degraded>) -> Had {
    let mut had = Had::default();
    let asked = async {
        loop {
            let lease = limiter.acquire(ACME, [("rpm", 1)]).await;
            let is_there = lease.as_ref().is_ok_and(|lease| lease.degraded().is_none());
            end(lease, &mut had, expected).await;
            if is_there {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(NEVER, asked).await.expect("the store is available again");
    had
}

async fn all_ask(limiter: &Limiter, expected: Option<Degraded>) -> Had {
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let limiter = limiter.clone();
        callers.spawn(async move {
            let mut had = Had::default();
            for _ in 0..TIMES {
                end(limiter.acquire(ACME, [("rpm", 1)]).await, &mut had, expected).await;
            }
            had
        });
    }
    let mut had = Had::default();
    while let Some(caller) = callers.join_next().await {
        had.add(&caller.expect("a caller is answered"));
    }
    had
}

/// Ends a lease, and notes what it was. While the store is unavailable it must be as `expected`; with none, callers are
/// refused.
async fn end(lease: Result<Lease, LimitError>, had: &mut Had, expected: Option<Degraded>) {
    match lease {
        Ok(mut lease) => {
            match lease.degraded() {
                None => had.settled += 1,
                degraded => {
                    had.degraded += 1;
                    assert_eq!(degraded, expected);
                }
            }
            lease.settle_as_held().await.expect("an ending is taken, now or later");
        }
        Err(LimitError::Unavailable { .. }) => {
            had.unavailable += 1;
            assert_eq!(expected, None, "no caller is to be refused");
        }
        Err(error) => panic!("an unavailable store is reported as {error:?}"),
    }
}

/// The answer of a server that is available: on a busy machine it is asked again.
pub(crate) async fn answer<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let asked = async {
        loop {
            match ask().await {
                Err(error) if error.is_transient() => tokio::time::sleep(PAUSE).await,
                answer => return answer.expect("the server is there"),
            }
        }
    };
    tokio::time::timeout(NEVER, asked).await.expect("the server answers")
}

async fn consumed(store: &dyn Store) -> i64 {
    let subject = Subject::new(ACME.0, ACME.1).expect("valid names");
    let seen = answer(async || store.balances(&Lookup::Subjects(vec![subject.clone()])).await).await;
    let mut consumed = 0;
    for meter in seen.buckets.iter().flat_map(|bucket| &bucket.meters) {
        consumed += meter.consumed();
    }
    consumed
}

async fn used(store: &dyn Store) -> u64 {
    let of = UsageOf::Resource(Subject::new(ACME.0, ACME.1).expect("valid names").resource);
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let page = answer(async || store.usage(&query, &Paging::default()).await).await;
    page.items.iter().map(|line| line.tally.units).sum()
}
