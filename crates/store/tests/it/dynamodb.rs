//! The store in a table of DynamoDB, on DynamoDB Local, Amazon's own: it passes the suite with speculative writes, and with
//! a read before each write. On the system's clock, dynoxide is asked.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::dynamodb::jumping;

#[path = "dynamodb_store/mod.rs"]
mod store;

/// The engine of these tests.
const ENGINE: &str = crate::kit::engine::DYNAMODB;

async fn guessing(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, true, namespace).await
}

async fn reading(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, false, namespace).await
}

conformance::suite!(speculative, guessing, jumps);
conformance::suite!(read_then_write, reading, jumps);
