//! Runs the tours of pages against a real server, and compares the output with the page.
//!
//! Between `<!-- tour -->` and `<!-- /tour -->`, every `sh` block of a page is run, in one shell and in
//! order. A `text` block after one is its expected output. In it, `…` matches anything on its line, and alone
//! on a line any lines. Numbers may differ by a twentieth, because limits refill while the tour runs; they
//! refill by the day, so the tolerance is an hour.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::server::TestServer;
use super::{Fixture, clear_environment};

/// Placeholders in the pages for values that differ per server.
const ADDRESS: &str = "http://127.0.0.1:8707";
const TOKEN: &str = "tg_admin_…";

/// Ends the output of each block. No program writes it.
const END: &str = "\u{1e}";

/// Commands, and their expected output if the page shows it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) line: usize,
    pub(crate) commands: String,
    pub(crate) shown: Option<String>,
}

/// The blocks of a page's tours.
pub(crate) fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut is_tour, mut fence) = (false, None);
    for (line, number) in page.lines().zip(1..) {
        match (fence, line) {
            (None, "<!-- tour -->") => is_tour = true,
            (None, "<!-- /tour -->") => is_tour = false,
            (None, _) => {
                fence = line.strip_prefix("```");
                match (fence, blocks.last_mut()) {
                    (Some("sh"), _) if is_tour => {
                        blocks.push(Block { line: number, commands: String::new(), shown: None });
                    }
                    (Some("text"), Some(last)) if is_tour => last.shown = Some(String::new()),
                    _ => {}
                }
            }
            (Some(_), "```") => fence = None,
            (Some(kind), line) => {
                let last = blocks.last_mut().filter(|_| is_tour);
                let text = match kind {
                    "sh" => last.map(|last| &mut last.commands),
                    "text" => last.and_then(|last| last.shown.as_mut()),
                    _ => None,
                };
                if let Some(text) = text {
                    text.extend([line, "\n"]);
                }
            }
        }
    }
    blocks
}

/// Whether the output matches the page.
pub(crate) fn fits(shown: &str, came: &str) -> bool {
    fits_from(shown, came, true)
}

/// Matches the rest of the output, which may be at the start of a line.
fn fits_from(shown: &str, came: &str, is_start: bool) -> bool {
    let Some(next) = shown.chars().next() else { return came.is_empty() };
    let rest = &shown[next.len_utf8()..];
    match next {
        '…' if is_start && rest.starts_with('\n') => {
            lines_from(came).any(|came| fits_from(&rest[1..], came, true))
        }
        '…' => {
            let line = came.find('\n').unwrap_or(came.len());
            let ends = (0..=line).filter(|end| came.is_char_boundary(*end));
            ends.into_iter().any(|end| fits_from(rest, &came[end..], false))
        }
        '0'..='9' => {
            let ((wanted, rest), (found, came)) = (number(shown), number(came));
            (wanted - found).abs() <= wanted * 0.05 && fits_from(rest, came, false)
        }
        _ => came.strip_prefix(next).is_some_and(|came| fits_from(rest, came, next == '\n')),
    }
}

/// The number that a text begins with, and the rest.
fn number(text: &str) -> (f64, &str) {
    let is_part = |(at, letter): (usize, char)| {
        let is_point = letter == '.' && text[at + 1..].starts_with(|next: char| next.is_ascii_digit());
        !(letter.is_ascii_digit() || is_point)
    };
    let end = text.char_indices().find(|part| is_part(*part)).map_or(text.len(), |(at, _)| at);
    (text[..end].parse().unwrap_or(f64::NAN), &text[end..])
}

/// The rest of a text from each of its lines on.
fn lines_from(text: &str) -> impl Iterator<Item = &str> {
    let starts = text.match_indices('\n').map(|(at, _)| at + 1);
    [0].into_iter().chain(starts).map(|start| &text[start..])
}

/// Runs the tours of a page against a server over a new store, and compares the output. The default store is
/// a file.
pub(crate) fn walk(page: &str, store: Option<&str>) {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page));
    let blocks = blocks(&text.expect("the page exists"));
    assert!(!blocks.is_empty(), "{page} has no tour");
    let fixture = Fixture::new();
    // A long timeout, so that the output does not depend on the speed of a disk or network.
    let mut serve = fixture.command(&["serve", "--listen", "127.0.0.1:0", "--timeout", "30s"]);
    if let Some(store) = store {
        serve.args(["--store", store]);
    }
    let server = TestServer::start(&mut serve);
    let here = |text: &str| {
        let token = server.token().expect("the first token");
        text.replace(ADDRESS, &format!("http://{}", server.address)).replace(TOKEN, token)
    };
    let mut script = String::from("exec 2>&1\nset -e\n");
    for block in &blocks {
        script += &here(&block.commands);
        script.extend(["printf '%s' '", END, "'\n"]);
    }
    let output = shell(&fixture, &script);
    let mut parts = output.split(END);
    for Block { line, commands, shown } in &blocks {
        let came: String =
            parts.next().unwrap_or_default().lines().flat_map(|line| [line.trim_end(), "\n"]).collect();
        let shown = shown.as_deref().unwrap_or_default();
        assert!(
            fits(&here(shown), &came),
            "{page}, line {line}:\n{commands}\nshows\n{shown}\nand writes\n{came}"
        );
    }
    assert_eq!(output.matches(END).count(), blocks.len(), "{page}: a command has failed: {output}");
    server.stop();
}

/// The output of a script in a shell, with the program and curl on its path, in the store's folder.
fn shell(fixture: &Fixture, script: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([program].into_iter().chain(std::env::split_paths(&path)));
    let mut command = Command::new("sh");
    clear_environment(command.args(["-c", script])).current_dir(fixture.path("")).stdin(Stdio::null());
    command.env("PATH", path.expect("a path")).env("HOME", fixture.path("")).env("TIDEGATE_TIMEOUT", "1m");
    let output = command.output().expect("a shell");
    String::from_utf8(output.stdout).expect("UTF-8")
}
