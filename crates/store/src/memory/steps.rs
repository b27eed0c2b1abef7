//! The steps of a lease, each decided under the locks of its shards, and leases that end by themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::time::Stamp;

use super::Space;
use crate::buckets::{Held, Standing};
use crate::engine::{Applied, Change, Step, Taking};
use crate::error::StoreError;
use crate::shared_engine::{KnownLease, LeaseTable};
use crate::store::Swept;
use crate::sync::lock;

impl Space {
    #[inline]
    pub(super) fn apply(&self, step: &Step<'_>) -> Result<Applied, StoreError> {
        let now = self.now();
        // Only what draws books usage, or a lease, at the wall clock.
        let Change::Take(_, taking @ (Taking::Open(_) | Taking::Spend)) = step.change else {
            return self.decide(step.levels, now, |context| context.apply(step));
        };
        let offset = self.clock.offset();
        self.decide(step.levels, now, |context| {
            context.offset = offset;
            let answer = context.apply(step);
            if taking != Taking::Spend {
                self.is_due_at(context.leases.next_due());
            }
            answer
        })
    }

    /// A lease is on the shard of its subject, which its id does not tell: all are asked, one after the other. One that is
    /// past its deadline is ended first.
    pub(super) fn lease(&self, lease: LeaseId) -> Result<Standing, StoreError> {
        let now = self.now();
        match self.standing(lease, now) {
            Some(Standing::Open(held)) if held.record.is_due(now) => {
                // Somebody may be faster, and then it has ended as well.
                if let Ok(one) = self.decide(&held.levels, now, |context| context.expire(lease)) {
                    lock(&self.passed).add(one);
                }
                self.standing(lease, now)
            }
            standing => standing,
        }
        .ok_or(StoreError::NoLease { lease })
    }

    fn standing(&self, lease: LeaseId, at: Stamp) -> Option<Standing> {
        self.shards.iter().find_map(|shard| match lock(shard).leases.find(lease) {
            KnownLease::Open(open) => {
                let (levels, record) = (Arc::clone(&open.levels), open.record.clone());
                Some(Standing::Open(Held { at, levels, record }))
            }
            KnownLease::Ended(ended) => Some(Standing::Ended(ended)),
            KnownLease::Unknown => None,
        })
    }

    /// A lease will be due at `deadline`.
    fn is_due_at(&self, deadline: Stamp) {
        if deadline.as_micros() < self.due_at.load(Ordering::Relaxed) {
            self.due_at.fetch_min(deadline.as_micros(), Ordering::Relaxed);
        }
    }

    /// Ends leases for a call that has something else to do.
    #[cold]
    pub(super) fn sweep_in_passing(&self, now: Stamp, max: usize) {
        let swept = self.sweep(now, max);
        lock(&self.passed).add(swept);
    }

    /// Ends leases that are past their deadline, up to `max` of them.
    pub(super) fn sweep(&self, now: Stamp, max: usize) -> Swept {
        let mut swept = Swept::default();
        let mut left = max;
        // Lowered by whoever draws meanwhile, and by us below.
        self.due_at.store(u64::MAX, Ordering::Relaxed);
        for shard in &self.shards {
            let mut guard = lock(shard);
            let due = guard.leases.due(now, left);
            swept.forgotten += guard.leases.forget(now);
            drop(guard);
            left -= due.len();
            // One after the other, since each may need other tables too.
            for (lease, levels) in due {
                if let Ok(one) = self.decide(&levels, now, |context| context.expire(lease)) {
                    swept.add(one);
                }
            }
            self.is_due_at(lock(shard).leases.next_due());
        }
        swept
    }
}
