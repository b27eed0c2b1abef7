//! The conformance suite that every store passes.
//!
//! One line in the tests of a store checks it against the contract:
//!
//! ```
//! use std::sync::Arc;
//! use tidegate_core::time::Stamp;
//! use tidegate_store::conformance::{self, Fixture};
//! use tidegate_store::{ManualWall, Memory};
//!
//! async fn open(namespace: &str) -> Fixture {
//!     let clock = ManualWall::new(Stamp::from_secs(1_800_000_000));
//!     let store = Memory::with_clock(clock.clone()).namespace(namespace).expect("a case's name is valid");
//!     Fixture::new(Arc::new(store), Arc::new(clock))
//! }
//!
//! conformance::suite!(memory, open, jumps);
//! # fn main() {}
//! ```
//!
//! It generates a module `memory` with one test per case. `open` returns an empty namespace for each, named
//! after the case. It may return an `Option<Fixture>` instead: a case without a fixture is skipped, for
//! example if the store's server is not running. A store whose clock cannot be set omits `jumps`, and the
//! cases that let minutes and hours pass are not generated; its time is a [`RealTime`]. No case depends on
//! the speed of the store.

#[doc(hidden)]
pub mod audit;
#[doc(hidden)]
pub mod buckets;
#[doc(hidden)]
pub mod cascade;
#[doc(hidden)]
pub mod deadlines;
#[doc(hidden)]
pub mod debts;
#[doc(hidden)]
pub mod entities;
mod kit;
#[doc(hidden)]
pub mod leases;
#[doc(hidden)]
pub mod ledger;
mod list;
#[doc(hidden)]
pub mod listings;
#[doc(hidden)]
pub mod policies;
#[doc(hidden)]
pub mod prune;
#[doc(hidden)]
pub mod races;
#[doc(hidden)]
pub mod random_calls;
#[doc(hidden)]
pub mod renewals;
#[doc(hidden)]
pub mod repairs;
#[doc(hidden)]
pub mod rules;
#[doc(hidden)]
pub mod steps;
#[doc(hidden)]
pub mod tokens;
mod turns;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::time::Stamp;

#[doc(inline)]
pub use crate::__tidegate_suite as suite;
use crate::{Lookup, ManualWall, Store};

/// A store under test, and its time. Clones share both.
#[derive(Debug, Clone)]
pub struct Fixture {
    /// The store: an empty namespace.
    pub store: Arc<dyn Store>,
    /// Controls the store's time.
    pub time: Arc<dyn Time>,
    leases: Arc<AtomicU64>,
    turns: turns::Turns,
    is_slow: bool,
}

impl Fixture {
    /// A store and its time.
    pub fn new(store: Arc<dyn Store>, time: Arc<dyn Time>) -> Self {
        Self { store, time, leases: Arc::default(), turns: Arc::default(), is_slow: false }
    }

    /// Marks a store whose calls take milliseconds: cases with thousands of iterations run hundreds, which is
    /// as exact but less likely to find rare errors.
    #[must_use]
    pub fn slow(mut self) -> Self {
        self.is_slow = true;
        self
    }

    /// The iterations of a case: `often`, or `fewer` for a slow store.
    pub(crate) const fn times(&self, often: u32, fewer: u32) -> u32 {
        if self.is_slow { fewer } else { often }
    }

    /// Replaces the store, for example by a wrapper of it.
    #[must_use]
    pub fn with_store(self, store: Arc<dyn Store>) -> Self {
        Self { store, ..self }
    }

    /// A new lease id, a millisecond after the previous one.
    pub fn next_lease(&self) -> LeaseId {
        let number = self.leases.fetch_add(1, Ordering::Relaxed);
        LeaseId::new(1_800_000_000_000 + number, u128::from(number))
    }
}

/// The time of a store, as far as a test controls it.
pub trait Time: fmt::Debug + Send + Sync + 'static {
    /// Waits until `span` has passed by the store's clock.
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Whether time can be advanced by hours at once.
    fn can_jump(&self) -> bool;
}

impl Time for ManualWall {
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.advance(span);
        Box::pin(std::future::ready(()))
    }

    fn can_jump(&self) -> bool {
        true
    }
}

/// The time of a store with its own clock: waits until that clock has advanced.
#[derive(Debug, Clone)]
pub struct RealTime(pub Arc<dyn Store>);

/// The interval of reading the store's clock.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

impl RealTime {
    async fn now(&self) -> Stamp {
        self.0.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are read").at
    }
}

impl Time for RealTime {
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let until = self.now().await + span;
            tokio::time::sleep(span).await;
            while self.now().await < until {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        })
    }

    fn can_jump(&self) -> bool {
        false
    }
}

/// Runs one case on an empty namespace with its name, or skips it if `open` returns `None`.
///
/// # Panics
/// If the store violates the contract, or the system provides no threads.
pub fn run<F: Into<Option<Fixture>>>(
    case: &str,
    open: impl AsyncFnOnce(&str) -> F,
    test: impl AsyncFnOnce(Fixture),
) {
    // Several threads, for the cases with races.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(4).enable_all().build().expect("the system provides threads");
    runtime.block_on(async {
        if let Some(fixture) = open(case).await.into() {
            test(fixture).await;
        }
    });
}
