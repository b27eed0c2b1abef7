//! Parsers for command-line values: scopes, costs, durations and times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use tidegate::store::Cursor;
use tidegate::{
    EntityId, Expect, InvalidName, OnExpiry, OnUnavailable, Paging, ResourceName, Scope, Share, Stamp,
    Subject, Version,
};

use crate::failure::Failure;
use crate::format;

/// The syntax of a scope. A keyword precedes every name, so that any word can be a name.
pub(crate) const SCOPES: &str = "\
Scopes:
  system                           every entity, every resource
  resource NAME                    every entity, one resource
  entity ID                        one entity, every resource
  entity ID resource NAME          one entity, one resource
For each limit, the narrowest scope wins. A limit counts each entity on each
resource separately, unless across= pools it.";

/// The syntax of a limit.
pub(crate) const LIMITS: &str = "\
Limits:
  name:amount/period[:burst]       tpm:100k/min:150k is 100,000 per minute,
                                   with a burst of 150,000
  ...,across=resources             one bucket for all resources of an entity
  ...,across=entities              one bucket for all entities on a resource
  ...,across=both                  one bucket for all entities and resources
  ...,debt=units                   how far usage above the limit may go into
                                   debt [default: 10 times the burst]
Amounts may end in k, M or G. A period is s, min, h or day, or a number of
them, such as 30s.";

/// Parses a scope from the front of `words` and returns the rest.
pub(crate) fn scope(words: &[String]) -> Result<(Scope, &[String]), Failure> {
    let words_of: Vec<&str> = words.iter().map(String::as_str).collect();
    let named = |name: &str| name_failure(name);
    let (scope, used) = match words_of[..] {
        ["system", ..] => (Scope::System, 1),
        ["resource", name, ..] => {
            (Scope::Resource(ResourceName::new(name).map_err(|error| invalid(&error))?), 2)
        }
        ["entity", id, "resource", name, ..] => {
            (Scope::Subject(Subject::new(id, name).map_err(|error| invalid(&error))?), 4)
        }
        ["entity", _, "resource"] => return Err(named("resource")),
        ["entity", id, ..] => (Scope::Entity(EntityId::new(id).map_err(|error| invalid(&error))?), 2),
        ["resource" | "entity"] => return Err(named(words_of[0])),
        [other, ..] => {
            let what = format!(
                "the scope begins with `{}`: expected system, resource or entity",
                format::escape(other)
            );
            return Err(Failure::usage(what).next("see the scopes in --help"));
        }
        [] => return Err(Failure::usage("no scope is given").next("see the scopes in --help")),
    };
    Ok((scope, &words[used..]))
}

/// Parses `words` as one scope, without a rest.
pub(crate) fn whole_scope(words: &[String]) -> Result<Scope, Failure> {
    match scope(words)? {
        (scope, []) => Ok(scope),
        (scope, [word, ..]) => {
            let what =
                format!("unexpected `{}` after the scope `{}`", format::escape(word), format::scope(&scope));
            Err(Failure::usage(what).next(
                "quote names with spaces; for one resource of an entity, write: entity ID resource NAME",
            ))
        }
    }
}

fn name_failure(word: &str) -> Failure {
    Failure::usage(format!("`{word}` must be followed by a name")).next("see the scopes in --help")
}

fn invalid(error: &InvalidName) -> Failure {
    Failure::usage(error.to_string())
}

/// Parses a behaviour while the store is unavailable.
pub(crate) fn unavailable(text: &str) -> Result<OnUnavailable, String> {
    match text {
        "block" => Ok(OnUnavailable::Block),
        "allow" => Ok(OnUnavailable::Allow),
        _ => {
            let fraction = text.strip_prefix("share:").and_then(|fraction| fraction.parse().ok());
            let fraction = fraction.ok_or("expected block, allow or share:FRACTION, such as share:0.2")?;
            Share::new(fraction).map(OnUnavailable::LocalShare).map_err(|error| error.to_string())
        }
    }
}

/// Parses a behaviour for expired leases.
pub(crate) fn expiry(text: &str) -> Result<OnExpiry, String> {
    match text {
        "settle" => Ok(OnExpiry::Settle),
        "return" => Ok(OnExpiry::Return),
        _ => Err("expected settle or return".to_owned()),
    }
}

/// Parses `absent` or a version.
pub(crate) fn expect(text: &str) -> Result<Expect, String> {
    if text == "absent" {
        return Ok(Expect::Absent);
    }
    let number = text.parse().map_err(|_| "expected `absent` or a version number".to_owned())?;
    Ok(Expect::Version(Version::new(number)))
}

/// An entity's id.
pub(crate) fn entity(text: &str) -> Result<EntityId, String> {
    EntityId::new(text).map_err(|error| error.to_string())
}

/// A resource's name.
pub(crate) fn resource(text: &str) -> Result<ResourceName, String> {
    ResourceName::new(text).map_err(|error| error.to_string())
}

/// The units requested of one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Units {
    pub(crate) limit: String,
    pub(crate) units: u64,
}

