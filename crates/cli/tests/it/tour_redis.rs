//! The server tour on Redis: the same commands have the same output.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::walk;

/// The variable with the address of the engine.
const REDIS: &str = "TIDEGATE_TEST_REDIS";

#[test]
fn server_tour_matches_its_output_on_redis() {
    skip_without!(REDIS);
    skip_without_tool!(CURL);
    let (server, name) = (address(REDIS), unique("tour"));
    walk("docs/server/tour.md", Some(&format!("{server}?namespace={name}&timeout_ms=30000")));
}
