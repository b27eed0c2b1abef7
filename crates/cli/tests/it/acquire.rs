//! `tidegate acquire`: units drawn, and held while a command runs.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use rusqlite::Connection;
use rustix::process::Signal;

use crate::kit::{Shop, codec, finish, send, wait_until_it_catches};

/// A store and a server, with ten jobs a day for every entity.
fn shops() -> [Shop; 2] {
    let shops = Shop::both();
    for shop in &shops {
        shop.ok("limits set system jobs:10/day");
    }
    shops
}

/// A command that holds three of ten jobs, and has reported that it runs.
fn holding(shop: &Shop, script: &str) -> Child {
    let mut command = shop.command(&["acquire", "acme", "build", "jobs=3", "--", "sh", "-c", script]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    // The pipe stays open: what it writes later is not read, and fits.
    BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "runs\n");
    assert_eq!(shop.available("acme", "build", "jobs"), 7, "held while it runs");
    child
}

#[test]
fn units_are_spent_at_once() {
    for shop in shops() {
        assert_eq!(shop.ok("acquire acme build jobs=4"), "granted to acme on build: jobs=4\n");
        let granted = shop.json("acquire acme build jobs=2 --within 1s");
        let wanted = r#"{ "granted": true, "subject": { "entity": "acme", "resource": "build" },
                      "cost": { "jobs": 2 }, "is_degraded": false }"#;
        assert_eq!(granted, codec::parse(wanted));
        assert_eq!(shop.available("acme", "build", "jobs"), 4);
        assert_eq!(shop.json("usage summary entity acme")["limits"][0]["units"], 6);
    }
}

#[test]
fn a_refusal_ends_with_3_and_says_which_limit_and_when_to_come_back() {
    for shop in shops() {
        shop.ok("acquire acme build jobs=8");
        for line in [
            "acquire acme build jobs=3",
            "acquire acme build jobs=3 --within 1s",
            "acquire acme build jobs=3 -- true",
        ] {
            let run = shop.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (3, ""), "{run:?}");
            let start =
                "error: refused: jobs of acme on build: 2 of 10 there, 3 asked (by system); come back in ";
            assert!(run.stderr.starts_with(start), "{}", run.stderr);
            assert!(run.stderr.ends_with("\n next: come back then, or wait for it with --within SPAN\n"));
        }
        let run = shop.run("--json acquire acme build jobs=3");
        assert_eq!((run.code, run.stdout.as_str()), (3, ""));
        let error = &codec::parse(&run.stderr)["error"];
        assert_eq!(codec::fields(error), ["code", "kind", "limits", "message", "next", "retry_after"]);
        assert_eq!((&error["code"], &error["kind"]), (&3.into(), &"refused".into()));
        assert_eq!(error["limits"][0]["source"]["kind"], "system");
        assert!(error["retry_after"].as_f64().unwrap() > 8_000.0);

        let never = shop.run("acquire acme build jobs=11");
        assert_eq!(never.code, 3);
        assert_eq!(
            never.stderr,
            "error: never possible: jobs of acme on build: 2 of 10 there, 11 asked (by system)\n \
         next: ask for less, or raise the limit's burst with `tidegate limits set`\n"
        );
    }
}

#[test]
fn what_is_short_is_waited_for_if_it_comes_in_time() {
    for shop in Shop::both() {
        shop.ok("limits set system jobs:20/s:1");
        for _ in 0..3 {
            shop.ok("acquire acme build jobs=1 --within 1m");
        }
        assert_eq!(shop.json("usage summary entity acme")["limits"][0]["units"], 3);
    }
}

