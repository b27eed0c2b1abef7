//! The exported metrics and `docs/metrics.md` agree in both directions, and the number of limit names is
//! bounded.

use std::collections::{BTreeMap, BTreeSet};

use metrics_exporter_prometheus::PrometheusBuilder;
use tidegate::store::wrap::{CallEnd, Verb, Watcher as _};
use tidegate::{Limit, Limiter, Memory, Policy, Scope, StoreError, Subject};
use tidegate_core::limit::name::LimitName;

use super::catalog::METRICS;
use super::*;
use crate::tls::TlsStats;

const PAGE: &str = include_str!("../../../../docs/metrics.md");

/// Labels with their possible values; an empty set allows any value.
type Labels = BTreeMap<String, BTreeSet<String>>;

/// The server's rows of the page: type and labels by name.
fn documented() -> BTreeMap<String, (String, Labels)> {
    let (_, page) = PAGE.split_once("\n## `tidegate serve`\n").expect("the page has this part");
    let bare = |word: &str| word.trim().trim_matches('`').to_owned();
    let labels = |cell: &str| -> Labels {
        let label = |part: &str| {
            let (name, values) = part.split_once('=').unwrap_or((part, ""));
            (bare(name), values.split(',').map(bare).filter(|value| !value.is_empty()).collect())
        };
        cell.split(';').filter(|part| !part.trim().is_empty()).map(label).collect()
    };
    let rows = page.lines().filter(|line| line.starts_with("| `tidegate_"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        (bare(cells[0]), (bare(cells[1]), labels(cells[2])))
    })
    .collect()
}

/// The exported metrics: type and labels by name, without the `le` label of buckets.
fn exported(text: &str) -> BTreeMap<String, (String, Labels)> {
    let mut exported: BTreeMap<String, (String, Labels)> = BTreeMap::new();
    let mut name = "";
    for line in text.lines() {
        if let Some(head) = line.strip_prefix("# TYPE ") {
            let (of, kind) = head.split_once(' ').expect("a name and a type");
            name = of;
            assert!(text.contains(&format!("# HELP {name} ")), "{name} has a help text");
            exported.insert(name.to_owned(), (kind.to_owned(), Labels::new()));
        } else if let Some((_, rest)) = line.split_once('{') {
            let (labels, _) = rest.rsplit_once('}').expect("a whole line");
            let known = &mut exported.get_mut(name).expect("a type before it").1;
            for label in labels.split("\",") {
                let (key, value) = label.split_once("=\"").expect("a label");
                if key != "le" {
                    known.entry(key.to_owned()).or_default().insert(value.trim_end_matches('"').to_owned());
                }
            }
        }
    }
    exported
}

/// Exercises every metric on one server.
async fn exercised() -> String {
    let meters = StoreMeters::new();
    let limiter = Limiter::over(meters.watch(Arc::new(Memory::new()))).build().unwrap();
    let policy = Policy::new([Limit::per_day("rpm", 10)]).unwrap();
    limiter.admin("test").set_policy(Scope::System, policy).await.unwrap();
    let state = State::new(limiter).await.unwrap().measured_by(meters.clone());
    let all = state.meters();
    let route = all.route("GET", "/v1/entities");
    for status in [200, 404, 429, 500] {
        route.answered(status, Duration::from_millis(2));
    }
    for what in [
        Decision::Acquire,
        Decision::AcquireWithin,
        Decision::Spend,
        Decision::Extend,
        Decision::Adjust,
        Decision::Renew,
        Decision::Settle,
        Decision::Cancel,
    ] {
        all.decided(what, Duration::from_micros(3));
    }
    let subject = ("acme", "gpt");
    let few = state.limiter().request(subject, &[("rpm", 7)]).spend_with_balances().await.unwrap();
    all.granted(&few);
    let left = state.limiter().request(subject, &[("rpm", 1)]).spend_with_balances().await.unwrap();
    all.granted(&left);
    all.refused(&state.limiter().spend(subject, [("rpm", 3)]).await.unwrap_err());
    (0..3).for_each(|_| all.opened());
    all.ended(Decision::Settle);
    all.ended(Decision::Cancel);
    all.busy();
    for listener in ["api", "envoy", "metrics"] {
        all.connections(listener).open.increment(1.0);
    }
    all.call_expired("openai");
    all.panicked();
    all.swept(SweepReport::default());
    all.clock_offset(Duration::ZERO);
    for answer in ["ok", "over_limit", "refused", "failed"] {
        all.counter("tidegate_rls_requests_total", &[("answer", answer)]).increment(1);
    }
    for kind in ["shadowed", "unknown", "unlimited", "invalid", "reported", "refunded", "lost", "unasked"] {
        all.counter("tidegate_rls_descriptors_total", &[("kind", kind)]).increment(1);
    }
    all.histogram("tidegate_rls_request_seconds", &[]).record(0.001);
    all.secured(&TlsStats {
        expires_at: Stamp::from_secs(2_000_000_000),
        reloads: [1, 2],
        failures: [3, 4, 5],
    });
    let what = || "x".to_owned();
    for error in [
        StoreError::unavailable("x"),
        StoreError::TimedOut { millis: 1 },
        StoreError::Busy { place: what(), waiting_max: 1, retry_after: Duration::ZERO },
        StoreError::Closed { what: what() },
        StoreError::Denied { what: what() },
        StoreError::Corrupt { what: what() },
        StoreError::Full { what: "x", max: 1 },
        StoreError::Invalid { what: what() },
    ] {
        meters.0.ended(Verb::Draw, Duration::ZERO, CallEnd::Failed(&error));
    }
    meters.0.ended(Verb::Draw, Duration::ZERO, CallEnd::GivenUp);
    all.show(&state)
}

