//! Whoever counts, beside those who draw, what leases have used.
//!
//! Most stores count usage with the end of a lease, and need nobody. One whose engine lets a draw be a single write leaves a
//! mark where a lease has ended; the marks are counted by whoever comes by, and an [`Aggregator`] comes by soon.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tidegate_core::time::Stamp;

use crate::reply::Reply;

/// From where on an engine's stream is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Since {
    /// From now on; what was there before is looked for in the store itself.
    #[default]
    Now,
    /// From the oldest record that the engine still has. What was counted already costs reads, and no more.
    Oldest,
}

/// How an [`Aggregator`] goes about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateOptions {
    /// From where on the stream is read.
    pub since: Since,
    /// How often it is read while nothing comes; every second by default.
    pub every: Duration,
    /// How long an item that was heard of waits for more to count with it; two seconds by default.
    pub linger: Duration,
}

impl Default for AggregateOptions {
    fn default() -> Self {
        Self { since: Since::Now, every: Duration::from_secs(1), linger: Duration::from_secs(2) }
    }
}

/// What an [`Aggregator`] has done so far, and how far it is behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Aggregated {
    /// Records of the stream that were read, those included that are about something else.
    pub records: u64,
    /// Ended leases that were counted.
    pub counted: u64,
    /// Times that something went wrong and was tried again.
    pub errors: u64,
    /// Ended leases whose item the engine had removed before anybody counted them.
    pub lost: u64,
    /// How long ago the oldest change was made that is not counted yet; zero where there is none.
    pub lag: Duration,
    /// When the newest record that was read was made.
    pub newest: Option<Stamp>,
    /// Everything was read and counted when it last looked.
    pub is_caught_up: bool,
}

/// When to stop: a future that is ready then.
pub type Until<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Counts what leases have used, in the background.
///
/// To count twice, or in two places at once, counts nothing twice: a mark goes in the same transaction that counts it. So
/// there is nothing to be kept between one run and the next.
pub trait Aggregator: fmt::Debug + Send + Sync {
    /// Follows the engine until it is told to stop, and then counts what it has heard of. An engine that is away, or asked
    /// more than it may be, is asked again after a while.
    ///
    /// # Errors
    /// [`StoreError::Invalid`](crate::StoreError::Invalid) where there is no stream, and what else does not pass by itself.
    ///
    /// # Cancel safety
    /// Dropping the reply leaves to others, or to the next run, what was not counted.
    fn run<'a>(&'a self, until: Until<'a>) -> Reply<'a, ()>;

    /// Counts everything that is there to count, and ends.
    ///
    /// # Errors
    /// As [`run`](Self::run), and [`StoreError::Unavailable`](crate::StoreError::Unavailable) where the engine stays away.
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    fn catch_up(&self) -> Reply<'_, ()>;

    /// What it has done so far.
    fn stats(&self) -> Aggregated;
}
