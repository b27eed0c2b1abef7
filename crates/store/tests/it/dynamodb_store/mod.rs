//! What the store in a table of DynamoDB promises beyond the suite: what it asks of the engine, what becomes of faults, of
//! clocks that are apart and of several processes, and what its items look like.
//!
//! The module is in the program once for each engine.

mod cascade;
mod clocks;
mod crowd;
mod faults;
mod items;
mod kept;
mod listings;
mod older;
mod processes;
mod requests;
mod trouble;

use super::ENGINE;