#[tokio::test]
async fn exported_metrics_match_docs() {
    let (text, documented) = (exercised().await, documented());
    let kind = |kind: catalog::Kind| format!("{kind:?}").to_lowercase();
    let known: BTreeMap<String, (String, BTreeSet<String>)> = METRICS
        .iter()
        .map(|metric| {
            let labels = metric.labels.iter().map(|label| (*label).to_owned()).collect();
            (metric.name.to_owned(), (kind(metric.kind), labels))
        })
        .collect();
    let bare = |rows: &BTreeMap<String, (String, Labels)>| -> BTreeMap<String, (String, BTreeSet<String>)> {
        let row = |(name, (kind, labels)): (&String, &(String, Labels))| {
            (name.clone(), (kind.clone(), labels.keys().cloned().collect()))
        };
        rows.iter().map(row).collect()
    };
    let exported = exported(&text);
    assert_eq!(known.len(), METRICS.len(), "each name once");
    assert_eq!(bare(&exported), known);
    assert_eq!(bare(&documented), known);
    for (name, (_, labels)) in &exported {
        for (label, values) in labels {
            let listed = &documented[name].1[label];
            assert!(
                listed.is_empty() || values == listed,
                "{name} {label}: {values:?}, and the page {listed:?}"
            );
        }
    }
}

#[tokio::test]
async fn exported_metrics_match_events() {
    let text = exercised().await;
    for line in [
        "tidegate_granted_total 2",
        "tidegate_refused_total 1",
        "tidegate_refusals_total{limit=\"rpm\"} 1",
        "tidegate_near_limit_total{limit=\"rpm\"} 1",
        "tidegate_near_limit_total{limit=\"other\"} 0",
        "tidegate_leases_granted_total 3",
        "tidegate_leases_open 1",
        "tidegate_decision_seconds_bucket{verb=\"spend\",le=\"0.000005\"} 1",
        "tidegate_store_errors_total{verb=\"draw\",kind=\"given_up\"} 1",
        "tidegate_store_seconds_count{verb=\"spend\"} 3",
        "tidegate_tls_certificate_expiry_seconds 2000000000",
        "tidegate_upstream_permits_expired_total{upstream=\"openai\"} 1",
        "tidegate_upstream_outcomes_total{upstream=\"openai\",outcome=\"ignored\"} 1",
        "tidegate_upstream_outcomes_total{upstream=\"other\",outcome=\"ignored\"} 0",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line} in {text}");
    }
    assert_eq!(catalog::sorted(&text), text);
}

#[test]
fn open_leases_never_underflow() {
    let meters = Meters::new();
    meters.ended(Decision::Settle);
    assert_eq!(meters.open_leases(), 0);
    meters.opened();
    meters.opened();
    meters.ended(Decision::Cancel);
    assert_eq!(meters.open_leases(), 1);
}

#[test]
fn limit_names_beyond_bound_share_one_counter() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let (limits, handle) = (LimitMeters::new(&recorder), recorder.handle());
    let balance = |limit: &str, available| Balance {
        subject: Subject::new("acme", "gpt").unwrap(),
        limit: LimitName::new(limit).unwrap(),
        available,
        burst: 10,
        amount: 10,
        period: Duration::from_secs(1),
        consumed: 0,
        asked: 0,
        retry_after: None,
    };
    for round in 0..2 {
        for number in 0..100 {
            // Balances above a fifth are not counted.
            limits.granted(&recorder, &[balance(&format!("l{number}"), 2), balance("far", 3)]);
        }
        let text = handle.render();
        let count = text.lines().filter(|line| line.starts_with("tidegate_near_limit_total{")).count();
        assert_eq!(count, 65);
        assert!(
            text.contains(&format!("tidegate_near_limit_total{{limit=\"l63\"}} {}", round + 1)),
            "{text}"
        );
        assert!(text.contains(&format!("tidegate_near_limit_total{{limit=\"other\"}} {}", 36 * (round + 1))));
    }
    limits.granted(&recorder, &[balance("l1", i64::MIN)]);
}
