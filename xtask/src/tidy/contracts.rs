//! docs/contracts.md: every promise in its tables cites a test that exists.
//!
//! Without this check a table of promises goes stale when a test is renamed.

use std::collections::BTreeMap;

use super::Problem;
use super::links::prose;
use super::source::{Source, is_word};

const CONTRACTS: &str = "docs/contracts.md";

/// The files that define each function, by name.
type Functions<'a> = BTreeMap<&'a str, Vec<&'a str>>;

/// Every test cited in a table of the contracts exists.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let Some(page) = sources.iter().find(|source| source.path == CONTRACTS) else {
        return vec![Problem::new(CONTRACTS, 1, "the file is missing: it lists the test of each promise")];
    };
    let cited = citations(&page.text);
    if cited.is_empty() {
        return vec![Problem::new(CONTRACTS, 1, "no table cites a test")];
    }
    let functions = functions(sources);
    let missing = cited.into_iter().filter(|(_, citation)| !exists(citation, &functions));
    missing
        .map(|(line, citation)| {
            Problem::new(CONTRACTS, line, format!("the test `{citation}` does not exist"))
        })
        .collect()
}

/// Test names in backticks inside table rows, each with its line.
fn citations(text: &str) -> Vec<(usize, &str)> {
    let rows = prose(text).filter(|(_, line)| line.trim_start().starts_with('|'));
    let spans =
        rows.flat_map(|(number, row)| row.split('`').skip(1).step_by(2).map(move |span| (number, span)));
    spans.filter(|(_, span)| is_citation(span)).collect()
}

/// `test_name` or `file::test_name`. A single word is a component, and `Type::method` an item, not a test.
fn is_citation(span: &str) -> bool {
    let is_snake = |part: &str| {
        part.starts_with(|letter: char| letter.is_ascii_lowercase())
            && part
                .chars()
                .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_')
    };
    span.split("::").all(is_snake) && span.contains(['_', ':'])
}

fn functions(sources: &[Source]) -> Functions<'_> {
    let mut functions = Functions::new();
    for source in sources {
        for (start, keyword) in source.code.match_indices("fn ") {
            if source.code[..start].chars().next_back().is_some_and(is_word) {
                continue;
            }
            let rest = &source.code[start + keyword.len()..];
            let name = rest.split(|letter| !is_word(letter)).next().unwrap_or_default();
            functions.entry(name).or_default().push(&source.path);
        }
    }
    functions
}

/// Whether the cited function is defined, in a file or folder of the cited name if the citation has one.
fn exists(citation: &str, functions: &Functions<'_>) -> bool {
    let mut parts: Vec<&str> = citation.split("::").collect();
    let Some(paths) = parts.pop().and_then(|name| functions.get(name)) else {
        return false;
    };
    let is_in_path =
        |path: &&str| path.split('/').any(|step| parts.contains(&step.strip_suffix(".rs").unwrap_or(step)));
    parts.is_empty() || paths.iter().any(is_in_path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(row: &str) -> Vec<String> {
        let page = format!("`not_in_a_table`\n\n| part | drop |\n|---|---|\n{row}\n");
        let code = "//! Why.\n#[test]\nfn a_drop_returns_its_slot() {}\n// fn only_a_comment()\n";
        let sources = [Source::new("crates/tidegate/tests/permit.rs", code), Source::new(CONTRACTS, page)];
        check(&sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn missing_cited_test_is_found() {
        for missing in
            ["a_drop_returns", "permit::a_drop", "queue::a_drop_returns_its_slot", "only_a_comment"]
        {
            assert_eq!(
                reported(&format!("| permit | yes: `{missing}` |")),
                [format!("docs/contracts.md:5: the test `{missing}` does not exist")]
            );
        }
    }

    #[test]
    fn cited_tests_that_exist_are_fine() {
        let row = "| `Permit`, `permit`, `Permit::settle` | `permit::a_drop_returns_its_slot`, `a_drop_returns_its_slot` |";
        assert!(reported(row).is_empty());
    }

    #[test]
    fn missing_contracts_and_uncited_tables_are_problems() {
        assert_eq!(reported("| permit | yes |").len(), 1);
        assert_eq!(check(&[]).len(), 1);
    }
}
