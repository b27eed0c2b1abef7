//! The JSON output of `watch`: one object per line.

use serde_json::{Value, json};
use tidegate::{EntityId, ResourceName, Stamp, Subject};
use tidegate_client::{Event, Snapshot};

use super::model::{Health, Totals, Update};
use super::subjects::Level;
use crate::codec::{self, Json};

/// The lines of an update; `at` is when this program received it.
pub(crate) fn update(update: &Update, at: Stamp) -> Vec<Json> {
    let line = |kind: &str, mut body: Json| {
        body["type"] = json!(kind);
        body["at"] = json!(at.to_string());
        body
    };
    match update {
        Update::Up => vec![line("up", json!({}))],
        Update::Lost { why } => vec![line("lost", json!({ "why": why }))],
        Update::Totals(totals) => vec![line("totals", of_totals(totals))],
        Update::Silent { why } => vec![line("silent", json!({ "why": why }))],
        Update::Unknown { count } => vec![line("unknown", json!({ "count": count }))],
        Update::Busiest(busiest) => {
            let grants = |(subject, granted): &(Subject, u64)| json!({ "entity": subject.entity.as_str(), "resource": subject.resource.as_str(), "granted": granted });
            vec![line("busiest", json!({ "subjects": busiest.iter().map(grants).collect::<Vec<_>>() }))]
        }
        Update::Upstreams(upstreams) => vec![line("upstreams", codec::upstreams(upstreams))],
        Update::HasMore { has_more } => vec![line("looked", json!({ "has_more": has_more }))],
        Update::Store(health) => vec![line("store", of_health(health))],
        Update::Event(event) => vec![line(event.name(), of_event(event))],
        Update::Levels { subject, levels } => vec![line("levels", of_levels(subject, levels))],
        Update::Scan { subjects, has_more } => {
            let levels = subjects.iter().map(|(subject, levels)| line("levels", of_levels(subject, levels)));
            levels.chain([line("looked", json!({ "has_more": has_more }))]).collect()
        }
    }
}

/// A snapshot of a server.
pub(crate) fn snapshot(snapshot: &Snapshot, health: &Health, subjects: &[(Subject, Vec<Level>)]) -> Json {
    json!({ "snapshot": value(snapshot), "store": of_health(health), "subjects": of_subjects(subjects) })
}

/// A scan of a store.
pub(crate) fn scan(health: &Health, subjects: &[(Subject, Vec<Level>)], has_more: bool) -> Json {
    json!({ "store": of_health(health), "subjects": of_subjects(subjects), "has_more": has_more })
}

fn of_subjects(subjects: &[(Subject, Vec<Level>)]) -> Vec<Json> {
    subjects.iter().map(|(subject, levels)| of_levels(subject, levels)).collect()
}

fn value(of: &impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

fn of_event(event: &Event) -> Json {
    value(event)
}

fn of_totals(totals: &Totals) -> Json {
    json!({
        "up_since": totals.up_since.to_string(),
        "granted": totals.granted,
        "refused": totals.refused,
        "degraded": totals.degraded,
        "unsettled": totals.unsettled,
        "expired": totals.expired,
        "open_leases": totals.open_leases,
        "waiting": totals.waiting,
        "store_away": totals.store_away.map(|span| span.as_secs_f64()),
    })
}

fn of_health(health: &Health) -> Json {
    match health {
        Health::Good { engine, version, took } => {
            json!({ "is_away": false, "engine": engine, "version": version, "took": took.as_secs_f64() })
        }
        Health::Away { why } => json!({ "is_away": true, "why": why }),
    }
}

fn of_levels(subject: &Subject, levels: &[Level]) -> Json {
    let level = |level: &Level| {
        json!({
            "limit": level.name.to_string(),
            "of": level.of.as_ref().map(EntityId::as_str),
            "available": level.available,
            "burst": level.burst,
            "amount": level.amount,
            "period": level.period.as_secs_f64(),
            "consumed": level.consumed,
        })
    };
    json!({
        "entity": subject.one_entity().map(EntityId::as_str),
        "resource": subject.one_resource().map(ResourceName::as_str),
        "limits": levels.iter().map(level).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::model_tests::{level, subject};
    use super::*;

    #[test]
    fn level_has_its_limit_and_owner_and_scan_has_more() {
        let subjects = vec![(subject("kid", "gpt"), vec![level("rpm of acme", 1, 2, 3)])];
        let lines = update(&Update::Scan { subjects, has_more: true }, Stamp::ZERO);
        assert_eq!((&lines[0]["type"], &lines[0]["entity"]), (&json!("levels"), &json!("kid")));
        let limit = &lines[0]["limits"][0];
        assert_eq!((&limit["limit"], &limit["of"]), (&json!("rpm"), &json!("acme")));
        assert_eq!((&lines[1]["type"], &lines[1]["has_more"]), (&json!("looked"), &json!(true)));
        let unknown = update(&Update::Unknown { count: 2 }, Stamp::ZERO);
        assert_eq!((&unknown[0]["type"], &unknown[0]["count"]), (&json!("unknown"), &json!(2)));
    }
}
