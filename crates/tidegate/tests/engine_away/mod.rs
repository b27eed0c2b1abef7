//! A limiter over a real server behind a wire: what callers are told while the wire is slow, a black hole, cut in every reply or
//! down, and what is made good when it is whole again.
//!
//! Time over sockets is real, so that nothing here asks how long something took: a wire that never answers at all shows that
//! callers do not wait for it, and connections are counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::{Lookup, Store};
use tidegate::{
    Degraded, Lease, Limit, LimitError, Limiter, OnUnavailable, Paging, Share, Stamp, StoreError, Subject,
    UsageOf, UsageQuery, Window,
};
use tokio::task::JoinSet;

use crate::proxy::Proxy;

const ACME: (&str, &str) = ("acme", "gpt");
const CALLERS: usize = 32;
/// Each caller asks so often while the store is away.
const TIMES: usize = 8;
/// Long enough that a server on a busy machine is not away.
const DEADLINE: Duration = Duration::from_millis(400);
/// Whoever is not answered by then waits for the wire.
const NEVER: Duration = Duration::from_mins(2);
/// For all callers together, however often they ask: a few for each time that somebody looks whether the server is back.
pub(crate) const FEW: u64 = 24;

/// A store by way of a wire, and the same directly.
pub(crate) struct Rig {
    pub(crate) wire: Proxy,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) near: Arc<dyn Store>,
    /// New connections in the time that it is away and comes back.
    pub(crate) connections_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Every reply comes a second late.
    Late,
    /// Nothing comes through, and nobody says so.
    Hole,
    /// Every reply is cut in the middle.
    Cut,
    /// Nobody is there.
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
    away: u64,
}

impl Had {
    fn add(&mut self, other: &Self) {
        self.settled += other.settled;
        self.degraded += other.degraded;
        self.away += other.away;
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
        let away = tokio::time::timeout(NEVER, all_ask(&limiter, expected)).await;
        had.add(&away.unwrap_or_else(|_| panic!("{trouble:?}: callers wait for a wire that never answers")));
        assert!(had.away + had.degraded > 0, "{trouble:?}: nobody noticed");
        trouble.ends(&rig.wire);
        had.add(&is_there(&limiter, expected).await);
        let connections = rig.wire.connections() - before;
        // Whoever listens for changes, and whoever looks whether it is back, comes again with time, and not with callers.
        let connections_max = rig.connections_max + 8 * since.elapsed().as_secs();
        assert!(connections <= connections_max, "{trouble:?}: {connections} connections for {had:?}");
        tokio::time::timeout(NEVER, limiter.drain()).await.expect("all endings reach the store");
        settled += i64::try_from(had.settled).expect("it is small");
    }
    // What was drawn and never heard of has been returned, and what was asked again was charged once.
    assert_eq!(consumed(&*rig.near).await, settled, "{trouble:?}");
    assert_eq!(used(&*rig.near).await, u64::try_from(settled).expect("it is small"), "{trouble:?}");
}

/// A lease of the store itself, as soon as it is there.
pub(crate) async fn from_the_store(limiter: &Limiter) -> Lease {
    for _ in 0..2_000 {
        match limiter.acquire(ACME, [("rpm", 1)]).await {
            Ok(lease) if lease.degraded().is_none() => return lease,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("the store does not come back");
}

/// Asks until the store itself answers.
async fn is_there(limiter: &Limiter, expected: Option<Degraded>) -> Had {
    let mut had = Had::default();
    for _ in 0..2_000 {
        let lease = limiter.acquire(ACME, [("rpm", 1)]).await;
        let is_there = lease.as_ref().is_ok_and(|lease| lease.degraded().is_none());
        end(lease, &mut had, expected).await;
        if is_there {
            return had;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the store does not come back: {had:?}");
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

/// Ends a lease, and notes what it was. Where the store is away it must be as `expected`; with none, nobody is let in.
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
            had.away += 1;
            assert_eq!(expected, None, "nobody is to be turned away");
        }
        Err(error) => panic!("a store that is away is told as {error:?}"),
    }
}

/// What a server says that is there: on a busy machine it is asked again.
pub(crate) async fn answer<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let asked = async {
        loop {
            match ask().await {
                Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(20)).await,
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
