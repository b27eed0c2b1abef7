//! What engines that decide in this process share: the steps of a lease, decided on buckets in memory.
//!
//! An engine reads the buckets and the lease that a step names, calls [`decide`], and writes what has changed, all in one
//! transaction of its own. `docs/write-an-engine.md` in the repository has a complete example.
//!
//! The memory store works on the tables of its shards, under their locks. The SQLite store loads what a batch of steps
//! needs into one, works on it in the same way, and writes what has changed.

mod bucket_set;
pub(crate) mod bucket_table;
mod decide;
mod steps;

pub(crate) use bucket_set::{BucketSet, Capacity};
pub(crate) use bucket_table::{Bucket, BucketTable, Place, Places, SHARDS, hash_subject, table_of};
pub use decide::{Decided, LeaseState, decide, expire};
#[allow(unused_imports, reason = "whether a store decides so depends on what is built in")]
pub(crate) use decide::{OneLease, decide_by};
pub(crate) use steps::{KnownLease, LeaseTable, Open, StepContext, check_levels};
#[allow(unused_imports, reason = "whether a store decides elsewhere depends on what is built in")]
pub(crate) use steps::{drew_from, fits, tell};
