//! The steps of leases, decided on buckets in memory: shared by all engines that decide in this process.
//!
//! An engine reads the buckets and the lease that a step names, calls [`decide`], and writes the changes, all
//! in one transaction. `docs/write-an-engine.md` in the repository has a complete example.
//!
//! The memory store uses the tables of its shards, under their locks. The SQLite store loads the state of a
//! batch of steps into one table, applies the steps, and writes the changes.

mod bucket_set;
pub(crate) mod bucket_table;
mod decide;
mod steps;

pub(crate) use bucket_set::{BucketSet, Capacity};
pub(crate) use bucket_table::{Bucket, BucketTable, Place, Places, SHARDS, hash_subject, table_of};
pub use decide::{Decision, LeaseState, decide, expire};
#[allow(unused_imports, reason = "used depending on the features")]
pub(crate) use decide::{LoadedLease, OneLease, Unbounded, decide_by};
pub(crate) use steps::{KnownLease, LeaseTable, Open, StepContext, check_levels};
#[allow(unused_imports, reason = "used depending on the features")]
pub(crate) use steps::{attach_rules, drew_from, fits};
