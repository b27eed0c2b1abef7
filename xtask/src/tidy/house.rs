//! Rules for every file: its length, its first line, and text that must not be committed.

use super::Problem;
use super::source::{Source, holds, lines_with};

const LINES_MAX: usize = 600;

/// Words that mean "not finished". Split, so that this file does not report itself.
const PLACEHOLDERS: [&str; 5] = [
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("#[ig", "nore"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];

/// Folders that exist only on one machine.
const MACHINE_FOLDERS: [&str; 3] = ["work", "root", "home"];

/// No Rust file is longer than [`LINES_MAX`].
pub(super) fn length(source: &Source) -> Vec<Problem> {
    let lines = source.text.lines().count();
    if !source.is_rust() || lines <= LINES_MAX {
        return Vec::new();
    }
    let sentence =
        format!("the file has {lines} lines, at most {LINES_MAX} are allowed: split it by concept");
    vec![Problem::new(&source.path, LINES_MAX + 1, sentence)]
}

/// Every Rust file begins with a module doc that says why it exists.
pub(super) fn module_doc(source: &Source) -> Vec<Problem> {
    if !source.is_rust() || source.text.starts_with("//!") {
        return Vec::new();
    }
    vec![Problem::new(&source.path, 1, "the file does not begin with a `//!` line that says why it exists")]
}

/// No path leads to a folder that only the author has.
pub(super) fn machine_paths(source: &Source) -> Vec<Problem> {
    // Cargo generates Cargo.lock.
    if source.name() == "Cargo.lock" {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for (line, number) in source.text.lines().zip(1..) {
        for folder in MACHINE_FOLDERS.map(|folder| format!("/{folder}/")) {
            if line.match_indices(&folder).any(|(start, _)| is_machine_path(line, start, folder.len())) {
                let sentence = format!("a path under {folder} exists on one machine only");
                problems.push(Problem::new(&source.path, number, sentence));
            }
        }
    }
    problems
}

/// Whether an absolute path begins here and continues; within a relative path or an address it is harmless.
fn is_machine_path(line: &str, start: usize, length: usize) -> bool {
    let before = line[..start].chars().next_back();
    let begins = before.is_none_or(|letter| !letter.is_alphanumeric() && !"._-~}*".contains(letter));
    begins && line[start + length..].starts_with(|letter: char| letter.is_alphabetic())
}

/// Code contains no placeholders: unfinished work is an issue, not a comment.
pub(super) fn placeholders(source: &Source) -> Vec<Problem> {
    if !source.is_rust() {
        return Vec::new();
    }
    let found = PLACEHOLDERS
        .iter()
        .flat_map(|word| lines_with(&source.text, word).into_iter().map(move |line| (word, line)));
    found
        .map(|(word, line)| Problem::new(&source.path, line, format!("`{word}` leaves something unfinished")))
        .collect()
}

/// Tests do not sleep in real time: they would be slow, and fail on a busy machine. The kit may, to poll a
/// condition.
pub(super) fn sleeping_tests(source: &Source) -> Vec<Problem> {
    let mut folders = source.path.split('/').rev().skip(1);
    if !folders.any(|folder| folder == "tests") || source.path.contains("/it/kit/") {
        return Vec::new();
    }
    let mut lines = lines_with(&source.code, "thread::sleep");
    let imports =
        source.code.lines().zip(1..).filter(|(line, _)| holds(line, "thread::{") && holds(line, "sleep"));
    lines.extend(imports.map(|(_, number)| number));
    let sentence = "a test sleeps in real time: pause the clock, or wait for the event";
    lines.into_iter().map(|line| Problem::new(&source.path, line, sentence)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::FileRule;

    /// The lines that `rule` reports.
    fn lines(rule: FileRule, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text)).into_iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn file_over_600_lines_is_too_long() {
        assert_eq!(lines(length, "tests/a.rs", &"\n".repeat(601)), [601]);
        assert!(lines(length, "tests/a.rs", &"\n".repeat(600)).is_empty());
        assert!(lines(length, "CHANGELOG.md", &"\n".repeat(601)).is_empty());
    }

    #[test]
    fn rust_file_begins_with_its_module_doc() {
        assert_eq!(lines(module_doc, "build.rs", "// a remark\n//! late\n"), [1]);
        assert_eq!(lines(module_doc, "a.rs", ""), [1]);
        assert!(lines(module_doc, "a.rs", "//! Why.\n").is_empty());
        assert!(lines(module_doc, "a.py", "print()\n").is_empty());
    }

    #[test]
    fn machine_path_is_found_in_any_text() {
        for folder in MACHINE_FOLDERS {
            assert_eq!(lines(machine_paths, "README.md", &format!("\nsee `/{folder}/someone/x`\n")), [2]);
        }
    }

    #[test]
    fn relative_paths_and_addresses_are_no_machine_paths() {
        for harmless in
            ["target/work/x", "../work/x", "https://example.com/home/x", "/work/", "/home/*", "/homes/x"]
        {
            assert!(lines(machine_paths, "README.md", harmless).is_empty(), "{harmless}");
        }
        assert!(lines(machine_paths, "Cargo.lock", &format!("/{}/x", "root")).is_empty());
    }

    #[test]
    fn every_placeholder_is_found_even_in_comments() {
        for word in PLACEHOLDERS {
            assert_eq!(lines(placeholders, "a.rs", &format!("//! Why.\n// {word}\n")), [2], "{word}");
        }
        assert!(lines(placeholders, "a.rs", "//! A list to do.\n#[test]\nfn ignored() {}\n").is_empty());
        assert!(lines(placeholders, "a.md", PLACEHOLDERS[3]).is_empty());
    }

    #[test]
    fn sleeping_test_is_found() {
        assert_eq!(lines(sleeping_tests, "crates/a/tests/b.rs", "std::thread::sleep(x);"), [1]);
        assert_eq!(lines(sleeping_tests, "tests/deep/b.rs", "use std::thread::{self, sleep};"), [1]);
    }

    #[test]
    fn talk_of_sleep_and_virtual_sleep_are_fine() {
        assert!(
            lines(sleeping_tests, "tests/b.rs", "// no thread::sleep\ntokio::time::sleep(x).await;")
                .is_empty()
        );
        assert!(lines(sleeping_tests, "src/b.rs", "std::thread::sleep(x);").is_empty());
        assert!(lines(sleeping_tests, "src/tests.rs", "std::thread::sleep(x);").is_empty());
        assert!(lines(sleeping_tests, "crates/a/tests/it/kit/mod.rs", "std::thread::sleep(x);").is_empty());
    }
}
