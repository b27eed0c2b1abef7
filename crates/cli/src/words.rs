//! What people type, read once: scopes, costs, spans and times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use tidegate::store::Cursor;
use tidegate::{
    EntityId, Expect, InvalidName, OnExpiry, OnUnavailable, Paging, Policy, ResourceName, Scope, Share,
    Stamp, Subject, Version,
};

use crate::failure::Failure;

/// How a scope is written. Every word that may be a name stands behind one that says what it names.
pub(crate) const SCOPES: &str = "\
Scopes:
  system                           everybody's use of everything
  resource NAME                    everybody's use of a resource
  entity ID                        an entity's use of everything
  entity ID resource NAME          an entity's use of a resource
The narrower scope wins, for each limit by itself.";

/// How a limit is written.
pub(crate) const LIMITS: &str = "\
Limits:
  name:amount/period[:burst]       tpm:100k/min:150k is 100,000 a minute,
                                   and 150,000 at once
Amounts may end in k, M or G. A period is s, min, h, day, or so many: 30s.";

/// Takes a scope from the front of `words`.
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
            let what =
                format!("the scope begins with `{}`, and must with system, resource or entity", shown(other));
            return Err(Failure::usage(what).next("see the scopes in --help"));
        }
        [] => return Err(Failure::usage("no scope is given").next("see the scopes in --help")),
    };
    Ok((scope, &words[used..]))
}

/// The scope that all of `words` are.
pub(crate) fn whole_scope(words: &[String]) -> Result<Scope, Failure> {
    match scope(words)? {
        (scope, []) => Ok(scope),
        (scope, [word, ..]) => {
            let what = format!("`{}` comes after the scope `{}`", shown(word), scope_words(&scope));
            Err(Failure::usage(what)
                .next("quote names with spaces; an entity's use of a resource is: entity ID resource NAME"))
        }
    }
}

fn name_failure(word: &str) -> Failure {
    Failure::usage(format!("the word `{word}` needs a name after it")).next("see the scopes in --help")
}

fn invalid(error: &InvalidName) -> Failure {
    Failure::usage(error.to_string())
}

/// A scope as it is typed.
pub(crate) fn scope_words(scope: &Scope) -> String {
    match scope {
        Scope::Subject(subject) => format!("entity {} resource {}", subject.entity, subject.resource),
        other => other.to_string(),
    }
}

/// A policy on one line.
pub(crate) fn policy_words(policy: &Policy) -> String {
    let mut words: Vec<String> = policy.rules().iter().map(ToString::to_string).collect();
    words.extend(policy.is_only().then(|| "only".to_owned()));
    words.extend(
        policy.unavailable().map(|behaviour| format!("on-unavailable={}", unavailable_words(behaviour))),
    );
    words.extend(policy.expiry().map(|behaviour| format!("on-expiry={}", expiry_word(behaviour))));
    if words.is_empty() { "no limits".to_owned() } else { words.join(" ") }
}

/// What happens when the store is away, as it is typed.
pub(crate) fn unavailable_words(behaviour: OnUnavailable) -> String {
    match behaviour {
        OnUnavailable::Block => "block".to_owned(),
        OnUnavailable::Allow => "allow".to_owned(),
        OnUnavailable::LocalShare(share) => format!("share:{}", share.fraction()),
    }
}

/// Reads the same.
pub(crate) fn unavailable(text: &str) -> Result<OnUnavailable, String> {
    match text {
        "block" => Ok(OnUnavailable::Block),
        "allow" => Ok(OnUnavailable::Allow),
        _ => {
            let fraction = text.strip_prefix("share:").and_then(|fraction| fraction.parse().ok());
            let fraction = fraction.ok_or("it may be block, allow or share:FRACTION, such as share:0.2")?;
            Share::new(fraction).map(OnUnavailable::LocalShare).map_err(|error| error.to_string())
        }
    }
}

/// What becomes of leases that are never ended, as it is typed.
pub(crate) const fn expiry_word(behaviour: OnExpiry) -> &'static str {
    match behaviour {
        OnExpiry::Settle => "settle",
        OnExpiry::Return => "return",
    }
}

