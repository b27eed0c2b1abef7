//! The tour of the README on PostgreSQL: the same commands, and the same comes out.

mod kit;

use kit::engine::{address, unique};
use kit::tour::walk;

#[test]
fn the_tour_of_the_readme_goes_as_it_says_on_postgres() {
    walk("README.md", Some(&format!("{}?schema={}", address("TIDEGATE_TEST_POSTGRES"), unique("tour"))));
}
