//! Applies steps under the locks of their shards, and ends leases past their deadline.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::time::Stamp;

use super::Space;
use crate::buckets::{LeaseSnapshot, LeaseStatus};
use crate::engine::{Change, Step, StepResult, TakeMode};
use crate::error::StoreError;
use crate::shared_engine::{KnownLease, LeaseTable};
use crate::store::SweepReport;
use crate::sync::lock;

impl Space {
    #[inline]
    pub(super) fn apply(&self, step: &Step<'_>) -> Result<StepResult, StoreError> {
        let now = self.now();
        // Only draws and spends need the wall clock, for usage.
        let Change::Take(_, taking @ (TakeMode::Open(_) | TakeMode::Spend)) = step.change else {
            return self.decide(step.levels, now, |context| context.apply(step));
        };
        let offset = self.clock.offset();
        self.decide(step.levels, now, |context| {
            context.offset = offset;
            let answer = context.apply(step);
            if taking != TakeMode::Spend {
                self.note_deadline(context.leases.next_due());
            }
            answer
        })
    }

    /// Finds a lease by its id. The id does not determine the shard, so all are searched. A lease past its
    /// deadline is ended first.
    pub(super) fn lease(&self, lease: LeaseId) -> Result<LeaseStatus, StoreError> {
        let now = self.now();
        match self.standing(lease, now) {
            Some(LeaseStatus::Open(held)) if held.record.is_due(held.at) => {
                // Another call may have been faster: the lease has then ended, too.
                if let Ok(one) = self.decide(&held.levels, held.at, |context| context.expire(lease)) {
                    lock(&self.passed).add(one);
                }
                self.standing(lease, now)
            }
            standing => standing,
        }
        .ok_or(StoreError::NoLease { lease })
    }

    fn standing(&self, lease: LeaseId, now: Stamp) -> Option<LeaseStatus> {
        self.shards.iter().find_map(|shard| {
            let mut guard = lock(shard);
            // A step that read an earlier time is decided at this one: it finds a lease that is due ended.
            let at = guard.advance(now);
            match guard.leases.find(lease) {
                KnownLease::Open(open) => {
                    let (levels, record) = (Arc::clone(&open.levels), open.record.clone());
                    Some(LeaseStatus::Open(LeaseSnapshot { at, levels, record }))
                }
                KnownLease::Ended(ended) => Some(LeaseStatus::Ended(ended)),
                KnownLease::Unknown => None,
            }
        })
    }

    /// Lowers the earliest deadline to `deadline`.
    fn note_deadline(&self, deadline: Stamp) {
        if deadline.as_micros() < self.due_at.load(Ordering::Relaxed) {
            self.due_at.fetch_min(deadline.as_micros(), Ordering::Relaxed);
        }
    }

    /// Ends due leases before a call does its own work.
    #[cold]
    pub(super) fn sweep_before_call(&self, now: Stamp, max: usize) {
        let swept = self.sweep(now, max);
        lock(&self.passed).add(swept);
    }

    /// Ends leases that are past their deadline, up to `max` of them.
    pub(super) fn sweep(&self, now: Stamp, max: usize) -> SweepReport {
        let mut swept = SweepReport::default();
        let mut left = max;
        // Lowered by concurrent draws, and below.
        self.due_at.store(u64::MAX, Ordering::Relaxed);
        for shard in &self.shards {
            let mut guard = lock(shard);
            // A step that read an earlier time is decided at this one: it cannot extend a lease that is due.
            let now = guard.advance(now);
            let due = guard.leases.due(now, left);
            swept.forgotten += guard.leases.rotate(now);
            drop(guard);
            left -= due.len();
            // One at a time: each may need the locks of other shards.
            for (lease, levels) in due {
                if let Ok(one) = self.decide(&levels, now, |context| context.expire(lease)) {
                    swept.add(one);
                }
            }
            self.note_deadline(lock(shard).leases.next_due());
        }
        swept
    }
}
