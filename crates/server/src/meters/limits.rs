//! Counters per limit name.

use metrics::Counter;
use metrics_exporter_prometheus::PrometheusRecorder;
use tidegate::{Balance, LimitError};

use super::by_name::ByName;
use super::counter;

/// Counters by limit name.
pub(super) struct LimitMeters(ByName<Counters>);

struct Counters {
    refused: Counter,
    near: Counter,
}

impl Counters {
    fn new(recorder: &PrometheusRecorder, limit: &str) -> Self {
        let of = |name| counter(recorder, name, &[("limit", limit)]);
        Self { refused: of("tidegate_refusals_total"), near: of("tidegate_near_limit_total") }
    }
}

impl LimitMeters {
    pub(super) fn new(recorder: &PrometheusRecorder) -> Self {
        Self(ByName::new(recorder, Counters::new))
    }

    pub(super) fn refused(&self, recorder: &PrometheusRecorder, error: &LimitError) {
        if let Some(line) = error.limited().and_then(|limited| limited.primary()) {
            self.0.with(recorder, line.balance.limit.as_str(), |counters| counters.refused.increment(1));
        }
    }

    pub(super) fn granted(&self, recorder: &PrometheusRecorder, left: &[Balance]) {
        for balance in left.iter().filter(|balance| is_near(balance)) {
            self.0.with(recorder, balance.limit.as_str(), |counters| counters.near.increment(1));
        }
    }
}

/// Whether at most a fifth of the burst is available.
fn is_near(balance: &Balance) -> bool {
    i128::from(balance.available) * 5 <= i128::from(balance.burst)
}
