//! What a server counts, for Prometheus. No name of an entity, a resource or a token is in it.

use std::fmt;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tidegate::Limiter;
use tidegate::store::Swept;

/// Bounds of the times that are counted, in seconds.
const SECONDS: [f64; 12] = [0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

const HERE: Metadata<'static> = Metadata::new("tidegate_server", Level::INFO, Some("tidegate_server"));

/// Counters of one server.
pub(crate) struct Meters {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    expired: [Counter; 2],
    busy: Counter,
    panics: Counter,
}

/// Counters of one route.
pub(crate) struct RouteMeters {
    /// Answers by status: 2xx and 3xx, 4xx but 429, 429, 5xx.
    answers: [Counter; 4],
    seconds: Histogram,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let suffix = Matcher::Suffix("_seconds".to_owned());
        let builder = PrometheusBuilder::new();
        // The bounds are not empty, which is all that can be wrong with them.
        let builder = builder.set_buckets_for_metric(suffix, &SECONDS).unwrap_or_default();
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        let expired = ["settled", "returned"]
            .map(|how| counter(&recorder, "tidegate_leases_expired_total", &[("how", how)]));
        let busy = counter(&recorder, "tidegate_http_busy_total", &[]);
        let panics = counter(&recorder, "tidegate_http_panics_total", &[]);
        Self { recorder, handle, expired, busy, panics }
    }

    pub(crate) fn route(&self, method: &str, path: &'static str) -> RouteMeters {
        let method = method.to_owned();
        let answers = ["ok", "client", "limited", "server"].map(|kind| {
            let labels = [("method", method.as_str()), ("path", path), ("kind", kind)];
            counter(&self.recorder, "tidegate_http_requests_total", &labels)
        });
        let labels = vec![Label::new("method", method), Label::new("path", path)];
        let key = Key::from_parts("tidegate_http_request_seconds", labels);
        RouteMeters { answers, seconds: self.recorder.register_histogram(&key, &HERE) }
    }

    pub(crate) fn swept(&self, swept: Swept) {
        let [settled, returned] = &self.expired;
        settled.increment(swept.settled);
        returned.increment(swept.returned);
    }

    /// As many requests are under way as may.
    pub(crate) fn busy(&self) {
        self.busy.increment(1);
    }

    pub(crate) fn panicked(&self) {
        self.panics.increment(1);
    }

    /// Sums what was measured: until then every measurement takes room.
    pub(crate) fn tidy_up(&self) {
        self.handle.run_upkeep();
    }

    /// Everything as text.
    pub(crate) fn show(&self, limiter: &Limiter) -> String {
        let stats = limiter.stats();
        let totals = [
            ("tidegate_granted_total", stats.granted),
            ("tidegate_refused_total", stats.refused),
            ("tidegate_degraded_total", stats.degraded),
            ("tidegate_unsettled_total", stats.unsettled),
            ("tidegate_listener_panics_total", stats.panics),
            ("tidegate_policy_cache_hits_total", stats.cache.hits),
            ("tidegate_policy_cache_misses_total", stats.cache.misses),
        ];
        for (name, total) in totals {
            counter(&self.recorder, name, &[]).absolute(total);
        }
        let levels = [
            ("tidegate_waiting", stats.waiting as u64),
            ("tidegate_settling", stats.settling as u64),
            ("tidegate_policy_cache_entries", stats.cache.entries),
        ];
        for (name, level) in levels {
            // Counts in memory are far below where a double leaves out numbers.
            #[expect(clippy::cast_precision_loss, reason = "a few at most")]
            gauge(&self.recorder, name).set(level as f64);
        }
        self.handle.render()
    }
}

impl RouteMeters {
    pub(crate) fn answered(&self, status: u16, took: Duration) {
        let [ok, client, limited, server] = &self.answers;
        match status {
            ..400 => ok,
            429 => limited,
            400..500 => client,
            500.. => server,
        }
        .increment(1);
        self.seconds.record(took);
    }
}

fn counter(recorder: &PrometheusRecorder, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
    let labels: Vec<Label> =
        labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
    recorder.register_counter(&Key::from_parts(name, labels), &HERE)
}

fn gauge(recorder: &PrometheusRecorder, name: &'static str) -> Gauge {
    recorder.register_gauge(&Key::from_static_name(name), &HERE)
}

impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meters")
    }
}

impl fmt::Debug for RouteMeters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RouteMeters")
    }
}
