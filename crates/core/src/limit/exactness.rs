//! The exactness checker: verifies from a log of movements that no bucket ever admitted more than its rate
//! and burst.
//!
//! The log has an [`Entry`] for every shape of a bucket and every movement of a lease: the store's time of
//! the decision, the bucket, the lease, its step and signed units. [`check`] verifies for every window *W*
//! that ends with a draw that units taken minus units returned are at most burst + rate·*W*. Units that an
//! [`Adjust`](Kind::Adjust), or a settle above the units held, takes are not checked themselves, because they
//! may leave a debt; they count against every later draw. Each lease is checked too: a step applies once, a
//! lease returns no more than it holds, and nothing moves after its end. [`check_ledger`] compares the
//! settled units with the ledger.
//!
//! The bound is on draws minus returns, not on draws alone. A refund goes back into the bucket even if the
//! bucket has refilled since the draw, so that two bursts of work can run at the same time: draw a burst,
//! wait until the bucket is full, draw a burst, cancel the first, draw a burst.
//!
//! A bucket whose debt is at its bound takes less than a settlement: the log has the units that it took, the
//! ledger has all of them, and [`check_ledger`] reports the difference.
//!
//! A repair of a bucket sets its level, and the bound counts from there. Draws of the same moment may have been
//! before it or after it, and may use both levels.
//!
//! # Format of the log
//! Entries may be in any order: they are sorted by time, and those of one lease at one time by step. Within
//! one time the order of different leases is unknown; a log is exact if some order is. The times of a bucket
//! must not contradict the order of its changes. A shape is logged when a bucket is first seen and whenever
//! its shape differs, even if a refused draw reports it. A repeated step is not logged. A lease ended by the
//! store itself has the step [`STEP_MAX`]; a cancel of a lease that never drew is a return of 0.

mod leases;
mod level;
mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::bucket::Shape;
use crate::limit::lease::LeaseId;
use crate::limit::name::{LimitName, Subject};
use crate::limit::rule::Rule;
use crate::time::Stamp;

use leases::Leases;
use level::{Level, Moment};
pub use report::{Report, Totals, Violation};

/// The step of an ending by the store, after the lease's deadline.
pub const STEP_MAX: u32 = u32::MAX;

/// The key of a bucket: its subject and row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketId {
    /// The subject.
    pub subject: Subject,
    /// The name of the bucket within the subject: see [`Rule::row`].
    pub row: Arc<str>,
}

impl BucketId {
    /// The bucket of `rule` for `subject`.
    pub fn new(subject: &Subject, rule: &Rule) -> Self {
        Self { subject: subject.clone(), row: rule.row().into() }
    }

    /// The limit's name: the row, up to the `~` that separates the shape of a limit given with a call.
    pub fn limit(&self) -> &str {
        self.row.split('~').next().unwrap_or(&self.row)
    }
}

impl fmt::Display for BucketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.row, self.subject)
    }
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// When the store decided, by its clock.
    pub at: Stamp,
    /// The bucket.
    pub bucket: BucketId,
    /// The event.
    pub what: What,
}

impl Entry {
    /// The bucket was first seen, or seen with another shape.
    pub const fn shape(at: Stamp, bucket: BucketId, shape: Shape<Stamp>) -> Self {
        Self { at, bucket, what: What::Shape(shape) }
    }

    /// An administrator set the units available.
    pub const fn set(at: Stamp, bucket: BucketId, units: u64) -> Self {
        Self { at, bucket, what: What::Set(units) }
    }

    /// A lease took or returned units.
    pub const fn moved(at: Stamp, bucket: BucketId, movement: Move) -> Self {
        Self { at, bucket, what: What::Moved(movement) }
    }
}

/// An event of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The bucket has this shape from now on.
    Shape(Shape<Stamp>),
    /// A lease took or returned units.
    Moved(Move),
    /// An administrator set the units available.
    Set(u64),
}

/// The effect of one step of a lease on one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The lease.
    pub lease: LeaseId,
    /// The step.
    pub step: u32,
    /// Units taken; below zero, units returned. For a [`Settle`](Kind::Settle), the amount the lease was
    /// settled at.
    pub units: i64,
    /// The kind of step.
    pub kind: Kind,
    /// The number of buckets that the step named, including this one; 0 if unknown.
    pub buckets: u32,
}

