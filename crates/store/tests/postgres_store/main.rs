//! The store in a PostgreSQL server: how it is opened, how little it asks of the server, and what becomes of it when the server, the wire,
//! the clock or other processes misbehave.

#[path = "../sqlite_processes/child.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod child;
#[path = "../engine_kit/mod.rs"]
mod engine_kit;
#[path = "../engine_kit/held.rs"]
mod held;
#[path = "../sqlite_processes/log.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod log;
#[path = "../engine_kit/private_postgres.rs"]
mod private_postgres;
#[path = "../engine_kit/proxy.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod proxy;
#[path = "../engine_kit/soak.rs"]
mod soak_kit;
#[path = "../engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

mod bounds;
mod changes;
mod clock;
mod faults;
mod kit;
mod lifecycle;
mod opening;
mod processes;
mod soak;
mod trips;
