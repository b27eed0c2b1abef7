//! `cargo xtask tidy`: project rules that no compiler checks.
//!
//! Each rule is a pure function from files to problems, so that a test can show it firing. All problems are
//! listed, not only the first.

mod borders;
mod contracts;
mod house;
mod links;
mod plain_english;
mod source;

use std::fmt;
use std::fs;

use anyhow::{Context as _, Result, ensure};

use crate::{step, workspace};
use source::Source;

pub(crate) use links::{is_relative as is_relative_link, resolved as resolve_link};

/// One breach of one rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    path: String,
    line: usize,
    sentence: String,
}

impl Problem {
    fn new(path: &str, line: usize, sentence: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, sentence: sentence.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}: {}", self.path, self.line, self.sentence)
    }
}

type FileRule = fn(&Source) -> Vec<Problem>;
type TreeRule = fn(&[Source]) -> Vec<Problem>;

/// Rules that check one file at a time.
const FILE_RULES: [FileRule; 9] = [
    house::length,
    house::module_doc,
    house::machine_paths,
    house::placeholders,
    house::sleeping_tests,
    borders::pure_core,
    borders::core_dependencies,
    borders::features,
    borders::serde,
];

/// Rules that check the whole tree.
const TREE_RULES: [TreeRule; 3] = [links::check, contracts::check, plain_english::check];

/// What to do with counts that have fallen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ratchet {
    /// Report them.
    Check,
    /// Record them.
    Record,
}

/// Checks the working tree and prints every problem.
pub(crate) fn run(ratchet: Ratchet) -> Result<()> {
    let mut sources = sources()?;
    if ratchet == Ratchet::Record
        && let Some(record) = plain_english::record(&sources)
    {
        let path = plain_english::RECORD;
        fs::write(workspace::root().join(path), &record)
            .with_context(|| format!("could not write {path}"))?;
        sources.retain(|source| source.path != path);
        sources.push(Source::new(path, record));
    }
    let problems = check(&sources);
    for problem in &problems {
        println!("{problem}");
    }
    ensure!(problems.is_empty(), "tidy checked {} files; problems: {}", sources.len(), problems.len());
    println!("    {} files are tidy", sources.len());
    Ok(())
}

fn check(sources: &[Source]) -> Vec<Problem> {
    let of_files = sources.iter().flat_map(|source| FILE_RULES.iter().flat_map(move |rule| rule(source)));
    let of_tree = TREE_RULES.iter().flat_map(|rule| rule(sources));
    let mut problems: Vec<_> = of_files.chain(of_tree).collect();
    problems.sort();
    problems
}

/// The files that git tracks or would track. Binary files count as empty, because links may point to them.
fn sources() -> Result<Vec<Source>> {
    let mut list = workspace::at_root("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let list = step::capture("git ls-files", &mut list)?;
    let mut sources = Vec::new();
    for path in list.split_terminator('\0') {
        let file = workspace::root().join(path);
        // Git still lists a file whose removal is not staged, and a symbolic link is checked at its target.
        if !file.symlink_metadata().is_ok_and(|data| data.is_file()) {
            continue;
        }
        let bytes = fs::read(&file).with_context(|| format!("could not read {path}"))?;
        sources.push(Source::new(path, String::from_utf8(bytes).unwrap_or_default()));
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_reported_in_reading_order() {
        let sources = [
            Source::new("b.rs", "fn b() {}\n"),
            Source::new("a.rs", "fn a() {}\n"),
            Source::new("docs/contracts.md", "| part | test |\n|---|---|\n| x | `a::no_such_test` |\n"),
        ];
        let found = check(&sources);
        let found: Vec<_> = found.iter().map(|problem| (problem.path.as_str(), problem.line)).collect();
        assert_eq!(found, [("a.rs", 1), ("b.rs", 1), ("docs/contracts.md", 3), (plain_english::RECORD, 1)]);
    }

    #[test]
    fn problem_reads_as_path_line_sentence() {
        assert_eq!(Problem::new("a.rs", 7, "no good").to_string(), "a.rs:7: no good");
    }
}
