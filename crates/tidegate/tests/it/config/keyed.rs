//! Configuration keys of keyed throttles, and the mapping of per-domain limiter fields to them.

use tidegate::config::{Fault, fields};
use tidegate::{Auto, Circuit, Config, Controller, Draft, KeyedOptions, Throttle};

use super::{MINUTE, SECOND, toml, variables};

fn keyed(text: &str) -> (Draft, KeyedOptions) {
    toml(text).to_keyed().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn complaint(text: &str) -> String {
    Config::from_toml(text).and_then(|config| config.to_keyed()).map(drop).expect_err(text).to_string()
}

#[test]
fn empty_config_is_host_preset_with_defaults() {
    assert_eq!(keyed(""), (Draft::host(), KeyedOptions::default()));
    assert_eq!(keyed("[keyed]"), (Draft::host(), KeyedOptions::default()));
    assert_eq!(keyed("preset = 'gentle'"), (Draft::gentle(), KeyedOptions::default()));
    assert_eq!(keyed("preset = 'empty'"), (Draft::default(), KeyedOptions::default()));
}

/// Throttle keys in a keyed configuration set the limits of every key.
#[test]
fn keyed_options_and_throttle_keys_are_read() {
    let text = "
        auto.rate_max = 9
        [circuit]
        probes = 1
        [keyed]
        enabled = false
        keys_max = 7
        idle_ttl = '1h'
        shards = 1
        throttled_after = 0.5";
    let options = KeyedOptions::default().enabled(false).keys_max(7).idle_ttl(60 * MINUTE).shards(1);
    let (draft, found) = keyed(text);
    assert_eq!(found, options.throttled_after(SECOND / 2));
    let circuit = Circuit::at_error_rate(0.4, 10, 30 * SECOND).or_after_failures(5).open_for(15 * SECOND);
    let controller = Controller::Auto(Auto::default().rate_max(9.0));
    let wanted = Draft { controller, circuit: Some(circuit.probes(1)), ..Draft::host() };
    assert_eq!(draft, wanted);
    let config = variables(&[("TIDEGATE_KEYED_ENABLED", "false"), ("TIDEGATE_KEYED_SHARDS", "2")]).unwrap();
    let (_, options) = config.to_keyed().unwrap();
    assert_eq!((options.enabled, options.shards), (false, 2));
}

#[test]
fn single_circuit_key_keeps_other_host_defaults() {
    let host =
        Circuit::at_error_rate(0.4, 10, 30 * SECOND).or_after_failures(5).open_for(15 * SECOND).probes(3);
    let with = |circuit| Draft { circuit: Some(circuit), ..Draft::host() };
    assert_eq!(keyed("circuit.slices = 30").0, with(host.slices(30)));
    let wider = Circuit::at_error_rate(0.4, 10, MINUTE).or_after_failures(5).open_for(15 * SECOND).probes(3);
    assert_eq!(keyed("circuit.window = '1m'").0, with(wider));
    assert_eq!(keyed("circuit.failures = 8").0, with(host.or_after_failures(8)));
}

#[test]
fn single_throttle_rejects_keyed_options() {
    let config = toml("slots.max = 3\n[keyed]\nshards = 32\nenabled = true");
    let error = Throttle::from_config(&config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`keyed.enabled` is given in TOML, and has no effect on a single throttle; \
         `keyed.shards` is given in TOML, and has no effect on a single throttle"
    );
    assert!(error.problems().iter().all(|problem| problem.fault == Fault::OfMany));
    assert_eq!(config.to_draft().unwrap_err(), error);
}

#[test]
fn invalid_options_name_key_value_and_bound() {
    let table = [
        ("keyed.shards = 12", "`keyed.shards` is 12 in TOML, and must be a power of two from 1 to 1024"),
        ("keyed.shards = 0", "`keyed.shards` is 0 in TOML, and must be a power of two from 1 to 1024"),
        ("keyed.shards = 2048", "`keyed.shards` is 2048 in TOML, and must be a power of two from 1 to 1024"),
        ("keyed.shards = 1.5", "`keyed.shards` is 1.5 in TOML, and must be a power of two from 1 to 1024"),
        ("keyed.keys_max = 0", "`keyed.keys_max` is 0 in TOML, and must be from 1 to 1073741824"),
        ("keyed.keys_max = -1", "`keyed.keys_max` is -1 in TOML, and must be from 1 to 1073741824"),
        (
            "keyed.keys_max = 99999999999999999999",
            "`keyed.keys_max` is 99999999999999999999 in TOML, and must be from 1 to 1073741824",
        ),
        ("keyed.idle_ttl = 179.9", "`keyed.idle_ttl` is 179.9 in TOML, and must be from 3m to 366d"),
        ("keyed.idle_ttl = nan", "`keyed.idle_ttl` is NaN in TOML, and must be from 3m to 366d"),
        (
            "keyed.throttled_after = -0.01",
            "`keyed.throttled_after` is -0.01 in TOML, and must be from 0s to 366d",
        ),
        ("keyed.enabled = 1", "`keyed.enabled` is 1 in TOML, and must be `true` or `false`"),
        ("keyed.enabled = 'true'", "`keyed.enabled` is \"true\" in TOML, and must be `true` or `false`"),
        ("keyed.shard = 16", "`keyed.shard` in TOML is not a key, did you mean `keyed.shards`?"),
        ("keyed = true", "`keyed` in TOML is not a key, did you mean `keyed.enabled`?"),
    ];
    for (text, wanted) in table {
        assert_eq!(complaint(text), wanted);
    }
    let both =
        complaint("rate.amount = 9\nkeyed.keys_max = 3\npreset = 'empty'\nslots.start = 1\naimd.memory = 1");
    assert_eq!(
        both,
        "`slots.min` is missing, because `slots.start` is given in TOML; \
         `slots.max` is missing, because `slots.start` is given in TOML; \
         `rate.period` is missing, because `rate.amount` is given in TOML; \
         `rate.amount` is 9 in TOML, and must be given, since `aimd` moves it"
    );
    for word in ["1", "yes", "TRUE", ""] {
        assert!(variables(&[("TIDEGATE_KEYED_ENABLED", word)]).is_err(), "{word}");
    }
}

#[test]
fn bounds_of_options_are_inclusive() {
    let ends = [
        ("keyed.keys_max", ["1", "1073741824"]),
        ("keyed.idle_ttl", ["180s", "366d"]),
        ("keyed.shards", ["1", "1024"]),
        ("keyed.throttled_after", ["0", "366d"]),
        ("keyed.enabled", ["true", "false"]),
    ];
    let keys = fields().iter().filter(|field| field.key().starts_with("keyed.")).count();
    assert_eq!(keys, ends.len());
    for (key, values) in ends {
        for value in values {
            let result = Config::from_map([(key, value)]).and_then(|config| config.to_keyed());
            assert!(result.is_ok(), "{key} = {value}: {result:?}");
        }
    }
}

/// The fields of a per-domain limiter in documentation order, each with its key and default.
const PER_DOMAIN: [(&str, &str, &str); 21] = [
    ("Enabled", "keyed.enabled", "true"),
    ("InitialRPS", "rate.amount", "2"),
    ("MinRPS", "aimd.rate_min", "0.25"),
    ("MaxRPS", "aimd.rate_max", "8.0"),
    ("TokenBucketCapacity", "rate.burst", "4"),
    ("AIMDIncrease", "aimd.increase", "0.25"),
    ("AIMDDecrease", "aimd.decrease", "0.5"),
    ("LatencyTarget", "aimd.latency_target", "1s"),
    ("LatencyDegradeFactor", "aimd.latency_factor", "2.0"),
    ("ErrorRateThreshold", "circuit.error_rate", "0.4"),
    ("MinSamplesToTrip", "circuit.samples_min", "10"),
    ("ConsecutiveFailThreshold", "circuit.failures", "5"),
    ("OpenStateDuration", "circuit.open_for", "15s"),
    ("HalfOpenProbes", "circuit.probes", "3"),
    ("RetryBaseDelay", "retry.backoff_base", "200ms"),
    ("RetryMaxDelay", "retry.backoff_max", "5s"),
    ("RetryMaxAttempts", "retry.attempts", "3"),
    ("StatsWindow", "circuit.window", "30s"),
    ("StatsBucket", "circuit.slices", "15"),
    ("DomainStateTTL", "keyed.idle_ttl", "3m"),
    ("Shards", "keyed.shards", "16"),
];

#[test]
fn every_per_domain_field_has_a_key_and_default() {
    let adaptive = || toml("controller = 'aimd'\nrate.amount = 2\nrate.period = 1\nrate.burst = 4");
    let (draft, options) = adaptive().to_keyed().expect("a controller and its rate");
    let map = Config::from_draft(&draft).with_keyed(&options).to_map();
    for (field, key, default) in PER_DOMAIN {
        assert_eq!(map[key], default, "{field}");
        let given = adaptive().overlaid_by(Config::from_map([(key, default)]).expect(key)).to_keyed();
        assert_eq!(given.expect(key), (draft.clone(), KeyedOptions::default()), "{key} = {default}");
    }
    assert_eq!((map["rate.period"].as_str(), map["retry.jitter"].as_str()), ("1s", "full"));
    assert_eq!((map["keyed.keys_max"].as_str(), map["keyed.throttled_after"].as_str()), ("100000", "10ms"));
    assert_eq!(KeyedOptions::default().idle_ttl, 180 * SECOND);
}

#[test]
fn documentation_lists_every_per_domain_field() {
    let page = include_str!("../../../../../docs/moving/per-domain-limiter.md");
    let (_, section) = page.split_once("\n## Options").expect("its section");
    let section = section.split("\n## ").next().expect("its end");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Vec<&str>> =
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    let wanted: Vec<_> = PER_DOMAIN
        .iter()
        .map(|(field, key, default)| [field, key, default].map(|text| format!("`{text}`")))
        .collect();
    assert_eq!(rows.len(), wanted.len(), "as many rows as fields");
    for (row, wanted) in rows.iter().zip(&wanted) {
        assert_eq!(row[..3], wanted[..], "field, key, default");
    }
}
