//! Rejected configurations: unknown keys and invalid values, in every source and several at once.

use std::ffi::OsString;
use std::time::Duration;

use tidegate::config::{Fault, Origin, fields};
use tidegate::{Bytes, Config, ConfigError, Draft, Slots};

use super::{complaint, toml, variables};

/// The same key and value in TOML, JSON, a map and a variable; `literal` is how the typed formats write it.
fn in_every_source(key: &str, literal: &str, text: &str) -> [Result<Config, ConfigError>; 4] {
    let field = fields().iter().find(|field| field.key() == key).expect(key);
    [
        Config::from_toml(&format!("{key} = {literal}")),
        Config::from_json(&format!("{{ \"{key}\": {literal} }}")),
        Config::from_map([(key, text)]),
        Config::from_variables("T", [(field.variable("T"), text)]),
    ]
}

#[test]
fn unknown_key_error_suggests_nearest_key() {
    let table = [
        ("slots.maks = 3", "`slots.maks` in TOML is not a key, did you mean `slots.max`?"),
        ("slots = 3", "`slots` in TOML is not a key, did you mean `slots.min`?"),
        ("[bucket]\nsize = 3", "`bucket.size` in TOML is not a key"),
        ("[bucket]", "`bucket` in TOML is not a key"),
        ("slots.max.most = 3", "`slots.max.most` in TOML is not a key"),
        ("\"a\\nb\" = 3", "`a\\nb` in TOML is not a key"),
    ];
    for (text, wanted) in table {
        assert_eq!(complaint(text), wanted);
    }
    let error =
        variables(&[("TIDEGATE_SLOT_MAX", "3"), ("TIDEGATE_", ""), ("TIDEGATES_X", "1")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`TIDEGATE_SLOT_MAX` in the environment is not a key, did you mean `TIDEGATE_SLOTS_MAX`?; \
         `TIDEGATE_` in the environment is not a key"
    );
}

#[test]
fn out_of_bounds_numbers_fail_in_every_source() {
    let span = "from 0s to 366d";
    let table = [
        // The key, its value in TOML and JSON, its value in a map or variable, and the expected bound.
        ("slots.max", "0", "0", "from 1 to 1073741824"),
        ("slots.max", "-3", "-3", "from 1 to 1073741824"),
        ("slots.max", "1073741825", "1073741825", "from 1 to 1073741824"),
        ("slots.max", "8.5", "8.5", "a whole number from 1 to 1073741824"),
        ("slots.max", "true", "true", "a whole number from 1 to 1073741824"),
        ("bytes.recovering_price", "65536", "65536", "from 1 to 65535"),
        ("total", "-1", "-1", "from 0 to 18446744073709551615"),
        ("pace.jitter", "-0.1", "-0.1", "from 0 to 1"),
        ("pace.jitter", "1.1", "1.1", "from 0 to 1"),
        ("pace.jitter", "true", "half", "a number from 0 to 1"),
        ("circuit.error_rate", "0", "0", "above 0 and at most 1"),
        ("pause.max", "31622401", "31622401", span),
        ("pause.max", "\"367d\"", "367d", span),
        ("budget.window", "0", "0", "from 1ns to 366d"),
        ("controller", "\"vegas\"", "vegas", "`fixed` or `brake` or `aimd` or `auto`"),
        ("controller", "1", "1", "`fixed` or `brake` or `aimd` or `auto`"),
        ("auto.rate_max", "0", "0", "from 0.000001 to 1000000000"),
        ("aimd.rate_min", "0", "0", "from 0.000001 to 1000000"),
        ("aimd.rate_max", "-8", "-8", "from 0.000001 to 1000000"),
        ("aimd.decrease", "1.5", "1.5", "from 0.000001 to 0.999999"),
        ("aimd.latency_factor", "true", "twice", "a number from 1 to 1000"),
    ];
    for (key, literal, text, bound) in table {
        for result in in_every_source(key, literal, text) {
            let error = result.expect_err(key);
            let [problem] = error.problems() else { panic!("{error}") };
            assert_eq!(problem.field, key);
            let Fault::OutOfBounds { value, bound: found } = &problem.fault else { panic!("{error}") };
            assert_eq!(found, bound, "{error}");
            assert!(
                value.trim_matches('"').starts_with(text.trim_matches('"')) || literal == "true",
                "{error}"
            );
        }
    }
}

#[test]
fn non_numbers_are_rejected_in_every_source() {
    let of_toml = ["nan", "-inf", "inf", "1e999", "'NaN'", "[1]", "1979-05-27", "{}", "9e99", "'1 s'", "''"];
    let of_json = ["null", "[1]", "{}", "1e99", "\"NaN\"", "\"\"", "{\"a\": 1}", "false", "-1"];
    let of_text =
        ["NaN", "inf", "-1", "-1s", "", " ", "1e3", "1_000", "1y", "٣", "99999999999999999999999999"];
    for key in ["slots.max", "pace.interval_min", "pace.jitter", "rate.burst", "aimd.decrease", "preset"] {
        for value in of_toml {
            assert!(Config::from_toml(&format!("{key} = {value}")).is_err(), "{key} = {value}");
        }
        for value in of_json {
            assert!(Config::from_json(&format!("{{\"{key}\": {value}}}")).is_err(), "{key}: {value}");
        }
        let variable = format!("T_{}", key.replace('.', "_").to_uppercase());
        for value in of_text {
            assert!(Config::from_map([(key, value)]).is_err(), "{key}: {value:?}");
            assert!(Config::from_variables("T", [(&variable, value)]).is_err(), "{variable}={value}");
        }
    }
    for huge in ["99999999999999999999999999999999999999999999", "18446744073709551616"] {
        for result in in_every_source("rate.burst", huge, huge) {
            assert!(result.is_err(), "{huge}");
        }
    }
}

#[test]
fn quoted_number_is_rejected_in_typed_formats() {
    assert_eq!(
        complaint("slots.max = '8'"),
        "`slots.max` is \"8\" in TOML, and must be a whole number from 1 to 1073741824"
    );
    let error = Config::from_json(r#"{ "pace": { "jitter": "0.5" } }"#).unwrap_err();
    assert_eq!(error.to_string(), "`pace.jitter` is \"0.5\" in JSON, and must be a number from 0 to 1");
}

/// Each problem names its source, field, value and bound.
#[test]
fn all_problems_are_reported_together() {
    let text = "
        brake.failures = 'many'
        [slots]
        max = 0
        maxx = 3
        [pause]
        sizes = [1]
        tail = '1 minute'";
    assert_eq!(
        complaint(text),
        "`brake.failures` is \"many\" in TOML, and must be a whole number from 1 to 1073741824; \
         `pause.sizes` in TOML is not a key, did you mean `pause.sizes.small_max`?; \
         `pause.tail` is \"1 minute\" in TOML, and must be a time from 0s to 366d, in seconds or with a \
         unit, such as `200ms`, `1.5s`, `2m`; \
         `slots.max` is 0 in TOML, and must be from 1 to 1073741824; \
         `slots.maxx` in TOML is not a key, did you mean `slots.max`?"
    );
}

#[test]
fn cross_key_rules_are_checked_after_merging() {
    let environment =
        variables(&[("TIDEGATE_SLOTS_MIN", "9"), ("TIDEGATE_PACE_INTERVAL_MIN", "1m")]).unwrap();
    let config =
        environment.overlaid_by(toml("preset = 'gentle'\nslots.max = 4\nslots.start = 5\nrate.amount = 1"));
    assert_eq!(
        config.to_draft().unwrap_err().to_string(),
        "`rate.period` is missing, because `rate.amount` is given in TOML; \
         `slots.min` is 9 in the environment variable `TIDEGATE_SLOTS_MIN`, and must be from 1 to 4; \
         `slots.start` is 5 in TOML, and must be from 9 to 4; \
         `pace.interval_max` is 30s by default, and must be from 1m to 366d"
    );
    assert!(
        config
            .overlaid_by(toml("slots.max = 9\nslots.start = 9\nrate.period = 1\npace.interval_max = '2m'"))
            .to_draft()
            .is_ok()
    );
}

/// Regression: each of these was accepted, and limited nothing.
#[test]
fn number_without_effect_is_refused() {
    let tail =
        "and must be used with a `pause.tail` above 0s, because it counts only in the phase after a pause";
    let table = [
        ("recovery_slots = 5", format!("`recovery_slots` is 5 in TOML, {tail}")),
        (
            "bytes = { capacity = 9, recovering_price = 20 }",
            format!("`bytes.recovering_price` is 20 in TOML, {tail}"),
        ),
        (
            "pause.tail = 10",
            "`pause.tail` is 10 in TOML, and must be used with `recovery_slots` or a `bytes.recovering_price` above 1, \
             because nothing else limits in the phase after a pause"
                .to_owned(),
        ),
        (
            "pace = { interval_min = 0, interval_max = 0 }",
            "`pace.interval_max` is 0 in TOML, and must be above 0s, because an interval of 0s delays nothing".to_owned(),
        ),
        (
            "milestone_percent = 25",
            "`milestone_percent` is 25 in TOML, and must be used with a `total` above 0, because it is a part of it"
                .to_owned(),
        ),
        (
            "retry = { attempts = 1, backoff_base = 1, jitter = 'none', budget = { share = 0.1 } }",
            ["backoff_base", "jitter", "budget.share"]
                .map(|key| {
                    format!("`retry.{key}` is given in TOML, and has no effect because `retry.attempts` is 1")
                })
                .join("; "),
        ),
        (
            "preset = 'empty'\nslots = { min = 8, max = 8 }\ncontroller = 'brake'",
            "`controller` is brake in TOML, and must be `fixed`, because neither slots nor the pace has a range in \
             which it could move them"
                .to_owned(),
        ),
    ];
    for (text, wanted) in table {
        assert_eq!(toml(text).to_draft().unwrap_err().to_string(), wanted);
    }
    // Another source may turn off what a file configures.
    let off = Config::from_map([("retry.attempts", "1")]).unwrap();
    assert!(toml("retry.backoff_base = 1").overlaid_by(off).to_draft().unwrap().retry.is_off());
    // What only the preset has follows.
    let draft = toml("preset = 'layered'\npause.tail = 0").to_draft().unwrap();
    let pause = Draft::layered().pause.tail(Duration::ZERO);
    assert_eq!(
        draft,
        Draft { pause, recovery_slots: None, bytes: Some(Bytes::in_flight(5 << 20)), ..Draft::layered() }
    );
}

#[test]
fn draft_problems_match_core_checks() {
    let draft = Draft { slots: Some(Slots::adaptive(2..=4).start(9)), waiters_max: 0, ..Draft::default() };
    let invalid = draft.clone().check().expect_err("two problems");
    let error = Config::from_draft(&draft).to_draft().unwrap_err();
    for (problem, core) in error.problems().iter().zip(invalid.problems()) {
        assert_eq!((problem.field.as_str(), &problem.origin), (core.field, &Origin::Draft));
        let wanted = Fault::OutOfBounds { value: core.value.clone(), bound: core.bound.clone() };
        assert_eq!(problem.fault, wanted);
    }
    assert_eq!(error.problems().len(), 2);
}

/// If a schema bound were wider than core's, core would refuse what the schema accepts; if it were narrower,
/// the round trip of drafts at their bounds would break.
#[test]
fn schema_bounds_are_not_wider_than_core() {
    // Other keys, set so that every value of the tested key is valid.
    const AROUND: &str = "preset = 'empty'\nslots.min = 1\nslots.max = 1073741824\nbytes.capacity = 1\n\
        pace.interval_min = 0\npace.interval_max = '366d'\nrate.amount = 1099511627776\nrate.period = 1\n\
        budget.tokens = 1\nbudget.window = 1\ncircuit.error_rate = 1\ncircuit.samples_min = 1\n\
        circuit.window = 1\npause.tail = 1\nrecovery_slots = 1\ntotal = 1\npause.sizes.small_max = 1\npause.sizes.small = 1\npause.sizes.large = 1\n\
        controller = 'brake'\nretry.backoff_base = 0\nretry.backoff_max = '366d'\nretry.jitter = 'range'\n\
        retry.jitter_min = 0\nretry.jitter_max = 1";
    let of_one = |key: &str| !key.starts_with("keyed.");
    for field in fields().iter().filter(|field| field.kind() != "a word" && of_one(field.key())) {
        let bounds = field.bounds();
        let ends = match bounds.strip_prefix("from ").and_then(|rest| rest.split_once(" to ")) {
            Some((min, max)) => [min, max],
            None if field.key() == "rates" => ["x:1/1ns:1", "x:1099511627776/366d"],
            None if field.key() == "budgets" => ["x:1/1ns", "x:9007199254740992/366d:input_tokens:alone"],
            None => ["0.000001", "1"],
        };
        for end in ends {
            if field.key().starts_with("aimd.") || field.key().starts_with("auto.") {
                check_adaptive(field.key(), end);
                continue;
            }
            let key = Config::from_map([(field.key(), end)]).unwrap_or_else(|error| panic!("{error}"));
            let result = toml(AROUND).overlaid_by(key).to_draft();
            // The bound of the burst depends on the rate; zeros have no effect beside the other keys.
            let is_apart = matches!(
                (field.key(), end),
                ("rate.burst", _) | ("pause.tail" | "pace.interval_max" | "total", "0s" | "0")
            );
            assert!(result.is_ok() || is_apart, "{} = {end}: {result:?}", field.key());
        }
    }
}

/// A key of the adaptive rate accepts its bounds; its rates do where all three are equal.
fn check_adaptive(key: &str, end: &str) {
    let around = match (key, end) {
        ("aimd.rate_min" | "aimd.rate_max", "0.000001") => {
            "rate.amount = 1\nrate.period = 1000000\naimd.rate_min = 0.000001\naimd.rate_max = 0.000001"
        }
        ("aimd.rate_min" | "aimd.rate_max", _) => {
            "rate.amount = 1000000\nrate.period = 1\naimd.rate_min = 1e6\naimd.rate_max = 1e6"
        }
        ("auto.rate_min" | "auto.rate_start" | "auto.rate_max", "0.000001") => "auto.rate_min = 0.000001",
        ("auto.rate_min" | "auto.rate_start" | "auto.rate_max", _) => "auto.rate_max = 1e9",
        _ => "controller = 'aimd'",
    };
    let result = toml(around).overlaid_by(Config::from_map([(key, end)]).expect(key)).to_draft();
    assert!(result.is_ok(), "{key} = {end}: {result:?}");
}

#[test]
fn syntax_error_reports_line_and_column() {
    let table = [
        (Config::from_toml("slots.max = 3\nslots.min 4"), Origin::Toml, "line 2 column 11"),
        (Config::from_toml("total = 1\ntotal = 2"), Origin::Toml, "line 2 column 1"),
        (Config::from_json("{\n  \"total\": ,\n}"), Origin::Json, "line 2 column 12"),
        (Config::from_json("[]"), Origin::Json, "it is not an object"),
        (Config::from_json(""), Origin::Json, "line 1 column 0"),
    ];
    for (result, origin, wanted) in table {
        let error = result.unwrap_err();
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!((&problem.origin, problem.field.as_str()), (&origin, ""));
        let sentence = error.to_string();
        assert!(sentence.starts_with(&format!("cannot parse the input {origin}: ")), "{sentence}");
        assert!(sentence.ends_with(wanted), "{sentence}");
        assert!(!sentence.contains('\n'), "{sentence}");
    }
}

#[test]
fn nesting_depth_is_bounded() {
    let dots = "a.".repeat(70);
    let texts = [
        format!("a = {}1{}", format!("{{{dots}a = ").repeat(79), "}".repeat(79)),
        format!("[{dots}a]\n{dots}a = {}1{}", format!("{{{dots}a = ").repeat(8), "}".repeat(8)),
        format!("a = {}{}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("{}a = 1", "a.".repeat(100_000)),
    ];
    for text in &texts {
        assert!(Config::from_toml(text).is_err());
    }
    for depth in [100, 100_000] {
        let text = format!("{}1{}", "{\"a\": ".repeat(depth), "}".repeat(depth));
        assert!(Config::from_json(&text).is_err());
    }
    let inside = "{ a = ".repeat(9);
    assert_eq!(
        complaint(&format!("\na = {inside}")),
        "cannot parse the input in TOML: more than 8 nested tables at line 2 column 53"
    );
}

#[test]
fn duplicate_key_is_rejected() {
    let twice = Config::from_map([("total", "1"), ("total", "1")]).unwrap_err();
    assert_eq!(twice.to_string(), "`total` is given twice in the map");
    let dotted = Config::from_json(r#"{ "slots": { "max": 1 }, "slots.max": 2 }"#).unwrap_err();
    assert_eq!(dotted.to_string(), "`slots.max` is given twice in JSON");
    let named = variables(&[("TIDEGATE_TOTAL", "1"), ("TIDEGATE_TOTAL", "2")]).unwrap_err();
    assert_eq!(named.to_string(), "`total` is given twice in the environment variable `TIDEGATE_TOTAL`");
}

#[test]
fn variables_match_prefix_and_known_keys() {
    let all =
        fields().iter().filter(|field| field.kind() == "a time").map(|field| (field.variable("A_B"), "200s"));
    let config =
        Config::from_variables("A_B", all.chain([("A_C".to_owned(), "1"), ("A_BC_TOTAL".to_owned(), "1")]));
    assert!(config.unwrap().to_map().values().all(|value| value == "200s"));
    let error = Config::from_variables("", [("TOTAL", "1")]).unwrap_err();
    let wanted =
        "cannot parse the input in the environment: the prefix is empty, which would match every variable";
    assert_eq!(error.to_string(), wanted);
}

#[cfg(unix)]
#[test]
fn non_utf8_variable_error_names_the_variable() {
    use std::os::unix::ffi::OsStringExt as _;

    let broken = || OsString::from_vec(b"4\xff".to_vec());
    let name = |text: &str| OsString::from(text);
    let foreign = OsString::from_vec(b"\xffTIDEGATE_X".to_vec());
    let variables = [(name("TIDEGATE_SLOTS_MAX"), broken()), (name("OTHER"), broken()), (foreign, broken())];
    let error = Config::from_variables("TIDEGATE", variables).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`slots.max` is \"4\u{fffd}\" in the environment variable `TIDEGATE_SLOTS_MAX`, and must be valid UTF-8"
    );
}

#[test]
fn process_environment_is_read() {
    // The test sets no variables, because other tests read the environment concurrently.
    assert_eq!(Config::from_env("TIDEGATE_TEST_OF_CONFIG_ONLY"), Ok(Config::default()));
}
