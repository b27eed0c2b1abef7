//! `tidegate explain --replay` with numbers that are known: who would have been refused, by what, when and for how long.

use std::fmt::Write as _;
use std::fs;

use crate::kit::serving::Serving;
use crate::kit::{self, Json, Run, Shop, codec};

/// The first second of the logs.
const BEGINS: u64 = 1_769_850_000;

/// A line of a log, so many seconds after it begins.
fn line(second: u64, entity: &str, cost: &str) -> String {
    let at = BEGINS + second;
    format!("{{\"at\": {at}, \"entity\": \"{entity}\", \"resource\": \"gpt\", \"cost\": {cost}}}\n")
}

/// A shop with a log and a file of limits.
fn shop(log: &str, limits: &str) -> Shop {
    let shop = Shop::new();
    fs::write(shop.path("log"), log).expect("it is written");
    fs::write(shop.path("limits.toml"), limits).expect("it is written");
    shop
}

/// Replays the log, with or without a store.
fn replay(shop: &Shop, has_store: bool, more: &[&str]) -> Run {
    let (log, limits) =
        (shop.path("log").display().to_string(), shop.path("limits.toml").display().to_string());
    let line = [&["explain", "--replay", &log, "--manifest", &limits], more].concat();
    let mut command = shop.command(&line);
    if !has_store {
        command.env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", shop.path("data"));
    }
    kit::run(&mut command)
}

fn json(shop: &Shop, has_store: bool, more: &[&str]) -> (i32, Json) {
    let run = replay(shop, has_store, &[&["--json"], more].concat());
    assert_eq!(run.stderr, "");
    (run.code, codec::parse(&run.stdout))
}

/// What was asked, granted and refused of the first limit.
fn first(json: &Json) -> [u64; 3] {
    ["asked", "granted", "refused"].map(|field| json["limits"][0][field].as_u64().expect("a number"))
}

