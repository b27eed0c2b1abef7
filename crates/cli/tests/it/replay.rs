//! `tidegate explain --replay` on logs with known results.

use std::fmt::Write as _;
use std::fs;

use crate::kit::server::TestServer;
use crate::kit::{self, Fixture, Json, Run, codec};

/// The first second of the logs.
const BEGINS: u64 = 1_769_850_000;

/// A line of a log, `second` seconds after its begin.
fn line(second: u64, entity: &str, cost: &str) -> String {
    let at = BEGINS + second;
    format!("{{\"at\": {at}, \"entity\": \"{entity}\", \"resource\": \"gpt\", \"cost\": {cost}}}\n")
}

/// A fixture with a log and a file of limits.
fn fixture(log: &str, limits: &str) -> Fixture {
    let fixture = Fixture::new();
    fs::write(fixture.path("log"), log).expect("it is written");
    fs::write(fixture.path("limits.toml"), limits).expect("it is written");
    fixture
}

/// Replays the log, with or without a store.
fn replay(fixture: &Fixture, has_store: bool, more: &[&str]) -> Run {
    let (log, limits) =
        (fixture.path("log").display().to_string(), fixture.path("limits.toml").display().to_string());
    let line = [&["explain", "--replay", &log, "--manifest", &limits], more].concat();
    let mut command = fixture.command(&line);
    if !has_store {
        command.env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", fixture.path("data"));
    }
    kit::run(&mut command)
}

fn json(fixture: &Fixture, has_store: bool, more: &[&str]) -> (i32, Json) {
    let run = replay(fixture, has_store, &[&["--json"], more].concat());
    assert_eq!(run.stderr, "");
    (run.code, codec::parse(&run.stdout))
}

/// The requests, grants and refusals of the first limit.
fn first(json: &Json) -> [u64; 3] {
    ["asked", "granted", "refused"].map(|field| json["limits"][0][field].as_u64().expect("a number"))
}

