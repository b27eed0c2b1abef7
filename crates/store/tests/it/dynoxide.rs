//! Runs the suite on dynoxide, a server with DynamoDB's API, with a manual clock and with the system clock.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::dynamodb::{jumping, real};

#[path = "dynamodb_store/mod.rs"]
mod store;

/// The engine under test.
const ENGINE: &str = crate::kit::engine::DYNOXIDE;

async fn on_manual_time(namespace: &str) -> Option<Fixture> {
    jumping(ENGINE, namespace).await
}

async fn on_real_time(namespace: &str) -> Option<Fixture> {
    real(ENGINE, namespace).await
}

conformance::suite!(manual_time, on_manual_time, jumps);
conformance::suite!(real_time, on_real_time);
