//! The store in a table of DynamoDB passes the suite on DynamoDB Local, Amazon's own: with writes that are guessed, and with
//! writes that are read before. On the time that it is, dynoxide is asked.

#[allow(dead_code, reason = "another test needs the rest")]
mod dynamodb_kit;
mod engine_kit;

use tidegate_store::conformance::{self, Fixture};

const ENGINE: &str = "TIDEGATE_TEST_DYNAMODB";

async fn guessing(namespace: &str) -> Fixture {
    dynamodb_kit::jumping(dynamodb_kit::options(ENGINE), namespace).await
}

async fn reading(namespace: &str) -> Fixture {
    dynamodb_kit::jumping(dynamodb_kit::options(ENGINE).speculative(false), namespace).await
}

conformance::suite!(speculative, guessing, jumps);
conformance::suite!(read_then_write, reading, jumps);
