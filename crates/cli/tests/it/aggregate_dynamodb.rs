//! `tidegate aggregate`: usage of a DynamoDB table, counted by its stream.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use rustix::process::Signal;

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::life::{Life, Older};
use crate::kit::serving::Serving;
use crate::kit::{Json, Shop, codec, finish, send};

/// The variable with the address of the engine.
const DYNAMODB: &str = "TIDEGATE_TEST_DYNAMODB";

/// A table that exists, with limits.
fn table(name: &str) -> Life {
    let (table, server) = (unique(name), address(DYNAMODB));
    let url =
        format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&deadline_ms=5000&timeout_ms=30000");
    let life = Life { shop: Shop::new(), url, wanted: 1, older: Older::Refused };
    for line in ["store init", "limits set system rpm:60/day"] {
        assert_eq!(life.run(line).code, 0, "{line}");
    }
    life
}

fn acquire(life: &Life, times: u32) {
    for _ in 0..times {
        let run = life.run("acquire acme gpt rpm=2");
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    }
}

#[test]
fn once_counts_all_there_is_and_nothing_twice_from_wherever_it_reads() {
    skip_without!(DYNAMODB);
    let life = table("once");
    acquire(&life, 3);
    for (line, counted) in [("aggregate --once", 3), ("aggregate --once --from oldest", 0)] {
        let (code, stats) = life.json(line);
        assert_eq!((code, &stats["counted"], &stats["is_caught_up"]), (0, &counted.into(), &true.into()));
        assert_eq!((&stats["lag"], &stats["errors"], &stats["lost"]), (&0.0.into(), &0.into(), &0.into()));
        assert_eq!(stats["records"].as_u64() > Some(0), line.ends_with("oldest"), "{stats}");
    }
    acquire(&life, 1);
    let run = life.run("aggregate --once --from oldest");
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    assert!(
        run.stdout.starts_with("1 leases counted, ") && run.stdout.ends_with(" read, caught up\n"),
        "{run:?}"
    );
    let (_, usage) = life.json("usage summary entity acme --window month");
    assert_eq!(usage["limits"][0]["units"], 8, "{usage}");
}

#[test]
fn it_follows_tells_programs_line_by_line_and_ends_well_when_it_is_told_to() {
    skip_without!(DYNAMODB);
    let life = table("follow");
    let mut command = life.shop.command(&["--json", "--store", &life.url, "aggregate"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next_where = |is_meant: &dyn Fn(&Json) -> bool| loop {
        let text = lines.next().expect("it goes on").unwrap();
        let stats = codec::parse(&text);
        if is_meant(&stats) {
            return stats;
        }
    };
    next_where(&|stats| stats["is_caught_up"] == true);
    acquire(&life, 2);
    let stats = next_where(&|stats| stats["counted"] == 2 && stats["is_caught_up"] == true);
    assert_eq!(stats["lag"], 0.0, "{stats}");
    send(&child, Signal::TERM);
    let last = lines.last().expect("a last line").unwrap();
    assert_eq!(codec::parse(&last)["counted"], 2);
    let run = finish(child);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
}

#[test]
fn a_server_counts_in_the_background_unless_it_is_told_not_to() {
    skip_without!(DYNAMODB);
    let life = table("serve");
    acquire(&life, 1);
    let serve = |more: &[&str]| {
        let places = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"];
        let words = [&["--store", &life.url, "--timeout", "30s", "serve"], &places[..], more];
        Serving::start(&mut life.shop.command(&words.concat()))
    };
    let server = serve(&[]);
    server.wait_for_metric("tidegate_usage_counted_total ", 1);
    server.wait_for_metric("tidegate_usage_caught_up ", 1);
    assert_eq!(server.metric("tidegate_usage_lag_seconds "), 0);
    server.stop();
    let silent = serve(&["--aggregate=false"]);
    let token = life.json("token create watcher --scopes read").1["secret"].as_str().unwrap().to_owned();
    let (status, metrics) = silent.ask("GET /metrics", Some(&token), "");
    assert_eq!(status, 200);
    assert!(!metrics.contains("tidegate_usage_"), "{metrics}");
    silent.stop();
}

#[test]
fn aggregate_refuses_a_file_and_a_server() {
    let shop = Shop::new();
    let run = shop.run("aggregate --once");
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("counts usage as leases end: there is nothing to aggregate"), "{run:?}");
    let run = shop.run("--server http://127.0.0.1:1 aggregate");
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("`aggregate` works on the store itself"), "{run:?}");
}

#[test]
fn aggregate_names_store_init_for_a_missing_table() {
    skip_without!(DYNAMODB);
    let (shop, server) = (Shop::new(), address(DYNAMODB));
    let url = format!("dynamodb://{}?region=eu-central-1&endpoint={server}", unique("none"));
    let run = shop.run_words(&["--store", &url, "aggregate", "--once"]);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("tidegate store init"), "{run:?}");
}
