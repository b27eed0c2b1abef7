//! Configuration: each source alone, all sources merged, and every kind of error.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::config::fields;
use tidegate::{
    Aimd, Auto, Backoff, Brake, Budget, Circuit, Config, ConfigError, Controller, Draft, Jitter,
    KeyedOptions, Oversize, Pace, Pause, Rate, Retry, RetryBudget, SizeRule, Slots, Throttle, WhenRefused,
};

mod keyed;
mod named;
mod properties;
mod refused;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn toml(text: &str) -> Config {
    Config::from_toml(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn draft(text: &str) -> Draft {
    toml(text).to_draft().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The error for a TOML text, after parsing and assembly.
fn complaint(text: &str) -> String {
    let result = Config::from_toml(text).and_then(|config| config.to_draft());
    result.map(drop).expect_err(text).to_string()
}

fn variables(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::from_variables("TIDEGATE", pairs.iter().copied())
}

#[test]
fn empty_config_builds_default_throttle() {
    assert_eq!(Config::default().to_draft(), Ok(Draft::auto()));
    for empty in ["", "[slots]", "[pause.sizes]\n[retry.budget]"] {
        assert_eq!(toml(empty), Config::default());
    }
    assert_eq!(Config::from_json("{ \"slots\": {} }"), Ok(Config::default()));
    let throttle = Throttle::from_config(&Config::default()).unwrap().build().unwrap();
    assert_eq!((throttle.snapshot().slots, throttle.snapshot().slots_max), (Some(32), Some(1_024)));
}

#[test]
fn each_preset_is_a_draft_of_core() {
    assert_eq!(draft("preset = 'auto'"), Draft::auto());
    assert_eq!(draft("preset = 'gentle'"), Draft::gentle());
    assert_eq!(draft("preset = 'layered'"), Draft::layered());
    assert_eq!(draft("preset = 'host'"), Draft::host());
    assert_eq!(draft("preset = 'empty'"), Draft::default());
}

#[test]
fn toml_json_map_and_environment_are_equivalent() {
    let text = "
        controller = 'brake'
        waiters_max = 0x10
        [slots]
        max = 16
        [pace]
        interval_min = 0.2
        jitter = 1
        [pause.sizes]
        small_max = 1_024
        small = '1s'
        large = 5";
    let json = r#"{
        "controller": "brake", "waiters_max": 16,
        "slots": { "max": 16 }, "pace": { "interval_min": 0.2, "jitter": 1.0 },
        "pause": { "sizes": { "small_max": 1024, "small": "1000ms" }, "sizes.large": 5.0 }
    }"#;
    let pairs = [
        ("controller", "brake"),
        ("waiters_max", "16"),
        ("slots.max", "16"),
        ("pace.interval_min", "200ms"),
        ("pace.jitter", "1"),
        ("pause.sizes.small_max", "1024"),
        ("pause.sizes.small", "1"),
        ("pause.sizes.large", "5s"),
    ];
    let named = pairs.map(|(key, value)| (format!("APP_{}", key.replace('.', "_").to_uppercase()), value));
    let config = toml(text);
    assert_eq!(Config::from_json(json).as_ref(), Ok(&config));
    assert_eq!(Config::from_map(pairs).as_ref(), Ok(&config));
    assert_eq!(Config::from_variables("APP", named).as_ref(), Ok(&config));
    assert_eq!(config.to_draft().unwrap().waiters_max, 16);
}

#[test]
fn every_gate_key_sets_its_draft_field() {
    let pace = || Pace::every(Duration::from_millis(200)).slowest(30 * SECOND);
    let table = [
        ("slots.max = 3", Draft { slots: Some(Slots::adaptive(1..=3)), ..Draft::auto() }),
        ("slots.start = 2", Draft { slots: Some(Slots::adaptive(1..=1_024).start(2)), ..Draft::auto() }),
        (
            "preset = 'gentle'\npace.jitter = 0.25",
            Draft { pace: Some(pace().jitter(0.25)), ..Draft::gentle() },
        ),
        (
            "preset = 'empty'\npace.interval_min = 1",
            Draft { pace: Some(Pace::every(SECOND)), ..Draft::default() },
        ),
        ("rate.amount = 9\nrate.period = '1m'", Draft { rate: Some(Rate::per_minute(9)), ..Draft::auto() }),
        (
            "rate.amount = 9\nrate.period = 1\nrate.burst = 2",
            Draft { rate: Some(Rate::per_second(9).burst(2)), ..Draft::auto() },
        ),
        (
            "budget = { tokens = 5, window = 60, oversize = 'alone' }",
            Draft { budget: Some(Budget::tokens(5, MINUTE).oversize(Oversize::Alone)), ..Draft::auto() },
        ),
        ("circuit.probes = 2", Draft { circuit: Some(Circuit::default().probes(2)), ..Draft::auto() }),
        (
            "circuit = { error_rate = 0.5, samples_min = 20, window = 30, open_for = '1m' }",
            Draft {
                circuit: Some(Circuit::at_error_rate(0.5, 20, 30 * SECOND).open_for(MINUTE)),
                ..Draft::auto()
            },
        ),
        (
            "circuit = { error_rate = 0.5, samples_min = 20, window = 30, slices = 60, failures = 4 }",
            Draft {
                circuit: Some(Circuit::at_error_rate(0.5, 20, 30 * SECOND).slices(60).or_after_failures(4)),
                ..Draft::auto()
            },
        ),
    ];
    for (text, wanted) in table {
        assert_eq!(draft(text), wanted, "{text}");
    }
}

#[test]
fn controller_retry_and_total_keys_set_the_draft() {
    let table = [
        (
            "preset = 'layered'\npause = { tail = 20, sizes = { small_max = 9, small = 1, large = 60 } }",
            Draft {
                pause: Pause::default().tail(20 * SECOND).sizes(SizeRule::new(9, SECOND, MINUTE)),
                ..Draft::layered()
            },
        ),
        (
            "brake.failures = 7",
            Draft { controller: Controller::Brake(Brake::default().at(7, MINUTE)), ..Draft::auto() },
        ),
        (
            "brake.share = 0.5",
            Draft { controller: Controller::Brake(Brake::default().share(0.5)), ..Draft::auto() },
        ),
        (
            "auto.rate_max = 5",
            Draft { controller: Controller::Auto(Auto::default().rate_max(5.0)), ..Draft::auto() },
        ),
        (
            "auto = { rate_min = 2, rate_max = 50, rate_start = 3 }",
            Draft {
                controller: Controller::Auto(Auto::default().within(2.0..=50.0).rate_start(3.0)),
                ..Draft::auto()
            },
        ),
        ("controller = 'fixed'", Draft { slots: Some(Slots::fixed(1_024)), ..Draft::default() }),
        ("controller = 'fixed'\nslots.max = 5", Draft { slots: Some(Slots::fixed(5)), ..Draft::default() }),
        ("preset = 'gentle'\ncontroller = 'fixed'", Draft::gentle().controlled_by(Controller::Fixed)),
        (
            "preset = 'gentle'\nbrake.within = 1",
            Draft { controller: Controller::Brake(Brake::default().at(3, SECOND)), ..Draft::gentle() },
        ),
        (
            "preset = 'empty'\nslots = { min = 2, max = 40 }",
            Draft {
                slots: Some(Slots::adaptive(2..=40)),
                controller: Controller::Auto(Auto::default()),
                ..Draft::default()
            },
        ),
        ("preset = 'layered'\nslots.max = 50", Draft { slots: Some(Slots::fixed(50)), ..Draft::layered() }),
        ("retry.attempts = 3", Draft { retry: Retry::attempts(3), ..Draft::auto() }),
        (
            "retry = { backoff = 'fixed', backoff_base = 1, jitter = 'full', when_refused = 'wait' }",
            Draft {
                retry: Retry::default()
                    .backoff(Backoff::fixed(SECOND).jitter(Jitter::Full))
                    .when_refused(WhenRefused::Wait),
                ..Draft::auto()
            },
        ),
        (
            "retry = { backoff_max = '1m', jitter_min = 0.75, jitter_max = 1, budget = { share = 0.1 } }",
            Draft {
                retry: Retry::default()
                    .backoff(Backoff::exponential(SECOND / 5, MINUTE).jitter(Jitter::Range(0.75..=1.0)))
                    .budget(RetryBudget::new(0.1, 10, 10 * SECOND)),
                ..Draft::auto()
            },
        ),
        (
            "total = 100\nmilestone_percent = 25",
            Draft { total: Some(100), milestone_percent: 25, ..Draft::auto() },
        ),
    ];
    for (text, wanted) in table {
        assert_eq!(draft(text), wanted, "{text}");
    }
}

/// Precedence: builder, then file, then environment, then default.
#[test]
fn sources_override_in_documented_order() {
    let environment = variables(&[
        ("TIDEGATE_SLOTS_MAX", "7"),
        ("TIDEGATE_WAITERS_MAX", "70"),
        ("TIDEGATE_TOTAL", "700"),
        ("TIDEGATE_PAUSE_MAX", "7s"),
    ]);
    let config = environment.unwrap().overlaid_by(toml("slots.max = 8\nwaiters_max = 80\ntotal = 800"));
    let config = config.overlaid_by(Config::from_map([("total", "900")]).unwrap());
    let map = config.to_map();
    let wanted = [("slots.max", "8"), ("waiters_max", "80"), ("total", "900"), ("pause.max", "7s")];
    assert_eq!(map, BTreeMap::from(wanted.map(|(key, value)| (key, value.to_owned()))));

    let draft = config.to_draft().unwrap();
    assert_eq!((draft.controller, draft.waiters_max), (Draft::auto().controller, 80));
    let throttle = Throttle::from_config(&config).unwrap().slots(Slots::fixed(9)).build().unwrap();
    assert_eq!(throttle.snapshot().slots, Some(9));
}

#[test]
fn group_can_be_split_across_sources() {
    let tokens = variables(&[("TIDEGATE_BUDGET_TOKENS", "500")]).unwrap();
    let error = tokens.to_draft().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`budget.window` is missing, because `budget.tokens` is given in the environment variable \
         `TIDEGATE_BUDGET_TOKENS`"
    );
    let both = tokens.overlaid_by(toml("budget.window = 60"));
    assert_eq!(both.to_draft().unwrap().budget, Some(Budget::tokens(500, MINUTE)));
}

#[test]
fn incomplete_group_error_names_missing_key() {
    let table: [(&str, &[(&str, &str)]); 13] = [
        ("preset = 'empty'\nslots.max = 3", &[("slots.min", "slots.max")]),
        ("preset = 'empty'\nslots.start = 3", &[("slots.min", "slots.start"), ("slots.max", "slots.start")]),
        ("bytes.recovering_price = 20", &[("bytes.capacity", "bytes.recovering_price")]),
        ("preset = 'empty'\npace.jitter = 0.5", &[("pace.interval_min", "pace.jitter")]),
        ("rate.amount = 3", &[("rate.period", "rate.amount")]),
        ("rate.burst = 3", &[("rate.amount", "rate.burst"), ("rate.period", "rate.burst")]),
        ("budget.tokens = 3", &[("budget.window", "budget.tokens")]),
        ("budget.window = 3", &[("budget.tokens", "budget.window")]),
        (
            "circuit.error_rate = 0.5",
            &[("circuit.samples_min", "circuit.error_rate"), ("circuit.window", "circuit.error_rate")],
        ),
        (
            "circuit.slices = 30",
            &[
                ("circuit.error_rate", "circuit.slices"),
                ("circuit.samples_min", "circuit.slices"),
                ("circuit.window", "circuit.slices"),
            ],
        ),
        (
            "pause.sizes.small = 1",
            &[("pause.sizes.small_max", "pause.sizes.small"), ("pause.sizes.large", "pause.sizes.small")],
        ),
        ("retry.jitter_min = 0.5", &[("retry.jitter_max", "retry.jitter_min")]),
        (
            "retry.jitter = 'range'",
            &[("retry.jitter_min", "retry.jitter"), ("retry.jitter_max", "retry.jitter")],
        ),
    ];
    for (text, wanted) in table {
        let sentences = wanted.iter().map(|(missing, because)| {
            format!("`{missing}` is missing, because `{because}` is given in TOML")
        });
        assert_eq!(complaint(text), sentences.collect::<Vec<_>>().join("; "), "{text}");
    }
}

#[test]
fn key_without_effect_is_rejected() {
    let table = [
        ("controller = 'fixed'\nbrake.failures = 3", "brake.failures", "controller", "fixed"),
        ("controller = 'fixed'\naimd.memory = 3", "aimd.memory", "controller", "fixed"),
        ("controller = 'brake'\naimd.slow_start = 'on'", "aimd.slow_start", "controller", "brake"),
        ("controller = 'aimd'\nbrake.within = 3", "brake.within", "controller", "aimd"),
        ("aimd.memory = 3\nbrake.within = 3", "brake.within", "controller", "aimd"),
        ("retry.backoff = 'fixed'\nretry.backoff_max = 3", "retry.backoff_max", "retry.backoff", "fixed"),
        ("retry.jitter = 'full'\nretry.jitter_min = 0", "retry.jitter_min", "retry.jitter", "full"),
    ];
    for (text, key, because, value) in table {
        let wanted = format!("`{key}` is given in TOML, and has no effect because `{because}` is {value}");
        assert_eq!(complaint(text), wanted);
    }
}

/// Each row has the key's type, bounds, variable and default.
#[test]
fn documentation_lists_every_key() {
    let page = include_str!("../../../../docs/configuration.md");
    let keys =
        page.split("## Keys").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a section of keys");
    let rows = keys.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Vec<&str>> =
        rows.map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    let defaults = Config::from_draft(&Draft::auto()).with_keyed(&KeyedOptions::default()).to_map();
    let wanted = fields().iter().map(|field| {
        let default = match field.key() {
            "preset" => "auto",
            key => defaults.get(key).map_or("", String::as_str),
        };
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        let names = [format!("`{}`", field.key()), format!("`{}`", field.variable("TIDEGATE"))];
        let [key, variable] = names;
        [key, field.kind().to_owned(), field.bounds(), default, variable]
    });
    let wanted: Vec<_> = wanted.collect();
    assert_eq!(rows.len(), wanted.len(), "as many rows as keys");
    for (row, wanted) in rows.iter().zip(&wanted) {
        assert_eq!(row[..3], wanted[..3], "key, type, bounds");
        assert_eq!(row[4], wanted[4], "variable");
        // For a key without a default, the last column describes the behaviour in words.
        assert!(if wanted[3].is_empty() { !row[3].is_empty() } else { row[3] == wanted[3] }, "{row:?}");
    }
}

#[test]
fn configured_controller_is_built() {
    let config = Config::from_toml("slots.max = 8\ncontroller = \"fixed\"").unwrap();
    let throttle = Throttle::from_config(&config).unwrap().build().unwrap();
    throttle.record(tidegate::Outcome::overload());
    assert_eq!(throttle.snapshot().slots, Some(8));
}

#[test]
fn adaptive_rate_keys_set_the_draft() {
    let table = [
        (
            "preset = 'empty'\naimd.rate_max = 20",
            Draft {
                rate: Some(Aimd::RATE),
                controller: Controller::Aimd(Aimd::default().within(0.25..=20.0)),
                ..Draft::default()
            },
        ),
        (
            "controller = 'aimd'\nrate = { amount = 30, period = '1m', burst = 2 }",
            Draft {
                rate: Some(Rate::per_minute(30).burst(2)),
                slots: Some(Slots::fixed(1_024)),
                controller: Controller::Aimd(Aimd::default()),
                ..Draft::default()
            },
        ),
        (
            "preset = 'empty'\n[aimd]\nrate_min = 1\nrate_max = 4\nincrease = 0.5\ndecrease = 0.7\nmemory = 60\n\
             latency_target = '100ms'\nlatency_factor = 3\nlatency_weight = 0.5\nslow_start = 'on'",
            Draft {
                rate: Some(Aimd::RATE),
                controller: Controller::Aimd(
                    Aimd::default()
                        .within(1.0..=4.0)
                        .increase(0.5)
                        .decrease(0.7)
                        .memory(MINUTE)
                        .latency_target(SECOND / 10)
                        .latency_factor(3.0)
                        .latency_weight(0.5)
                        .slow_start(),
                ),
                ..Draft::default()
            },
        ),
    ];
    for (text, wanted) in table {
        assert_eq!(draft(text), wanted, "{text}");
    }
}

#[test]
fn invalid_adaptive_rate_reports_key_and_bound() {
    let table = [
        ("aimd.rate_min = 9", "`aimd.rate_min` is 9 in TOML, and must be from 0.000001 to 8"),
        ("aimd.rate_min = -1", "`aimd.rate_min` is -1 in TOML, and must be from 0.000001 to 1000000"),
        ("aimd.decrease = nan", "`aimd.decrease` is NaN in TOML, and must be from 0.000001 to 0.999999"),
        ("aimd.decrease = 1", "`aimd.decrease` is 1 in TOML, and must be from 0.000001 to 0.999999"),
        ("aimd.slow_start = true", "`aimd.slow_start` is true in TOML, and must be `off` or `on`"),
        ("aimd.rate_min = 3", "and must be from 3/s to 8/s, where `aimd` moves it"),
    ];
    for (text, wanted) in table {
        let error = Config::from_toml(text).and_then(|config| config.to_draft()).unwrap_err().to_string();
        assert!(error.ends_with(wanted), "{error}");
    }
}

#[test]
fn written_json_round_trips() {
    let config = Config::from_draft(&Draft::auto());
    assert_eq!(Config::from_json(&config.to_json()).unwrap(), config);
    assert_eq!(Config::from_json(&Config::default().to_json()).unwrap(), Config::default());
}
