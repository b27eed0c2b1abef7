//! The steps of a lease, each decided under the locks of its shards, and leases that end by themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::time::Stamp;

use super::{Memory, Space};
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Held, Lookup, Moved, Renew, Renewed, Seen, Settle,
    Standing,
};
use crate::desk::{Book, Known};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;
use crate::sync::lock;

impl Buckets for Memory {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::ready(self.space.draw(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        Reply::ready(self.space.extend(extend))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        Reply::ready(self.space.adjust(adjust))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        Reply::ready(self.space.renew(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        Reply::ready(self.space.settle(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        Reply::ready(self.space.cancel(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::ready(self.space.spend(draw))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::ready(self.space.lease(lease))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::ready(Ok(self.space.balances(lookup)))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::ready(self.space.buckets_of(resource, paging))
    }
}

impl Space {
    fn draw(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        let (now, offset) = (self.now(), self.clock.offset());
        self.decide(&draw.levels, now, |desk| {
            desk.offset = offset;
            let answer = desk.draw(draw);
            self.is_due_at(desk.leases.next_due());
            answer
        })
    }

    fn spend(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        let (now, offset) = (self.now(), self.clock.offset());
        self.decide(&draw.levels, now, |desk| {
            desk.offset = offset;
            desk.spend(draw)
        })
    }

    fn extend(&self, extend: &Extend) -> Result<Drawn, StoreError> {
        self.decide(&extend.levels, self.now(), |desk| desk.extend(extend))
    }

    fn adjust(&self, adjust: &Adjust) -> Result<Moved, StoreError> {
        self.decide(&adjust.levels, self.now(), |desk| desk.adjust(adjust))
    }

    fn renew(&self, renew: &Renew) -> Result<Renewed, StoreError> {
        self.decide(&renew.levels, self.now(), |desk| desk.renew(renew))
    }

    fn settle(&self, settle: &Settle) -> Result<Moved, StoreError> {
        self.decide(&settle.levels, self.now(), |desk| desk.settle(settle))
    }

    fn cancel(&self, cancel: &Cancel) -> Result<Moved, StoreError> {
        self.decide(&cancel.levels, self.now(), |desk| desk.cancel(cancel))
    }

    /// A lease is on the shard of its subject, which its id does not tell: all are asked, one after the other. One that is
    /// past its deadline is ended first.
    fn lease(&self, lease: LeaseId) -> Result<Standing, StoreError> {
        let now = self.now();
        match self.standing(lease, now) {
            Some(Standing::Open(held)) if held.record.is_due(now) => {
                // Somebody may be faster, and then it has ended as well.
                if let Ok(one) = self.decide(&held.levels, now, |desk| desk.expire(lease)) {
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
            Known::Open(open) => {
                let (levels, record) = (Arc::clone(&open.levels), open.record.clone());
                Some(Standing::Open(Held { at, levels, record }))
            }
            Known::Ended(ended) => Some(Standing::Ended(ended)),
            Known::Unknown => None,
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
            // One after the other, since each may need other shelves too.
            for (lease, levels) in due {
                if let Ok(one) = self.decide(&levels, now, |desk| desk.expire(lease)) {
                    swept.add(one);
                }
            }
            self.is_due_at(lock(shard).leases.next_due());
        }
        swept
    }
}
