//! The server tour on DynamoDB: the same commands have the same output.

use crate::kit::Fixture;
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::walk;

/// The variable with the address of the engine.
const DYNAMODB: &str = "TIDEGATE_TEST_DYNAMODB";

#[test]
fn server_tour_matches_its_output_on_dynamodb() {
    skip_without!(DYNAMODB);
    skip_without_tool!(CURL);
    let (table, server) = (unique("tour"), address(DYNAMODB));
    let url =
        format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&deadline_ms=5000&timeout_ms=30000");
    let made = Fixture::new().run_words(&["--store", &url, "store", "init"]);
    assert_eq!((made.code, made.stderr.as_str()), (0, ""), "{made:?}");
    walk("docs/server/tour.md", Some(&url));
}
