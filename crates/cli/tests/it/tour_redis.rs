//! The tour of the README on Redis: the same commands, and the same comes out.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::walk;

/// The variable with the address of the engine.
const REDIS: &str = "TIDEGATE_TEST_REDIS";

#[test]
fn the_tour_of_the_readme_goes_as_it_says_on_redis() {
    skip_without!(REDIS);
    skip_without_tool!(CURL);
    let (server, name) = (address(REDIS), unique("tour"));
    walk("README.md", Some(&format!("{server}?namespace={name}&timeout_ms=30000")));
}
