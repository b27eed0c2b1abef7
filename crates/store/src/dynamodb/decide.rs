//! A step of a lease, decided on what was seen of its buckets, by the code that decides it in every store of ours.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::view::View;
use crate::desk::shelf::Row;
use crate::desk::{Book, Desk, Known, Open, Place, Places, Reach, Room, Shelf, check_levels, hash_subject};
use crate::error::StoreError;

/// A table has room for as many buckets as there are.
struct Anywhere;

impl Room for Anywhere {
    fn has_room(&self, _: &mut Shelf, _: &[Place], _: Stamp) -> Result<(), StoreError> {
        Ok(())
    }

    fn made(&self, _: &Subject) {}
}

/// What is known of the one lease that a step is about.
pub(super) struct Slip {
    lease: LeaseId,
    state: State,
    /// What it held before the step.
    before: Option<Record>,
    has_ended: bool,
}

enum State {
    Unknown,
    Open(Box<Open>),
    Ended(Ended),
}

impl Slip {
    pub(super) const fn unknown(lease: LeaseId) -> Self {
        Self { lease, state: State::Unknown, before: None, has_ended: false }
    }

    pub(super) const fn ended(lease: LeaseId, ended: Ended) -> Self {
        Self { lease, state: State::Ended(ended), before: None, has_ended: false }
    }

    pub(super) fn open(lease: LeaseId, record: Record, levels: Arc<Levels>) -> Self {
        let before = Some(record.clone());
        let open = Open { lease, record, levels, places: Places::new() };
        Self { lease, state: State::Open(Box::new(open)), before, has_ended: false }
    }

    /// The lease after the step: what it holds, if it is open.
    pub(super) fn record(&self) -> Option<&Record> {
        match &self.state {
            State::Open(open) => Some(&open.record),
            State::Unknown | State::Ended(_) => None,
        }
    }

    /// The lease after the step: how it ended, if it has.
    pub(super) const fn end(&self) -> Option<Ended> {
        match self.state {
            State::Ended(ended) => Some(ended),
            State::Unknown | State::Open(_) => None,
        }
    }

    /// Whether the step has changed anything about the lease.
    pub(super) fn is_changed(&self) -> bool {
        self.has_ended || self.record() != self.before.as_ref()
    }
}

impl Book for Slip {
    fn find(&self, lease: LeaseId) -> Known<'_> {
        match &self.state {
            State::Open(open) if lease == self.lease => Known::Open(open),
            State::Ended(ended) if lease == self.lease => Known::Ended(*ended),
            _ => Known::Unknown,
        }
    }

    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError> {
        if !matches!(self.find(lease), Known::Open(_)) {
            return Err(self.not_open(lease));
        }
        match &mut self.state {
            State::Open(open) => Ok(open),
            State::Unknown | State::Ended(_) => Err(StoreError::NoLease { lease }),
        }
    }

    fn may_draw(&self, _: LeaseId) -> Result<(), StoreError> {
        Ok(())
    }

    fn insert(&mut self, open: Open) {
        self.state = State::Open(Box::new(open));
    }

    fn end(&mut self, _: LeaseId, ended: Ended) -> u64 {
        (self.state, self.has_ended) = (State::Ended(ended), true);
        0
    }
}

/// What was decided.
pub(super) struct Decided<T> {
    pub(super) answer: Result<T, StoreError>,
    /// The limits of each level after it, by row.
    pub(super) meters: Vec<BTreeMap<String, Meter>>,
    pub(super) slip: Slip,
}

impl<T> Decided<T> {
    /// Whether nothing is to be written.
    pub(super) fn is_nothing(&self, views: &[&View]) -> bool {
        !self.slip.is_changed() && views.iter().zip(&self.meters).all(|(view, after)| view.meters == *after)
    }
}

/// Decides a step with the buckets of these levels as they were seen.
pub(super) fn decide<T>(
    views: &[&View],
    levels: &Levels,
    mut slip: Slip,
    now: Stamp,
    step: impl FnOnce(&mut Desk<'_, Slip>) -> Result<T, StoreError>,
) -> Decided<T> {
    let hasher = foldhash::fast::RandomState::default();
    let mut shelf = Shelf::default();
    let mut places = Places::new();
    for (level, view) in levels.levels().iter().zip(views) {
        let hash = hash_subject(&hasher, &level.subject);
        let rows = view.meters.values().map(|meter| Row { meter: meter.clone(), usage: None });
        let index = view.is_there().then(|| shelf.push(hash, level.subject.clone(), rows.collect()));
        places.push(Place { hash, index });
    }
    if let State::Open(open) = &mut slip.state {
        // Those that it drew from, which it does not hold: all of this is gone when the step is decided.
        let place = |subject: &Subject| Place { hash: hash_subject(&hasher, subject), index: None };
        open.places = open.levels.levels().iter().map(|level| place(&level.subject)).collect();
    }
    let answer = check_levels(levels).and_then(|()| {
        let reach = Reach { home: (0, &mut shelf), others: Vec::new(), room: &Anywhere };
        step(&mut Desk { leases: &mut slip, reach, places: &mut places, now, offset: Duration::ZERO })
    });
    let meters = levels.levels().iter().map(|level| {
        let bucket = shelf.get(hash_subject(&hasher, &level.subject), &level.subject);
        let rows = bucket.into_iter().flat_map(|bucket| &bucket.rows);
        rows.map(|row| (row.meter.rule().row().to_owned(), row.meter.clone())).collect()
    });
    let meters = meters.collect();
    Decided { answer, meters, slip }
}
