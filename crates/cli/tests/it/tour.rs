//! The pages that people follow word by word, on the store that is there by itself: their commands are run, and what they show is
//! what comes out.

use crate::kit::tool::{CURL, skip_without_tool};
use crate::kit::tour::{Block, blocks, fits, walk};

#[test]
fn the_tour_of_the_readme_goes_as_it_says() {
    skip_without_tool!(CURL);
    walk("README.md", None);
}

#[test]
fn what_is_said_of_tokens_and_of_the_network_is_so() {
    skip_without_tool!(CURL);
    walk("docs/secure.md", None);
}

#[test]
fn blocks_are_found_between_the_marks_with_what_they_write() {
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
fn what_is_shown_differs_from_what_came_out_by_dots_and_a_little_time_and_nothing_else() {
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
