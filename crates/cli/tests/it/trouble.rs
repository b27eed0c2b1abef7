//! What goes wrong: bad input, unusable stores, readers that close their pipe. One clear sentence each.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::process::Stdio;

use rusqlite::Connection;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::kit::{Shop, finish, run};

#[test]
fn bad_input_names_the_field_the_value_and_the_bound() {
    for shop in Shop::both() {
        shop.ok("limits set system rpm:60/min");
        let table = [
            (
                "limits set planet rpm:1/s",
                "the scope begins with `planet`, and must with system, resource or entity",
            ),
            ("limits set entity acme", "no limit is given for `entity acme`"),
            ("limits set entity acme gpt-4 rpm:1/s", "`gpt-4` is no limit: "),
            ("limits set system rpm:0/s", "the limit `rpm`: "),
            ("limits set system rpm:1/s rpm:2/s", "the limit `rpm` is there twice"),
            (
                "limits set system rpm:1/s --on-unavailable share:2",
                "'share:2' for '--on-unavailable <HOW>': a local share of 2, outside 0.000001..=1",
            ),
            ("limits show entity a#b", "the entity `a#b` holds '#' at byte 1, which no such name does"),
            ("limits show entity acme gpt-4", "`gpt-4` comes after the scope `entity acme`"),
            ("limits list --max 0", "invalid value '0' for '--max <COUNT>': 0 is not in 1..=1000"),
            ("entity create $SYSTEM", "'$SYSTEM' for '<ID>': the entity `$SYSTEM` is reserved"),
            ("entity set-parent acme", "<PARENT>"),
            ("acquire acme gpt-4", "<LIMIT=UNITS>..."),
            ("acquire acme gpt-4 rpm", "'rpm' for '<LIMIT=UNITS>...': it is limit=units, such as tpm=800"),
            ("acquire acme gpt-4 rpm=-1", "the units are `-1`, and must be a whole number from 0"),
            ("acquire acme gpt-4 tpm=1", "`acme on gpt-4` has no limit `tpm`; it has `rpm`"),
            ("acquire acme gpt-4 rpm=0", "at least one limit needs a cost above 0"),
            ("acquire acme gpt-4 rpm=1 rpm=2", "the limit `rpm` is asked for twice"),
            ("acquire acme gpt-4 rpm=9999999999999", "9999999999999 units of `rpm`, more than "),
            (
                "acquire acme gpt-4 rpm=1 --within soon",
                "'soon' for '--within <SPAN>': it is a number and a unit",
            ),
            (
                "acquire acme gpt-4 rpm=1 --deadline 2d",
                "'2d' for '--deadline <SPAN>': it must be from 1s to 24h",
            ),
            (
                "usage list entity acme --since yesterday",
                "'yesterday' for '--since <TIME>': it is a time such as 2026-01-31",
            ),
            (
                "--store mysql://x status",
                "`mysql://x` is no address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
            ),
            ("limits", "Usage: tidegate limits"),
            ("", "Usage: tidegate"),
        ];
        for (line, sentence) in table {
            let run = shop.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {run:?}");
            assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
        }
        assert_eq!(shop.json("limits list")["limits"].as_array().unwrap().len(), 1, "nothing was written");
    }
}

#[test]
fn a_cursor_of_another_listing_is_refused() {
    let run = Shop::new().run("limits list --after nonsense");
    assert_eq!(run.code, 1);
    assert_eq!(run.stderr, "error: the cursor \"nonsense\" is not one of this listing\n");
}

#[test]
fn a_store_that_cannot_be_used_is_told_in_one_sentence_and_left_as_it_is() {
    let shop = Shop::new();
    let place = shop.file().display().to_string();
    fs::write(shop.file(), "certainly no database, and longer than a header of one would be: ".repeat(9))
        .unwrap();
    let next = "\n next: name the right file with --store sqlite:PATH, or put a backup in its place\n";
    let run = shop.run("status");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(
        run.stderr.starts_with(&format!(
            "error: the store holds what it should not: `{place}` is damaged, or no database: "
        )),
        "{}",
        run.stderr
    );
    assert!(run.stderr.ends_with(next), "{}", run.stderr);

    fs::remove_file(shop.file()).unwrap();
    Connection::open(shop.file())
        .unwrap()
        .execute_batch("CREATE TABLE mine (x); PRAGMA application_id = 7")
        .unwrap();
    let run = shop.run("limits set system rpm:1/s");
    assert_eq!(run.code, 1);
    assert_eq!(
        run.stderr,
        format!("error: `{place}` is a database of another program: its application id is 7\n")
    );

    fs::remove_file(shop.file()).unwrap();
    shop.ok("limits set system rpm:1/s");
    Connection::open(shop.file()).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    let run = shop.run("limits list");
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.starts_with(&format!("error: `{place}` has schema version 99, newer than ")),
        "{}",
        run.stderr
    );
    assert!(run.stderr.ends_with(": use a newer tidegate\n"), "{}", run.stderr);

    let run = shop.run(&format!("--store sqlite:{}/none/limits.db status", shop.path("").display()));
    assert_eq!(run.code, 1);
    assert!(run.stderr.starts_with("error: the store denies access: "), "{}", run.stderr);
}

