//! What the store in a table of DynamoDB promises beyond the suite: what it asks of the engine, what becomes of faults, of
//! clocks that are apart and of several processes, and what its items look like.

#[path = "../dynamodb_kit/mod.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod dynamodb_kit;
#[path = "../engine_kit/mod.rs"]
mod engine_kit;
#[path = "../engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

mod cascade;
mod clocks;
mod crowd;
mod faults;
mod hand;
mod items;
mod kept;
mod listings;
mod processes;
mod proxy;
mod requests;
mod trouble;

/// The engine that these run on.
pub(crate) const ENGINE: &str = "TIDEGATE_TEST_DYNAMODB";
