//! What the suite cannot see of the store on a cluster: nodes that are lost, connections that they end, and an index that has lost
//! something.

mod failover;
mod soak;
mod tended;
