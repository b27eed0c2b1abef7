//! What a log shows: what moved, what is open, and everything that is not exact, each as one sentence.

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;

use super::{BucketId, Kind, Move};
use crate::limit::lease::LeaseId;
use crate::limit::name::Subject;
use crate::time::Stamp;

/// What a log shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What was not exact, lease by lease in the order of time, then bucket by bucket.
    pub violations: Vec<Violation>,
    /// What was granted while the store was away.
    pub degraded: Vec<(BucketId, Move)>,
    /// What moved, for each bucket.
    pub totals: BTreeMap<BucketId, Totals>,
    /// Leases that drew and have not ended.
    pub open: Vec<LeaseId>,
}

impl Report {
    /// Whether nothing is wrong. Leases that are open are not wrong, nor are degraded ones.
    pub const fn is_exact(&self) -> bool {
        self.violations.is_empty()
    }
}

impl fmt::Display for Report {
    /// One violation on each line, or that there are none.
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

/// What moved in or out of one bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Taken by draws and extensions.
    pub drawn: i128,
    /// Taken, there or not, by adjustments and by settling above what was held.
    pub declared: i128,
    /// Given back by whatever.
    pub returned: i128,
    /// What leases ended at.
    pub settled: i128,
    /// Leases that ended at something, be it nothing.
    pub leases: u64,
}

impl Totals {
    /// Counts a movement that changed the bucket by `delta`.
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

/// What is not exact.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A draw was admitted that was not there.
    #[error(
        "{bucket}: {taken} taken from {since} to {at}, {} more than the {allowed} that burst and rate allow",
        taken - allowed
    )]
    Excess {
        /// From which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// When the bucket was last full.
        since: Stamp,
        /// What was taken since then, less what was given back.
        taken: i128,
        /// What burst and rate allow.
        allowed: i128,
    },
    /// Units moved in a bucket whose shape nobody has told.
    #[error("{bucket}: {units} units moved at {at}, and no shape was known")]
    NoShape {
        /// In which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// How many.
        units: i64,
    },
    /// A step of a lease took twice.
    #[error("{bucket}: step {step} of the lease {lease} counted again at {at}, for {units} units")]
    ChargedTwice {
        /// From which bucket.
        bucket: BucketId,
        /// When it counted again.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// Which step.
        step: u32,
        /// For how many units.
        units: i64,
    },
    /// A lease gave back what it did not hold.
    #[error(
        "{bucket}: the lease {lease} gave back {returned} at {at}, {} more than the {held} it held",
        returned - held
    )]
    ReturnedTooMuch {
        /// To which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// What it held there.
        held: i128,
        /// What it gave back.
        returned: i128,
    },
    /// Something moved for a lease that had ended.
    #[error(
        "{bucket}: {kind} of {units} units at {at} as step {step} of the lease {lease}, which ended at {ended}"
    )]
    AfterEnd {
        /// In which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// Which step.
        step: u32,
        /// How.
        kind: Kind,
        /// How many units.
        units: i64,
        /// When it had ended.
        ended: Stamp,
    },
    /// A lease ended again.
    #[error("{bucket}: {kind} of {units} units at {at} ends the lease {lease} again, which ended at {ended}")]
    EndedTwice {
        /// In which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// How.
        kind: Kind,
        /// How many units.
        units: i64,
        /// When it had ended.
        ended: Stamp,
    },
    /// A draw or an extension was not all or nothing.
    #[error("step {step} of the lease {lease} took from {found} of the {named} buckets it named, at {at}")]
    Partial {
        /// When.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// Which step.
        step: u32,
        /// Buckets it took from.
        found: u32,
        /// Buckets it named.
        named: u32,
    },
    /// A lease ended and kept what it held.
    #[error(
        "{bucket}: the lease {lease} ended at {at}, and {held} units it held there neither returned nor were settled"
    )]
    Kept {
        /// Of which bucket.
        bucket: BucketId,
        /// When it ended.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// What it held.
        held: i128,
    },
    /// Something moved for a lease that never drew.
    #[error("{bucket}: {kind} of {units} units at {at} for the lease {lease}, which never drew")]
    NoDraw {
        /// In which bucket.
        bucket: BucketId,
        /// When.
        at: Stamp,
        /// Which lease.
        lease: LeaseId,
        /// How.
        kind: Kind,
        /// How many units.
        units: i64,
    },
    /// The ledger does not say what was settled.
    #[error("{limit} of {subject}: the ledger has {ledger} units, and leases were settled at {settled}")]
    Ledger {
        /// Whose usage.
        subject: Subject,
        /// Of which limit.
        limit: String,
        /// What the ledger says.
        ledger: i128,
        /// What leases were settled at.
        settled: i128,
    },
}
