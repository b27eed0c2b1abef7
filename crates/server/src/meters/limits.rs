//! Counters per limit name, with a bounded number of names and one counter for the rest.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use metrics::Counter;
use metrics_exporter_prometheus::PrometheusRecorder;
use tidegate::{Balance, LimitError};
use tidegate_core::limit::name::LimitName;

use super::counter;

/// Limit names with their own counters. Policy writers choose the names, and each name takes memory here and
/// in Prometheus.
const NAMES_MAX: usize = 64;
/// The label of all other limits; a limit with this name is counted with them.
const OTHER: &str = "other";

/// Counters by limit name.
pub(super) struct LimitMeters {
    known: RwLock<HashMap<LimitName, Counters>>,
    other: Counters,
}

#[derive(Clone)]
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
        Self { known: RwLock::default(), other: Counters::new(recorder, OTHER) }
    }

    pub(super) fn refused(&self, recorder: &PrometheusRecorder, error: &LimitError) {
        if let Some(line) = error.limited().and_then(|limited| limited.primary()) {
            self.count(recorder, &line.balance.limit, |counters| counters.refused.increment(1));
        }
    }

    pub(super) fn granted(&self, recorder: &PrometheusRecorder, left: &[Balance]) {
        for balance in left.iter().filter(|balance| is_near(balance)) {
            self.count(recorder, &balance.limit, |counters| counters.near.increment(1));
        }
    }

    /// Fast path: a read lock for a known name. A new name takes the write lock once.
    fn count(&self, recorder: &PrometheusRecorder, limit: &LimitName, count: impl FnOnce(&Counters)) {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = known.get(limit) {
            return count(counters);
        }
        let is_full = known.len() >= NAMES_MAX;
        drop(known);
        if is_full {
            return count(&self.other);
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= NAMES_MAX && !known.contains_key(limit) {
            return count(&self.other);
        }
        count(known.entry(limit.clone()).or_insert_with(|| Counters::new(recorder, limit.as_str())));
    }
}

/// Whether at most a fifth of the burst is available.
fn is_near(balance: &Balance) -> bool {
    i128::from(balance.available) * 5 <= i128::from(balance.burst)
}