/// Reads the same.
pub(crate) fn expiry(text: &str) -> Result<OnExpiry, String> {
    match text {
        "settle" => Ok(OnExpiry::Settle),
        "return" => Ok(OnExpiry::Return),
        _ => Err("it may be settle or return".to_owned()),
    }
}

/// Reads `absent` or a version.
pub(crate) fn expect(text: &str) -> Result<Expect, String> {
    if text == "absent" {
        return Ok(Expect::Absent);
    }
    let number = text.parse().map_err(|_| "it may be absent or the number of a version".to_owned())?;
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

/// What is asked of one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Units {
    pub(crate) limit: String,
    pub(crate) units: u64,
}

/// Reads `limit=units`.
pub(crate) fn units(text: &str) -> Result<Units, String> {
    let (limit, units) = text.split_once('=').ok_or("it is limit=units, such as tpm=800")?;
    let units = units
        .parse()
        .map_err(|_| format!("the units are `{}`, and must be a whole number from 0", shown(units)))?;
    Ok(Units { limit: limit.to_owned(), units })
}

/// Reads `key=value`.
pub(crate) fn note(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("it is key=value, such as tier=gold")?;
    if key.is_empty() {
        return Err("the key is empty".to_owned());
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Reads a span: `5s`, `1m 30s`, `250ms`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "it is a number and a unit, such as 250ms, 5s, 2m or 1h".to_owned())
}

/// A span as people say it, never too short: to the millisecond, and from a minute on to the second.
pub(crate) fn span_words(span: Duration) -> String {
    let grain = if span < Duration::from_mins(1) { 1 } else { 1_000 };
    let millis = span.as_nanos().div_ceil(grain * 1_000_000) * grain;
    humantime::format_duration(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))).to_string()
}

/// A sentence of the library or of a server, with its wait as people say it.
pub(crate) fn come_back(sentence: &str, retry_after: Option<Duration>) -> String {
    const WAIT: &str = "; come back in ";
    match (sentence.rsplit_once(WAIT), retry_after) {
        (Some((before, _)), Some(span)) => format!("{before}{WAIT}{}", span_words(span)),
        _ => sentence.to_owned(),
    }
}

/// Reads how long to wait for a store or a server.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(1)..=Duration::from_mins(1);
    span(text).ok().filter(|span| bounds.contains(span)).ok_or_else(|| "it must be from 1ms to 1m".to_owned())
}

/// Reads a time: a date, RFC 3339, or a span ago.
pub(crate) fn time(text: &str) -> Result<Stamp, String> {
    let at = SystemTime::now();
    let read = humantime::parse_rfc3339(text).ok();
    let read = read.or_else(|| humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).ok());
    let read = read.or_else(|| at.checked_sub(humantime::parse_duration(text).ok()?));
    let since = read.and_then(|read| read.duration_since(UNIX_EPOCH).ok());
    let micros = since.and_then(|since| u64::try_from(since.as_micros()).ok());
    let forms =
        "it is a time such as 2026-01-31, 2026-01-31T09:30:00Z or, for so long ago, 24h; from 1970 on";
    micros.map(Stamp::from_micros).ok_or_else(|| forms.to_owned())
}

/// Reads a time to come: a date, RFC 3339, or a span from now.
pub(crate) fn time_to_come(text: &str) -> Result<Stamp, String> {
    match humantime::parse_duration(text) {
        Ok(span) => time("0s").map(|now| now + span),
        Err(_) => time(text).map_err(|_| {
            "it is a time such as 2030-01-31, 2030-01-31T09:30:00Z or, for so long from now, 90d".to_owned()
        }),
    }
}

/// Which page of a listing.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// List at most so many, from 1 to 1000
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    max: u32,
    /// Go on where the listing before this one ended: the cursor that it told
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

