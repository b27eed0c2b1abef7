//! What the store in a table of DynamoDB promises beyond the suite, on dynoxide: the same tests as on DynamoDB Local.

#[allow(dead_code, reason = "another test needs the rest")]
mod dynamodb_kit;
mod engine_kit;
#[path = "engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

#[path = "dynamodb_store/cascade.rs"]
mod cascade;
#[path = "dynamodb_store/clocks.rs"]
mod clocks;
#[path = "dynamodb_store/crowd.rs"]
mod crowd;
#[path = "dynamodb_store/faults.rs"]
mod faults;
#[path = "dynamodb_store/hand.rs"]
mod hand;
#[path = "dynamodb_store/items.rs"]
mod items;
#[path = "dynamodb_store/kept.rs"]
mod kept;
#[path = "dynamodb_store/listings.rs"]
mod listings;
#[path = "dynamodb_store/processes.rs"]
mod processes;
#[path = "dynamodb_store/proxy.rs"]
mod proxy;
#[path = "dynamodb_store/requests.rs"]
mod requests;
#[path = "dynamodb_store/trouble.rs"]
mod trouble;

/// The engine that these run on.
pub(crate) const ENGINE: &str = "TIDEGATE_TEST_DYNOXIDE";
