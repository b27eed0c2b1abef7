//! What a throttle reports, as JSON: the feature `serde`.

use std::collections::BTreeSet;

use serde_json::{Value, json, to_value};
use tidegate::{
    Budget, Cause, Change, Circuit, Cost, Dimension, Event, Instant, Notice, Outcome, QuotaLevel, Rate,
    Reset, Slots, Throttle, Trip, Why,
};

use crate::kit::{millis, secs};

#[test]
fn events_are_serialized_with_their_name() {
    let at = Instant::from_nanos(1_500_000_000);
    let slowed = Event::Slowed {
        slots: Change { from: 8, to: 4 },
        interval: Change { from: millis(100), to: millis(250) },
        rate: None,
        why: Why::Latency { latency: secs(3), target: millis(1_500) },
    };
    let opened = Event::CircuitOpened { span: secs(5), why: Trip::Consecutive { failures: 3 } };
    let table = [
        (
            slowed,
            json!({
                "at": 1.5, "event": "slowed", "slots": {"from": 8, "to": 4},
                "interval": {"from": 0.1, "to": 0.25}, "rate": null,
                "why": {"latency": {"latency": 3.0, "target": 1.5}}
            }),
        ),
        (
            opened,
            json!({"at": 1.5, "event": "circuit_opened", "span": 5.0, "why": {"consecutive": {"failures": 3}}}),
        ),
        (Event::Drained, json!({"at": 1.5, "event": "drained"})),
    ];
    for (event, wanted) in table {
        assert_eq!(to_value(Notice::new(at, event)).unwrap(), wanted);
    }
}

#[test]
fn outcome_is_serialized_with_usage_and_quotas() {
    let level = QuotaLevel { limit: 500, remaining: 20, reset: Reset::Full(secs(58)), window: None };
    let outcome = Outcome::overload().because(Cause::Throttled).retry_after(millis(1_500));
    let outcome = outcome.with_malformed(2).quota(Dimension::Requests, level);
    let wanted = json!({
        "kind": "overload", "cause": "throttled", "retry_after": 1.5, "latency": null, "is_retried": false,
        "malformed": 2, "exceeded": null,
        "quotas": {
            "requests": {"limit": 500, "remaining": 20, "reset_after": 58.0, "window": null},
            "tokens": null, "input_tokens": null, "output_tokens": null
        },
        "spent": {"requests": 1, "tokens": 40, "bytes": 0, "input_tokens": 0, "output_tokens": 0}
    });
    assert_eq!(to_value(outcome.spent(Cost::from(40))).unwrap(), wanted);
}

/// Checks that a JSON object has all fields: their names are in the debug text.
fn has_all_fields(json: &Value, debug: &str) {
    let fields = debug.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    let fields: BTreeSet<_> = fields.map(|(name, _)| name).filter(|name| !name.starts_with(' ')).collect();
    let names: BTreeSet<_> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(names, fields);
}

#[test]
fn snapshot_is_serialized_with_all_fields() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(4))
        .rate(Rate::per_second(10))
        .budget(Budget::tokens(1_000, secs(60)))
        .circuit(Circuit::after_failures(3))
        .build()
        .unwrap();
    let _held = throttle.try_acquire(Cost::from(40)).unwrap();
    let snapshot = throttle.snapshot();
    let json = to_value(&snapshot).unwrap();
    has_all_fields(&json, &format!("{snapshot:#?}"));
    assert_eq!((&json["state"], &json["in_flight"]), (&Value::from("running"), &Value::from(1)));
    assert_eq!((&json["tokens_used"], &json["rate"]), (&Value::from(40), &Value::from(10.0)));
    assert_eq!(json["circuit"]["state"], "closed");
    assert_eq!(json["outcomes"]["successes"], 0);
    let control = Throttle::new().snapshot().control.unwrap();
    has_all_fields(&to_value(control).unwrap(), &format!("{control:#?}"));
}
