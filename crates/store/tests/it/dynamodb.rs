//! Runs the suite on DynamoDB Local, Amazon's own server, with a manual clock. The system clock is tested on
//! dynoxide.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::dynamodb::jumping;

#[path = "dynamodb_store/mod.rs"]
mod store;

/// The engine under test.
const ENGINE: &str = crate::kit::engine::DYNAMODB;

async fn on_manual_time(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, namespace).await
}

conformance::suite!(manual_time, on_manual_time, jumps);
