//! All metrics of a server: name, type, labels and help text in one table. `docs/metrics.md` has the same
//! table.

use metrics::{KeyName, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A metric.
#[derive(Debug)]
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compare them with the page and the output"))]
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, labels, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels: &[], help }
}

const fn labelled_gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, help }
}

const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram, labels, help }
}

/// All metrics.
pub(super) const METRICS: [Metric; 43] = [
    histogram(
        "tidegate_decision_seconds",
        &["verb"],
        "Latency of the limiter's decisions; acquire_within includes its wait.",
    ),
    counter("tidegate_granted_total", &[], "Granted leases and spends."),
    counter("tidegate_refused_total", &[], "Acquires and spends refused by a limit."),
    counter("tidegate_refusals_total", &["limit"], "Refusals by the limit with the longest retry delay."),
    counter(
        "tidegate_near_limit_total",
        &["limit"],
        "Grants that left at most a fifth of a limit, by limit.",
    ),
    counter("tidegate_degraded_total", &[], "Leases granted without the store."),
    counter("tidegate_unsettled_total", &[], "Lease endings that never reached the store."),
    counter(
        "tidegate_debt_bound_total",
        &[],
        "Settlements above the held units that left a bucket at the bound of its debt.",
    ),
    gauge("tidegate_waiting", "Acquires queued for a limit."),
    gauge("tidegate_settling", "Lease endings being sent to the store."),
    counter("tidegate_leases_granted_total", &[], "Granted leases."),
    counter("tidegate_leases_ended_total", &["how"], "Leases ended by their holders."),
    counter("tidegate_leases_expired_total", &["how"], "Leases that expired."),
    gauge("tidegate_leases_open", "Leases granted by this server and not yet ended."),
    histogram("tidegate_store_seconds", &["verb"], "Latency of store calls."),
    counter("tidegate_store_errors_total", &["verb", "kind"], "Failed store calls."),
    gauge(
        "tidegate_clock_offset_seconds",
        "How far the store's time is ahead of its clock, because the clock stepped back.",
    ),
    counter("tidegate_policy_cache_hits_total", &[], "Policy cache hits."),
    counter("tidegate_policy_cache_misses_total", &[], "Policy cache misses."),
    gauge("tidegate_policy_cache_entries", "Cached policies."),
    counter("tidegate_listener_panics_total", &[], "Panics in event listeners."),
    counter("tidegate_http_requests_total", &["method", "path", "kind"], "Responses to HTTP requests."),
    histogram("tidegate_http_request_seconds", &["method", "path"], "Latency of HTTP requests."),
    gauge("tidegate_http_requests_under_way", "HTTP requests in flight."),
    counter("tidegate_http_busy_total", &[], "Requests rejected because too many were in flight."),
    counter("tidegate_http_panics_total", &[], "Requests that panicked."),
    counter("tidegate_rls_requests_total", &["answer"], "Requests to Envoy's rate limit service."),
    counter("tidegate_rls_descriptors_total", &["kind"], "Envoy descriptors that were not plain draws."),
    histogram("tidegate_rls_request_seconds", &[], "Latency of requests from Envoy."),
    counter(
        "tidegate_upstream_outcomes_total",
        &["upstream", "outcome"],
        "Settled and expired permits, by the outcome of the call.",
    ),
    counter(
        "tidegate_upstream_permits_expired_total",
        &["upstream"],
        "Permits that were not settled in time.",
    ),
    labelled_gauge("tidegate_upstream_rate", &["upstream"], "Permits per second that the throttle grants."),
    labelled_gauge("tidegate_upstream_slots", &["upstream"], "Permits that may be out at a time."),
    labelled_gauge("tidegate_upstream_in_flight", &["upstream"], "Permits that are not settled."),
    labelled_gauge("tidegate_upstream_waiting", &["upstream"], "Requests that wait for a permit."),
    gauge("tidegate_event_listeners", "Event listeners."),
    labelled_gauge("tidegate_connections_open", &["listener"], "Open connections."),
    counter(
        "tidegate_connections_closed_total",
        &["listener", "reason"],
        "Connections that the server closed because of a bound.",
    ),
    counter("tidegate_log_lines_suppressed_total", &[], "Log lines suppressed because many were alike."),
    gauge("tidegate_up_since_seconds", "Start time of the server, as a Unix timestamp."),
    gauge("tidegate_tls_certificate_expiry_seconds", "Expiry of the certificate, as a Unix timestamp."),
    counter("tidegate_tls_reloads_total", &["result"], "Reloads of the TLS files."),
    counter("tidegate_tls_handshakes_failed_total", &["kind"], "Failed TLS handshakes."),
];

/// Registers the help text of every metric.
pub(super) fn describe(recorder: &PrometheusRecorder) {
    for metric in &METRICS {
        let (name, help) = (KeyName::from_const_str(metric.name), metric.help.into());
        match metric.kind {
            Kind::Counter => recorder.describe_counter(name, None, help),
            Kind::Gauge => recorder.describe_gauge(name, None, help),
            Kind::Histogram => recorder.describe_histogram(name, None, help),
        }
    }
}

/// Sorts the output: metrics by name, series by labels.
pub(super) fn sorted(text: &str) -> String {
    let mut blocks: Vec<&str> = text.split("\n\n").filter(|block| !block.trim().is_empty()).collect();
    blocks.sort_unstable();
    let mut sorted = String::with_capacity(text.len());
    for block in blocks {
        let (head, lines): (Vec<&str>, Vec<&str>) = block.lines().partition(|line| line.starts_with('#'));
        // The lines of a histogram stay together, with its buckets in order.
        let is_last =
            |line: &&str| !line.contains("_bucket{") && !line.split(['{', ' ']).next().is_some_and(is_sum);
        let mut series: Vec<&[&str]> = lines.split_inclusive(is_last).collect();
        series.sort_unstable();
        for line in head.iter().chain(series.into_iter().flatten()) {
            sorted.push_str(line);
            sorted.push('\n');
        }
        sorted.push('\n');
    }
    sorted
}

fn is_sum(name: &str) -> bool {
    name.ends_with("_sum")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_sorted_and_histograms_stay_whole() {
        let text = "# TYPE b counter\nb{x=\"2\"} 1\nb{x=\"1\"} 5\n\n# HELP a_s x\n# TYPE a_s histogram\n\
            a_s_bucket{v=\"y\",le=\"0.5\"} 1\na_s_bucket{v=\"y\",le=\"+Inf\"} 1\na_s_sum{v=\"y\"} 3\na_s_count{v=\"y\"} 1\n\
            a_s_bucket{v=\"x\",le=\"0.5\"} 1\na_s_bucket{v=\"x\",le=\"+Inf\"} 1\na_s_sum{v=\"x\"} 3\na_s_count{v=\"x\"} 1\n\n";
        let expected = "# HELP a_s x\n# TYPE a_s histogram\n\
            a_s_bucket{v=\"x\",le=\"0.5\"} 1\na_s_bucket{v=\"x\",le=\"+Inf\"} 1\na_s_sum{v=\"x\"} 3\na_s_count{v=\"x\"} 1\n\
            a_s_bucket{v=\"y\",le=\"0.5\"} 1\na_s_bucket{v=\"y\",le=\"+Inf\"} 1\na_s_sum{v=\"y\"} 3\na_s_count{v=\"y\"} 1\n\n\
            # TYPE b counter\nb{x=\"1\"} 5\nb{x=\"2\"} 1\n\n";
        assert_eq!(sorted(text), expected);
        assert_eq!(sorted(""), "");
    }
}
