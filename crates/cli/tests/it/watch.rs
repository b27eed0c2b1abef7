//! `tidegate watch` in a real terminal: what happens is seen, and the terminal is given back, however it ends.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::kit::serving::Serving;
use crate::kit::tool::{TMUX, skip_without_tool};
use crate::kit::watch::Terminal;
use crate::kit::{Shop, codec, send, wait_until_it_catches};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tidegate");

/// A server that gives each entity two an hour.
fn served() -> Shop {
    let shop = Shop::served();
    shop.ok("limits set system jobs:2/h");
    shop
}

fn terminal(shop: &Shop, size: (u16, u16)) -> Terminal {
    let folder = shop.path("");
    let mut variables = vec![("TIDEGATE_TIMEOUT", "1m".to_owned())];
    if let (Some(server), Some(token)) = (&shop.server, &shop.token) {
        variables.push(("TIDEGATE_SERVER", server.url()));
        variables.push(("TIDEGATE_TOKEN", token.clone()));
    } else {
        variables.push(("TIDEGATE_STORE", shop.store()));
    }
    Terminal::new(&folder, size, &variables)
}

/// Uses up what an entity has, and is refused so often.
fn refuse(shop: &Shop, entity: &str, times: usize) {
    let line = format!("acquire {entity} build jobs=1");
    while shop.run(&line).code == 0 {}
    for _ in 1..times {
        assert_eq!(shop.run(&line).code, 3);
    }
}

/// The row of the table that begins with a name.
fn row<'a>(screen: &'a str, entity: &str) -> Option<Vec<&'a str>> {
    let words =
        |line: &'a str| line.trim_matches('│').split_whitespace().filter(|word| *word != ">").collect();
    screen.lines().map(words).find(|words: &Vec<&str>| words.first() == Some(&entity))
}

