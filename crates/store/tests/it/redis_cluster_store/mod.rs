//! Tests of the store on a cluster beyond the suite: lost nodes, closed connections, lookups, and a damaged index.

mod failover;
mod housekeeping;
mod lookups;
mod soak;
