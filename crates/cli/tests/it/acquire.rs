//! `tidegate acquire`: drawing units, and holding a lease while a command runs.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use rusqlite::Connection;
use rustix::process::Signal;

use crate::kit::{Fixture, codec, finish, send, wait_until_it_catches};

/// A store and a server, with ten jobs a day for every entity.
fn fixtures() -> [Fixture; 2] {
    let fixtures = Fixture::both();
    for fixture in &fixtures {
        fixture.ok("limits set system jobs:10/day");
    }
    fixtures
}

/// A running command that holds three of ten jobs.
fn holding(fixture: &Fixture, script: &str) -> Child {
    let mut command = fixture.command(&["acquire", "acme", "build", "jobs=3", "--", "sh", "-c", script]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    // The pipe stays open: what it writes later is not read, and fits.
    BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "runs\n");
    assert_eq!(fixture.available("acme", "build", "jobs"), 7, "held while it runs");
    child
}

#[test]
fn acquire_spends_units_without_a_command() {
    for fixture in fixtures() {
        assert_eq!(fixture.ok("acquire acme build jobs=4"), "granted to acme on build: jobs=4\n");
        let granted = fixture.json("acquire acme build jobs=2 --within 1s");
        let wanted = r#"{ "granted": true, "subject": { "entity": "acme", "resource": "build" },
                      "cost": { "jobs": 2 }, "is_degraded": false }"#;
        assert_eq!(granted, codec::parse(wanted));
        assert_eq!(fixture.available("acme", "build", "jobs"), 4);
        assert_eq!(fixture.json("usage summary entity acme")["limits"][0]["units"], 6);
    }
}

#[test]
fn refusal_exits_with_3_and_names_limit_and_wait() {
    for fixture in fixtures() {
        fixture.ok("acquire acme build jobs=8");
        for line in [
            "acquire acme build jobs=3",
            "acquire acme build jobs=3 --within 1s",
            "acquire acme build jobs=3 -- true",
        ] {
            let run = fixture.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (3, ""), "{run:?}");
            let start = "error: limit \"jobs\" exceeded for acme on build: \
                         2 of 10 available, 3 requested (by system); retry after ";
            assert!(run.stderr.starts_with(start), "{}", run.stderr);
            assert!(run.stderr.ends_with("\n next: retry then, or wait with --within SPAN\n"));
        }
        let run = fixture.run("--json acquire acme build jobs=3");
        assert_eq!((run.code, run.stdout.as_str()), (3, ""));
        let error = &codec::parse(&run.stderr)["error"];
        assert_eq!(codec::fields(error), ["code", "kind", "limits", "message", "next", "retry_after"]);
        assert_eq!((&error["code"], &error["kind"]), (&3.into(), &"refused".into()));
        assert_eq!(error["limits"][0]["source"]["kind"], "system");
        assert!(error["retry_after"].as_f64().unwrap() > 8_000.0);

        let never = fixture.run("acquire acme build jobs=11");
        assert_eq!(never.code, 3);
        assert_eq!(
            never.stderr,
            "error: never possible: limit \"jobs\" exceeded for acme on build: 2 of 10 available, 11 requested (by system)\n \
         next: request less, or raise the limit's burst with `tidegate limits set`\n"
        );
    }
}

#[test]
fn acquire_waits_within_the_given_time() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system jobs:20/s:1");
        for _ in 0..3 {
            fixture.ok("acquire acme build jobs=1 --within 1m");
        }
        assert_eq!(fixture.json("usage summary entity acme")["limits"][0]["units"], 3);
    }
}