#[test]
fn a_burst_beyond_the_limit_is_refused_and_what_refills_is_granted() {
    let burst = line(0, "acme", r#"{"rpm": 1}"#).repeat(100);
    let later = line(30, "acme", r#"{"rpm": 1}"#).repeat(31) + &line(90, "calm", r#"{"rpm": 1}"#);
    let shop = shop(&(burst + &later), "[system]\nlimits = ['rpm:60/min']\n");
    let run = replay(&shop, false, &[]);
    assert_eq!((run.code, run.stderr.as_str()), (3, ""));
    assert_eq!(
        run.stdout,
        "132 asked from 2026-01-31T09:00:00Z to 2026-01-31T09:01:30Z: 91 granted, 41 refused\n\
         ENTITY  RESOURCE  LIMIT  ASKED  GRANTED  REFUSED  FIRST REFUSED         LONGEST WAIT  BY\n\
         acme    gpt       rpm      131       90       41  2026-01-31T09:00:00Z  1s            system\n"
    );
    assert!(!shop.path("data").exists(), "nobody named a store, and none is made");
    let (code, json) = json(&shop, false, &[]);
    assert_eq!((code, first(&json)), (3, [131, 90, 41]));
    assert_eq!(json["limits"][1]["entity"], "calm");
    assert_eq!(
        (&json["limits"][1]["refused"], &json["limits"][1]["first_refused"]),
        (&0.into(), &Json::Null)
    );
}

#[test]
fn limits_that_are_wide_enough_refuse_nobody() {
    let shop = shop(&line(0, "acme", r#"{"rpm": 1}"#).repeat(100), "[system]\nlimits = ['rpm:100/min']\n");
    let run = replay(&shop, false, &[]);
    assert_eq!(run.code, 0);
    assert_eq!(
        run.stdout,
        "100 asked from 2026-01-31T09:00:00Z to 2026-01-31T09:00:00Z: 100 granted, 0 refused\n"
    );
}

#[test]
fn parents_and_limits_that_are_written_count_unless_the_file_says_otherwise() {
    let log = line(0, "kid", r#"{"rpm": 1}"#).repeat(10);
    let shop = shop(&log, "[entity.acme]\nlimits = ['rpm:4/min']\n");
    shop.ok("limits set system rpm:7/min");
    shop.ok("entity create acme");
    shop.ok("entity create kid --parent acme --cascade");
    let (_, declared) = json(&shop, true, &[]);
    assert_eq!(
        (first(&declared), &declared["limits"][0]["by"]),
        ([10, 4, 6], &"entity acme, of acme".into())
    );
    fs::write(shop.path("limits.toml"), "[resource.other]\nlimits = ['rpm:1/min']\n").unwrap();
    let (_, written) = json(&shop, true, &[]);
    assert_eq!((first(&written), &written["limits"][0]["by"]), ([10, 7, 3], &"system".into()));
    let (_, pruned) = json(&shop, true, &["--prune"]);
    assert_eq!((first(&pruned), &pruned["limits"][0]["by"]), ([10, 0, 10], &"nothing limits it".into()));
    let present = shop.run(&format!("explain --json --replay {}", shop.path("log").display()));
    assert_eq!(
        first(&codec::parse(&present.stdout)),
        [10, 7, 3],
        "without a file: the limits that are written"
    );
    assert_eq!(shop.available("kid", "gpt", "rpm"), 7, "nothing was taken from anybody");
}

#[test]
fn an_estimate_is_held_until_it_is_known_what_was_used() {
    let ask = |second: u64, more: &str| {
        line(second, "acme", r#"{"tpm": 800}"#).replace("}}", &format!("}}{more}}}"))
    };
    let limits = "[system]\nlimits = ['tpm:1000/day']\n";
    // Of 800, 100 were used, and that was known after ten seconds.
    let held =
        shop(&[ask(0, r#", "actual": {"tpm": 100}, "held": 10"#), ask(5, ""), ask(11, "")].concat(), limits);
    let (_, json_held) = json(&held, false, &[]);
    assert_eq!(first(&json_held), [3, 2, 1]);
    assert_eq!(json_held["limits"][0]["first_refused"], "2026-01-31T09:00:05Z");
    // At once: the second finds 900.
    let known = shop(&[ask(0, r#", "actual": {"tpm": 100}"#), ask(5, "")].concat(), limits);
    assert_eq!(first(&json(&known, false, &[]).1), [2, 2, 0]);
}

#[test]
fn what_could_never_be_granted_is_told_apart_and_of_two_limits_the_one_that_is_short() {
    let log =
        [line(0, "acme", r#"{"rpm": 1, "tpm": 5000}"#), line(1, "acme", r#"{"rpm": 1, "tpm": 10}"#)].concat();
    let shop = shop(&log, "[system]\nlimits = ['rpm:60/min', 'tpm:1000/min']\n");
    let (_, json) = json(&shop, false, &[]);
    let of = |limit: &str| {
        json["limits"].as_array().unwrap().iter().find(|row| row["limit"] == limit).unwrap().clone()
    };
    assert_eq!((&of("tpm")["refused"], &of("tpm")["is_never"]), (&1.into(), &true.into()));
    let rpm = of("rpm");
    assert_eq!((&rpm["asked"], &rpm["granted"], &rpm["refused"]), (&2.into(), &1.into(), &0.into()));
    assert!(replay(&shop, false, &[]).stdout.contains("for ever"));
}

#[test]
fn what_cannot_be_replayed_says_which_line_and_why() {
    let good = line(0, "acme", r#"{"rpm": 1}"#);
    let shop =
        shop(&(good.clone() + &line(1, "acme", r#"{"rpm": "x"}"#)), "[system]\nlimits = ['rpm:60/min']\n");
    let run = replay(&shop, false, &[]);
    let log = shop.path("log").display().to_string();
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(
        run.stderr.starts_with(&format!("error: line 2 of `{log}`: `cost.rpm`: invalid type: string \"x\"")),
        "{}",
        run.stderr
    );
    fs::write(shop.path("log"), good.clone() + &line(1, "acme", r#"{"typo": 1}"#)).unwrap();
    let run = replay(&shop, false, &[]);
    assert_eq!(run.code, 2);
    assert!(
        run.stderr.starts_with("error: line 2: `cost`: `acme on gpt` has no limit `typo`; it has "),
        "{}",
        run.stderr
    );
    fs::write(shop.path("limits.toml"), "[system]\nlimits = 7\n").unwrap();
    assert_eq!(replay(&shop, false, &[]).code, 2);
    let alone = kit::run(shop.command(&["explain", "--replay", &log]).env_remove("TIDEGATE_STORE"));
    assert_eq!(alone.code, 2);
    assert!(alone.stderr.contains("neither a manifest nor a store or a server is given"), "{}", alone.stderr);
    assert_eq!(shop.run("explain").code, 2);
    assert_eq!(shop.run(&format!("explain acme gpt rpm=1 --replay {log}")).code, 2);
    assert_eq!(shop.run("explain acme gpt rpm=1 --manifest x").code, 2);
}

#[test]
fn a_log_is_read_from_stdin_and_out_of_order_up_to_its_bound() {
    let mut log = String::new();
    for second in 0..20_000_u64 {
        // Each two are the wrong way round.
        let _ = write!(log, "{}", line(second ^ 1, "acme", r#"{"rpm": 1}"#));
    }
    let shop = shop(&log, "[system]\nlimits = ['rpm:30/min:1']\n");
    assert_eq!(first(&json(&shop, false, &[]).1), [20_000, 10_000, 10_000], "one each two seconds");
    let limits = shop.path("limits.toml").display().to_string();
    let mut command = shop.command(&["explain", "--json", "--replay", "-", "--manifest", &limits]);
    command.env_remove("TIDEGATE_STORE").stdin(fs::File::open(shop.path("log")).unwrap());
    assert_eq!(first(&codec::parse(&kit::run(&mut command).stdout)), [20_000, 10_000, 10_000]);
    fs::write(shop.path("log"), log + &line(3, "acme", r#"{"rpm": 1}"#)).unwrap();
    let late = replay(&shop, false, &[]);
    assert!(late.code == 2 && late.stderr.contains("line 20001 of"), "{}", late.stderr);
}

#[test]
fn the_log_of_a_server_can_be_replayed() {
    let shop = shop("", "[system]\nlimits = ['rpm:1/day', 'tpm:1000/day']\n");
    shop.ok("limits set system rpm:100/day tpm:1000/day");
    let line = ["serve", "--listen", "127.0.0.1:0", "--log", "json", "--log-level", "debug"];
    let server = Serving::start(&mut shop.command(&line));
    let token = server.token().map(str::to_owned);
    let ask = r#"{"entity": "acme", "resource": "gpt", "cost": {"rpm": 1, "tpm": 5}}"#;
    for (route, status) in [("POST /v1/acquire", 200), ("POST /v1/spend", 204), ("POST /v1/spend", 204)] {
        assert_eq!(server.ask(route, token.as_deref(), ask).0, status);
    }
    // What the server refuses by itself is in its log, too, and so is what brings limits of its own.
    let typo = r#"{"entity": "acme", "resource": "gpt", "cost": {"typo": 1}}"#;
    assert_eq!(server.ask("POST /v1/spend", token.as_deref(), typo).0 / 100, 4);
    let own = r#"{"entity": "acme", "resource": "gpt", "cost": {"own": 1}, "limits": ["own:9/min"]}"#;
    assert_eq!(server.ask("POST /v1/spend", token.as_deref(), own).0, 204);
    fs::write(shop.path("log"), server.stop().stderr).unwrap();
    let (code, json) = json(&shop, false, &[]);
    assert_eq!((code, first(&json), &json["limits"][0]["limit"]), (3, [3, 1, 2], &"rpm".into()));
    assert_eq!(
        (&json["asked"], &json["invalid"], &json["own_limits"]),
        (&5.into(), &1.into(), &1.into()),
        "{json}"
    );
}
