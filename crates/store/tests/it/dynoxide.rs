//! The store in a table of DynamoDB, on dynoxide, a server that speaks as DynamoDB does: it passes the suite with speculative
//! writes, with a read before each write, and on the system's clock.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::dynamodb::{jumping, real};

#[path = "dynamodb_store/mod.rs"]
mod store;

/// The engine of these tests.
const ENGINE: &str = crate::kit::engine::DYNOXIDE;

async fn guessing(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, true, namespace).await
}

async fn reading(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, false, namespace).await
}

async fn on_real_time(namespace: &str) -> Option<Fixture> {
    real(ENGINE, namespace).await
}

conformance::suite!(speculative, guessing, jumps);
conformance::suite!(read_then_write, reading, jumps);
conformance::suite!(speculative_on_real_time, on_real_time);
