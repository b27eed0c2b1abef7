//! Charges that negative hits can return, by rule and subject.
//!
//! Such a charge is an open lease, which the store settles at its deadline: the end of the time in which it
//! can be refunded. So this process only loses the possibility of a refund if it ends, and the store's record
//! of the lease bounds what a bucket gets back.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidegate::{Lease, LeaseId, LimitError, Limiter, StoreError};
use tidegate_core::limit::name::Subject;

use super::rules::DrawRequest;

/// The maximum number of charges that can be refunded. Further ones are settled at once.
const CHARGES_MAX: usize = 100_000;
/// The minimum time between two searches of a full table for charges that can no longer be refunded.
const PRUNE_EVERY: Duration = Duration::from_secs(1);

/// The charges of this server that can be refunded.
#[derive(Debug, Default)]
pub(super) struct RefundableCharges(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// The charges of a rule and subject, the oldest first.
    charges: HashMap<Key, VecDeque<OpenCharge>>,
    count: usize,
    pruned_at: Option<Instant>,
}

/// The number of a rule, and a subject.
type Key = (usize, Subject);

/// A charge whose lease is open.
#[derive(Debug)]
struct OpenCharge {
    lease: LeaseId,
    /// The last step of the lease.
    step: u32,
    /// The hits that are left to refund.
    hits: u64,
    until: Instant,
}

impl RefundableCharges {
    /// Keeps a granted lease open, if its units can be refunded. Otherwise returns it, to be settled.
    pub(super) fn keep(&self, draw: &DrawRequest<'_>, lease: Lease) -> Option<Lease> {
        let Some(within) = draw.rule.refund_within else { return Some(lease) };
        let now = Instant::now();
        let mut table = self.lock();
        // A degraded lease is not the store's, and cannot be found again.
        if lease.degraded().is_some() || !table.has_space(now) {
            drop(table);
            return Some(lease);
        }
        // The draw was its step 0, and that of a report also its step 1.
        let charge = OpenCharge { lease: lease.id(), step: 1, hits: draw.hits, until: now + within };
        table.push(key(draw), charge);
        drop(table);
        lease.detach();
        None
    }

    /// Returns the units of up to the requested hits, of the latest charges first.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a charge that can no longer be refunded.
    pub(super) async fn refund(&self, limiter: &Limiter, draw: &DrawRequest<'_>) -> Result<(), LimitError> {
        let mut left = draw.hits;
        // Out of the table while its lease makes a step: a lease makes one step at a time.
        while left > 0
            && let Some(mut charge) = self.pop(draw)
        {
            let hits = left.min(charge.hits);
            charge.step += 1;
            charge.hits -= hits;
            left -= hits;
            let refunded = if charge.hits == 0 {
                limiter.cancel_lease(charge.lease, charge.step).await
            } else {
                let returned = |units: u64| i64::try_from(units.saturating_mul(hits)).unwrap_or(i64::MAX);
                let cost = draw.rule.cost();
                let changes: Vec<_> = cost.map(|(limit, units)| (limit, -returned(units))).collect();
                limiter.adjust_lease(charge.lease, charge.step, changes).await
            };
            if let Err(LimitError::Store(StoreError::Ended { .. } | StoreError::NoLease { .. })) = refunded {
                // Its time is over, and its units stay charged.
                left += hits;
                continue;
            }
            if charge.hits > 0 {
                // Also after an error: the store may have returned the units, and returns none twice.
                self.lock().push(key(draw), charge);
            }
            refunded?;
        }
        Ok(())
    }

    /// Takes out the latest charge of a rule and subject.
    fn pop(&self, draw: &DrawRequest<'_>) -> Option<OpenCharge> {
        let mut table = self.lock();
        let key = key(draw);
        let charges = table.charges.get_mut(&key)?;
        let charge = charges.pop_back();
        if charges.is_empty() {
            table.charges.remove(&key);
        }
        table.count -= usize::from(charge.is_some());
        charge
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Whether one more charge fits.
    fn has_space(&mut self, now: Instant) -> bool {
        if self.count >= CHARGES_MAX && self.pruned_at.is_none_or(|at| now.duration_since(at) >= PRUNE_EVERY)
        {
            self.pruned_at = Some(now);
            self.charges.retain(|_, charges| {
                charges.retain(|charge| charge.until > now);
                !charges.is_empty()
            });
            self.count = self.charges.values().map(VecDeque::len).sum();
        }
        self.count < CHARGES_MAX
    }

    fn push(&mut self, key: Key, charge: OpenCharge) {
        let charges = self.charges.entry(key).or_default();
        // All charges of a rule last equally long, so the oldest ends first.
        while charges.pop_front_if(|oldest| oldest.until <= Instant::now()).is_some() {
            self.count -= 1;
        }
        charges.push_back(charge);
        self.count += 1;
    }
}

fn key(draw: &DrawRequest<'_>) -> Key {
    (draw.rule.number, draw.subject.clone())
}
