//! Metrics of Envoy's requests.

use std::fmt;
use std::time::Duration;

use metrics::{Counter, Histogram};

use crate::meters::Meters;

/// The metrics of one server.
pub(super) struct RlsMeters {
    ok: Counter,
    over_limit: Counter,
    refused: Counter,
    failed: Counter,
    seconds: Histogram,
    /// Descriptors that a shadow rule would have refused.
    pub(super) shadowed: Counter,
    pub(super) unknown: Counter,
    pub(super) unlimited: Counter,
    pub(super) invalid: Counter,
    pub(super) reported: Counter,
    pub(super) refunded: Counter,
    /// Reports whose usage the store did not record.
    pub(super) lost: Counter,
    /// Descriptors whose rule could not be evaluated.
    pub(super) unasked: Counter,
}

impl RlsMeters {
    pub(super) fn new(meters: &Meters) -> Self {
        let answers = |answer: &str| meters.counter("tidegate_rls_requests_total", &[("answer", answer)]);
        let descriptors = |kind: &str| meters.counter("tidegate_rls_descriptors_total", &[("kind", kind)]);
        Self {
            ok: answers("ok"),
            over_limit: answers("over_limit"),
            refused: answers("refused"),
            failed: answers("failed"),
            seconds: meters.histogram("tidegate_rls_request_seconds", &[]),
            shadowed: descriptors("shadowed"),
            unknown: descriptors("unknown"),
            unlimited: descriptors("unlimited"),
            invalid: descriptors("invalid"),
            reported: descriptors("reported"),
            refunded: descriptors("refunded"),
            lost: descriptors("lost"),
            unasked: descriptors("unasked"),
        }
    }

    /// A request was decided.
    pub(super) fn decided(&self, is_over: bool) {
        if is_over { &self.over_limit } else { &self.ok }.increment(1);
    }

    /// A call was rejected before it was read.
    pub(super) fn refused(&self) {
        self.refused.increment(1);
    }

    /// A request could not be decided.
    pub(super) fn failed(&self) {
        self.failed.increment(1);
    }

    pub(super) fn took(&self, span: Duration) {
        self.seconds.record(span);
    }
}

impl fmt::Debug for RlsMeters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RlsMeters")
    }
}
