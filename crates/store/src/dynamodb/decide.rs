//! Decides a step of a lease in the shared engine, on a snapshot of its buckets.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::bucket_view::BucketView;
use crate::error::StoreError;
use crate::shared_engine::{self, LeaseState, OneLease, StepContext};

/// The result of a decision.
pub(super) struct Decision<T> {
    pub(super) answer: Result<T, StoreError>,
    /// The limits of each level after it, by row.
    pub(super) meters: Vec<BTreeMap<String, Meter>>,
    before: LeaseState,
    after: LeaseState,
}

impl<T> Decision<T> {
    /// The lease after the step, if it is open.
    pub(super) const fn record(&self) -> Option<&Record> {
        match &self.after {
            LeaseState::Open(record, _) => Some(record),
            LeaseState::Unknown | LeaseState::Ended(_) => None,
        }
    }

    /// How the lease has ended after the step, if it has.
    pub(super) const fn end(&self) -> Option<EndRecord> {
        match self.after {
            LeaseState::Ended(ended) => Some(ended),
            LeaseState::Unknown | LeaseState::Open(..) => None,
        }
    }

    /// Whether the step changes the lease.
    pub(super) fn is_changed(&self) -> bool {
        self.before != self.after
    }

    /// Whether nothing needs to be written.
    pub(super) fn is_nothing(&self, views: &[&BucketView]) -> bool {
        !self.is_changed() && views.iter().zip(&self.meters).all(|(view, after)| view.meters == *after)
    }
}

/// Decides a step on these buckets.
pub(super) fn decide<T>(
    views: &[&BucketView],
    levels: &Levels,
    (lease, before): (LeaseId, LeaseState),
    now: Stamp,
    step: impl FnOnce(&mut StepContext<'_, OneLease>) -> Result<T, StoreError>,
) -> Decision<T> {
    let buckets: Vec<Vec<Meter>> = views.iter().map(|view| view.meters.values().cloned().collect()).collect();
    let decision =
        shared_engine::decide_by(lease, levels, before.clone(), &buckets, now, Duration::ZERO, step);
    let by_row =
        |meters: Vec<Meter>| meters.into_iter().map(|meter| (meter.rule().row().to_owned(), meter)).collect();
    let meters = decision.buckets.into_iter().map(by_row).collect();
    Decision { answer: decision.answer, meters, before, after: decision.lease }
}
