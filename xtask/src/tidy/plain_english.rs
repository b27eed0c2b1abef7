//! Lines in indirect English, counted per crate as a ratchet: the counts may only fall.
//!
//! The idioms are those that STYLE.md replaces. Comments, docs, string literals and test names are searched.
//! A count shows where to look and proves nothing about the rest. `plain_english.txt` records the count of
//! each crate; `cargo xtask tidy --ratchet` records a lower count, so that it cannot rise again.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Problem;
use super::source::{Source, holds};

/// The path of the record.
pub(super) const RECORD: &str = "xtask/src/tidy/plain_english.txt";

/// Files that have to name the idioms.
const EXEMPT: [&str; 2] = ["STYLE.md", "xtask/src/tidy/plain_english.rs"];
const EXTENSIONS: [&str; 5] = ["rs", "md", "lua", "sql", "toml"];
const IDIOMS: [&str; 36] = [
    concat!("who", "ever"),
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("any", "body"),
    concat!("those", " who"),
    concat!("whose", " turn"),
    concat!("is", " told"),
    concat!("are", " told"),
    concat!("was", " told"),
    concat!("te", "lls"),
    concat!("what", " was"),
    concat!("what", " they"),
    concat!("all the", " same"),
    concat!("far", " side"),
    concat!("be", "ar"),
    concat!("be", "ars"),
    concat!("mean", "while"),
    concat!("is", " said"),
    concat!("was", " said"),
    concat!("said", " again"),
    concat!("short", " way"),
    concat!("long", " way"),
    concat!("is", " away"),
    concat!("be", " away"),
    concat!("left", " alone"),
    concat!("come back", " in"),
    concat!("let", " in"),
    concat!("let", " go"),
    concat!("in", " vain"),
    concat!("me", "nd"),
    concat!("me", "nds"),
    concat!("me", "nded"),
    concat!("me", "nding"),
    concat!("in the", " way"),
    IS_THERE,
    concat!("as often", " as"),
];

/// The idiom with exceptions: see [`has_idiom`].
const IS_THERE: &str = concat!("is", " there");

/// Lines with an idiom, by crate.
type Counts = BTreeMap<String, usize>;

/// Compares the tree with the record.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let recorded = match sources.iter().find(|source| source.path == RECORD).map(|source| read(&source.text))
    {
        Some(Ok(recorded)) => recorded,
        Some(Err(line)) => return vec![Problem::new(RECORD, line, "expected a path and a count")],
        None => return vec![Problem::new(RECORD, 1, "missing: `cargo xtask tidy --ratchet` writes it")],
    };
    let counted = count(sources);
    let names = recorded.keys().chain(counted.keys()).collect::<std::collections::BTreeSet<_>>();
    let of = |counts: &Counts, name: &str| counts.get(name).copied().unwrap_or(0);
    let mut problems = Vec::new();
    for name in names {
        let (was, is) = (of(&recorded, name), of(&counted, name));
        if is > was {
            let sentence = format!("{name} has {is} lines in indirect English, at most {was} are allowed");
            problems.push(Problem::new(RECORD, 1, sentence));
        } else if is < was {
            let sentence =
                format!("{name} is down from {was} to {is}: record it with `cargo xtask tidy --ratchet`");
            problems.push(Problem::new(RECORD, 1, sentence));
        }
    }
    problems
}

/// The record of the current tree; `None` if a count would rise.
pub(super) fn record(sources: &[Source]) -> Option<String> {
    let counted = count(sources);
    if let Some(Ok(recorded)) =
        sources.iter().find(|source| source.path == RECORD).map(|source| read(&source.text))
    {
        let rises = |(name, is): (&String, &usize)| recorded.get(name).is_none_or(|was| is > was);
        if counted.iter().any(rises) {
            return None;
        }
    }
    let mut text = String::new();
    for (name, lines) in counted {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} {lines}");
    }
    Some(text)
}

fn read(text: &str) -> Result<Counts, usize> {
    let entry = |(line, number): (&str, usize)| {
        let (name, lines) = line.split_once(' ').ok_or(number)?;
        Ok((name.to_owned(), lines.parse().map_err(|_| number)?))
    };
    text.lines().zip(1..).map(entry).collect()
}

fn count(sources: &[Source]) -> Counts {
    let mut counts = Counts::new();
    let is_searched = |source: &&Source| {
        !EXEMPT.contains(&source.path.as_str()) && EXTENSIONS.iter().any(|end| source.has_extension(end))
    };
    for source in sources.iter().filter(is_searched) {
        let lines = source.text.lines().filter(|line| is_indirect(source, line)).count();
        if lines > 0 {
            *counts.entry(crate_of(&source.path)).or_default() += lines;
        }
    }
    counts
}

