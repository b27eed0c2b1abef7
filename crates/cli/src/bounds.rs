//! The bounds of a server by name: each has a key in `[bounds]` and a `TIDEGATE_` variable, and the commonly
//! set ones have a flag.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::Args;
use tidegate_server::Bounds;
use toml::{Table, Value};

use crate::failure::Failure;
use crate::format;
use crate::parse;

/// The flags. clap reads their variables; [`decide`] reads the variables of the other bounds.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Bounds")]
pub(crate) struct BoundArgs {
    /// Maximum requests in flight, 15 of 16 for one token; those that wait for a limit count [default: 4096]
    #[arg(long, value_name = "COUNT", env = "TIDEGATE_REQUESTS_MAX", hide_env_values = true)]
    requests_max: Option<String>,
    /// Maximum open connections, 15 of 16 for one address; idle ones make room [default: 8192]
    #[arg(long, value_name = "COUNT", env = "TIDEGATE_CONNECTIONS_MAX", hide_env_values = true)]
    connections_max: Option<String>,
    /// Maximum time that an acquire may wait for its units [default: 1m]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_WITHIN_MAX", hide_env_values = true)]
    within_max: Option<String>,
    /// Deadline of a lease whose request sets none [default: 5m]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_LEASE_DEADLINE", hide_env_values = true)]
    lease_deadline: Option<String>,
    /// Maximum time for requests in flight to finish after a signal to stop [default: 30s]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_DRAIN_TIME", hide_env_values = true)]
    drain_time: Option<String>,
}

impl BoundArgs {
    /// The value of a flag or of its variable.
    fn of(&self, name: &str) -> Option<&String> {
        match name {
            "requests_max" => self.requests_max.as_ref(),
            "connections_max" => self.connections_max.as_ref(),
            "within_max" => self.within_max.as_ref(),
            "lease_deadline" => self.lease_deadline.as_ref(),
            "drain_time" => self.drain_time.as_ref(),
            _ => None,
        }
    }
}

/// A bound: its name, which is its key, the server field it sets, and its valid range.
struct Key {
    name: &'static str,
    field: Field,
}

enum Field {
    Count(fn(&mut Bounds) -> &mut usize, RangeInclusive<usize>),
    Span(fn(&mut Bounds) -> &mut Duration, RangeInclusive<Duration>),
}

const KIB: usize = 1_024;
const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// Every bound.
const KEYS: [Key; 15] = [
    count("body_max", |bounds| &mut bounds.body_max, KIB..=KIB * KIB * KIB),
    span("body_time", |bounds| &mut bounds.body_time, MILLI..=HOUR),
    count("requests_max", |bounds| &mut bounds.requests_max, 1..=1_000_000),
    span("within_max", |bounds| &mut bounds.within_max, MILLI..=DAY),
    span("lease_deadline", |bounds| &mut bounds.lease_deadline, SECOND..=DAY),
    span("lease_deadline_max", |bounds| &mut bounds.lease_deadline_max, SECOND..=DAY),
    span("report_time", |bounds| &mut bounds.report_time, MILLI..=HOUR),
    count("head_max", |bounds| &mut bounds.head_max, 8 * KIB..=KIB * KIB),
    count("headers_max", |bounds| &mut bounds.headers_max, 1..=1_000),
    span("head_time", |bounds| &mut bounds.head_time, MILLI..=HOUR),
    count("connections_max", |bounds| &mut bounds.connections_max, 1..=1_000_000),
    span("drain_time", |bounds| &mut bounds.drain_time, MILLI..=HOUR),
    span("sweep_every", |bounds| &mut bounds.sweep_every, MILLI..=HOUR),
    count("listeners_max", |bounds| &mut bounds.listeners_max, 0..=100_000),
    span("alive_every", |bounds| &mut bounds.alive_every, MILLI..=HOUR),
];

const fn count(
    name: &'static str,
    field: fn(&mut Bounds) -> &mut usize,
    range: RangeInclusive<usize>,
) -> Key {
    Key { name, field: Field::Count(field, range) }
}

const fn span(
    name: &'static str,
    field: fn(&mut Bounds) -> &mut Duration,
    range: RangeInclusive<Duration>,
) -> Key {
    Key { name, field: Field::Span(field, range) }
}

