//! Tests of the store on a cluster beyond the suite: lost nodes, closed connections, and a damaged index.

mod failover;
mod housekeeping;
mod soak;
