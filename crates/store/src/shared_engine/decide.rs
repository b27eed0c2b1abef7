//! Decides one step of a lease on values that an engine has read (SQLite's rows), and returns what to write.
//!
//! The rules themselves are in `steps.rs`, as for the memory store.

use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::usage::{Usage, Window};
use tidegate_core::time::Stamp;

use super::bucket_table::{BucketTable, Place, Places, Row, hash_subject};
use super::steps::{KnownLease, LeaseTable, Open, StepContext, check_levels};
use super::{BucketSet, Capacity};
use crate::buckets::{LeaseSnapshot, LeaseStatus};
use crate::engine::{Step, StepResult};
use crate::error::StoreError;
use crate::store::SweepReport;

/// The stored state of a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum LeaseState {
    /// Unknown: it never drew, or ended long ago.
    #[default]
    Unknown,
    /// It is open, and drew from these levels.
    Open(Record, Arc<Levels>),
    /// It has ended.
    Ended(EndRecord),
}

impl LeaseState {
    /// The status of a lease that was read at `at`.
    #[allow(dead_code, reason = "used depending on the features")]
    pub(crate) fn status(self, lease: LeaseId, at: Stamp) -> Result<LeaseStatus, StoreError> {
        match self {
            Self::Unknown => Err(StoreError::NoLease { lease }),
            Self::Open(record, levels) => Ok(LeaseStatus::Open(LeaseSnapshot { at, levels, record })),
            Self::Ended(ended) => Ok(LeaseStatus::Ended(ended)),
        }
    }
}

/// The outcome of a step. Write all of it in one transaction, even if the answer is an error: a step after
/// the deadline ends its lease.
#[derive(Debug)]
pub struct Decision<T> {
    /// The result for the caller.
    pub answer: Result<T, StoreError>,
    /// The limits of each level's bucket after the step, in the order of the levels. An empty bucket need not
    /// be stored.
    pub buckets: Vec<Vec<Meter>>,
    /// The lease after the step.
    pub lease: LeaseState,
    /// The usage to add to the ledger.
    pub usage: Vec<Usage>,
}

/// Decides a step at `now`, the engine's time, which is `offset` ahead of the wall clock because that was set
/// back.
///
/// `buckets` are the limits of the bucket of each of the step's levels, in that order; a bucket that does not
/// exist is empty. If the step names other buckets than the lease drew from, nothing changes and the answer
/// is [`Invalid`](StoreError::Invalid).
pub fn decide(
    step: &Step<'_>,
    lease: LeaseState,
    buckets: &[Vec<Meter>],
    now: Stamp,
    offset: Duration,
) -> Decision<StepResult> {
    decide_by(step.lease, step.levels, lease, buckets, now, offset, |context| context.apply(step))
}

/// Ends an open lease that is past its deadline, according to its terms. Otherwise changes nothing.
///
/// `buckets` are those of the levels that the lease drew from.
pub fn expire(
    lease: LeaseId,
    state: LeaseState,
    buckets: &[Vec<Meter>],
    now: Stamp,
) -> Decision<SweepReport> {
    let LeaseState::Open(record, levels) = &state else {
        let buckets = buckets.to_vec();
        return Decision { answer: Ok(SweepReport::default()), buckets, lease: state, usage: Vec::new() };
    };
    let (is_due, levels) = (record.is_due(now), Arc::clone(levels));
    decide_by(lease, &levels, state, buckets, now, Duration::ZERO, |context| {
        if is_due { context.expire(lease) } else { Ok(SweepReport::default()) }
    })
}

