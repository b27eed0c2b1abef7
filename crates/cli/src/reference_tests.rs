//! docs/cli.md is the help of every command, generated from clap.
//!
//! `TIDEGATE_REWRITE_REFERENCE=1 cargo test -p tidegate-cli --all-features reference` writes it.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use clap::{Command, CommandFactory as _};

use crate::args::Args;

const PAGE: &str = "../../docs/cli.md";
const HEAD: &str = "\
# Command line

The program `tidegate` has one command per task. This page is generated from its help: `tidegate COMMAND --help` shows the same.
Options of every command are listed once, at the top.
";

#[test]
fn cli_reference_matches_help() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = page();
    if env::var_os("TIDEGATE_REWRITE_REFERENCE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap();
    let difference = stored.lines().zip(page.lines()).find(|(stored, wanted)| stored != wanted);
    assert_eq!(difference, None, "write it with TIDEGATE_REWRITE_REFERENCE=1");
    assert_eq!(stored.lines().count(), page.lines().count(), "write it with TIDEGATE_REWRITE_REFERENCE=1");
}

fn page() -> String {
    let mut root = Args::command().term_width(100).disable_help_subcommand(true);
    root.build();
    let mut page = HEAD.to_owned();
    section(&mut page, &root, "tidegate");
    commands(&mut page, &root, "tidegate");
    page
}

fn commands(page: &mut String, parent: &Command, path: &str) {
    for command in parent.get_subcommands().filter(|command| !command.is_hide_set()) {
        let path = format!("{path} {}", command.get_name());
        let command = command.clone().mut_args(|arg| {
            let is_hidden = arg.is_global_set() || arg.is_hide_set();
            arg.hide(is_hidden)
        });
        section(page, &command, &path);
        commands(page, &command, &path);
    }
}

fn section(page: &mut String, command: &Command, path: &str) {
    let level = "#".repeat(path.split(' ').count().min(3) + 1);
    let help = command.clone().render_long_help().to_string();
    // clap pads lines, and Markdown must not have spaces at their ends.
    let help = help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
    let _ = write!(page, "\n{level} `{path}`\n\n```text\n{}\n```\n", help.trim_end());
}
