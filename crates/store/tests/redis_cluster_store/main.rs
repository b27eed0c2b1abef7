//! What the suite cannot see of the store on a cluster: nodes that are lost, connections that they end, and an index that has lost
//! something.

#[path = "../engine_kit/account.rs"]
mod account;
#[path = "../sqlite_processes/child.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod child;
#[path = "../engine_kit/connect_redis.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod connect_redis;
#[path = "../engine_kit/mod.rs"]
mod engine_kit;
#[path = "../sqlite_processes/log.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod log;
#[path = "../engine_kit/private_redis.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod private_redis;
#[path = "../engine_kit/soak.rs"]
mod soak_kit;
#[path = "../engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

mod failover;
mod nodes;
mod soak;
mod tended;