#[test]
fn refusals_and_levels_are_seen_filtered_sorted_and_paused_at_any_size() {
    skip_without_tool!(TMUX);
    let shop = served();
    let terminal = terminal(&shop, (80, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live ") && screen.contains("store sqlite ok"));
    refuse(&shop, "acme", 3);
    let counted =
        |screen: &str, entity: &str, count: &str| row(screen, entity).is_some_and(|row| row[3] == count);
    let screen = terminal.until("three refusals and a level", |screen| {
        counted(screen, "acme", "3") && screen.contains("0 of 2")
    });
    assert!(screen.contains("levels of acme on build"), "{screen}");
    assert_eq!(row(&screen, "acme").unwrap()[..3], ["acme", "build", "jobs"]);
    refuse(&shop, "zeta", 1);
    terminal.until("both", |screen| counted(screen, "zeta", "1"));

    terminal.press(&["/"]);
    terminal.press(&["z", "e", "Enter"]);
    terminal.until("one of the two", |screen| {
        screen.contains("limited: 1 of 2 with `ze`") && row(screen, "acme").is_none()
    });
    terminal.press(&["/", "Escape"]);
    terminal.until("both again", |screen| screen.contains("limited: 2, by refusals"));
    terminal.press(&["s"]);
    terminal.until("another order", |screen| screen.contains(", by speed"));
    terminal.press(&["s", "s", "s", "j"]);
    terminal.until("the second row", |screen| screen.contains("levels of zeta on build"));

    terminal.press(&["p"]);
    terminal.until("a pause", |screen| screen.contains("PAUSED at"));
    refuse(&shop, "late", 5);
    // A key redraws the screen with all events so far: without the pause the refusals would be on it.
    terminal.press(&["s"]);
    let screen = terminal.until("another order", |screen| screen.contains(", by speed"));
    assert!(row(&screen, "late").is_none(), "it is not shown: {screen}");
    terminal.press(&["s", "s", "s", "p"]);
    terminal.until("what was missed", |screen| counted(screen, "late", "5"));

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
fn levels_of_limits_that_callers_brought_with_them_are_seen() {
    skip_without_tool!(TMUX);
    let shop = Shop::served();
    let (server, token) = (shop.server.as_ref().unwrap(), shop.token.as_deref());
    let terminal = terminal(&shop, (80, 24));
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
fn a_server_that_stops_is_lost_and_one_that_comes_back_is_found() {
    skip_without_tool!(TMUX);
    let mut shop = served();
    let terminal = terminal(&shop, (100, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live "));
    refuse(&shop, "acme", 2);
    terminal.until("the refusals", |screen| row(screen, "acme").is_some_and(|row| row[3] == "2"));
    let server = shop.server.take().unwrap();
    let address = server.address.clone();
    server.stop();
    let screen = terminal
        .until("the loss", |screen| screen.contains("LOST since") && screen.contains("no connection"));
    assert!(row(&screen, "acme").is_some(), "what was seen stays: {screen}");
    let mut command = shop.command(&["serve", "--listen", &address]);
    shop.server = Some(Serving::start(&mut command));
    terminal.until("the server again", |screen| screen.contains(" live ") && !screen.contains("LOST"));
    refuse(&shop, "acme", 2);
    terminal.until("refusals of both servers", |screen| row(screen, "acme").is_some_and(|row| row[3] == "4"));
    terminal.press(&["C-c"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn signals_end_it_with_the_terminal_as_it_was() {
    skip_without_tool!(TMUX);
    let shop = served();
    let terminal = terminal(&shop, (80, 24));
    for (signal, code) in [(Signal::TERM, "143"), (Signal::HUP, "129"), (Signal::INT, "130")] {
        terminal.start(&format!("{PROGRAM} watch"));
        terminal.until("a live screen", |screen| screen.contains(" live "));
        kill_process(Pid::from_raw(terminal.id()).unwrap(), signal).unwrap();
        assert_eq!(terminal.ended(), code, "{signal:?}");
    }
}

#[test]
fn a_shell_that_stops_it_has_its_terminal_until_it_goes_on() {
    skip_without_tool!(TMUX);
    let shop = served();
    let terminal = terminal(&shop, (80, 24));
    for stop in ["a key", "a signal"] {
        terminal.start(&format!("{PROGRAM} watch"));
        terminal.until("a live screen", |screen| screen.contains(" live "));
        if stop == "a key" {
            terminal.press(&["C-z"]);
        } else {
            kill_process(Pid::from_raw(terminal.id()).unwrap(), Signal::TSTP).unwrap();
        }
        assert_eq!(terminal.ended(), "147", "by {stop}: the shell goes on, and the terminal is as it was");
        terminal.line("clear; fg");
        terminal.until("a live screen again", |screen| {
            screen.starts_with("tidegate watch") && screen.contains(" live ")
        });
        terminal.press(&["q"]);
        terminal.until("a prompt", |screen| screen.trim_end().ends_with("ready$"));
    }
}

#[test]
fn a_token_that_is_revoked_ends_it_with_what_to_do() {
    skip_without_tool!(TMUX);
    let shop = served();
    let made = shop.json("token create viewer --scopes read");
    let terminal = terminal(&shop, (100, 24));
    let token = made["secret"].as_str().unwrap();
    terminal.start(&format!("env TIDEGATE_TOKEN={token} {PROGRAM} watch --every 100ms"));
    terminal.until("a live screen", |screen| screen.contains(" live "));
    shop.ok("token revoke viewer");
    assert_eq!(terminal.ended(), "1");
    let screen = terminal.screen();
    assert!(screen.contains("error: the server does not let this token in"), "{screen}");
    terminal.start(&format!("env TIDEGATE_SERVER=http://127.0.0.1:1 {PROGRAM} watch"));
    assert_eq!(terminal.ended(), "4", "one that was never there is not waited for");
}

#[test]
fn a_store_is_watched_by_its_levels_and_says_what_it_does_not_tell() {
    skip_without_tool!(TMUX);
    let shop = Shop::new();
    shop.ok("limits set system jobs:100/day");
    shop.ok("entity create acme");
    shop.ok("acquire acme build jobs=10");
    let terminal = terminal(&shop, (80, 24));
    terminal.start(&format!("{PROGRAM} watch --every 100ms"));
    terminal.until("the level", |screen| screen.contains("90 of 100"));
    shop.ok("acquire acme build jobs=25");
    let screen = terminal.until("what was taken", |screen| {
        screen.contains("65 of 100") && row(screen, "acme").is_some_and(|row| row[3] == "25")
    });
    assert!(screen.contains("A store does not tell whom it refuses"), "{screen}");
    assert!(screen.contains("A store tells no events"), "{screen}");
    terminal.press(&["Escape"]);
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn without_a_terminal_it_says_what_else_there_is() {
    let shop = served();
    let piped = shop.run("watch");
    assert_eq!((piped.code, piped.stdout.as_str()), (2, ""));
    assert_eq!(
        piped.stderr,
        "error: stdout is no terminal, and a live view needs one\n next: say --json for a line for each event, or --once for one look as a table\n"
    );
    refuse(&shop, "acme", 1);
    let text = shop.ok("watch --once acme");
    assert!(text.starts_with("decisions  2 granted, 1 refused, 0 without the store, since "), "{text}");
    assert!(
        text.lines().any(|line| line.split_whitespace().take(5).eq(["acme", "build", "jobs", "0", "2"])),
        "{text}"
    );
    let json = shop.json("watch --once acme");
    assert_eq!(codec::fields(&json), ["snapshot", "store", "subjects"]);
    assert_eq!(
        (&json["snapshot"]["refused"], &json["subjects"][0]["limits"][0]["burst"]),
        (&1.into(), &2.into())
    );
}

#[test]
fn with_json_every_event_is_a_line_until_a_signal_ends_it() {
    let shop = served();
    let mut command = shop.command(&["watch", "--json", "--every", "100ms"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines =
        BufReader::new(child.stdout.take().unwrap()).lines().map(|line| codec::parse(&line.unwrap()));
    assert_eq!(lines.next().unwrap()["type"], "up");
    refuse(&shop, "acme", 1);
    let refused = lines.find(|line| line["type"] == "refused").unwrap();
    assert_eq!(codec::fields(&refused), ["at", "entity", "limit", "of", "resource", "retry_after", "type"]);
    assert_eq!((&refused["entity"], &refused["limit"]), (&"acme".into(), &"jobs".into()));
    let totals = lines.find(|line| line["type"] == "totals" && line["refused"] == 1).unwrap();
    assert_eq!(totals["granted"], 2);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_reader_that_stops_reading_holds_up_no_signal_and_a_full_disk_is_told() {
    let shop = served();
    let (theirs, mut ours) = io::pipe().unwrap();
    // The pipe is full before it starts: its first line blocks.
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    while ours.write(b"\n").is_ok() {}
    rustix::io::ioctl_fionbio(&ours, false).unwrap();
    let mut command = shop.command(&["watch", "--json", "--every", "100ms"]);
    let mut child = command.stdout(Stdio::from(ours)).spawn().unwrap();
    drop(command);
    // It blocks in its first write, and the handler still runs.
    wait_until_it_catches(&child, Signal::TERM);
    refuse(&shop, "acme", 1);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().to_string(), "exit status: 143");
    drop(theirs);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = shop.command(&["watch", "--json"]).stdout(Stdio::from(full)).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