/// A configured bound, and the flag, variable or key that it comes from.
struct Setting {
    origin: String,
    value: String,
}

impl Setting {
    fn invalid(&self, what: impl Display) -> Failure {
        Failure::usage(format!("{} is `{}`, and must be {what}", self.origin, format::escape(&self.value)))
            .next("see the bounds: tidegate serve --help")
    }
}

/// Resolves the bounds: flags, then the environment, then the file, then the defaults.
pub(crate) fn decide(
    args: &BoundArgs,
    environment: impl Fn(&str) -> Option<String>,
    file: &Table,
) -> Result<Bounds, Failure> {
    let known = || KEYS.map(|key| key.name).join(", ");
    if let Some(unknown) = file.keys().find(|name| KEYS.iter().all(|key| key.name != name.as_str())) {
        let what = format!("unknown bound `bounds.{}`", format::escape(unknown));
        return Err(Failure::usage(what).next(format!("the bounds are {}", known())));
    }
    let mut bounds = Bounds::default();
    for Key { name, field } in &KEYS {
        let variable = format!("TIDEGATE_{}", name.to_ascii_uppercase());
        let typed =
            args.of(name).map(|value| (format!("--{} or {variable}", name.replace('_', "-")), value.clone()));
        let setting = typed.or_else(|| Some((variable.clone(), environment(&variable)?)));
        let setting = setting.or_else(|| Some((format!("`bounds.{name}`"), text(file.get(*name)?))));
        let Some(setting) = setting.map(|(origin, value)| Setting { origin, value }) else { continue };
        match field {
            Field::Count(field, range) => {
                let value = setting.value.parse().ok().filter(|count| range.contains(count));
                let (least, most) = (range.start(), range.end());
                *field(&mut bounds) = value
                    .ok_or_else(|| setting.invalid(format_args!("a whole number from {least} to {most}")))?;
            }
            Field::Span(field, range) => {
                let value = parse::duration(&setting.value).ok().filter(|span| range.contains(span));
                let [least, most] = [range.start(), range.end()].map(|span| format::duration(*span));
                *field(&mut bounds) = value.ok_or_else(|| {
                    setting.invalid(format_args!(
                        "a number and a unit, such as 250ms, 5s or 2m, from {least} to {most}"
                    ))
                })?;
            }
        }
    }
    let [own, most] = [bounds.lease_deadline, bounds.lease_deadline_max].map(format::duration);
    if bounds.lease_deadline > bounds.lease_deadline_max {
        return Err(Failure::usage(format!(
            "lease_deadline is {own}, more than lease_deadline_max, which is {most}"
        ))
        .next("lower the one or raise the other"));
    }
    Ok(bounds)
}

