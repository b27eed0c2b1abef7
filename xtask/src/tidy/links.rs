//! Markdown links: each relative link points to a file that a fresh checkout has.
//!
//! Links are checked against the list of tracked files, not against the disk, because the author may have
//! more files.

use std::collections::BTreeSet;

use super::Problem;
use super::source::Source;

/// Every relative link of every Markdown file points to a file or folder of the tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let files: BTreeSet<&str> = sources.iter().map(|source| source.path.as_str()).collect();
    let pages = sources.iter().filter(|source| source.has_extension("md"));
    pages.flat_map(|page| broken_links(page, &files)).collect()
}

/// The lines of a Markdown page outside code blocks, counted from one.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence = None;
    text.lines().zip(1..).filter_map(move |(line, number)| {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, None) => return Some((number, line)),
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (Some(_), _) => {}
        }
        None
    })
}

fn broken_links(page: &Source, files: &BTreeSet<&str>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in prose(&page.text) {
        let line = without_code_spans(line);
        for link in inline_links(&line).chain(definition(&line)).filter(|link| is_relative(link)) {
            let sentence = match resolved(&page.path, link) {
                None => format!("the link to {link} leaves the repository"),
                Some(target) if exists(&target, files) => continue,
                Some(target) => format!("the link to {link} is broken: {target} does not exist"),
            };
            problems.push(Problem::new(&page.path, number, sentence));
        }
    }
    problems
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// The targets of `[text](target "title")`, including images.
fn inline_links(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("](").filter_map(|(start, open)| target(&line[start + open.len()..]))
}

/// The target of `[label]: target`.
fn definition(line: &str) -> Option<&str> {
    let (label, rest) = line.trim_start().strip_prefix('[')?.split_once("]:")?;
    // A footnote is text, and a bracket in the label means that this is not a definition.
    if label.starts_with('^') || label.contains(['[', ']']) { None } else { target(rest) }
}

fn target(rest: &str) -> Option<&str> {
    let rest = rest.trim_start();
    match rest.strip_prefix('<') {
        Some(bracketed) => bracketed.split('>').next(),
        None => rest.split([')', ' ', '\t']).next(),
    }
}

/// Whether the link is relative: neither an address nor a Rust path (`crate::Throttle`), nor an anchor on the
/// same page.
pub(crate) fn is_relative(link: &str) -> bool {
    !link.is_empty() && !link.starts_with('#') && !link.contains(':')
}

/// The path from the root that `link` in `page` refers to; `None` if it climbs above the root.
pub(crate) fn resolved(page: &str, link: &str) -> Option<String> {
    let file = link.split(['#', '?']).next().unwrap_or_default();
    let mut parts: Vec<&str> = if file.starts_with('/') { Vec::new() } else { page.split('/').collect() };
    parts.pop();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn exists(target: &str, files: &BTreeSet<&str>) -> bool {
    let folder = format!("{target}/");
    target.is_empty()
        || files.contains(target)
        || files.range(folder.as_str()..).next().is_some_and(|file| file.starts_with(&folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(page: &str, text: &str) -> Vec<String> {
        let others = ["README.md", "docs/decisions/001-why.md", "crates/core/src/lib.rs"];
        let mut sources: Vec<_> =
            others.into_iter().filter(|path| *path != page).map(|path| Source::new(path, "")).collect();
        sources.push(Source::new(page, text));
        check(&sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn broken_link_is_found() {
        assert_eq!(
            reported("docs/guide.md", "# Guide\n[a](../README.md), [b](gone.md#part)\n"),
            ["docs/guide.md:2: the link to gone.md#part is broken: docs/gone.md does not exist"]
        );
        assert_eq!(reported("a.md", "![x](x.png \"title\")\n[y]: <y.md>\n").len(), 2);
        assert_eq!(reported("a.md", "[x](../x.md)"), ["a.md:1: the link to ../x.md leaves the repository"]);
    }

    #[test]
    fn links_to_files_and_folders_are_fine() {
        for link in [
            "decisions/001-why.md#top",
            "decisions/",
            "./decisions",
            "../crates/core",
            "/README.md",
            "..",
            "#here",
        ] {
            assert!(reported("docs/guide.md", &format!("[`x`]({link})")).is_empty(), "{link}");
        }
    }

    #[test]
    fn addresses_items_and_code_are_no_links() {
        let text =
            "[a](https://x.example/y) [b](crate::Throttle) `[c](d)`\n```\n[e](f)\n```\n[^note]: text\n";
        assert!(reported("a.md", text).is_empty());
    }
}
