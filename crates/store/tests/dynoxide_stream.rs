//! Usage is counted by whoever follows the table's stream, on dynoxide, a server that speaks as DynamoDB does.

#[path = "dynamodb_kit/mod.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod dynamodb_kit;
#[path = "engine_kit/mod.rs"]
mod engine_kit;
#[path = "dynamodb_store/proxy.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod proxy;
#[path = "dynamodb_kit/stream.rs"]
mod stream;
#[path = "engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

/// The engine that these run on.
pub(crate) const ENGINE: &str = "TIDEGATE_TEST_DYNOXIDE";
