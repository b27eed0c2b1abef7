//! The suite that every store passes.
//!
//! A store of any maker is shown to keep the contract by one line in its tests:
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
//! It makes a module `memory` with one test per case. `open` gives each an empty namespace, named after the case. It may
//! return an `Option<Fixture>` instead: a case without a fixture is skipped, for a store whose server is not running, say.
//! A store whose clock cannot be set by hand leaves `jumps` out, and the cases that let minutes and hours pass are
//! not made; its time is a [`RealTime`]. No case depends on how fast the store is.

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
pub mod renewals;
#[doc(hidden)]
pub mod rules;
#[doc(hidden)]
pub mod steps;
#[doc(hidden)]
pub mod tokens;
mod turns;
#[doc(hidden)]
pub mod wander;

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

/// A store to be shown, and its time. Clones are the same.
#[derive(Debug, Clone)]
pub struct Fixture {
    /// The store: one namespace, with nothing in it.
    pub store: Arc<dyn Store>,
    /// How to let the store's time pass.
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

    /// The same for a store each of whose answers takes milliseconds: what a case does thousands of times in a row it does
    /// hundreds of times, which is as exact, and shows less of what only shows now and then.
    #[must_use]
    pub fn slow(mut self) -> Self {
        self.is_slow = true;
        self
    }

    /// How often a case does what it does many times: as `often` as it is written, or `fewer` times where that takes too long.
    pub(crate) const fn times(&self, often: u32, fewer: u32) -> u32 {
        if self.is_slow { fewer } else { often }
    }

    /// The same with another store in its place: a wrapper around it, say.
    #[must_use]
    pub fn with_store(self, store: Arc<dyn Store>) -> Self {
        Self { store, ..self }
    }

    /// A lease id that this namespace has not seen, made a millisecond after the one before it.
    pub fn next_lease(&self) -> LeaseId {
        let number = self.leases.fetch_add(1, Ordering::Relaxed);
        LeaseId::new(1_800_000_000_000 + number, u128::from(number))
    }
}

/// A store's time, as far as a test can let it pass.
pub trait Time: fmt::Debug + Send + Sync + 'static {
    /// Comes back when `span` has passed by the store's clock.
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Whether hours pass at once.
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

/// The time of a store that goes by a clock of its own: it is waited for until that clock shows it.
#[derive(Debug, Clone)]
pub struct RealTime(pub Arc<dyn Store>);

/// How often a store is asked what time it is.
const ASKED_EVERY: Duration = Duration::from_millis(2);

impl RealTime {
    async fn now(&self) -> Stamp {
        self.0.balances(&Lookup::Subjects(Vec::new())).await.expect("the store says what time it is").at
    }
}

impl Time for RealTime {
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let until = self.now().await + span;
            tokio::time::sleep(span).await;
            while self.now().await < until {
                tokio::time::sleep(ASKED_EVERY).await;
            }
        })
    }

    fn can_jump(&self) -> bool {
        false
    }
}

/// Runs one case on an empty namespace of its name, or skips it where `open` returns `None`.
///
/// # Panics
/// If the store does not keep the promise that the case is about, or the system gives no threads to run it.
pub fn run<F: Into<Option<Fixture>>>(
    case: &str,
    open: impl AsyncFnOnce(&str) -> F,
    show: impl AsyncFnOnce(Fixture),
) {
    // Several threads, so that what races does.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(4).enable_all().build().expect("the system gives threads");
    runtime.block_on(async {
        if let Some(fixture) = open(case).await.into() {
            show(fixture).await;
        }
    });
}
