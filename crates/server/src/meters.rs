//! Prometheus metrics of a server. They never contain names of entities, resources or tokens.

mod by_name;
mod catalog;
mod connections;
mod limits;
mod store;
mod upstreams;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tidegate::store::SweepReport;
use tidegate::{Balance, LimitError, Outcome, Stamp};

use crate::log_throttle;
use crate::state::State;
use crate::tls::TlsStats;
pub use connections::{ConnectionCounts, ConnectionMeters};
use limits::LimitMeters;
pub use store::StoreMeters;
use upstreams::UpstreamMeters;

/// Histogram buckets, in seconds.
const SECONDS: [f64; 12] = [0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

/// Histogram buckets of decisions, which take microseconds with an in-process store.
const DECISION_SECONDS: [f64; 13] =
    [0.000_002, 0.000_005, 0.000_01, 0.000_05, 0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0];

const HERE: Metadata<'static> = Metadata::new("tidegate_server", Level::INFO, Some("tidegate_server"));

/// The metrics of one server.
pub(crate) struct Meters {
    recorder: Arc<PrometheusRecorder>,
    handle: PrometheusHandle,
    decisions: [Histogram; 8],
    limits: LimitMeters,
    upstreams: UpstreamMeters,
    leases: Leases,
    expired: [Counter; 2],
    busy: Counter,
    panics: Counter,
}

/// The kind of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    Acquire,
    /// May wait in the queue, so it has a label of its own.
    AcquireWithin,
    Spend,
    Extend,
    Adjust,
    Renew,
    Settle,
    Cancel,
}

const DECISIONS: [&str; 8] =
    ["acquire", "acquire_within", "spend", "extend", "adjust", "renew", "settle", "cancel"];

/// Lease counters of this process.
struct Leases {
    granted: Counter,
    ended: [Counter; 2],
    open: AtomicU64,
}