/// Runs `step` on the lease and the buckets.
pub(crate) fn decide_by<T>(
    lease: LeaseId,
    levels: &Levels,
    state: LeaseState,
    buckets: &[Vec<Meter>],
    now: Stamp,
    offset: Duration,
    step: impl FnOnce(&mut StepContext<'_, OneLease>) -> Result<T, StoreError>,
) -> Decision<T> {
    let hasher = RandomState::default();
    let place = |subject: &Subject| Place { hash: hash_subject(&hasher, subject), index: None };
    let place_all = |levels: &Levels| levels.levels().iter().map(|level| place(&level.subject)).collect();
    let mut leases = OneLease { id: lease, state: LoadedLease::new(lease, state, place_all) };
    let mut table = BucketTable::default();
    let mut places = Places::new();
    for (number, level) in levels.levels().iter().enumerate() {
        let hash = hash_subject(&hasher, &level.subject);
        // Also without limits, so that usage is counted even if the bucket was evicted.
        let meters = buckets.get(number).map_or(&[][..], Vec::as_slice);
        let rows = meters.iter().map(|meter| Row { meter: meter.clone(), usage: None }).collect();
        places.push(Place { hash, index: Some(table.push(hash, level.subject.clone(), rows)) });
    }
    let answer = check_levels(levels).and_then(|()| {
        let buckets = BucketSet { home: (0, &mut table), others: Vec::new(), capacity: &Unbounded };
        step(&mut StepContext { leases: &mut leases, buckets, places: &mut places, now, offset })
    });
    let (mut after, mut usage) = (Vec::with_capacity(places.len()), Vec::new());
    for (level, place) in levels.levels().iter().zip(&places) {
        let rows = table.get(place.hash, &level.subject).map_or(&[][..], |bucket| &bucket.rows[..]);
        after.push(rows.iter().map(|row| row.meter.clone()).collect());
        for row in rows {
            let Some(windows) = &row.usage else { continue };
            for window in Window::ALL {
                let line = |(start, tally)| {
                    let (subject, limit) = (level.subject.clone(), row.meter.rule().name().clone());
                    Usage { subject, limit, window, start, tally }
                };
                usage.extend(windows.within(window, &(Stamp::ZERO..Stamp::MAX)).map(line));
            }
        }
    }
    Decision { answer, buckets: after, lease: leases.state.into_state(), usage }
}

/// No bound: the engine bounds its buckets itself.
pub(crate) struct Unbounded;

impl Capacity for Unbounded {
    fn reserve(&self, _: &mut BucketTable, _: &[Place], _: Stamp) -> Result<(), StoreError> {
        Ok(())
    }

    fn created(&self, _: &Subject) {}
}

/// A lease in memory.
pub(crate) enum LoadedLease {
    Unknown,
    Open(Box<Open>),
    Ended(EndRecord),
}

impl LoadedLease {
    pub(crate) fn new(lease: LeaseId, state: LeaseState, place: impl Fn(&Levels) -> Places) -> Self {
        match state {
            LeaseState::Unknown => Self::Unknown,
            LeaseState::Ended(ended) => Self::Ended(ended),
            LeaseState::Open(record, levels) => {
                let places = place(&levels);
                Self::Open(Box::new(Open { lease, record, levels, places }))
            }
        }
    }

    pub(crate) fn known(&self) -> KnownLease<'_> {
        match self {
            Self::Open(open) => KnownLease::Open(open),
            Self::Ended(ended) => KnownLease::Ended(*ended),
            Self::Unknown => KnownLease::Unknown,
        }
    }

    fn into_state(self) -> LeaseState {
        match self {
            Self::Unknown => LeaseState::Unknown,
            Self::Open(open) => LeaseState::Open(open.record, open.levels),
            Self::Ended(ended) => LeaseState::Ended(ended),
        }
    }
}

/// A lease table with the lease of one step.
pub(crate) struct OneLease {
    id: LeaseId,
    state: LoadedLease,
}

