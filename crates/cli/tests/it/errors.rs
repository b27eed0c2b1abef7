//! Errors: invalid input, unusable stores and closed pipes. One clear sentence each.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::process::Stdio;

use rusqlite::Connection;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::kit::{Fixture, finish, run};

#[test]
fn invalid_input_names_field_value_and_bound() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpm:60/min");
        let table = [
            (
                "limits set planet rpm:1/s",
                "the scope begins with `planet`: expected system, resource or entity",
            ),
            ("limits set entity acme", "no limit is given for `entity acme`"),
            ("limits set entity acme gpt-4 rpm:1/s", "`gpt-4` is not a limit: "),
            ("limits set system rpm:0/s", "the limit `rpm`: "),
            ("limits set system rpm:1/s rpm:2/s", "the limit `rpm` is defined twice"),
            (
                "limits set system rpm:1/s --on-unavailable share:2",
                "'share:2' for '--on-unavailable <HOW>': a local share of 2, outside 0.000001..=1",
            ),
            ("limits show entity a#b", "the entity `a#b` has '#' at byte 1, which is not allowed"),
            ("limits show entity acme gpt-4", "unexpected `gpt-4` after the scope `entity acme`"),
            ("limits list --max 0", "invalid value '0' for '--max <COUNT>': 0 is not in 1..=1000"),
            ("entity create $SYSTEM", "'$SYSTEM' for '<ID>': the entity `$SYSTEM` is reserved"),
            ("entity set-parent acme", "<PARENT>"),
            ("acquire acme gpt-4", "<LIMIT=UNITS>..."),
            ("acquire acme gpt-4 rpm", "'rpm' for '<LIMIT=UNITS>...': expected limit=units, such as tpm=800"),
            ("acquire acme gpt-4 rpm=-1", "the units are `-1`, and must be a whole number from 0"),
            ("acquire acme gpt-4 tpm=1", "`acme on gpt-4` has no limit `tpm`; it has `rpm`"),
            ("acquire acme gpt-4 rpm=0", "at least one limit needs a cost above 0"),
            ("acquire acme gpt-4 rpm=1 rpm=2", "the limit `rpm` is requested twice"),
            ("acquire acme gpt-4 rpm=9999999999999", "9999999999999 units of `rpm`, more than "),
            (
                "acquire acme gpt-4 rpm=1 --within soon",
                "'soon' for '--within <SPAN>': expected a number and a unit",
            ),
            (
                "acquire acme gpt-4 rpm=1 --deadline 2d",
                "'2d' for '--deadline <SPAN>': must be from 1s to 24h",
            ),
            (
                "usage list entity acme --since yesterday",
                "'yesterday' for '--since <TIME>': expected a time such as 2026-01-31",
            ),
            (
                "--store mysql://x status",
                "`mysql://x` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
            ),
            ("limits", "Usage: tidegate limits"),
            ("", "Usage: tidegate"),
        ];
        for (line, sentence) in table {
            let run = fixture.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {run:?}");
            assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
        }
        assert_eq!(fixture.json("limits list")["limits"].as_array().unwrap().len(), 1, "nothing was written");
    }
}

#[test]
fn cursor_of_another_listing_is_refused() {
    let run = Fixture::new().run("limits list --after nonsense");
    assert_eq!(run.code, 1);
    assert_eq!(run.stderr, "error: the cursor \"nonsense\" is not valid for this listing\n");
}

#[test]
fn unusable_store_is_one_sentence_and_unchanged() {
    let fixture = Fixture::new();
    let place = fixture.file().display().to_string();
    fs::write(fixture.file(), "certainly no database, and longer than a header of one would be: ".repeat(9))
        .unwrap();
    let next = "\n next: choose the right file with --store sqlite:PATH, or restore a backup\n";
    let run = fixture.run("status");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(
        run.stderr.starts_with(&format!(
            "error: the store has corrupt data: `{place}` is damaged, or no database: "
        )),
        "{}",
        run.stderr
    );
    assert!(run.stderr.ends_with(next), "{}", run.stderr);

    fs::remove_file(fixture.file()).unwrap();
    Connection::open(fixture.file())
        .unwrap()
        .execute_batch("CREATE TABLE mine (x); PRAGMA application_id = 7")
        .unwrap();
    let run = fixture.run("limits set system rpm:1/s");
    assert_eq!(run.code, 1);
    assert_eq!(
        run.stderr,
        format!("error: `{place}` is a database of another program: its application id is 7\n")
    );

    fs::remove_file(fixture.file()).unwrap();
    fixture.ok("limits set system rpm:1/s");
    Connection::open(fixture.file()).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    let run = fixture.run("limits list");
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.starts_with(&format!("error: `{place}` has schema version 99, newer than ")),
        "{}",
        run.stderr
    );
    assert!(run.stderr.ends_with(": use a newer tidegate\n"), "{}", run.stderr);

    let run = fixture.run(&format!("--store sqlite:{}/none/limits.db status", fixture.path("").display()));
    assert_eq!(run.code, 1);
    assert!(run.stderr.starts_with("error: the store denies access: "), "{}", run.stderr);
}

