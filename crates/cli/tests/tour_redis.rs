//! The tour of the README on Redis: the same commands, and the same comes out.

mod kit;

use kit::engine::{address, unique};
use kit::tour::walk;

#[test]
fn the_tour_of_the_readme_goes_as_it_says_on_redis() {
    let (server, name) = (address("TIDEGATE_TEST_REDIS"), unique("tour"));
    walk("README.md", Some(&format!("{server}?namespace={name}&timeout_ms=30000")));
}
