//! Tests that the dashboard queries only metrics that a server exports.

use std::collections::BTreeSet;

use crate::kit::codec::{self, Value};

const BOARD: &str = include_str!("../../../../docs/grafana/tidegate.json");
const PAGE: &str = include_str!("../../../../docs/metrics.md");

/// Returns the documented metrics. A test next to the metrics compares them with the exported ones.
fn documented() -> BTreeSet<String> {
    let (_, page) = PAGE.split_once("\n## `tidegate serve`\n").expect("the page has this part");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `tidegate_")?.split_once("` | "));
    let names = rows.flat_map(|(name, rest)| {
        let name = format!("tidegate_{name}");
        if rest.starts_with("histogram ") {
            ["_bucket", "_sum", "_count"].map(|part| name.clone() + part).to_vec()
        } else {
            vec![name]
        }
    });
    names.collect()
}

/// Returns every query of a dashboard, with its panel.
fn queries(board: &Value) -> Vec<(String, String)> {
    fn walk(panel: &Value, queries: &mut Vec<(String, String)>) {
        let title = panel["title"].as_str().unwrap_or_default();
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push((title.to_owned(), target["expr"].as_str().expect("a query").to_owned()));
        }
        panel["panels"].as_array().into_iter().flatten().for_each(|panel| walk(panel, queries));
    }
    let mut queries = Vec::new();
    walk(board, &mut queries);
    for variable in board["templating"]["list"].as_array().expect("variables") {
        if let Some(definition) = variable["definition"].as_str() {
            queries.push((variable["name"].to_string(), definition.to_owned()));
        }
    }
    queries
}

/// Returns the metric names in a query.
fn names(query: &str) -> BTreeSet<String> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("tidegate_")).map(str::to_owned).collect()
}

/// Whether the brackets of a query are balanced, outside of strings.
fn is_balanced(query: &str) -> bool {
    let mut open = Vec::new();
    let mut is_text = false;
    for letter in query.chars() {
        match letter {
            '"' => is_text = !is_text,
            _ if is_text => {}
            '(' => open.push(')'),
            '[' => open.push(']'),
            '{' => open.push('}'),
            ')' | ']' | '}' if open.pop() != Some(letter) => return false,
            _ => {}
        }
    }
    open.is_empty() && !is_text
}

#[test]
fn dashboard_queries_use_documented_metrics() {
    let board: Value = codec::from_str(BOARD).unwrap();
    let (documented, queries) = (documented(), queries(&board));
    assert!(queries.len() > 30 && documented.len() > 30);
    let mut shown = BTreeSet::new();
    for (place, query) in &queries {
        let names = names(query);
        assert!(!names.is_empty() && is_balanced(query), "{place}: {query}");
        for name in names {
            assert!(documented.contains(&name), "{place}: there is no {name}");
            shown.insert(name);
        }
    }
    // The most important metrics are on the dashboard.
    for name in [
        "tidegate_granted_total",
        "tidegate_refusals_total",
        "tidegate_near_limit_total",
        "tidegate_decision_seconds_bucket",
        "tidegate_store_seconds_bucket",
        "tidegate_store_errors_total",
        "tidegate_leases_open",
        "tidegate_http_requests_total",
        "tidegate_tls_certificate_expiry_seconds",
        "tidegate_rls_requests_total",
    ] {
        assert!(shown.contains(name), "{name}");
    }
}

#[test]
fn dashboard_is_importable() {
    let board: Value = codec::from_str(BOARD).unwrap();
    assert!(board["schemaVersion"].as_u64() >= Some(39) && board["id"].is_null());
    let panels = board["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let sources = panel["targets"].as_array().unwrap().iter().chain([panel]);
        for source in sources {
            assert_eq!(source["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        }
    }
    assert_eq!(board["templating"]["list"][0]["type"], "datasource");
}

#[test]
fn unbalanced_queries_are_detected() {
    for (query, expected) in [
        ("sum(rate(a{b=\"(\"}[5m]))", true),
        ("sum(a", false),
        ("sum(a])", false),
        ("a{b=\"c}", false),
        (")(", false),
    ] {
        assert_eq!(is_balanced(query), expected, "{query}");
    }
}
