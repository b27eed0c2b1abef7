//! The tour of the README on PostgreSQL: the same commands, and the same comes out.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::walk;

/// The variable with the address of the engine.
const POSTGRES: &str = "TIDEGATE_TEST_POSTGRES";

#[test]
fn the_tour_of_the_readme_goes_as_it_says_on_postgres() {
    skip_without!(POSTGRES);
    skip_without_tool!(CURL);
    walk("README.md", Some(&format!("{}?schema={}", address(POSTGRES), unique("tour"))));
}
