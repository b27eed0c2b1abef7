//! Runs the tours of the documentation on the default store, and compares their output.

use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::{Block, blocks, fits, walk};

#[test]
fn server_tour_matches_its_output() {
    skip_without_tool!(CURL);
    walk("docs/server/tour.md", None);
}

#[test]
fn security_tour_matches_its_output() {
    skip_without_tool!(CURL);
    walk("docs/secure.md", None);
}

#[test]
fn blocks_between_the_marks_have_their_output() {
    let page = "```sh\nbefore\n```\n<!-- tour -->\n```sh\na\nb\n```\nwords\n```text\nc\n```\n```toml\nd\n```\n\
                ```sh\ne\n```\n<!-- /tour -->\n```sh\nafter\n```\n";
    let block = |line, commands: &str, shown: Option<&str>| Block {
        line,
        commands: commands.to_owned(),
        shown: shown.map(str::to_owned),
    };
    assert_eq!(blocks(page), [block(5, "a\nb\n", Some("c\n")), block(16, "e\n", None)]);
}

#[test]
fn match_allows_dots_and_small_number_differences() {
    let table = [
        ("a\n", "a\n", true),
        ("a\n", "a\nb\n", false),
        ("a…c\n", "abbc\n", true),
        ("a…c\n", "ab\nc\n", false),
        ("a\n…\nd\n", "a\nb\nc\nd\n", true),
        ("a\n…\nd\n", "a\nb\n", false),
        ("a …\nc\n", "a b\nc\n", true),
        ("a …\nc\n", "a b\nb\nc\n", false),
        ("t=1000;\n", "t=990.5;\n", true),
        ("t=1000;\n", "t=900;\n", false),
        ("v1.\n", "v1.\n", true),
        ("12\n", "x\n", false),
        ("", "", true),
        ("", "a\n", false),
    ];
    for (shown, came, is_so) in table {
        assert_eq!(fits(shown, came), is_so, "{shown:?} {came:?}");
    }
}
