//! `tidegate watch` in a real terminal: updates are displayed, and the terminal is restored however it ends.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::kit::server::TestServer;
use crate::kit::tool::{TMUX, skip_without_tool};
use crate::kit::watch::Terminal;
use crate::kit::{Fixture, codec, send, wait_until_it_catches};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tidegate");

/// A server with two jobs an hour per entity.
fn served() -> Fixture {
    let fixture = Fixture::served();
    fixture.ok("limits set system jobs:2/h");
    fixture
}

fn terminal(fixture: &Fixture, size: (u16, u16)) -> Terminal {
    let folder = fixture.path("");
    let mut variables = vec![("TIDEGATE_TIMEOUT", "1m".to_owned())];
    if let (Some(server), Some(token)) = (&fixture.server, &fixture.token) {
        variables.push(("TIDEGATE_SERVER", server.url()));
        variables.push(("TIDEGATE_TOKEN", token.clone()));
    } else {
        variables.push(("TIDEGATE_STORE", fixture.store()));
    }
    Terminal::new(&folder, size, &variables)
}

/// Exhausts an entity's limit, and is then refused `times` times.
fn refuse(fixture: &Fixture, entity: &str, times: usize) {
    let line = format!("acquire {entity} build jobs=1");
    while fixture.run(&line).code == 0 {}
    for _ in 1..times {
        assert_eq!(fixture.run(&line).code, 3);
    }
}

/// The table row of an entity.
fn row<'a>(screen: &'a str, entity: &str) -> Option<Vec<&'a str>> {
    let words =
        |line: &'a str| line.trim_matches('│').split_whitespace().filter(|word| *word != ">").collect();
    screen.lines().map(words).find(|words: &Vec<&str>| words.first() == Some(&entity))
}