#[test]
fn where_the_store_is_away_the_policy_decides() {
    let shop = Shop::new();
    shop.ok("limits set resource open jobs:10/day --on-unavailable allow");
    shop.ok("limits set resource shut jobs:10/day");
    let other = Connection::open(shop.file()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // The timeout covers opening the file and reading the policy too, which a slow machine may not manage: then it is raised.
    let tries = ["400ms", "3s", "15s", "1m"]
        .map(|time| format!("--timeout {time} acquire acme open jobs=1 -- echo runs"));
    let open =
        tries.iter().map(|line| shop.run(line)).find(|run| run.code == 0).expect("the policy lets it run");
    assert_eq!(open.stdout, "runs\n");
    let sentence = "tidegate: the store is away, and the policy lets the command run without it\n";
    assert!(open.stderr.starts_with(sentence), "{}", open.stderr);
    let shut = shop.run("--timeout 400ms acquire acme shut jobs=1 -- echo runs");
    assert_eq!((shut.code, shut.stdout.as_str()), (4, ""), "{}", shut.stderr);
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(shop.ok("usage list entity acme"), "no usage\n");
}

#[test]
fn what_nothing_limits_is_refused_with_what_to_write() {
    for shop in Shop::both() {
        let run = shop.run("acquire acme build jobs=1");
        assert_eq!(run.code, 1);
        assert_eq!(
            run.stderr,
            "error: nothing limits acme on build, and what nothing limits is refused\n \
         next: write a limit: tidegate limits set resource 'build' rpm:60/min\n"
        );
    }
}

#[test]
fn a_command_that_succeeds_has_spent_what_was_drawn() {
    for shop in shops() {
        let run = shop.run_words(&[
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
        assert_eq!(shop.available("acme", "build", "jobs"), 7);
        assert_eq!(shop.json("usage summary entity acme")["limits"][0]["units"], 3);
    }
}

#[test]
fn a_command_that_fails_has_spent_nothing_and_its_exit_code_is_ours() {
    for shop in shops() {
        let table: [(&[&str], i32); 4] = [
            (&["sh", "-c", "exit 7"], 7),
            (&["sh", "-c", "kill -9 $$"], 128 + 9),
            (&["no-such-command-anywhere"], 127),
            (&["/"], 126),
        ];
        for (command, code) in table {
            let run = shop.run_words(&[&["acquire", "acme", "build", "jobs=3", "--"], command].concat());
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{command:?}: {run:?}");
            assert_eq!(shop.available("acme", "build", "jobs"), 10, "{command:?}");
        }
        assert_eq!(shop.ok("usage summary entity acme"), "no usage\n");
        let run = shop.run("acquire acme build jobs=3 -- no-such-command-anywhere");
        assert!(run.stderr.starts_with("error: the command `no-such-command-anywhere` cannot be started: "));
    }
}

#[test]
fn a_signal_is_passed_on_and_the_lease_of_a_killed_command_returns() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        for shop in shops() {
            let child = holding(&shop, "echo runs; exec sleep 600");
            send(&child, signal);
            let run = finish(child);
            assert_eq!((run.code, run.stderr.as_str()), (code, ""), "{signal:?}");
            assert_eq!(shop.available("acme", "build", "jobs"), 10);
        }
    }
}

#[test]
fn a_command_that_ends_well_by_a_signal_has_spent_what_was_drawn() {
    for shop in shops() {
        let child = holding(&shop, "trap 'exit 0' TERM; echo runs; while :; do sleep 0.05; done");
        send(&child, Signal::TERM);
        assert_eq!(finish(child).code, 0);
        assert_eq!(shop.available("acme", "build", "jobs"), 7);
    }
}

#[test]
fn a_signal_while_it_waits_for_units_takes_nothing() {
    for shop in shops() {
        shop.ok("acquire acme build jobs=10");
        let mut command =
            shop.command(&["acquire", "acme", "build", "jobs=1", "--within", "30d", "--", "true"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until_it_catches(&child, Signal::INT);
        send(&child, Signal::INT);
        let run = finish(child);
        assert_eq!(run.code, 130);
        // The draw was in progress, on a slow disk.
        let is_late = run.stderr.starts_with("tidegate: the end was not heard of");
        assert!(run.stderr.is_empty() || is_late, "{}", run.stderr);
        assert_eq!(shop.json("usage summary entity acme")["limits"][0]["units"], 10);
    }
}