#[test]
fn burst_is_refused_beyond_the_limit_until_it_refills() {
    let burst = line(0, "acme", r#"{"rpm": 1}"#).repeat(100);
    let later = line(30, "acme", r#"{"rpm": 1}"#).repeat(31) + &line(90, "calm", r#"{"rpm": 1}"#);
    let fixture = fixture(&(burst + &later), "[system]\nlimits = ['rpm:60/min']\n");
    let run = replay(&fixture, false, &[]);
    assert_eq!((run.code, run.stderr.as_str()), (3, ""));
    assert_eq!(
        run.stdout,
        "132 requests from 2026-01-31T09:00:00Z to 2026-01-31T09:01:30Z: 91 granted, 41 refused\n\
         ENTITY  RESOURCE  LIMIT  REQUESTS  GRANTED  REFUSED  FIRST REFUSED         LONGEST WAIT  BY\n\
         acme    gpt       rpm         131       90       41  2026-01-31T09:00:00Z  1s            system\n"
    );
    assert!(!fixture.path("data").exists(), "without a configured store, none is created");
    let (code, json) = json(&fixture, false, &[]);
    assert_eq!((code, first(&json)), (3, [131, 90, 41]));
    assert_eq!(json["limits"][1]["entity"], "calm");
    assert_eq!(
        (&json["limits"][1]["refused"], &json["limits"][1]["first_refused"]),
        (&0.into(), &Json::Null)
    );
}

#[test]
fn sufficient_limits_refuse_no_request() {
    let fixture =
        fixture(&line(0, "acme", r#"{"rpm": 1}"#).repeat(100), "[system]\nlimits = ['rpm:100/min']\n");
    let run = replay(&fixture, false, &[]);
    assert_eq!(run.code, 0);
    assert_eq!(
        run.stdout,
        "100 requests from 2026-01-31T09:00:00Z to 2026-01-31T09:00:00Z: 100 granted, 0 refused\n"
    );
}

#[test]
fn stored_parents_and_limits_apply_unless_overridden() {
    let log = line(0, "kid", r#"{"rpm": 1}"#).repeat(10);
    let fixture = fixture(&log, "[entity.acme]\nlimits = ['rpm:4/min']\n");
    fixture.ok("limits set system rpm:7/min");
    fixture.ok("entity create acme");
    fixture.ok("entity create kid --parent acme --cascade");
    let (_, declared) = json(&fixture, true, &[]);
    assert_eq!(
        (first(&declared), &declared["limits"][0]["by"]),
        ([10, 4, 6], &"entity acme, of acme".into())
    );
    fs::write(fixture.path("limits.toml"), "[resource.other]\nlimits = ['rpm:1/min']\n").unwrap();
    let (_, written) = json(&fixture, true, &[]);
    assert_eq!((first(&written), &written["limits"][0]["by"]), ([10, 7, 3], &"system".into()));
    let (_, pruned) = json(&fixture, true, &["--prune"]);
    assert_eq!((first(&pruned), &pruned["limits"][0]["by"]), ([10, 0, 10], &"no limit applies".into()));
    let present = fixture.run(&format!("explain --json --replay {}", fixture.path("log").display()));
    assert_eq!(first(&codec::parse(&present.stdout)), [10, 7, 3], "without a file: the stored limits");
    assert_eq!(fixture.available("kid", "gpt", "rpm"), 7, "nothing was drawn from the store");
}

#[test]
fn estimate_is_held_until_the_actual_use_is_known() {
    let ask = |second: u64, more: &str| {
        line(second, "acme", r#"{"tpm": 800}"#).replace("}}", &format!("}}{more}}}"))
    };
    let limits = "[system]\nlimits = ['tpm:1000/day']\n";
    // Of 800 units, 100 were used, which was known after ten seconds.
    let held = fixture(
        &[ask(0, r#", "actual": {"tpm": 100}, "held": 10"#), ask(5, ""), ask(11, "")].concat(),
        limits,
    );
    let (_, json_held) = json(&held, false, &[]);
    assert_eq!(first(&json_held), [3, 2, 1]);
    assert_eq!(json_held["limits"][0]["first_refused"], "2026-01-31T09:00:05Z");
    // At once: the second finds 900.
    let known = fixture(&[ask(0, r#", "actual": {"tpm": 100}"#), ask(5, "")].concat(), limits);
    assert_eq!(first(&json(&known, false, &[]).1), [2, 2, 0]);
}

#[test]
fn impossible_request_is_marked_at_the_short_limit() {
    let log =
        [line(0, "acme", r#"{"rpm": 1, "tpm": 5000}"#), line(1, "acme", r#"{"rpm": 1, "tpm": 10}"#)].concat();
    let fixture = fixture(&log, "[system]\nlimits = ['rpm:60/min', 'tpm:1000/min']\n");
    let (_, json) = json(&fixture, false, &[]);
    let of = |limit: &str| {
        json["limits"].as_array().unwrap().iter().find(|row| row["limit"] == limit).unwrap().clone()
    };
    assert_eq!((&of("tpm")["refused"], &of("tpm")["is_never"]), (&1.into(), &true.into()));
    let rpm = of("rpm");
    assert_eq!((&rpm["asked"], &rpm["granted"], &rpm["refused"]), (&2.into(), &1.into(), &0.into()));
    assert!(replay(&fixture, false, &[]).stdout.contains("forever"));
}

#[test]
fn invalid_log_names_the_line_and_the_reason() {
    let good = line(0, "acme", r#"{"rpm": 1}"#);
    let fixture =
        fixture(&(good.clone() + &line(1, "acme", r#"{"rpm": "x"}"#)), "[system]\nlimits = ['rpm:60/min']\n");
    let run = replay(&fixture, false, &[]);
    let log = fixture.path("log").display().to_string();
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(
        run.stderr.starts_with(&format!("error: line 2 of `{log}`: `cost.rpm`: invalid type: string \"x\"")),
        "{}",
        run.stderr
    );
    fs::write(fixture.path("log"), good.clone() + &line(1, "acme", r#"{"typo": 1}"#)).unwrap();
    let run = replay(&fixture, false, &[]);
    assert_eq!(run.code, 2);
    assert!(
        run.stderr.starts_with("error: line 2: `cost`: `acme on gpt` has no limit `typo`; it has "),
        "{}",
        run.stderr
    );
    fs::write(fixture.path("limits.toml"), "[system]\nlimits = 7\n").unwrap();
    assert_eq!(replay(&fixture, false, &[]).code, 2);
    let alone = kit::run(fixture.command(&["explain", "--replay", &log]).env_remove("TIDEGATE_STORE"));
    assert_eq!(alone.code, 2);
    assert!(alone.stderr.contains("neither a manifest nor a store or a server is given"), "{}", alone.stderr);
    assert_eq!(fixture.run("explain").code, 2);
    assert_eq!(fixture.run(&format!("explain acme gpt rpm=1 --replay {log}")).code, 2);
    assert_eq!(fixture.run("explain acme gpt rpm=1 --manifest x").code, 2);
}

#[test]
fn log_is_read_from_stdin_and_sorted_within_bounds() {
    let mut log = String::new();
    for second in 0..20_000_u64 {
        // Each pair is swapped.
        let _ = write!(log, "{}", line(second ^ 1, "acme", r#"{"rpm": 1}"#));
    }
    let fixture = fixture(&log, "[system]\nlimits = ['rpm:30/min:1']\n");
    assert_eq!(first(&json(&fixture, false, &[]).1), [20_000, 10_000, 10_000], "one every two seconds");
    let limits = fixture.path("limits.toml").display().to_string();
    let mut command = fixture.command(&["explain", "--json", "--replay", "-", "--manifest", &limits]);
    command.env_remove("TIDEGATE_STORE").stdin(fs::File::open(fixture.path("log")).unwrap());
    assert_eq!(first(&codec::parse(&kit::run(&mut command).stdout)), [20_000, 10_000, 10_000]);
    fs::write(fixture.path("log"), log + &line(3, "acme", r#"{"rpm": 1}"#)).unwrap();
    let late = replay(&fixture, false, &[]);
    assert!(late.code == 2 && late.stderr.contains("line 20001 of"), "{}", late.stderr);
}

#[test]
fn log_of_a_server_can_be_replayed() {
    let fixture = fixture("", "[system]\nlimits = ['rpm:1/day', 'tpm:1000/day']\n");
    fixture.ok("limits set system rpm:100/day tpm:1000/day");
    let line = ["serve", "--listen", "127.0.0.1:0", "--log", "json", "--log-level", "debug"];
    let server = TestServer::start(&mut fixture.command(&line));
    let token = server.token().map(str::to_owned);
    let ask = r#"{"entity": "acme", "resource": "gpt", "cost": {"rpm": 1, "tpm": 5}}"#;
    for (route, status) in [("POST /v1/acquire", 200), ("POST /v1/spend", 204), ("POST /v1/spend", 204)] {
        assert_eq!(server.ask(route, token.as_deref(), ask).0, status);
    }
    // Invalid requests and requests with limits of their own are in the log, too.
    let typo = r#"{"entity": "acme", "resource": "gpt", "cost": {"typo": 1}}"#;
    assert_eq!(server.ask("POST /v1/spend", token.as_deref(), typo).0 / 100, 4);
    let own = r#"{"entity": "acme", "resource": "gpt", "cost": {"own": 1}, "limits": ["own:9/min"]}"#;
    assert_eq!(server.ask("POST /v1/spend", token.as_deref(), own).0, 204);
    fs::write(fixture.path("log"), server.stop().stderr).unwrap();
    let (code, json) = json(&fixture, false, &[]);
    assert_eq!((code, first(&json), &json["limits"][0]["limit"]), (3, [3, 1, 2], &"rpm".into()));
    assert_eq!(
        (&json["asked"], &json["invalid"], &json["own_limits"]),
        (&5.into(), &1.into(), &1.into()),
        "{json}"
    );
}
