//! The bounds of a server by their names: each has a key in `[bounds]` and a `TIDEGATE_` variable, and those that people set by
//! hand have a flag.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::Args;
use tidegate_server::Bounds;
use toml::{Table, Value};

use crate::failure::Failure;
use crate::words;

/// The flags. Their variables are read here, those of the others by [`decide`].
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Bounds")]
pub(crate) struct BoundArgs {
    /// Requests under way at once, those that wait for a limit included [default: 4096]
    #[arg(long, value_name = "COUNT", env = "TIDEGATE_REQUESTS_MAX", hide_env_values = true)]
    requests_max: Option<String>,
    /// Connections open at once; further ones wait to be accepted [default: 8192]
    #[arg(long, value_name = "COUNT", env = "TIDEGATE_CONNECTIONS_MAX", hide_env_values = true)]
    connections_max: Option<String>,
    /// How long an acquire may wait for its units [default: 1m]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_WITHIN_MAX", hide_env_values = true)]
    within_max: Option<String>,
    /// How long a lease has whose request does not say [default: 5m]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_LEASE_DEADLINE", hide_env_values = true)]
    lease_deadline: Option<String>,
    /// How long what is under way may take to end once it is told to stop [default: 30s]
    #[arg(long, value_name = "SPAN", env = "TIDEGATE_DRAIN_TIME", hide_env_values = true)]
    drain_time: Option<String>,
}

impl BoundArgs {
    /// What was typed, or said by the flag's variable.
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

/// A bound: its name, which is its key, what it is of the server's, and what it may be.
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

/// Every bound there is.
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

/// What is said of a bound, and where.
struct Said {
    place: String,
    value: String,
}

impl Said {
    fn refused(&self, what: impl Display) -> Failure {
        Failure::usage(format!("{} is `{}`, and must be {what}", self.place, words::shown(&self.value)))
            .next("see what the bounds may be: tidegate serve --help")
    }
}

/// The bounds that are typed, over those of the environment, over those of the file, over what is usual.
pub(crate) fn decide(
    args: &BoundArgs,
    environment: impl Fn(&str) -> Option<String>,
    file: &Table,
) -> Result<Bounds, Failure> {
    let known = || KEYS.map(|key| key.name).join(", ");
    if let Some(unknown) = file.keys().find(|name| KEYS.iter().all(|key| key.name != name.as_str())) {
        let what = format!("there is no bound `bounds.{}`", words::shown(unknown));
        return Err(Failure::usage(what).next(format!("there are {}", known())));
    }
    let mut bounds = Bounds::default();
    for Key { name, field } in &KEYS {
        let variable = format!("TIDEGATE_{}", name.to_ascii_uppercase());
        let typed =
            args.of(name).map(|value| (format!("--{} or {variable}", name.replace('_', "-")), value.clone()));
        let said = typed.or_else(|| Some((variable.clone(), environment(&variable)?)));
        let said = said.or_else(|| Some((format!("`bounds.{name}`"), text(file.get(*name)?))));
        let Some(said) = said.map(|(place, value)| Said { place, value }) else { continue };
        match field {
            Field::Count(field, range) => {
                let value = said.value.parse().ok().filter(|count| range.contains(count));
                let (least, most) = (range.start(), range.end());
                *field(&mut bounds) = value
                    .ok_or_else(|| said.refused(format_args!("a whole number from {least} to {most}")))?;
            }
            Field::Span(field, range) => {
                let value = words::span(&said.value).ok().filter(|span| range.contains(span));
                let [least, most] = [range.start(), range.end()].map(|span| words::span_words(*span));
                *field(&mut bounds) = value.ok_or_else(|| {
                    said.refused(format_args!(
                        "a number and a unit, such as 250ms, 5s or 2m, from {least} to {most}"
                    ))
                })?;
            }
        }
    }
    let [own, most] = [bounds.lease_deadline, bounds.lease_deadline_max].map(words::span_words);
    if bounds.lease_deadline > bounds.lease_deadline_max {
        return Err(Failure::usage(format!(
            "lease_deadline is {own}, more than lease_deadline_max, which is {most}"
        ))
        .next("lower the one or raise the other"));
    }
    Ok(bounds)
}

/// A value of the file as it would be typed.
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
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    fn file(text: &str) -> Table {
        text.parse().expect("a table")
    }

    #[test]
    fn every_bound_of_the_server_has_its_key_and_stands_in_the_documentation() {
        let shown = format!("{:#?}", Bounds::default());
        let fields: Vec<&str> =
            shown.lines().filter_map(|line| line.trim().split_once(": ")).map(|(name, _)| name).collect();
        assert_eq!(fields, KEYS.map(|key| key.name));
        let documentation = include_str!("../../../docs/cli.md");
        for Key { name, .. } in KEYS {
            let row = format!("| `TIDEGATE_{}` | `bounds.{name}` |", name.to_ascii_uppercase());
            assert!(documentation.contains(&row), "{row}");
            assert!(crate::verbs::serve::HOW.contains(&format!("\n  {name} = ")), "{name} in --help");
        }
    }

    #[test]
    fn what_is_usual_is_within_its_bounds() {
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

    #[test]
    fn what_is_typed_counts_before_the_environment_and_that_before_the_file() {
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
    fn a_bound_that_cannot_be_is_refused_with_its_field_its_value_and_what_it_may_be() {
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
                "`bounds.within_max` is `25h`, and must be a number and a unit, such as 250ms, 5s or 2m, from 1ms to 1day",
            ),
            ("lease_deadline = [1]", "`bounds.lease_deadline` is `array`"),
            ("requests = 1", "there is no bound `bounds.requests`"),
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
