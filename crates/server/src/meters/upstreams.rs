//! Metrics of upstreams that callers get permits for.

use std::sync::{Mutex, PoisonError};

use metrics::{Counter, Gauge, Recorder as _};
use metrics_exporter_prometheus::PrometheusRecorder;
use tidegate::{Cause, KeyView, Kind, Outcome, PerSecond};

use super::by_name::ByName;
use super::{HERE, counter, key};

const OUTCOMES: [&str; 6] = ["success", "throttled", "server", "network", "other", "ignored"];

/// Metrics by the name of an upstream.
pub(super) struct UpstreamMeters(ByName<Series>);

struct Series {
    outcomes: [Counter; 6],
    expired: Counter,
    /// Rate, slots, in flight, waiting.
    levels: [Gauge; 4],
    /// The sums of the next output.
    sums: Mutex<[f64; 4]>,
}

impl Series {
    fn new(recorder: &PrometheusRecorder, upstream: &str) -> Self {
        let labels = [("upstream", upstream)];
        let outcome = |outcome| {
            let labels = [("upstream", upstream), ("outcome", outcome)];
            counter(recorder, "tidegate_upstream_outcomes_total", &labels)
        };
        let names = [
            "tidegate_upstream_rate",
            "tidegate_upstream_slots",
            "tidegate_upstream_in_flight",
            "tidegate_upstream_waiting",
        ];
        Self {
            outcomes: OUTCOMES.map(outcome),
            expired: counter(recorder, "tidegate_upstream_permits_expired_total", &labels),
            levels: names.map(|name| recorder.register_gauge(&key(name, &labels), &HERE)),
            sums: Mutex::default(),
        }
    }
}

impl UpstreamMeters {
    pub(super) fn new(recorder: &PrometheusRecorder) -> Self {
        Self(ByName::new(recorder, Series::new))
    }

    pub(super) fn settled(&self, recorder: &PrometheusRecorder, upstream: &str, outcome: &Outcome) {
        let at = match outcome.blame() {
            None if outcome.kind() == Kind::Ignored => 5,
            None => 0,
            Some(Cause::Throttled) => 1,
            Some(Cause::Server) => 2,
            Some(Cause::Network) => 3,
            Some(_) => 4,
        };
        self.0.with(recorder, upstream, |series| series.outcomes[at].increment(1));
    }

    pub(super) fn expired(&self, recorder: &PrometheusRecorder, upstream: &str) {
        self.settled(recorder, upstream, &Outcome::ignored());
        self.0.with(recorder, upstream, |series| series.expired.increment(1));
    }

    /// Sets the gauges: those of an upstream that is gone become 0.
    pub(super) fn levels(&self, recorder: &PrometheusRecorder, views: &[KeyView<String>]) {
        for KeyView { key, throttle, .. } in views {
            let rate = throttle.rate.map_or(0.0, PerSecond::as_f64);
            let counts = [throttle.slots.unwrap_or(0), throttle.in_flight, throttle.waiting].map(f64::from);
            let levels = [rate].into_iter().chain(counts);
            self.0.with(recorder, key, |series| {
                let mut sums = series.sums.lock().unwrap_or_else(PoisonError::into_inner);
                sums.iter_mut().zip(levels).for_each(|(sum, level)| *sum += level);
            });
        }
        self.0.each(|series| {
            let sums = std::mem::take(&mut *series.sums.lock().unwrap_or_else(PoisonError::into_inner));
            series.levels.iter().zip(sums).for_each(|(gauge, sum)| gauge.set(sum));
        });
    }
}
