//! `cargo xtask docs`: the book, from the Markdown pages of the tree, built with mdBook.
//!
//! docs/SUMMARY.md lists the chapters, which stay where people read them: in docs/, beside the crate that tests their examples,
//! or at the root. This command copies them to target/book/src in the same folders, so that links between chapters stay right.
//! A link to anything else (source files, items of rustdoc) becomes text.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::tidy::{is_relative_link, resolve_link};
use crate::workspace::{self, at_root};
use crate::{install, step};

const SUMMARY: &str = "docs/SUMMARY.md";
const SETTINGS: &str = "\
[book]
title = \"tidegate\"
language = \"en\"

[build]
build-dir = \"html\"

[output.html]
no-section-label = true

[output.html.playground]
runnable = false
";

/// Builds the book and prints where it is.
pub(crate) fn run() -> Result<()> {
    let book = workspace::target().join("book");
    let root = workspace::root();
    let summary =
        fs::read_to_string(root.join(SUMMARY)).with_context(|| format!("could not read {SUMMARY}"))?;
    let chapters = chapters(&summary);
    ensure!(!chapters.is_empty(), "{SUMMARY} lists no chapter");
    if book.exists() {
        fs::remove_dir_all(&book).context("could not remove the old book")?;
    }
    write(&book.join("book.toml"), SETTINGS)?;
    write(&book.join("src/SUMMARY.md"), &rewritten(SUMMARY, &summary, |target| Some(target.to_owned())))?;
    for chapter in &chapters {
        let text =
            fs::read_to_string(root.join(chapter)).with_context(|| format!("could not read {chapter}"))?;
        let mut images = Vec::new();
        let text = rewritten(chapter, &text, |target| {
            let is_image = Path::new(target).extension().is_some_and(|kind| kind == "svg" || kind == "png");
            if is_image {
                images.push(target.to_owned());
            }
            (is_image || chapters.contains(target)).then(|| from_page(chapter, target))
        });
        write(&book.join("src").join(chapter), &text)?;
        for image in images {
            let copy = book.join("src").join(&image);
            fs::create_dir_all(copy.parent().unwrap_or(&copy)).context("could not create a folder")?;
            fs::copy(root.join(&image), copy).with_context(|| format!("could not copy {image}"))?;
        }
    }
    install::ensure_cargo_tool("mdbook")?;
    let mut mdbook = at_root("mdbook");
    mdbook.arg("build").arg(&book).env("PATH", install::path_with_cargo_tools()?);
    step::capture("mdbook build", &mut mdbook)?;
    println!("{} chapters: {}", chapters.len(), book.join("html/index.html").display());
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path)).context("could not create a folder")?;
    fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}

/// The pages that the summary links to, as paths from the root.
fn chapters(summary: &str) -> BTreeSet<String> {
    let mut chapters = BTreeSet::new();
    rewritten(SUMMARY, summary, |target| {
        chapters.insert(target.to_owned());
        None
    });
    chapters
}

/// A page with each relative link replaced by what `replace` makes of its target, a path from the root. A link that becomes
/// `None`, and one to an item of rustdoc, leaves its text. Fenced code is left as it is.
fn rewritten(page: &str, text: &str, mut replace: impl FnMut(&str) -> Option<String>) -> String {
    let mut is_code = false;
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if is_code {
            out.push_str(line);
        } else {
            rewrite_line(page, line, &mut replace, &mut out);
        }
    }
    out
}

fn rewrite_line(page: &str, line: &str, replace: &mut impl FnMut(&str) -> Option<String>, out: &mut String) {
    let mut rest = line;
    while let Some(open) = rest.find("](") {
        let (label, tail) = rest.split_at(open);
        let Some(close) = tail.find(')') else { break };
        let target = &tail[2..close];
        let is_item = target.contains("::");
        let (file, anchor) = target.split_once('#').map_or((target, ""), |(file, anchor)| (file, anchor));
        let path = if is_relative_link(target) { resolve_link(page, file) } else { None };
        let new_target = match path {
            Some(path) => replace(&path),
            None if is_item => None,
            None => Some(file.to_owned()),
        };
        // Text of the tail, from its opening bracket on.
        let start = label.rfind('[');
        match (new_target, start) {
            (None, Some(start)) => {
                let is_image = label[..start].ends_with('!');
                out.push_str(&label[..start - usize::from(is_image)]);
                out.push_str(&label[start + 1..]);
            }
            (Some(target), _) => {
                let mark = if anchor.is_empty() { "" } else { "#" };
                out.push_str(label);
                out.push_str(&["](", &target, mark, anchor, ")"].concat());
            }
            (None, None) => out.push_str(label),
        }
        rest = &tail[close + 1..];
    }
    out.push_str(rest);
}

/// The link from a page to a file, both as paths from the root.
fn from_page(page: &str, target: &str) -> String {
    let depth = page.matches('/').count();
    "../".repeat(depth) + target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_chapters_stay_and_others_become_text() {
        let chapters = ["docs/run.md", "README.md"];
        let replace = |page: &'static str| {
            move |target: &str| chapters.contains(&target).then(|| from_page(page, target))
        };
        let table = [
            ("docs/a.md", "see [run](run.md#flags).\n", "see [run](../docs/run.md#flags).\n"),
            ("docs/a.md", "[root](../README.md)", "[root](../README.md)"),
            ("docs/a.md", "[code](../crates/core/src/lib.rs) here", "code here"),
            (
                "docs/a.md",
                "[`Throttle`](crate::Throttle), [x](https://a.example/b)",
                "`Throttle`, [x](https://a.example/b)",
            ),
            ("docs/a.md", "```\n[a](b.md)\n```\n", "```\n[a](b.md)\n```\n"),
            ("docs/a.md", "[here](#part)", "[here](#part)"),
        ];
        for (page, text, wanted) in table {
            assert_eq!(rewritten(page, text, replace(page)), wanted);
        }
    }

    #[test]
    fn chapters_are_paths_from_the_root() {
        let found = chapters("# Book\n\n- [Run](run.md)\n- [Gates](../crates/tidegate/src/guide/gates.md)\n");
        assert!(found.iter().eq(["crates/tidegate/src/guide/gates.md", "docs/run.md"]));
    }
}