/// `crates/core`, the first folder of any other path, or `.` for files at the root.
fn crate_of(path: &str) -> String {
    let mut parts = path.split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("crates"), Some(name), Some(_)) => format!("crates/{name}"),
        (Some(folder), Some(_), _) => folder.to_owned(),
        _ => ".".to_owned(),
    }
}

fn is_indirect(source: &Source, line: &str) -> bool {
    let line = line.trim();
    let text = if source.has_extension("md") || ["//", "--", "#"].iter().any(|start| line.starts_with(start))
    {
        line.to_owned()
    } else if source.is_rust() && line.contains('"') {
        strings_in(line)
    } else if source.path.contains("test") && is_function(line) {
        line.replace('_', " ")
    } else {
        return false;
    };
    has_idiom(&text.to_lowercase())
}

fn has_idiom(text: &str) -> bool {
    IDIOMS.into_iter().any(|idiom| match idiom {
        // An article may follow ("… a limit?"); anything else is the idiom.
        IS_THERE => text.match_indices(idiom).any(|(start, _)| {
            let rest = &text[start + idiom.len()..];
            let is_article = [" a ", " an "].iter().any(|article| format!("{rest} ").starts_with(article));
            holds(&text[start.saturating_sub(1)..start + idiom.len()], idiom)
                && !rest.starts_with(char::is_alphanumeric)
                && !is_article
        }),
        idiom => holds(text, idiom),
    })
}

/// The contents of the string literals that begin and end on this line.
fn strings_in(line: &str) -> String {
    let (mut text, mut rest) = (String::new(), line);
    while let Some(start) = rest.find('"') {
        let inside = &rest[start + 1..];
        let mut is_escaped = false;
        let end = inside.find(|letter| {
            let ends = letter == '"' && !is_escaped;
            is_escaped = letter == '\\' && !is_escaped;
            ends
        });
        let Some(end) = end else { break };
        text.push_str(&inside[..end]);
        text.push(' ');
        rest = &inside[end + 1..];
    }
    text
}

fn is_function(line: &str) -> bool {
    line.starts_with("fn ") || line.starts_with("async fn ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bar splits each idiom, so that this file contains none.
    fn joined(text: &str) -> String {
        text.replace('|', "")
    }

    fn counted(path: &str, text: &str) -> usize {
        count(&[Source::new(path, joined(text))]).values().sum()
    }

    #[test]
    fn idioms_are_found_in_each_kind_of_text() {
        assert_eq!(counted("crates/a/src/b.rs", "// Who|ever waits.\nlet who|ever = 1;\n"), 1);
        assert_eq!(counted("crates/a/src/b.rs", "error(\"no|body is| there\", \"x\");\n"), 1);
        assert_eq!(counted("crates/a/tests/b.rs", "async fn what|_was_lost() {\n"), 1);
        assert_eq!(counted("docs/a.md", "It comes back.\nSome|body te|lls.\n"), 1);
        assert_eq!(counted("a.py", "# who|ever\n"), 0);
    }

    #[test]
    fn parts_of_words_and_questions_are_not_idioms() {
        for plain in ["// amendment", "// intelligence", "// Is there a limit?", "// is there an end"] {
            assert_eq!(counted("a.rs", plain), 0, "{plain}");
        }
        assert_eq!(counted("a.rs", "// what is| there"), 1);
        assert_eq!(counted("STYLE.md", "who|ever"), 0);
    }

    #[test]
    fn counts_may_only_fall() {
        let tree = |recorded: &str, text: &str| {
            [Source::new("crates/a/src/b.rs", text), Source::new(RECORD, recorded)]
        };
        let one = &joined("// who|ever\n");
        assert!(check(&tree("crates/a 1\n", one)).is_empty());
        let risen = check(&tree("crates/a 0\n", one));
        assert!(risen[0].sentence.ends_with("at most 0 are allowed"), "{risen:?}");
        assert_eq!(record(&tree("crates/a 0\n", one)), None);
        let fallen = check(&tree("crates/a 2\n", one));
        assert!(fallen[0].sentence.contains("from 2 to 1"), "{fallen:?}");
        assert_eq!(record(&tree("crates/a 2\n", one)).as_deref(), Some("crates/a 1\n"));
        assert_eq!(check(&[]).len(), 1, "the record is missing");
        assert_eq!(check(&tree("crates/a\n", one)).len(), 1, "the record cannot be read");
    }

    #[test]
    fn files_count_for_their_crate() {
        assert_eq!(crate_of("crates/core/src/lib.rs"), "crates/core");
        assert_eq!(crate_of("docs/decisions/001.md"), "docs");
        assert_eq!(crate_of("README.md"), ".");
    }
}
