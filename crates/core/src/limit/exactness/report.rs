//! The report of the checker: totals, open leases, and one sentence for each violation.

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;

use super::{BucketId, Kind, Move};
use crate::limit::lease::LeaseId;
use crate::limit::name::Subject;
use crate::time::Stamp;

/// The result of checking a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Violations of leases in order of time, then of buckets.
    pub violations: Vec<Violation>,
    /// Grants while the store was unavailable.
    pub degraded: Vec<(BucketId, Move)>,
    /// Units moved, by bucket.
    pub totals: BTreeMap<BucketId, Totals>,
    /// Leases that drew and have not ended.
    pub open: Vec<LeaseId>,
}

impl Report {
    /// Whether there is no violation. Open leases and degraded grants are not violations.
    pub const fn is_exact(&self) -> bool {
        self.violations.is_empty()
    }
}

impl fmt::Display for Report {
    /// A summary, and each violation on its own line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (buckets, open, degraded) = (self.totals.len(), self.open.len(), self.degraded.len());
        write!(f, "{buckets} buckets, {open} leases open, {degraded} grants degraded: ")?;
        match self.violations.len() {
            0 => f.write_str("exact"),
            count => write!(f, "{count} violations"),
        }?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n{violation}"))
    }
}

/// The units moved in and out of one bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Taken by draws and extensions.
    pub drawn: i128,
    /// Taken, available or not, by adjustments and by settling above the units held.
    pub declared: i128,
    /// Returned by any kind of step.
    pub returned: i128,
    /// The sum that leases were settled at.
    pub settled: i128,
    /// Settled leases, including those settled at zero.
    pub leases: u64,
}

impl Totals {
    /// Adds a movement that changed the bucket by `delta`.
    pub(super) fn add(&mut self, movement: &Move, delta: i128) {
        match movement.kind {
            Kind::Draw | Kind::Extend => self.drawn += delta,
            _ if delta < 0 => self.returned -= delta,
            _ => self.declared += delta,
        }
        if movement.kind == Kind::Settle {
            self.settled += i128::from(movement.units);
            self.leases += 1;
        }
    }
}

/// A violation of exactness.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A draw was admitted although its units were not available.
    #[error(
        "{bucket}: {taken} taken from {since} to {at}, {} more than the {allowed} that burst and rate allow",
        taken - allowed
    )]
    Excess {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// When the bucket was last full.
        since: Stamp,
        /// Units taken since then, minus units returned.
        taken: i128,
        /// The units that burst and rate allow.
        allowed: i128,
    },
    /// Units moved in a bucket before its shape was logged.
    #[error("{bucket}: {units} units moved at {at} before its shape was known")]
    NoShape {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// The units.
        units: i64,
    },
    /// A step of a lease was applied twice.
    #[error("{bucket}: step {step} of the lease {lease} was applied again at {at}, for {units} units")]
    ChargedTwice {
        /// The bucket.
        bucket: BucketId,
        /// When it was applied again.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The step.
        step: u32,
        /// The units.
        units: i64,
    },
    /// A lease returned more than it held.
    #[error(
        "{bucket}: the lease {lease} returned {returned} at {at}, {} more than the {held} it held",
        returned - held
    )]
    ReturnedTooMuch {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The units it held.
        held: i128,
        /// The units it returned.
        returned: i128,
    },
    /// Units moved for a lease that had ended.
    #[error(
        "{bucket}: {kind} of {units} units at {at} as step {step} of the lease {lease}, which ended at {ended}"
    )]
    AfterEnd {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The step.
        step: u32,
        /// The kind of step.
        kind: Kind,
        /// The units.
        units: i64,
        /// When it had ended.
        ended: Stamp,
    },
    /// A lease ended twice.
    #[error("{bucket}: {kind} of {units} units at {at} ends the lease {lease} again, which ended at {ended}")]
    EndedTwice {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The kind of step.
        kind: Kind,
        /// The units.
        units: i64,
        /// When it had ended.
        ended: Stamp,
    },
    /// A draw or an extension was not all or nothing.
    #[error("step {step} of the lease {lease} took from {found} of the {named} buckets it named, at {at}")]
    Partial {
        /// The time.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The step.
        step: u32,
        /// Buckets it took from.
        found: u32,
        /// Buckets it named.
        named: u32,
    },
    /// A lease ended, and units it held were neither returned nor settled.
    #[error(
        "{bucket}: the lease {lease} ended at {at} and neither returned nor settled {held} of the units it held"
    )]
    Kept {
        /// The bucket.
        bucket: BucketId,
        /// When it ended.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The units it held.
        held: i128,
    },
    /// Units moved for a lease that never drew.
    #[error("{bucket}: {kind} of {units} units at {at} for the lease {lease}, which never drew")]
    NoDraw {
        /// The bucket.
        bucket: BucketId,
        /// The time.
        at: Stamp,
        /// The lease.
        lease: LeaseId,
        /// The kind of step.
        kind: Kind,
        /// The units.
        units: i64,
    },
    /// The ledger differs from the settled units.
    #[error("{limit} of {subject}: the ledger has {ledger} units, and leases were settled at {settled}")]
    Ledger {
        /// The subject.
        subject: Subject,
        /// The limit.
        limit: String,
        /// The units in the ledger.
        ledger: i128,
        /// The units that leases were settled at.
        settled: i128,
    },
}
