//! Several processes on one file: exact under load, fair to each other, and whole after any of them is killed.
//!
//! A test starts its own program again to be a child of it. What the child is to do stands in an environment variable;
//! without it the test is the parent.

mod beside;
mod child;
mod kill;
#[path = "../sqlite_store/kit.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod kit;
mod load;
mod log;
