//! The server tour on PostgreSQL: the same commands have the same output.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::walk;

/// The variable with the address of the engine.
const POSTGRES: &str = "TIDEGATE_TEST_POSTGRES";

#[test]
fn server_tour_matches_its_output_on_postgres() {
    skip_without!(POSTGRES);
    skip_without_tool!(CURL);
    walk("docs/server/tour.md", Some(&format!("{}?schema={}", address(POSTGRES), unique("tour"))));
}
