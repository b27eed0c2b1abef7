//! Metrics per name, with a bounded number of names and one set of metrics for the rest.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use metrics_exporter_prometheus::PrometheusRecorder;

/// Names with their own metrics. Users choose the names, and each takes memory here and in Prometheus.
const NAMES_MAX: usize = 64;
/// The label of all other names; one with this name is counted with them.
pub(super) const OTHER: &str = "other";

/// The metrics of each name.
pub(super) struct ByName<T> {
    known: RwLock<HashMap<String, T>>,
    other: T,
    register: fn(&PrometheusRecorder, &str) -> T,
}

impl<T> ByName<T> {
    /// Registers the metrics of the other names.
    pub(super) fn new(recorder: &PrometheusRecorder, register: fn(&PrometheusRecorder, &str) -> T) -> Self {
        Self { known: RwLock::default(), other: register(recorder, OTHER), register }
    }

    /// Fast path: a read lock for a known name. A new name takes the write lock once.
    pub(super) fn with(&self, recorder: &PrometheusRecorder, name: &str, record: impl FnOnce(&T)) {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(series) = known.get(name) {
            return record(series);
        }
        let is_full = known.len() >= NAMES_MAX;
        drop(known);
        if is_full || name == OTHER {
            return record(&self.other);
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= NAMES_MAX && !known.contains_key(name) {
            return record(&self.other);
        }
        record(known.entry(name.to_owned()).or_insert_with(|| (self.register)(recorder, name)));
    }

    /// Calls `visit` with the metrics of every label.
    pub(super) fn each(&self, mut visit: impl FnMut(&T)) {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.values().chain([&self.other]).for_each(&mut visit);
    }
}
