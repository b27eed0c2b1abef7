//! What stores share that run our code: buckets on shelves, a reach over them, and the steps of a lease.
//!
//! The memory store works on its shards with this, under their locks. A store with a file loads what a call needs on to
//! a shelf, works on it in the same way, and writes what has changed.

mod reach;
pub(crate) mod shelf;
mod steps;

pub(crate) use reach::{Reach, Room};
pub(crate) use shelf::{Bucket, Place, Places, SHARDS, Shelf, hash_subject, shelf_of};
pub(crate) use steps::{Book, Desk, Known, Open, check_levels};
#[allow(unused_imports, reason = "whether a store decides elsewhere depends on what is built in")]
pub(crate) use steps::{check_renewal, drew_from, fits, tell};
