//! A step of a lease, decided by the shared engine on what was seen of its buckets.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::view::View;
use crate::error::StoreError;
use crate::shared_engine::{self, LeaseState, OneLease, StepContext};

/// What was decided.
pub(super) struct Decided<T> {
    pub(super) answer: Result<T, StoreError>,
    /// The limits of each level after it, by row.
    pub(super) meters: Vec<BTreeMap<String, Meter>>,
    before: LeaseState,
    after: LeaseState,
}

impl<T> Decided<T> {
    /// The lease after the step: what it holds, if it is open.
    pub(super) const fn record(&self) -> Option<&Record> {
        match &self.after {
            LeaseState::Open(record, _) => Some(record),
            LeaseState::Unknown | LeaseState::Ended(_) => None,
        }
    }

    /// The lease after the step: how it ended, if it has.
    pub(super) const fn end(&self) -> Option<Ended> {
        match self.after {
            LeaseState::Ended(ended) => Some(ended),
            LeaseState::Unknown | LeaseState::Open(..) => None,
        }
    }

    /// Whether the step has changed anything about the lease.
    pub(super) fn is_changed(&self) -> bool {
        self.before != self.after
    }

    /// Whether nothing is to be written.
    pub(super) fn is_nothing(&self, views: &[&View]) -> bool {
        !self.is_changed() && views.iter().zip(&self.meters).all(|(view, after)| view.meters == *after)
    }
}

/// Decides a step with the buckets of these levels as they were seen.
pub(super) fn decide<T>(
    views: &[&View],
    levels: &Levels,
    (lease, before): (LeaseId, LeaseState),
    now: Stamp,
    step: impl FnOnce(&mut StepContext<'_, OneLease>) -> Result<T, StoreError>,
) -> Decided<T> {
    let buckets: Vec<Vec<Meter>> = views.iter().map(|view| view.meters.values().cloned().collect()).collect();
    let decided =
        shared_engine::decide_by(lease, levels, before.clone(), &buckets, now, Duration::ZERO, step);
    let by_row =
        |meters: Vec<Meter>| meters.into_iter().map(|meter| (meter.rule().row().to_owned(), meter)).collect();
    let meters = decided.buckets.into_iter().map(by_row).collect();
    Decided { answer: decided.answer, meters, before, after: decided.lease }
}
