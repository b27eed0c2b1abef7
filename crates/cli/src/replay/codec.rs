//! A line of a log, read once with the field that is wrong; and the answer for programs.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use serde_json::{Value, json};
use tidegate::{Stamp, Subject};
use tidegate_client::{Cost, EntityId, ResourceName, Seconds};

use super::log::{Line, Origin};
use super::tally::{Key, Longest, Row, Tally};
use crate::codec::Json;
use crate::words::shown;

/// The last second of the year 9999.
const SECONDS_MAX: f64 = 253_402_300_799.0;
/// So much of a line is repeated when it cannot be read.
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

/// A line of the log of a server, `serve --log json --log-level debug`.
#[derive(Deserialize)]
struct Logged {
    timestamp: At,
    fields: Fields,
}

#[derive(Deserialize)]
struct Fields {
    entity: Option<EntityId>,
    resource: Option<ResourceName>,
    /// An object as text: the fields of a log are flat.
    cost: Option<String>,
    /// The request brought limits of its own. Older servers do not say.
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
        #[expect(clippy::cast_precision_loss, reason = "what is not exact is out of bounds")]
        self.visit_f64(seconds as f64)
    }

    fn visit_i64<E: Error>(self, seconds: i64) -> Result<At, E> {
        #[expect(clippy::cast_precision_loss, reason = "what is not exact is out of bounds")]
        self.visit_f64(seconds as f64)
    }

    fn visit_f64<E: Error>(self, seconds: f64) -> Result<At, E> {
        if !(0.0..=SECONDS_MAX).contains(&seconds) {
            return Err(E::custom(format!(
                "{seconds} is no time in seconds since 1970, outside 0..={SECONDS_MAX}"
            )));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in bounds by then")]
        let micros = (seconds * 1e6).round() as u64;
        Ok(At(Stamp::from_micros(micros)))
    }
}

/// The line that a text says, nothing for what a server's log says of other things, or what is wrong with it and where.
pub(crate) fn line(text: &[u8], number: u64) -> Result<Option<Line>, String> {
    let error = match serde_json::from_slice::<Raw>(text) {
        Ok(Raw { at, entity, resource, cost, actual, held }) => {
            let subject = Subject { entity: entity.0, resource: resource.0 };
            let held = held.unwrap_or_default().as_duration();
            return Ok(Some(Line {
                number,
                at: at.0,
                subject,
                cost,
                actual,
                held,
                origin: Origin::Somebody,
            }));
        }
        Err(error) => error,
    };
    match serde_json::from_slice::<Logged>(text) {
        Ok(logged) => of_server(logged, number),
        Err(_) => Err(wrong(text, &error)),
    }
}

fn of_server(logged: Logged, number: u64) -> Result<Option<Line>, String> {
    let Fields { entity: Some(entity), resource: Some(resource), cost: Some(cost), has_own_limits } =
        logged.fields
    else {
        return Ok(None);
    };
    let origin = if has_own_limits { Origin::OwnLimits } else { Origin::Server };
    let cost = serde_json::from_str(&cost)
        .map_err(|error| format!("`fields.cost`: {}", shown(&error.to_string())))?;
    let subject = Subject { entity: entity.0, resource: resource.0 };
    let at = logged.timestamp.0;
    Ok(Some(Line { number, at, subject, cost, actual: None, held: Duration::ZERO, origin }))
}

/// What is wrong with a text: it is read again to find out where, and only what is wrong costs this.
fn wrong(text: &[u8], error: &serde_json::Error) -> String {
    let short: String = shown(&String::from_utf8_lossy(text)).chars().take(SHOWN_MAX).collect();
    if !error.is_data() {
        return format!("it is no JSON: `{short}`");
    }
    let value: Value = serde_json::from_slice(text).unwrap_or_default();
    if value.get("type").is_some() && value.get("cost").is_none() {
        return format!("it is an event, as `watch --json` writes it, and no event tells a cost: `{short}`");
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let (field, sentence) = match serde_path_to_error::deserialize::<_, Raw>(&mut reader) {
        Ok(_) => (String::new(), error.to_string()),
        Err(error) => (error.path().to_string(), error.inner().to_string()),
    };
    let sentence = sentence.rsplit_once(" at line ").map_or(sentence.as_str(), |(sentence, _)| sentence);
    let field =
        if field == "." || field.is_empty() { String::new() } else { format!("`{}`: ", shown(&field)) };
    format!("{field}{}", shown(sentence))
}

/// What came of it.
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
                Longest::For(span) => json!(span.as_secs_f64()),
                Longest::Never => Json::Null,
            },
            "is_never": row.longest == Longest::Never,
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