/// A number in at most six letters.
pub(crate) fn number(number: u64) -> String {
    match number {
        0..1_000 => return number.to_string(),
        1_000..100_000 => return format!("{},{:03}", number / 1_000, number % 1_000),
        _ => {}
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
    let mut parts = number as f64 / 1e3;
    let mut letters = "kMGTPE".chars();
    let mut letter = letters.next().unwrap_or_default();
    // By what is shown: 999,999 is rounded to a million.
    while parts >= 999.95
        && let Some(next) = letters.next()
    {
        (parts, letter) = (parts / 1e3, next);
    }
    if parts < 9.995 { format!("{parts:.2}{letter}") } else { format!("{parts:.1}{letter}") }
}

/// Letters that are not seen and change how others are: they turn the direction of the text, end a line, or have no width.
const fn is_hidden(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200b}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Text from outside as it may stand on a terminal: on one line, and with nothing that moves the cursor or turns the text.
pub(crate) fn shown(text: &str) -> String {
    let shown = |letter: char| {
        let escaped = (letter.is_control() || is_hidden(letter)).then(|| letter.escape_default());
        let plain = escaped.is_none().then_some(letter);
        escaped.into_iter().flatten().chain(plain)
    };
    text.chars().flat_map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_scope_is_read_as_it_is_written_and_what_follows_is_left() {
        for text in [
            "system",
            "resource gpt-4",
            "entity acme",
            "entity acme resource gpt-4",
            "entity resource resource resource",
        ] {
            assert_eq!(scope_words(&whole_scope(&words(text)).unwrap()), text);
        }
        let with_limit = words("entity acme tpm:5/s rpm:1/s");
        let (scope, rest) = scope(&with_limit).unwrap();
        assert_eq!((scope.to_string().as_str(), rest), ("entity acme", &with_limit[2..]));
    }

    #[test]
    fn a_scope_that_is_none_says_why() {
        let table = [
            ("", "no scope is given"),
            ("acme", "the scope begins with `acme`, and must with system, resource or entity"),
            ("entity", "the word `entity` needs a name after it"),
            ("entity acme resource", "the word `resource` needs a name after it"),
            ("entity acme gpt-4", "`gpt-4` comes after the scope `entity acme`"),
            ("resource a#b", "the resource `a#b` holds '#' at byte 1, which no such name does"),
        ];
        for (text, sentence) in table {
            assert_eq!(whole_scope(&words(text)).unwrap_err().what, sentence);
        }
    }

    #[test]
    fn times_are_dates_points_and_spans_ago() {
        assert_eq!(time("2026-01-31").unwrap().to_string(), "2026-01-31T00:00:00Z");
        assert_eq!(time("2026-01-31T09:30:00Z").unwrap().to_string(), "2026-01-31T09:30:00Z");
        assert!(time("1h").unwrap() < time("0s").unwrap());
        for bad in ["", "yesterday", "2026-13-01", "1960-01-01"] {
            assert!(time(bad).unwrap_err().starts_with("it is a time such as"), "{bad}");
        }
    }

    #[test]
    fn the_unit_of_a_number_is_that_of_what_is_shown() {
        let table = [
            (99_999, "99,999"),
            (100_000, "100.0k"),
            (999_949, "999.9k"),
            (999_999, "1.00M"),
            (9_994_999, "9.99M"),
            (9_999_999, "10.0M"),
            (999_999_999, "1.00G"),
            (999_999_999_999, "1.00T"),
            (999_900_000_000_000, "999.9T"),
            (1_000_000_000_000_000, "1.00P"),
            (u64::MAX, "18.4E"),
        ];
        for (count, text) in table {
            assert_eq!(number(count), text);
            assert!(text.len() <= 6, "{text}");
        }
    }

    #[test]
    fn a_span_is_rounded_up() {
        assert_eq!(span_words(Duration::from_micros(2_999_999)), "3s");
        assert_eq!(span_words(Duration::from_micros(1)), "1ms");
        assert_eq!(span_words(Duration::from_secs(61)), "1m 1s");
        assert_eq!(span_words(Duration::from_millis(6_047_870)), "1h 40m 48s");
        assert_eq!(
            come_back("short; come back in 6047.87s", Some(Duration::from_millis(6_047_870))),
            "short; come back in 1h 40m 48s"
        );
        assert_eq!(come_back("short", None), "short");
    }

    #[test]
    fn behaviours_are_read_as_they_are_written() {
        for text in ["block", "allow", "share:0.2"] {
            assert_eq!(unavailable_words(unavailable(text).unwrap()), text);
        }
        assert_eq!(unavailable("share:2").unwrap_err(), "a local share of 2, outside 0.000001..=1");
        assert_eq!(expiry_word(expiry("return").unwrap()), "return");
        assert_eq!(units("tpm=-1").unwrap_err(), "the units are `-1`, and must be a whole number from 0");
    }
}