/// Parses `limit=units`.
pub(crate) fn units(text: &str) -> Result<Units, String> {
    let (limit, units) = text.split_once('=').ok_or("expected limit=units, such as tpm=800")?;
    let units = units.parse().map_err(|_| {
        format!("the units are `{}`, and must be a whole number from 0", format::escape(units))
    })?;
    Ok(Units { limit: limit.to_owned(), units })
}

/// Parses `key=value`.
pub(crate) fn note(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected key=value, such as tier=gold")?;
    if key.is_empty() {
        return Err("the key is empty".to_owned());
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Parses a duration: `5s`, `1m 30s`, `250ms`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    tidegate_core::duration::parse(text)
        .map_err(|_| "expected a number and a unit, such as 250ms, 5s, 2m or 1h".to_owned())
}

/// Parses a timeout for a store or a server.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(1)..=Duration::from_mins(1);
    duration(text)
        .ok()
        .filter(|span| bounds.contains(span))
        .ok_or_else(|| "must be from 1ms to 1m".to_owned())
}

/// Parses a time: a date, RFC 3339, or a duration ago.
pub(crate) fn time(text: &str) -> Result<Stamp, String> {
    let at = SystemTime::now();
    let read = humantime::parse_rfc3339(text).ok();
    let read = read.or_else(|| humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).ok());
    let read = read.or_else(|| at.checked_sub(tidegate_core::duration::parse(text).ok()?));
    let since = read.and_then(|read| read.duration_since(UNIX_EPOCH).ok());
    let micros = since.and_then(|since| u64::try_from(since.as_micros()).ok());
    let forms =
        "expected a time such as 2026-01-31, 2026-01-31T09:30:00Z or 24h (24 hours ago), from 1970 on";
    micros.map(Stamp::from_micros).ok_or_else(|| forms.to_owned())
}

/// Parses a future time: a date, RFC 3339, or a duration from now.
pub(crate) fn future_time(text: &str) -> Result<Stamp, String> {
    match tidegate_core::duration::parse(text) {
        Ok(span) => time("0s").map(|now| now + span),
        Err(_) => time(text).map_err(|_| {
            "expected a time such as 2030-01-31, 2030-01-31T09:30:00Z or 90d (90 days from now)".to_owned()
        }),
    }
}

/// Paging options of a listing.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// List at most COUNT items, from 1 to 1000
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    max: u32,
    /// Continue after this cursor, which the previous listing printed
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
}

impl PageArgs {
    /// The page.
    pub(crate) fn paging(&self) -> Result<Paging, Failure> {
        let paging = Paging::first(self.max)?;
        Ok(match &self.after {
            Some(cursor) => paging.after(Cursor::new(cursor)),
            None => paging,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn scope_parses_its_own_text_and_leaves_the_rest() {
        for text in [
            "system",
            "resource gpt-4",
            "entity acme",
            "entity acme resource gpt-4",
            "entity resource resource resource",
        ] {
            assert_eq!(format::scope(&whole_scope(&words(text)).unwrap()), text);
        }
        let with_limit = words("entity acme tpm:5/s rpm:1/s");
        let (scope, rest) = scope(&with_limit).unwrap();
        assert_eq!((scope.to_string().as_str(), rest), ("entity acme", &with_limit[2..]));
    }

    #[test]
    fn invalid_scope_is_rejected_with_a_reason() {
        let table = [
            ("", "no scope is given"),
            ("acme", "the scope begins with `acme`: expected system, resource or entity"),
            ("entity", "`entity` must be followed by a name"),
            ("entity acme resource", "`resource` must be followed by a name"),
            ("entity acme gpt-4", "unexpected `gpt-4` after the scope `entity acme`"),
            ("resource a#b", "the resource `a#b` has '#' at byte 1, which is not allowed"),
        ];
        for (text, sentence) in table {
            assert_eq!(whole_scope(&words(text)).unwrap_err().what, sentence);
        }
    }

    #[test]
    fn time_is_a_date_a_time_or_a_duration_ago() {
        assert_eq!(time("2026-01-31").unwrap().to_string(), "2026-01-31T00:00:00Z");
        assert_eq!(time("2026-01-31T09:30:00Z").unwrap().to_string(), "2026-01-31T09:30:00Z");
        assert!(time("1h").unwrap() < time("0s").unwrap());
        for bad in ["", "yesterday", "2026-13-01", "1960-01-01"] {
            assert!(time(bad).unwrap_err().starts_with("expected a time such as"), "{bad}");
        }
    }

    #[test]
    fn behaviours_parse_their_own_text() {
        for text in ["block", "allow", "share:0.2"] {
            assert_eq!(format::unavailable(unavailable(text).unwrap()), text);
        }
        assert_eq!(unavailable("share:2").unwrap_err(), "a local share of 2, outside 0.000001..=1");
        assert_eq!(format::expiry(expiry("return").unwrap()), "return");
        assert_eq!(units("tpm=-1").unwrap_err(), "the units are `-1`, and must be a whole number from 0");
    }
}