#[test]
fn a_store_that_another_process_holds_is_away() {
    let shop = Shop::new();
    shop.ok("limits set system rpm:1/s");
    let other = Connection::open(shop.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let away = shop.run("--timeout 20ms limits set system rpm:2/s");
    assert_eq!((away.code, away.stdout.as_str()), (4, ""));
    assert!(away.stderr.starts_with("error: the store did not answer within 20 ms\n"), "{}", away.stderr);
    assert!(away.stderr.contains("\n next: wait for whoever holds it and try again, or name another store"));
    other.execute_batch("ROLLBACK").unwrap();
    assert!(
        shop.ok("limits show system").starts_with("system at version 1: rpm:1/s\n"),
        "nothing was written"
    );
}

#[test]
fn a_reader_that_has_gone_away_is_no_failure() {
    for shop in Shop::both() {
        shop.ok("limits set system rpm:1/s");
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
            let mut command = shop.command(&line.split_whitespace().collect::<Vec<_>>());
            let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
            let run = finish(child);
            assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line}");
        }
        assert!(shop.ok("limits show system").contains("rpm:9/s"), "what was asked for is done");
    }
}

#[test]
fn colours_are_for_terminals_that_want_them() {
    let shop = Shop::new();
    let on_terminal = |variables: &[(&str, &str)]| {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = OpenOptions::new().read(true).write(true).open(name).unwrap();
        let mut command = shop.command(&["limits", "set", "system", "rpm:1/s"]);
        command.env("TERM", "xterm").envs(variables.iter().copied()).stdout(terminal);
        assert!(command.status().unwrap().success());
        drop(command);
        let mut text = Vec::new();
        // A terminal that no process has open ends with an error, after what was written.
        let _ = fs::File::from(master).read_to_end(&mut text);
        String::from_utf8(text).unwrap()
    };
    assert!(on_terminal(&[]).contains("\x1b[32m+"));
    for variable in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let text = on_terminal(&[variable]);
        assert!(text.contains("system") && !text.contains('\x1b'), "{variable:?}: {text:?}");
    }
    assert!(on_terminal(&[("NO_COLOR", "")]).contains('\x1b'), "an empty NO_COLOR says nothing");
    assert!(!shop.ok("limits list").contains('\x1b'));
}

#[test]
fn text_of_others_cannot_move_the_cursor() {
    let shop = Shop::new();
    let run = shop.run_words(&["entity", "create", "acme", "--name", "a\x1b[2Jb\nc"]);
    assert_eq!(run.code, 0);
    assert!(run.stdout.contains("a\\u{1b}[2Jb\\nc"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().count(), 2);
}

#[test]
fn the_help_of_every_verb_ends_well_and_the_first_has_the_exit_codes() {
    let shop = Shop::new();
    let help = shop.ok("--help");
    assert!(help.contains("Exit codes:\n  0  done\n"), "{help}");
    let table = [
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
        "entity set-parent",
        "entity delete",
        "acquire",
        "balance",
        "explain",
        "usage",
        "usage list",
        "usage summary",
        "audit",
        "audit list",
        "audit archive",
        "token",
        "token create",
        "token list",
        "token revoke",
        "serve",
        "status",
        "lab",
        "lab list",
        "lab run",
        "lab score",
        "completions",
    ];
    for verb in table {
        for flag in ["-h", "--help"] {
            let help = shop.ok(&format!("{verb} {flag}"));
            assert!(help.contains(&format!("Usage: tidegate {verb} [OPTIONS]")), "{help}");
        }
    }
    assert!(shop.ok("--version").starts_with("tidegate "));
    assert!(!shop.file().exists(), "nobody has asked a store");
}

#[test]
fn completions_know_the_verbs_of_every_shell() {
    let shop = Shop::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = shop.ok(&format!("completions {shell}"));
        assert!(script.contains("set-parent"), "{shell}");
    }
    assert_eq!(run(&mut shop.command(&["completions", "none"])).code, 2);
}