impl Move {
    /// A movement of a step with an unknown number of buckets.
    pub const fn new(kind: Kind, lease: LeaseId, step: u32, units: i64) -> Self {
        Self { lease, step, units, kind, buckets: 0 }
    }

    /// Sets the number of buckets that the step named. Fewer entries of a draw or an extension mean that it
    /// was not all or nothing.
    #[must_use]
    pub const fn one_of(mut self, buckets: u32) -> Self {
        self.buckets = buckets;
        self
    }
}

/// How units moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A lease began. Checked.
    Draw,
    /// A lease took more. Checked.
    Extend,
    /// A lease reported that it uses more or less. Never refused, so never checked.
    Adjust,
    /// A lease returned units when it ended: cancelled, expired, or settled below the units held.
    Return,
    /// A lease was settled at this amount. Units above the amount held are taken even if they are not
    /// available; units below it are returned, unless a return of their own is logged.
    Settle,
    /// A lease granted while the store was unavailable: listed, not counted.
    Degraded,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draw => "draw",
            Self::Extend => "extension",
            Self::Adjust => "adjustment",
            Self::Return => "return",
            Self::Settle => "settlement",
            Self::Degraded => "degraded grant",
        })
    }
}

/// Checks a log and reports every violation.
pub fn check(log: &[Entry]) -> Report {
    let mut order: Vec<&Entry> = log.iter().collect();
    order.sort_by_key(|entry| (entry.at, step(entry)));
    let mut report = Report::default();
    let mut leases = Leases::default();
    let mut buckets: BTreeMap<&BucketId, BTreeMap<Stamp, Moment>> = BTreeMap::new();
    for entry in order {
        let moment = buckets.entry(&entry.bucket).or_default().entry(entry.at).or_default();
        match entry.what {
            What::Shape(shape) => moment.shapes.push(shape),
            What::Set(units) => moment.set = moment.set.max(Some(units)),
            What::Moved(movement) if movement.kind == Kind::Degraded => {
                report.degraded.push((entry.bucket.clone(), movement));
            }
            What::Moved(movement) => {
                let delta = leases.follow(entry.at, &entry.bucket, &movement, &mut report.violations);
                report.totals.entry(entry.bucket.clone()).or_default().add(&movement, delta);
                moment.push(movement.lease, delta, matches!(movement.kind, Kind::Draw | Kind::Extend));
            }
        }
    }
    report.open = leases.finish(&mut report.violations);
    for (bucket, moments) in buckets {
        let mut level = Level::default();
        for (at, mut moment) in moments {
            report.violations.extend(level.pass(bucket, at, &mut moment));
        }
    }
    report
}

/// Compares the sum of the settled units with the ledger, for each limit of each subject.
///
/// `usage` is the total of the ledger over the time of the log.
pub fn check_ledger(log: &[Entry], usage: &BTreeMap<(Subject, LimitName), u64>) -> Vec<Violation> {
    // An outer join: a limit may be missing in the ledger or in the log.
    let mut sums: BTreeMap<(&Subject, &str), (i128, i128)> = BTreeMap::new();
    for ((subject, limit), units) in usage {
        sums.entry((subject, limit.as_str())).or_default().0 += i128::from(*units);
    }
    for entry in log {
        if let What::Moved(Move { kind: Kind::Settle, units, .. }) = entry.what {
            sums.entry((&entry.bucket.subject, entry.bucket.limit())).or_default().1 += i128::from(units);
        }
    }
    let differing = sums.into_iter().filter(|(_, (ledger, settled))| ledger != settled);
    let violation = |((subject, limit), (ledger, settled)): ((&Subject, &str), _)| Violation::Ledger {
        subject: subject.clone(),
        limit: limit.to_owned(),
        ledger,
        settled,
    };
    differing.map(violation).collect()
}

/// Sorts shapes before all steps of the same time.
fn step(entry: &Entry) -> Option<u32> {
    match &entry.what {
        What::Shape(_) | What::Set(_) => None,
        What::Moved(movement) => Some(movement.step),
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
#[path = "exactness_tests.rs"]
mod tests;
