//! The store in a table of DynamoDB passes the suite on dynoxide, a server that speaks as DynamoDB does: with writes that are
//! guessed, with writes that are read before, and on the time that it is.

#[allow(dead_code, reason = "another test needs the rest")]
mod dynamodb_kit;
mod engine_kit;

use tidegate_store::conformance::{self, Fixture};

const ENGINE: &str = "TIDEGATE_TEST_DYNOXIDE";

async fn guessing(namespace: &str) -> Fixture {
    dynamodb_kit::jumping(dynamodb_kit::options(ENGINE), namespace).await
}

async fn reading(namespace: &str) -> Fixture {
    dynamodb_kit::jumping(dynamodb_kit::options(ENGINE).speculative(false), namespace).await
}

async fn on_real_time(namespace: &str) -> Fixture {
    dynamodb_kit::real(dynamodb_kit::options(ENGINE), namespace).await
}

conformance::suite!(speculative, guessing, jumps);
conformance::suite!(read_then_write, reading, jumps);
conformance::suite!(speculative_on_real_time, on_real_time);