#[test]
fn store_locked_by_another_process_is_unavailable() {
    let fixture = Fixture::new();
    fixture.ok("limits set system rpm:1/s");
    let other = Connection::open(fixture.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let away = fixture.run("--timeout 20ms limits set system rpm:2/s");
    assert_eq!((away.code, away.stdout.as_str()), (4, ""));
    assert!(away.stderr.starts_with("error: the store did not respond within 20ms\n"), "{}", away.stderr);
    assert!(away.stderr.contains("\n next: retry when no other process locks it, or choose another store"));
    other.execute_batch("ROLLBACK").unwrap();
    assert!(
        fixture.ok("limits show system").starts_with("system at version 1: rpm:1/s\n"),
        "nothing was written"
    );
}

#[test]
fn closed_pipe_is_no_failure() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpm:1/s");
        for line in [
            "limits list",
            "--json limits list",
            "--help",
            "acquire --help",
            "completions bash",
            "limits set system rpm:9/s",
        ] {
            let (reader, writer) = io::pipe().unwrap();
            drop(reader);
            let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
            let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
            let run = finish(child);
            assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line}");
        }
        assert!(fixture.ok("limits show system").contains("rpm:9/s"), "the operation was executed");
    }
}

#[test]
fn colours_are_only_for_terminals_that_want_them() {
    let fixture = Fixture::new();
    let on_terminal = |variables: &[(&str, &str)]| {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = OpenOptions::new().read(true).write(true).open(name).unwrap();
        let mut command = fixture.command(&["limits", "set", "system", "rpm:1/s"]);
        command.env("TERM", "xterm").envs(variables.iter().copied()).stdout(terminal);
        assert!(command.status().unwrap().success());
        drop(command);
        let mut text = Vec::new();
        // Reading a terminal that no process has open ends with an error, after its output.
        let _ = fs::File::from(master).read_to_end(&mut text);
        String::from_utf8(text).unwrap()
    };
    assert!(on_terminal(&[]).contains("\x1b[32m+"));
    for variable in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let text = on_terminal(&[variable]);
        assert!(text.contains("system") && !text.contains('\x1b'), "{variable:?}: {text:?}");
    }
    assert!(on_terminal(&[("NO_COLOR", "")]).contains('\x1b'), "an empty NO_COLOR is ignored");
    assert!(!fixture.ok("limits list").contains('\x1b'));
}

#[test]
fn control_characters_in_names_are_escaped() {
    let fixture = Fixture::new();
    let run = fixture.run_words(&["entity", "create", "acme", "--name", "a\x1b[2Jb\nc"]);
    assert_eq!(run.code, 0);
    assert!(run.stdout.contains("a\\u{1b}[2Jb\\nc"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().count(), 2);
}

/// All verbs.
const VERBS: [&str; 60] = [
    "limits",
    "limits set",
    "limits show",
    "limits list",
    "limits delete",
    "limits plan",
    "limits apply",
    "entity",
    "entity create",
    "entity show",
    "entity list",
    "entity children",
    "entity tree",
    "entity disable",
    "entity enable",
    "entity set-parent",
    "entity delete",
    "acquire",
    "balance",
    "capacity",
    "explain",
    "bucket",
    "bucket set",
    "bucket reset",
    "usage",
    "usage list",
    "usage summary",
    "usage plot",
    "audit",
    "audit list",
    "audit archive",
    "token",
    "token create",
    "token list",
    "token revoke",
    "serve",
    "proxy",
    "mock",
    "store",
    "store init",
    "store check",
    "store upgrade",
    "store list",
    "store backup",
    "store destroy",
    "store template",
    "import",
    "import zae-limiter",
    "upstream",
    "upstream list",
    "upstream acquire",
    "upstream settle",
    "status",
    "watch",
    "fetch",
    "lab",
    "lab list",
    "lab run",
    "lab score",
    "completions",
];

#[test]
fn every_verb_has_help_and_the_program_has_exit_codes() {
    let fixture = Fixture::new();
    let help = fixture.ok("--help");
    assert!(help.contains("Exit codes:\n  0  done\n"), "{help}");
    for verb in VERBS {
        for flag in ["-h", "--help"] {
            let help = fixture.ok(&format!("{verb} {flag}"));
            // Completions have no option.
            let options = if verb == "completions" { "" } else { " [OPTIONS]" };
            assert!(help.contains(&format!("Usage: tidegate {verb}{options}")), "{help}");
        }
    }
    assert!(fixture.ok("--version").starts_with("tidegate "));
    assert!(!fixture.file().exists(), "no store was opened");
}

#[test]
fn completions_exist_for_every_shell() {
    let fixture = Fixture::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = fixture.ok(&format!("completions {shell}"));
        assert!(script.contains("set-parent"), "{shell}");
    }
    assert_eq!(run(&mut fixture.command(&["completions", "none"])).code, 2);
}
