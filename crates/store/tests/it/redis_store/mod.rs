//! What the suite cannot see of the store on Redis: its arithmetic line by line, what a call costs, what is kept how long,
//! which answers are errors and which mean that the server is unavailable, and what becomes of it when connections are cut and
//! servers die.

mod arithmetic;
mod failover;
mod fast;
mod faults;
mod keeping;
mod lost;
mod processes;
mod requests;
pub(crate) mod soak;
mod tended;
mod together;
mod trouble;