#[test]
fn table_filters_sorts_and_pauses_at_any_size() {
    skip_without_tool!(TMUX);
    let fixture = served();
    let terminal = terminal(&fixture, (80, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live ") && screen.contains("store sqlite ok"));
    refuse(&fixture, "acme", 3);
    let counted =
        |screen: &str, entity: &str, count: &str| row(screen, entity).is_some_and(|row| row[3] == count);
    let screen = terminal.until("three refusals and a level", |screen| {
        counted(screen, "acme", "3") && screen.contains("0 of 2")
    });
    assert!(screen.contains("levels of acme on build"), "{screen}");
    assert_eq!(row(&screen, "acme").unwrap()[..3], ["acme", "build", "jobs"]);
    refuse(&fixture, "zeta", 1);
    terminal.until("both", |screen| counted(screen, "zeta", "1"));

    terminal.press(&["/"]);
    terminal.press(&["z", "e", "Enter"]);
    terminal.until("one of the two", |screen| {
        screen.contains("users: 1 of 2 with `ze`") && row(screen, "acme").is_none()
    });
    terminal.press(&["/", "Escape"]);
    terminal.until("both again", |screen| screen.contains("users: 2, by refusals"));
    terminal.press(&["s"]);
    terminal.until("another order", |screen| screen.contains(", by speed"));
    terminal.press(&["s", "s", "s", "s", "j"]);
    terminal.until("the second row", |screen| screen.contains("levels of zeta on build"));

    terminal.press(&["p"]);
    terminal.until("a pause", |screen| screen.contains("PAUSED at"));
    refuse(&fixture, "late", 5);
    // A key redraws the screen with all events so far: without the pause, it would show the refusals.
    terminal.press(&["s"]);
    let screen = terminal.until("another order", |screen| screen.contains(", by speed"));
    assert!(row(&screen, "late").is_none(), "it is not shown: {screen}");
    terminal.press(&["s", "s", "s", "s", "p"]);
    terminal.until("events from the pause", |screen| counted(screen, "late", "5"));

    terminal.resize((40, 10));
    let screen = terminal.until("a small screen", |screen| {
        screen.lines().count() == 10 && screen.contains("q quit / filter s sort p pause ? help")
    });
    assert_eq!(row(&screen, "acme").unwrap(), ["acme", "build", "3"]);
    terminal.resize((120, 40));
    terminal.until("a large screen", |screen| {
        screen.lines().nth(39).is_some_and(|line| line.starts_with("q quit   / filter"))
            && screen.lines().nth(1).is_some_and(|line| line.chars().count() == 120)
    });
    terminal.press(&["?"]);
    terminal.until("help", |screen| screen.contains("Any key closes this."));
    terminal.press(&["?", "q"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn levels_of_limits_in_requests_are_shown() {
    skip_without_tool!(TMUX);
    let fixture = Fixture::served();
    let (server, token) = (fixture.server.as_ref().unwrap(), fixture.token.as_deref());
    let terminal = terminal(&fixture, (80, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live "));
    let ask = r#"{"entity": "ada", "resource": "web", "cost": {"requests": 2}, "limits": ["requests:3/h"]}"#;
    let statuses = [(); 2].map(|()| server.ask("POST /v1/spend", token, ask).0);
    assert_eq!(statuses, [204, 429]);
    terminal.until("its level", |screen| row(screen, "ada").is_some() && screen.contains("1 of 3"));
    terminal.press(&["q"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn stopped_server_is_lost_and_found_after_a_restart() {
    skip_without_tool!(TMUX);
    let mut fixture = served();
    let terminal = terminal(&fixture, (100, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live "));
    refuse(&fixture, "acme", 2);
    terminal.until("the refusals", |screen| row(screen, "acme").is_some_and(|row| row[3] == "2"));
    let server = fixture.server.take().unwrap();
    let address = server.address.clone();
    server.stop();
    let screen = terminal
        .until("the loss", |screen| screen.contains("LOST since") && screen.contains("no connection"));
    assert!(row(&screen, "acme").is_some(), "rows stay: {screen}");
    let mut command = fixture.command(&["serve", "--listen", &address]);
    fixture.server = Some(TestServer::start(&mut command));
    terminal.until("the server again", |screen| screen.contains(" live ") && !screen.contains("LOST"));
    refuse(&fixture, "acme", 2);
    terminal.until("refusals of both servers", |screen| row(screen, "acme").is_some_and(|row| row[3] == "4"));
    terminal.press(&["C-c"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn signal_ends_watch_and_restores_the_terminal() {
    skip_without_tool!(TMUX);
    let fixture = served();
    let terminal = terminal(&fixture, (80, 24));
    for (signal, code) in [(Signal::TERM, "143"), (Signal::HUP, "129"), (Signal::INT, "130")] {
        terminal.start(&format!("{PROGRAM} watch"));
        terminal.until("a live screen", |screen| screen.contains(" live "));
        kill_process(Pid::from_raw(terminal.id()).unwrap(), signal).unwrap();
        assert_eq!(terminal.ended(), code, "{signal:?}");
    }
}

#[test]
fn suspended_watch_gives_the_terminal_to_the_shell() {
    skip_without_tool!(TMUX);
    let fixture = served();
    let terminal = terminal(&fixture, (80, 24));
    for stop in ["a key", "a signal"] {
        terminal.start(&format!("{PROGRAM} watch"));
        terminal.until("a live screen", |screen| screen.contains(" live "));
        if stop == "a key" {
            terminal.press(&["C-z"]);
        } else {
            kill_process(Pid::from_raw(terminal.id()).unwrap(), Signal::TSTP).unwrap();
        }
        assert_eq!(terminal.ended(), "147", "by {stop}: the shell continues, and the terminal is restored");
        terminal.line("clear; fg");
        terminal.until("a live screen again", |screen| {
            screen.starts_with("tidegate watch") && screen.contains(" live ")
        });
        terminal.press(&["q"]);
        terminal.until("a prompt", |screen| screen.trim_end().ends_with("ready$"));
    }
}

#[test]
fn revoked_token_ends_watch_with_an_error() {
    skip_without_tool!(TMUX);
    let fixture = served();
    let made = fixture.json("token create viewer --scopes read");
    let terminal = terminal(&fixture, (100, 24));
    let token = made["secret"].as_str().unwrap();
    terminal.start(&format!("env TIDEGATE_TOKEN={token} {PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live "));
    fixture.ok("token revoke viewer");
    assert_eq!(terminal.ended(), "1");
    let screen = terminal.screen();
    assert!(screen.contains("error: the server rejected the token"), "{screen}");
    terminal.start(&format!("env TIDEGATE_SERVER=http://127.0.0.1:1 {PROGRAM} watch"));
    assert_eq!(terminal.ended(), "4", "an unavailable server is not retried at the start");
}

#[test]
fn store_is_watched_by_polling_its_levels() {
    skip_without_tool!(TMUX);
    let fixture = Fixture::new();
    fixture.ok("limits set system jobs:100/day");
    fixture.ok("entity create acme");
    fixture.ok("acquire acme build jobs=10");
    let terminal = terminal(&fixture, (80, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("the level", |screen| screen.contains("90 of 100"));
    fixture.ok("acquire acme build jobs=25");
    let screen = terminal.until("the taken units", |screen| {
        screen.contains("65 of 100") && row(screen, "acme").is_some_and(|row| row[3] == "25")
    });
    assert!(screen.contains("A store records no refusals"), "{screen}");
    assert!(screen.contains("A store has no events"), "{screen}");
    terminal.press(&["Escape"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn watch_without_a_terminal_suggests_other_formats() {
    let fixture = served();
    let piped = fixture.run("watch");
    assert_eq!((piped.code, piped.stdout.as_str()), (2, ""));
    assert_eq!(
        piped.stderr,
        "error: stdout is not a terminal, which a live view requires\n next: use --json for one line per event, or --once for a table\n"
    );
    refuse(&fixture, "acme", 1);
    let text = fixture.ok("watch --once acme");
    assert!(text.starts_with("decisions  2 granted, 1 refused, 0 without the store, since "), "{text}");
    assert!(
        text.lines().any(|line| line.split_whitespace().take(5).eq(["acme", "build", "jobs", "0", "2"])),
        "{text}"
    );
    let json = fixture.json("watch --once acme");
    assert_eq!(codec::fields(&json), ["snapshot", "store", "subjects"]);
    assert_eq!(
        (&json["snapshot"]["refused"], &json["subjects"][0]["limits"][0]["burst"]),
        (&1.into(), &2.into())
    );
}

#[test]
fn json_watch_writes_a_line_per_event_until_a_signal() {
    let fixture = served();
    let mut command = fixture.command(&["watch", "--json", "--every", "100ms"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines =
        BufReader::new(child.stdout.take().unwrap()).lines().map(|line| codec::parse(&line.unwrap()));
    assert_eq!(lines.next().unwrap()["type"], "up");
    refuse(&fixture, "acme", 1);
    let refused = lines.find(|line| line["type"] == "refused").unwrap();
    assert_eq!(codec::fields(&refused), ["at", "entity", "limit", "of", "resource", "retry_after", "type"]);
    assert_eq!((&refused["entity"], &refused["limit"]), (&"acme".into(), &"jobs".into()));
    let totals = lines.find(|line| line["type"] == "totals" && line["refused"] == 1).unwrap();
    assert_eq!(totals["granted"], 2);
    let server = fixture.server.as_ref().unwrap();
    assert_eq!(server.ask("POST /v1/upstreams/openai/acquire", fixture.token.as_deref(), "{}").0, 200);
    let listed = lines.find(|line| line["type"] == "upstreams").unwrap();
    assert_eq!(
        (&listed["upstreams"][0]["name"], &listed["upstreams"][0]["reason"]),
        (&"openai".into(), &"probing".into())
    );
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// And a full disk ends it with an error.
#[test]
fn blocked_reader_does_not_delay_a_signal() {
    let fixture = served();
    let (theirs, mut ours) = io::pipe().unwrap();
    // The pipe is full before it starts: its first line blocks.
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    while ours.write(b"\n").is_ok() {}
    rustix::io::ioctl_fionbio(&ours, false).unwrap();
    let mut command = fixture.command(&["watch", "--json", "--every", "100ms"]);
    let mut child = command.stdout(Stdio::from(ours)).spawn().unwrap();
    drop(command);
    // It blocks in its first write, and the handler still runs.
    wait_until_it_catches(&child, Signal::TERM);
    refuse(&fixture, "acme", 1);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().to_string(), "exit status: 143");
    drop(theirs);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = fixture.command(&["watch", "--json"]).stdout(Stdio::from(full)).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
