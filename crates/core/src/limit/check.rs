//! The exactness checker: proves from a log of what moved that no bucket ever gave more than it had.
//!
//! The log has an [`Entry`] for every shape a bucket takes and for everything a lease moves: the time the store
//! decided at, the bucket, the lease, its step and signed units. From it [`check`] proves for every window *W* that
//! ends with a draw: what was taken less what was given back is at most burst + rate·*W*. What an
//! [`Adjust`](Kind::Adjust), or a settle above what is held, takes is never judged itself, because it may leave
//! a debt; it counts against every draw after it. Leases are followed one by one: each step counts once, nobody
//! gives back more than it holds, and nothing moves after the end. [`check_ledger`] compares what was settled
//! with what the ledger says.
//!
//! The bound is on draws minus returns, not on draws alone. A refund goes back into the bucket even if the bucket has filled up
//! since its draw, so that two bursts of work can be under way at one moment: draw a burst, wait until it is full, draw a burst,
//! cancel the first, draw a burst.
//!
//! # What the log must be
//! Entries may come in any order: they are sorted by time, and those of one lease at one time by step. Within one
//! time the order of different leases is unknown, and a log is exact if some order is. A bucket's times must not
//! run against the order it was changed in. A shape is an entry when a bucket is first seen and whenever it is seen
//! with another one, be it by a draw that was refused. A step that was only repeated is none. An ending by the
//! store itself has the step [`STEP_MAX`], a cancel of a lease that never drew is a return of 0.

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

/// The step of an ending that nobody called for: the lease's deadline had passed.
pub const STEP_MAX: u32 = u32::MAX;

/// Which bucket: a subject's, by row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketId {
    /// Whose.
    pub subject: Subject,
    /// What it is called among the subject's, as [`Rule::row`] says.
    pub row: Arc<str>,
}

impl BucketId {
    /// The bucket that `rule` has with `subject`.
    pub fn new(subject: &Subject, rule: &Rule) -> Self {
        Self { subject: subject.clone(), row: rule.row().into() }
    }

    /// The limit's name: a row is that, and for a limit given with a call its shape after a `~`.
    pub fn limit(&self) -> &str {
        self.row.split('~').next().unwrap_or(&self.row)
    }
}

impl fmt::Display for BucketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.row, self.subject)
    }
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// When the store decided it.
    pub at: Stamp,
    /// Which bucket.
    pub bucket: BucketId,
    /// What happened to it.
    pub what: What,
}

impl Entry {
    /// The bucket was first seen, or seen with another shape.
    pub const fn shape(at: Stamp, bucket: BucketId, shape: Shape<Stamp>) -> Self {
        Self { at, bucket, what: What::Shape(shape) }
    }

    /// A lease moved units.
    pub const fn moved(at: Stamp, bucket: BucketId, movement: Move) -> Self {
        Self { at, bucket, what: What::Moved(movement) }
    }
}

/// What happened to a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// It has this shape from now on.
    Shape(Shape<Stamp>),
    /// A lease took from it or gave back.
    Moved(Move),
}

/// What one step of a lease did to one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which lease.
    pub lease: LeaseId,
    /// Which of its steps.
    pub step: u32,
    /// What it took; below zero is what it gave back. Of a [`Settle`](Kind::Settle), what the lease ended at.
    pub units: i64,
    /// How.
    pub kind: Kind,
    /// How many buckets the step named, this one included: 0 where the log does not tell.
    pub buckets: u32,
}

impl Move {
    /// A movement of a step that does not tell how many buckets it named.
    pub const fn new(kind: Kind, lease: LeaseId, step: u32, units: i64) -> Self {
        Self { lease, step, units, kind, buckets: 0 }
    }

    /// The step named so many buckets: fewer entries of a draw or an extension mean that it was not all or nothing.
    #[must_use]
    pub const fn one_of(mut self, buckets: u32) -> Self {
        self.buckets = buckets;
        self
    }
}

/// How units moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A lease began. Judged.
    Draw,
    /// A lease took more. Judged.
    Extend,
    /// A lease said it uses more or less: never refused, so never judged.
    Adjust,
    /// A lease gave back what it held when it ended: cancelled, expired, or settled below it.
    Return,
    /// A lease ended, at this many units. What is above what it holds is taken, there or not; what is below, and
    /// is no entry of its own, is given back.
    Settle,
    /// A lease that was granted while the store was away: listed, and not counted.
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

/// Proves a log exact, or tells everything that is not.
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

/// Compares the sum of what leases were settled at with what the ledger says, for each limit of each subject.
///
/// `usage` is the whole of the ledger's units over the time of the log.
pub fn check_ledger(log: &[Entry], usage: &BTreeMap<(Subject, LimitName), u64>) -> Vec<Violation> {
    // What the ledger says and what was settled, side by side: either may lack what the other has.
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

/// Shapes come before all steps of their time.
fn step(entry: &Entry) -> Option<u32> {
    match &entry.what {
        What::Shape(_) => None,
        What::Moved(movement) => Some(movement.step),
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
