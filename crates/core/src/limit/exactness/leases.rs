//! Checks each lease: a step applies once, a lease returns no more than it holds, and nothing moves after its
//! end.

use std::collections::{BTreeMap, BTreeSet};

use super::{BucketId, Kind, Move, Violation};
use crate::limit::lease::LeaseId;
use crate::time::Stamp;

/// The state of every lease of a log.
#[derive(Debug, Default)]
pub(super) struct Leases<'a> {
    leases: BTreeMap<LeaseId, Lease<'a>>,
}

#[derive(Debug, Default)]
struct Lease<'a> {
    held: BTreeMap<&'a BucketId, i128>,
    /// Steps that took units, with the bucket.
    charged: BTreeSet<(u32, &'a BucketId)>,
    /// The time and the number of named buckets of each all-or-nothing step.
    named: BTreeMap<u32, (Stamp, u32)>,
    end: Option<End<'a>>,
    has_drawn: bool,
}

#[derive(Debug)]
struct End<'a> {
    at: Stamp,
    step: u32,
    /// The kinds seen for each bucket: one step may log a return and a settlement.
    seen: BTreeSet<(Kind, &'a BucketId)>,
}

impl<'a> Leases<'a> {
    /// Applies a movement, in order of time and, for each lease, of steps. Returns the change of the units
    /// taken from the bucket.
    pub(super) fn follow(
        &mut self,
        at: Stamp,
        bucket: &'a BucketId,
        movement: &Move,
        violations: &mut Vec<Violation>,
    ) -> i128 {
        let lease = self.leases.entry(movement.lease).or_default();
        lease.has_drawn |= matches!(movement.kind, Kind::Draw | Kind::Degraded);
        if !lease.has_drawn && movement.units != 0 {
            let Move { lease, units, kind, .. } = *movement;
            violations.push(Violation::NoDraw { bucket: bucket.clone(), at, lease, kind, units });
        }
        match movement.kind {
            Kind::Return | Kind::Settle => violations.extend(lease.end(at, bucket, movement)),
            _ => violations.extend(lease.charge(at, bucket, movement)),
        }
        let held = lease.held.entry(bucket).or_default();
        let units = i128::from(movement.units);
        let delta = if movement.kind == Kind::Settle { units - *held } else { units };
        if *held + delta < 0 {
            violations.push(Violation::ReturnedTooMuch {
                bucket: bucket.clone(),
                at,
                lease: movement.lease,
                held: *held,
                returned: -delta,
            });
        }
        *held = (*held + delta).max(0);
        delta
    }

    /// Checks what needs the whole log: steps that were not all or nothing, and units kept after the end.
    /// Returns the open leases.
    pub(super) fn finish(&self, violations: &mut Vec<Violation>) -> Vec<LeaseId> {
        for (id, lease) in &self.leases {
            for (step, (at, named)) in &lease.named {
                let found = lease.charged.iter().filter(|(charged, _)| charged == step).count();
                let found = u32::try_from(found).unwrap_or(u32::MAX);
                if found < *named {
                    let (lease, step, named) = (*id, *step, *named);
                    violations.push(Violation::Partial { at: *at, lease, step, found, named });
                }
            }
        }
        for (id, lease) in &self.leases {
            let Some(end) = &lease.end else { continue };
            let kept = lease
                .held
                .iter()
                .filter(|(bucket, held)| **held > 0 && !end.seen.contains(&(Kind::Settle, **bucket)));
            violations.extend(kept.map(|(bucket, held)| {
                let bucket = (*bucket).clone();
                Violation::Kept { bucket, at: end.at, lease: *id, held: *held }
            }));
        }
        self.leases.iter().filter(|(_, lease)| lease.end.is_none()).map(|(id, _)| *id).collect()
    }
}

impl<'a> Lease<'a> {
    /// Checks that a step that takes, or an adjustment, applies once and not after the end.
    fn charge(&mut self, at: Stamp, bucket: &'a BucketId, movement: &Move) -> Option<Violation> {
        let Move { lease, step, units, kind, buckets } = *movement;
        if kind != Kind::Adjust && buckets > 0 {
            self.named.entry(step).or_insert((at, buckets));
        }
        if !self.charged.insert((step, bucket)) {
            return Some(Violation::ChargedTwice { bucket: bucket.clone(), at, lease, step, units });
        }
        let ended = self.end.as_ref()?.at;
        Some(Violation::AfterEnd { bucket: bucket.clone(), at, lease, step, kind, units, ended })
    }

    /// Checks that only one step ends the lease, with each kind once for each bucket.
    fn end(&mut self, at: Stamp, bucket: &'a BucketId, movement: &Move) -> Option<Violation> {
        let Move { lease, step, units, kind, .. } = *movement;
        let end = self.end.get_or_insert_with(|| End { at, step, seen: BTreeSet::new() });
        let is_first = end.seen.insert((kind, bucket));
        if is_first && (end.at, end.step) == (at, step) {
            return None;
        }
        Some(Violation::EndedTwice { bucket: bucket.clone(), at, lease, kind, units, ended: end.at })
    }
}
