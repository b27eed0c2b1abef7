//! Every metric of a server: its name, its type, its labels and what it is, in one table. `docs/metrics.md` has the same one.

use metrics::{KeyName, Recorder};
use metrics_exporter_prometheus::PrometheusRecorder;

/// What a metric is.
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
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a test compares them with the page and with what is told")
    )]
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, labels, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels: &[], help }
}

const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram, labels, help }
}

/// Every one.
pub(super) const METRICS: [Metric; 33] = [
    histogram(
        "tidegate_decision_seconds",
        &["verb"],
        "How long the limiter took to decide, waits for a limit apart.",
    ),
    counter("tidegate_granted_total", &[], "Leases and spends that were granted."),
    counter("tidegate_refused_total", &[], "Acquires and spends that a limit refused."),
    counter(
        "tidegate_refusals_total",
        &["limit"],
        "Refusals by the name of the limit that is short for longest.",
    ),
    counter(
        "tidegate_near_limit_total",
        &["limit"],
        "Grants that left a fifth of a limit or less, by its name.",
    ),
    counter("tidegate_degraded_total", &[], "Leases that were given without the store."),
    counter("tidegate_unsettled_total", &[], "Endings that the store never heard of."),
    gauge("tidegate_waiting", "Acquires that wait for a limit."),
    gauge("tidegate_settling", "Endings on their way to the store."),
    counter("tidegate_leases_granted_total", &[], "Leases that were handed out."),
    counter("tidegate_leases_ended_total", &["how"], "Leases that their holders have ended."),
    counter("tidegate_leases_expired_total", &["how"], "Leases that nobody has ended in their time."),
    gauge("tidegate_leases_open", "Leases that this server has handed out and has not seen end."),
    histogram("tidegate_store_seconds", &["verb"], "How long calls of the store took."),
    counter("tidegate_store_errors_total", &["verb", "kind"], "Calls of the store that failed."),
    gauge(
        "tidegate_clock_offset_seconds",
        "How far the store's time is ahead of its clock, because the clock stepped back.",
    ),
    counter("tidegate_policy_cache_hits_total", &[], "Policies that were remembered."),
    counter("tidegate_policy_cache_misses_total", &[], "Policies that were read."),
    gauge("tidegate_policy_cache_entries", "Policies that are remembered."),
    counter("tidegate_listener_panics_total", &[], "Panics of a listener in the program."),
    counter("tidegate_http_requests_total", &["method", "path", "kind"], "Answers to requests."),
    histogram("tidegate_http_request_seconds", &["method", "path"], "How long answers took."),
    gauge("tidegate_http_requests_under_way", "Requests that are under way."),
    counter("tidegate_http_busy_total", &[], "Requests that were refused because too many were under way."),
    counter("tidegate_http_panics_total", &[], "Requests that panicked."),
    counter("tidegate_rls_requests_total", &["answer"], "Requests of Envoy's rate limit service."),
    counter("tidegate_rls_descriptors_total", &["kind"], "Descriptors of Envoy's that were no plain draw."),
    histogram("tidegate_rls_request_seconds", &[], "How long answers to Envoy took."),
    gauge("tidegate_event_listeners", "Those who listen to events."),
    gauge("tidegate_up_since_seconds", "Since when the server runs, as a time of Unix."),
    gauge(
        "tidegate_tls_certificate_expiry_seconds",
        "Until when the certificate is good, as a time of Unix.",
    ),
    counter("tidegate_tls_reloads_total", &["result"], "Times that the files of TLS were read again."),
    counter("tidegate_tls_handshakes_failed_total", &["kind"], "Connections that never came to speak TLS."),
];

/// Says of each what it is.
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

/// The same text in an order that does not change: metrics by name, and series by their labels.
pub(super) fn sorted(text: &str) -> String {
    let mut blocks: Vec<&str> = text.split("\n\n").filter(|block| !block.trim().is_empty()).collect();
    blocks.sort_unstable();
    let mut sorted = String::with_capacity(text.len());
    for block in blocks {
        let (head, lines): (Vec<&str>, Vec<&str>) = block.lines().partition(|line| line.starts_with('#'));
        // The lines of a histogram stay together, with its buckets in their order.
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
    fn what_is_told_has_an_order_and_histograms_stay_whole() {
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
