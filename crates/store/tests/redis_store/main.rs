//! What the suite cannot see of the store on Redis: its arithmetic line by line, what a call costs, what is kept how long,
//! what is an error and what is away, and what becomes of it when connections are cut and servers die.

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
#[path = "../engine_kit/proxy.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod proxy;
#[path = "../engine_kit/soak.rs"]
mod soak_kit;
#[path = "../engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

mod arithmetic;
mod failover;
mod fast;
mod faults;
mod keeping;
mod kit;
mod lost;
mod processes;
mod requests;
mod soak;
mod tended;
mod together;
mod trouble;

/// Where four processes work.
const SOAKED: &str = kit::REDIS;
