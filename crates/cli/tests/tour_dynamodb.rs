//! The tour of the README in a table of DynamoDB: once it is made, the same commands, and the same comes out.

mod kit;

use kit::Shop;
use kit::engine::{address, unique};
use kit::tour::walk;

#[test]
fn the_tour_of_the_readme_goes_as_it_says_on_dynamodb() {
    let (table, server) = (unique("tour"), address("TIDEGATE_TEST_DYNAMODB"));
    let url =
        format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&deadline_ms=5000&timeout_ms=30000");
    let made = Shop::new().run_words(&["--store", &url, "store", "init"]);
    assert_eq!((made.code, made.stderr.as_str()), (0, ""), "{made:?}");
    walk("README.md", Some(&url));
}
