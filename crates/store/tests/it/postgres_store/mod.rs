//! The store in a PostgreSQL server: how it is opened, how little it asks of the server, and what becomes of it when the server, the wire,
//! the clock or other processes misbehave.

mod bounds;
mod changes;
mod clock;
mod evicts;
mod faults;
mod lifecycle;
mod opening;
mod processes;
mod records;
mod soak;
mod trips;