/// The metrics of one route.
pub(crate) struct RouteMeters {
    /// Responses by status: 2xx and 3xx, 4xx except 429, 429, 5xx.
    answers: [Counter; 4],
    seconds: Histogram,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let suffix = Matcher::Suffix("_seconds".to_owned());
        let builder = PrometheusBuilder::new();
        // `set_buckets_for_metric` fails only for empty buckets.
        let builder = builder.set_buckets_for_metric(suffix, &SECONDS).unwrap_or_default();
        let decision = Matcher::Full("tidegate_decision_seconds".to_owned());
        let builder = builder.set_buckets_for_metric(decision, &DECISION_SECONDS).unwrap_or_default();
        let recorder = builder.build_recorder();
        catalog::describe(&recorder);
        let handle = recorder.handle();
        let decisions =
            DECISIONS.map(|verb| histogram(&recorder, "tidegate_decision_seconds", &[("verb", verb)]));
        let limits = LimitMeters::new(&recorder);
        let upstreams = UpstreamMeters::new(&recorder);
        let leases = Leases {
            granted: counter(&recorder, "tidegate_leases_granted_total", &[]),
            ended: ["settled", "cancelled"]
                .map(|how| counter(&recorder, "tidegate_leases_ended_total", &[("how", how)])),
            open: AtomicU64::new(0),
        };
        let expired = ["settled", "returned"]
            .map(|how| counter(&recorder, "tidegate_leases_expired_total", &[("how", how)]));
        let busy = counter(&recorder, "tidegate_http_busy_total", &[]);
        let panics = counter(&recorder, "tidegate_http_panics_total", &[]);
        let recorder = Arc::new(recorder);
        Self { recorder, handle, decisions, limits, upstreams, leases, expired, busy, panics }
    }

    pub(crate) fn route(&self, method: &str, path: &'static str) -> RouteMeters {
        let method = method.to_owned();
        let answers = ["ok", "client", "limited", "server"].map(|kind| {
            let labels = [("method", method.as_str()), ("path", path), ("kind", kind)];
            self.counter("tidegate_http_requests_total", &labels)
        });
        let labels = [("method", method.as_str()), ("path", path)];
        RouteMeters { answers, seconds: histogram(&self.recorder, "tidegate_http_request_seconds", &labels) }
    }

    pub(crate) fn connections(&self, listener: &'static str) -> ConnectionMeters {
        let closed = |reason: &str| {
            let labels = [("listener", listener), ("reason", reason)];
            self.counter("tidegate_connections_closed_total", &labels)
        };
        let open =
            self.recorder.register_gauge(&key("tidegate_connections_open", &[("listener", listener)]), &HERE);
        let (evicted, refused) = (closed("evicted"), closed("refused"));
        ConnectionMeters {
            listener,
            open,
            evicted,
            refused,
            stalled: closed("stalled"),
            flooded: closed("flooded"),
        }
    }

    pub(crate) fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        counter(&self.recorder, name, labels)
    }

    pub(crate) fn histogram(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
        histogram(&self.recorder, name, labels)
    }

    /// Records this store's calls here.
    pub(crate) fn measure(&self, store: &StoreMeters) {
        store.attach(Arc::clone(&self.recorder));
    }

    /// Records the latency of a decision.
    pub(crate) fn decided(&self, what: Decision, took: Duration) {
        self.decisions[what as usize].record(took);
    }

    /// A draw was granted; `left` holds the remaining balances.
    pub(crate) fn granted(&self, left: &[Balance]) {
        self.limits.granted(&self.recorder, left);
    }

    /// A draw was refused.
    pub(crate) fn refused(&self, error: &LimitError) {
        self.limits.refused(&self.recorder, error);
    }

    /// The permit of a call of this upstream was settled.
    pub(crate) fn call_settled(&self, upstream: &str, outcome: &Outcome) {
        self.upstreams.settled(&self.recorder, upstream, outcome);
    }

    /// The permit of a call of this upstream expired.
    pub(crate) fn call_expired(&self, upstream: &str) {
        self.upstreams.expired(&self.recorder, upstream);
    }

    /// A lease was granted.
    pub(crate) fn opened(&self) {
        self.leases.granted.increment(1);
        self.leases.open.fetch_add(1, Ordering::Relaxed);
    }

    /// The holder settled or cancelled a lease.
    pub(crate) fn ended(&self, what: Decision) {
        let [settled, cancelled] = &self.leases.ended;
        if what == Decision::Cancel { cancelled } else { settled }.increment(1);
        self.leases.close(1);
    }

    /// Leases granted and not yet ended by this process. Leases from before a restart, or ended by another
    /// server, are not tracked.
    pub(crate) fn open_leases(&self) -> u64 {
        self.leases.open.load(Ordering::Relaxed)
    }

    pub(crate) fn swept(&self, swept: SweepReport) {
        self.leases.close(swept.settled + swept.returned);
        let [settled, returned] = &self.expired;
        settled.increment(swept.settled);
        returned.increment(swept.returned);
    }

    pub(crate) fn clock_offset(&self, offset: Duration) {
        gauge(&self.recorder, "tidegate_clock_offset_seconds").set(offset.as_secs_f64());
    }

    /// The maximum number of concurrent requests is reached.
    pub(crate) fn busy(&self) {
        self.busy.increment(1);
    }

    pub(crate) fn panicked(&self) {
        self.panics.increment(1);
    }

    /// Folds recorded samples into their histograms; until then each sample occupies memory.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Renders all metrics as text.
    pub(crate) fn show(&self, state: &State) -> String {
        if let Some(tls) = state.tls() {
            self.secured(&tls.stats());
        }
        let counts = state.limiter().stats();
        let totals = [
            ("tidegate_granted_total", counts.granted),
            ("tidegate_refused_total", counts.refused),
            ("tidegate_degraded_total", counts.degraded),
            ("tidegate_unsettled_total", counts.unsettled),
            ("tidegate_debt_bound_total", counts.debt_bound),
            ("tidegate_listener_panics_total", counts.panics),
            ("tidegate_policy_cache_hits_total", counts.cache.hits),
            ("tidegate_policy_cache_misses_total", counts.cache.misses),
            ("tidegate_log_lines_suppressed_total", log_throttle::suppressed()),
        ];
        for (name, total) in totals {
            counter(&self.recorder, name, &[]).absolute(total);
        }
        let levels = [
            ("tidegate_leases_open", self.open_leases()),
            ("tidegate_http_requests_under_way", state.requests() as u64),
            ("tidegate_event_listeners", state.events().listeners().0 as u64),
            ("tidegate_up_since_seconds", state.up_since().as_micros() / 1_000_000),
            ("tidegate_waiting", counts.waiting as u64),
            ("tidegate_settling", counts.settling as u64),
            ("tidegate_policy_cache_entries", counts.cache.entries),
        ];
        for (name, level) in levels {
            // In-memory counts are far below 2^53.
            #[expect(clippy::cast_precision_loss, reason = "a few at most")]
            gauge(&self.recorder, name).set(level as f64);
        }
        self.upstreams.levels(&self.recorder, &state.upstreams().all());
        catalog::sorted(&self.handle.render())
    }
}

impl Meters {
    fn secured(&self, stats: &TlsStats) {
        let expires_at = stats.expires_at.since(Stamp::ZERO).as_secs_f64();
        gauge(&self.recorder, "tidegate_tls_certificate_expiry_seconds").set(expires_at);
        for (result, count) in ["done", "failed"].into_iter().zip(stats.reloads) {
            counter(&self.recorder, "tidegate_tls_reloads_total", &[("result", result)]).absolute(count);
        }
        for (kind, count) in ["broken", "timed_out", "plain"].into_iter().zip(stats.failures) {
            counter(&self.recorder, "tidegate_tls_handshakes_failed_total", &[("kind", kind)])
                .absolute(count);
        }
    }
}

impl Leases {
    fn close(&self, count: u64) {
        let less = |open: u64| Some(open.saturating_sub(count));
        let _ = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
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
    recorder.register_counter(&key(name, labels), &HERE)
}

fn histogram(
    recorder: &PrometheusRecorder,
    name: &'static str,
    labels: &[(&'static str, &str)],
) -> Histogram {
    recorder.register_histogram(&key(name, labels), &HERE)
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())).collect();
    Key::from_parts(name, labels)
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

#[cfg(test)]
mod tests;