impl LeaseTable for OneLease {
    fn find(&self, lease: LeaseId) -> KnownLease<'_> {
        if lease == self.id { self.state.known() } else { KnownLease::Unknown }
    }

    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError> {
        let error = self.not_open(lease);
        match &mut self.state {
            LoadedLease::Open(open) if lease == self.id => Ok(open),
            _ => Err(error),
        }
    }

    fn may_draw(&self, _: LeaseId) -> Result<(), StoreError> {
        Ok(())
    }

    fn insert(&mut self, open: Open) {
        self.state = LoadedLease::Open(Box::new(open));
    }

    fn end(&mut self, _: LeaseId, ended: EndRecord) -> u64 {
        self.state = LoadedLease::Ended(ended);
        0
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
    use tidegate_core::limit::resolve::resolve;
    use tidegate_core::limit::rule::Limit;
    use tidegate_core::limit::usage::Tally;

    use super::*;
    use crate::buckets::Terms;
    use crate::engine::{Change, TakeMode};

    const NOW: Stamp = Stamp::from_secs(1_800_000_000);
    const TERMS: Terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Settle };

    fn levels(entities: &[&str]) -> Arc<Levels> {
        let level = |entity: &&str| {
            let subject = Subject::new(entity, "gpt").unwrap();
            let policy = Policy::new([Limit::per_day("rpm", 100)]).unwrap();
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        };
        Arc::new(Levels::new(Version::ZERO, entities.iter().map(level).collect()))
    }

    /// Takes seven units for the lease `1` from levels without buckets.
    fn take(levels: &Arc<Levels>, taking: TakeMode) -> Decision<StepResult> {
        let units = levels.units(&[("rpm", 7)]).unwrap();
        let (lease, change) = (LeaseId::new(1, 1), Change::Take(&units, taking));
        let step = Step { lease, number: 0, levels, change, is_watched: true };
        decide(&step, LeaseState::Unknown, &[], NOW, Duration::ZERO)
    }

    fn hourly(usage: &[Usage]) -> Vec<Tally> {
        usage.iter().filter(|line| line.window == Window::Hour).map(|line| line.tally).collect()
    }

    #[test]
    fn expiry_counts_usage_without_the_bucket() {
        let drawn = take(&levels(&["acme"]), TakeMode::Open(TERMS));
        assert!(matches!(drawn.answer, Ok(StepResult::Granted(_))), "{:?}", drawn.answer);
        assert!(drawn.usage.is_empty());
        let expired = expire(LeaseId::new(1, 1), drawn.lease, &[], NOW + TERMS.deadline);
        assert_eq!(expired.answer.unwrap().settled, 1);
        assert!(matches!(expired.lease, LeaseState::Ended(_)));
        assert_eq!(hourly(&expired.usage), [Tally { units: 7, own: 7, leases: 1 }]);
    }

    #[test]
    fn expiry_before_the_deadline_changes_nothing() {
        let drawn = take(&levels(&["acme"]), TakeMode::Open(TERMS));
        let same = expire(LeaseId::new(1, 1), drawn.lease.clone(), &drawn.buckets, NOW);
        assert_eq!((same.lease, same.buckets), (drawn.lease, drawn.buckets));
        assert_eq!((same.answer.unwrap(), same.usage), (SweepReport::default(), Vec::new()));
    }

    #[test]
    fn refused_draw_leaves_no_lease_and_no_bucket() {
        let levels = levels(&["acme"]);
        let units = levels.units(&[("rpm", 101)]).unwrap();
        let change = Change::Take(&units, TakeMode::Open(TERMS));
        let step = Step { lease: LeaseId::new(1, 1), number: 0, levels: &levels, change, is_watched: true };
        let refused = decide(&step, LeaseState::Unknown, &[Vec::new()], NOW, Duration::ZERO);
        assert!(matches!(refused.answer, Ok(StepResult::Refused(_))), "{:?}", refused.answer);
        assert_eq!((refused.lease, refused.buckets), (LeaseState::Unknown, vec![Vec::new()]));
    }

    /// Regression: the bucket was loaded once per level, and one of the two updates was lost.
    #[test]
    fn subject_named_twice_is_refused() {
        let spent = take(&levels(&["acme", "acme"]), TakeMode::Spend);
        assert!(matches!(spent.answer, Err(StoreError::Invalid { .. })), "{:?}", spent.answer);
        assert!(spent.usage.is_empty() && spent.buckets.iter().all(Vec::is_empty));
    }
}