#[test]
fn policy_decides_while_the_store_is_unavailable() {
    let fixture = Fixture::new();
    fixture.ok("limits set resource open jobs:10/day --on-unavailable allow");
    fixture.ok("limits set resource shut jobs:10/day");
    let other = Connection::open(fixture.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // The timeout covers opening the file and reading the policy too, which a slow machine may not manage:
    // then it is raised.
    let tries = ["400ms", "3s", "15s", "1m"]
        .map(|time| format!("--timeout {time} acquire acme open jobs=1 -- echo runs"));
    let open =
        tries.iter().map(|line| fixture.run(line)).find(|run| run.code == 0).expect("the policy lets it run");
    assert_eq!(open.stdout, "runs\n");
    let sentence = "tidegate: the store is unavailable, and the policy lets the command run without it\n";
    assert!(open.stderr.starts_with(sentence), "{}", open.stderr);
    let shut = fixture.run("--timeout 400ms acquire acme shut jobs=1 -- echo runs");
    assert_eq!((shut.code, shut.stdout.as_str()), (4, ""), "{}", shut.stderr);
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(fixture.ok("usage list entity acme"), "no usage\n");
}

#[test]
fn subject_without_limits_is_refused_with_a_hint() {
    for fixture in Fixture::both() {
        let run = fixture.run("acquire acme build jobs=1");
        assert_eq!(run.code, 1);
        assert_eq!(
            run.stderr,
            "error: no limit applies to acme on build, so its requests are refused\n \
         next: write a limit: tidegate limits set resource 'build' rpm:60/min\n"
        );
    }
}

#[test]
fn successful_command_spends_its_units() {
    for fixture in fixtures() {
        let run = fixture.run_words(&[
            "acquire",
            "acme",
            "build",
            "jobs=3",
            "--",
            "sh",
            "-c",
            "echo out; echo err >&2",
        ]);
        assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (0, "out\n", "err\n"));
        assert_eq!(fixture.available("acme", "build", "jobs"), 7);
        assert_eq!(fixture.json("usage summary entity acme")["limits"][0]["units"], 3);
    }
}

#[test]
fn failed_command_spends_nothing_and_passes_its_code() {
    for fixture in fixtures() {
        let table: [(&[&str], i32); 4] = [
            (&["sh", "-c", "exit 7"], 7),
            (&["sh", "-c", "kill -9 $$"], 128 + 9),
            (&["no-such-command-anywhere"], 127),
            (&["/"], 126),
        ];
        for (command, code) in table {
            let run = fixture.run_words(&[&["acquire", "acme", "build", "jobs=3", "--"], command].concat());
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{command:?}: {run:?}");
            assert_eq!(fixture.available("acme", "build", "jobs"), 10, "{command:?}");
        }
        assert_eq!(fixture.ok("usage summary entity acme"), "no usage\n");
        let run = fixture.run("acquire acme build jobs=3 -- no-such-command-anywhere");
        assert!(run.stderr.starts_with("error: the command `no-such-command-anywhere` cannot be started: "));
    }
}

#[test]
fn forwarded_signal_kills_and_returns_units() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        for fixture in fixtures() {
            let child = holding(&fixture, "echo runs; exec sleep 600");
            send(&child, signal);
            let run = finish(child);
            assert_eq!((run.code, run.stderr.as_str()), (code, ""), "{signal:?}");
            assert_eq!(fixture.available("acme", "build", "jobs"), 10);
        }
    }
}

#[test]
fn command_that_handles_a_signal_spends_its_units() {
    for fixture in fixtures() {
        let child = holding(&fixture, "trap 'exit 0' TERM; echo runs; while :; do sleep 0.05; done");
        send(&child, Signal::TERM);
        assert_eq!(finish(child).code, 0);
        assert_eq!(fixture.available("acme", "build", "jobs"), 7);
    }
}

#[test]
fn signal_during_the_wait_takes_no_units() {
    for fixture in fixtures() {
        fixture.ok("acquire acme build jobs=10");
        let mut command =
            fixture.command(&["acquire", "acme", "build", "jobs=1", "--within", "30d", "--", "true"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until_it_catches(&child, Signal::INT);
        send(&child, Signal::INT);
        let run = finish(child);
        assert_eq!(run.code, 130);
        // The draw was in progress, on a slow disk.
        let is_late = run.stderr.starts_with("tidegate: the end of the lease was not confirmed");
        assert!(run.stderr.is_empty() || is_late, "{}", run.stderr);
        assert_eq!(fixture.json("usage summary entity acme")["limits"][0]["units"], 10);
    }
}
