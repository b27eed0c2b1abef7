//! Tests of the Redis store beyond the suite: the script's arithmetic, the cost of calls, expiry of keys,
//! errors, and failures of connections and servers.

mod arithmetic;
mod batching;
mod errors;
mod expiry;
mod failover;
mod fast_path;
mod faults;
mod housekeeping;
mod processes;
mod promotion;
mod requests;
pub(crate) mod soak;
