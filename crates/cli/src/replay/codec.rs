//! Parses lines of a log, with errors that name the invalid field, and writes the JSON report.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use serde_json::{Value, json};
use tidegate::{Stamp, Subject};
use tidegate_client::{Cost, EntityId, ResourceName, Seconds};

use super::log::{Line, Origin};
use super::tally::{Key, LongestWait, Row, Tally};
use crate::codec::Json;
use crate::format;

/// The last second of the year 9999.
const SECONDS_MAX: f64 = 253_402_300_799.0;
/// Maximum characters of an invalid line that are shown.
const SHOWN_MAX: usize = 120;

#[derive(Deserialize)]
struct Raw {
    at: At,
    entity: EntityId,
    resource: ResourceName,
    cost: Cost,
    #[serde(default)]
    actual: Option<Cost>,
    #[serde(default)]
    held: Option<Seconds>,
}

/// A record of a server's log, written by `serve --log json --log-level debug`.
#[derive(Deserialize)]
struct LogRecord {
    timestamp: At,
    fields: Fields,
}

#[derive(Deserialize)]
struct Fields {
    entity: Option<EntityId>,
    resource: Option<ResourceName>,
    /// An object as text: the fields of a log are flat.
    cost: Option<String>,
    /// The request had limits of its own. Older servers do not log this.
    #[serde(default)]
    has_own_limits: bool,
}

/// A time: RFC 3339, or seconds since 1970.
struct At(Stamp);

impl<'de> Deserialize<'de> for At {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AtVisitor)
    }
}

struct AtVisitor;

impl Visitor<'_> for AtVisitor {
    type Value = At;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a time, such as \"2026-01-31T09:30:00Z\" or seconds since 1970")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<At, E> {
        text.parse().map(At).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, seconds: u64) -> Result<At, E> {
        #[expect(clippy::cast_precision_loss, reason = "inexact values are out of bounds")]
        self.visit_f64(seconds as f64)
    }

    fn visit_i64<E: Error>(self, seconds: i64) -> Result<At, E> {
        #[expect(clippy::cast_precision_loss, reason = "inexact values are out of bounds")]
        self.visit_f64(seconds as f64)
    }

    fn visit_f64<E: Error>(self, seconds: f64) -> Result<At, E> {
        if !(0.0..=SECONDS_MAX).contains(&seconds) {
            return Err(E::custom(format!(
                "{seconds} is not a time in seconds since 1970, outside 0..={SECONDS_MAX}"
            )));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
        let micros = (seconds * 1e6).round() as u64;
        Ok(At(Stamp::from_micros(micros)))
    }
}

/// Parses a line. Returns `None` for records of a server's log that are not requests. An error names the
/// invalid field.
pub(crate) fn line(text: &[u8], number: u64) -> Result<Option<Line>, String> {
    let error = match serde_json::from_slice::<Raw>(text) {
        Ok(Raw { at, entity, resource, cost, actual, held }) => {
            let subject = Subject { entity: entity.0, resource: resource.0 };
            let held = held.unwrap_or_default().as_duration();
            return Ok(Some(Line { number, at: at.0, subject, cost, actual, held, origin: Origin::User }));
        }
        Err(error) => error,
    };
    match serde_json::from_slice::<LogRecord>(text) {
        Ok(logged) => of_server(logged, number),
        Err(_) => Err(wrong(text, &error)),
    }
}

fn of_server(logged: LogRecord, number: u64) -> Result<Option<Line>, String> {
    let Fields { entity: Some(entity), resource: Some(resource), cost: Some(cost), has_own_limits } =
        logged.fields
    else {
        return Ok(None);
    };
    let origin = if has_own_limits { Origin::OwnLimits } else { Origin::Server };
    let cost = serde_json::from_str(&cost)
        .map_err(|error| format!("`fields.cost`: {}", format::escape(&error.to_string())))?;
    let subject = Subject { entity: entity.0, resource: resource.0 };
    let at = logged.timestamp.0;
    Ok(Some(Line { number, at, subject, cost, actual: None, held: Duration::ZERO, origin }))
}

/// Describes an invalid line. Parses it a second time to find the field; valid lines do not pay for that.
fn wrong(text: &[u8], error: &serde_json::Error) -> String {
    let short: String = format::escape(&String::from_utf8_lossy(text)).chars().take(SHOWN_MAX).collect();
    if !error.is_data() {
        return format!("invalid JSON: `{short}`");
    }
    let value: Value = serde_json::from_slice(text).unwrap_or_default();
    if value.get("type").is_some() && value.get("cost").is_none() {
        return format!("this is an event of `watch --json`, which has no cost: `{short}`");
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let (field, sentence) = match serde_path_to_error::deserialize::<_, Raw>(&mut reader) {
        Ok(_) => (String::new(), error.to_string()),
        Err(error) => (error.path().to_string(), error.inner().to_string()),
    };
    let sentence = sentence.rsplit_once(" at line ").map_or(sentence.as_str(), |(sentence, _)| sentence);
    let field = if field == "." || field.is_empty() {
        String::new()
    } else {
        format!("`{}`: ", format::escape(&field))
    };
    format!("{field}{}", format::escape(sentence))
}

/// The report.
pub(crate) fn tally(tally: &Tally, rows: &[(Key, &Row)]) -> Json {
    let row = |(key, row): &(Key, &Row)| {
        let [entity, resource, limit] = key.words();
        json!({
            "entity": entity,
            "resource": resource,
            "limit": limit,
            "asked": row.asked,
            "granted": row.granted,
            "refused": row.refused,
            "first_refused": row.first.map(|at| at.to_string()),
            "longest_wait": match row.longest {
                LongestWait::For(span) => json!(span.as_secs_f64()),
                LongestWait::Never => Json::Null,
            },
            "is_never": row.longest == LongestWait::Never,
            "by": row.by,
        })
    };
    json!({
        "asked": tally.asked,
        "granted": tally.granted,
        "refused": tally.refused,
        "invalid": tally.invalid,
        "own_limits": tally.own_limits,
        "from": tally.first.map(|at| at.to_string()),
        "to": tally.last.map(|at| at.to_string()),
        "limits": rows.iter().map(row).collect::<Vec<_>>(),
        "left_out": tally.left_out,
    })
}
