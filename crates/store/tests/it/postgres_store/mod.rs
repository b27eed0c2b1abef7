//! Tests of the PostgreSQL store beyond the suite: opening, round trips, and failures of the server, the
//! connection, the clock or other processes.

mod bounds;
mod changes;
mod clock;
mod eviction;
mod faults;
mod lifecycle;
mod opening;
mod processes;
mod records;
mod round_trips;
mod soak;
