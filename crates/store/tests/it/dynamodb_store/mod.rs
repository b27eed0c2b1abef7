//! Tests of the DynamoDB store beyond the suite: its requests, faults, clock skew, several processes, and the
//! layout of items.
//!
//! The module is compiled once per engine.

mod cascade;
mod clocks;
mod errors;
mod faults;
mod item_bounds;
mod item_lifetime;
mod items;
mod listings;
mod old_tables;
mod processes;
mod requests;

use super::ENGINE;