/// A TOML value in command-line form.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(flag) => flag.to_string(),
        other => other.type_str().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory as _};
    use tidegate::Config;

    use super::*;
    use crate::args::Args;

    fn none(_: &str) -> Option<String> {
        None
    }

    fn file(text: &str) -> Table {
        text.parse().expect("a table")
    }

    #[test]
    fn every_server_bound_has_a_documented_key() {
        let shown = format!("{:#?}", Bounds::default());
        let fields: Vec<&str> =
            shown.lines().filter_map(|line| line.trim().split_once(": ")).map(|(name, _)| name).collect();
        assert_eq!(fields, KEYS.map(|key| key.name));
        let documentation = include_str!("../../../docs/run.md");
        for Key { name, .. } in KEYS {
            let row = format!("| `TIDEGATE_{}` | `bounds.{name}` |", name.to_ascii_uppercase());
            assert!(documentation.contains(&row), "{row}");
            assert!(crate::verbs::serve::HELP.contains(&format!("\n  {name} = ")), "{name} in --help");
        }
    }

    #[test]
    fn defaults_are_within_their_ranges() {
        let mut usual = Bounds::default();
        for Key { name, field } in KEYS {
            let is_within = match field {
                Field::Count(field, range) => range.contains(field(&mut usual)),
                Field::Span(field, range) => range.contains(field(&mut usual)),
            };
            assert!(is_within, "{name}");
        }
        assert_eq!(decide(&BoundArgs::default(), none, &Table::new()).unwrap(), Bounds::default());
    }

    /// Regression: a program that reads its limits with the prefix `TIDEGATE` failed beside `TIDEGATE_SERVER`.
    #[test]
    fn variables_of_the_program_are_no_keys_of_a_throttle() {
        fn add(names: &mut Vec<String>, command: &Command) {
            let variables = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str());
            names.extend(variables.map(str::to_owned));
            command.get_subcommands().for_each(|command| add(names, command));
        }
        let mut names: Vec<_> =
            KEYS.iter().map(|key| format!("TIDEGATE_{}", key.name.to_ascii_uppercase())).collect();
        names.push("TIDEGATE_TOKEN".to_owned());
        add(&mut names, &Args::command());
        names.retain(|name| name.starts_with("TIDEGATE_"));
        let config = Config::from_variables("TIDEGATE", names.iter().map(|name| (name, "x")));
        assert_eq!(config, Ok(Config::default()));
        for typo in ["TIDEGATE_SERVERS", "TIDEGATE_SLOT_MAX"] {
            assert!(Config::from_variables("TIDEGATE", [(typo, "1")]).is_err(), "{typo}");
        }
        assert!(
            Config::from_variables("APP", [("APP_SERVER", "1")]).is_err(),
            "another prefix has no program"
        );
    }

    #[test]
    fn flag_overrides_environment_which_overrides_file() {
        let args = BoundArgs { within_max: Some("3s".to_owned()), ..BoundArgs::default() };
        let environment = |name: &str| match name {
            "TIDEGATE_WITHIN_MAX" => Some("4s".to_owned()),
            "TIDEGATE_BODY_MAX" => Some("2000".to_owned()),
            _ => None,
        };
        let file = file("within_max = '5s'\nbody_max = 3000\nheaders_max = 7\nsweep_every = '10ms'");
        let bounds = decide(&args, environment, &file).unwrap();
        assert_eq!((bounds.within_max, bounds.body_max, bounds.headers_max), (3 * SECOND, 2_000, 7));
        assert_eq!(bounds.sweep_every, 10 * MILLI);
    }

    #[test]
    fn invalid_bound_error_names_field_value_and_range() {
        let table = [
            (
                "body_max = -1",
                "`bounds.body_max` is `-1`, and must be a whole number from 1024 to 1073741824",
            ),
            ("body_max = 1.5", "`bounds.body_max` is `1.5`, and must be a whole number"),
            ("headers_max = nan", "`bounds.headers_max` is `NaN`, and must be a whole number from 1 to 1000"),
            (
                "requests_max = 0",
                "`bounds.requests_max` is `0`, and must be a whole number from 1 to 1000000",
            ),
            ("head_max = 9223372036854775807", "`bounds.head_max` is `9223372036854775807`, and must be"),
            (
                "body_time = nan",
                "`bounds.body_time` is `NaN`, and must be a number and a unit, such as 250ms, 5s or 2m, from 1ms to 1h",
            ),
            ("body_time = inf", "`bounds.body_time` is `inf`"),
            ("head_time = '-5s'", "`bounds.head_time` is `-5s`"),
            ("drain_time = 30", "`bounds.drain_time` is `30`"),
            ("report_time = '99999999999999999999d'", "`bounds.report_time` is `99999999999999999999d`"),
            (
                "within_max = '25h'",
                "`bounds.within_max` is `25h`, and must be a number and a unit, such as 250ms, 5s or 2m, from 1ms to 1d",
            ),
            ("lease_deadline = [1]", "`bounds.lease_deadline` is `array`"),
            ("requests = 1", "unknown bound `bounds.requests`"),
            (
                "lease_deadline_max = '10s'",
                "lease_deadline is 5m, more than lease_deadline_max, which is 10s",
            ),
        ];
        for (text, sentence) in table {
            let failure = decide(&BoundArgs::default(), none, &file(text)).unwrap_err();
            assert!(failure.what.starts_with(sentence), "{text}: {}", failure.what);
        }
        let environment = |name: &str| (name == "TIDEGATE_SWEEP_EVERY").then(|| "never".to_owned());
        let failure = decide(&BoundArgs::default(), environment, &Table::new()).unwrap_err();
        assert!(failure.what.starts_with("TIDEGATE_SWEEP_EVERY is `never`, and must be"), "{}", failure.what);
    }
}
