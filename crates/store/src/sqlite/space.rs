//! One namespace as this process knows it: loaded as calls need it, decided on in memory, written when they are done.
//!
//! Nothing here is believed once another connection has written to the file: whoever begins a transaction compares the
//! file's data version, and begins with an empty space if it has changed.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::evict::Round;
use super::leases::Leases;
use super::rows;
use super::trouble::Trouble;
use crate::error::StoreError;
use crate::shared_engine::bucket_table::Row;
use crate::shared_engine::{
    BucketSet, BucketTable, Capacity, KnownLease, LeaseTable, Place, Places, StepContext, check_levels,
    hash_subject,
};
use crate::store::Swept;
use crate::tables::{column, stamp};

/// Leases a transaction ends in passing whose deadline has passed, and forgets that ended long ago; twice as many as it
/// has calls, where that is more.
const SWEPT_IN_PASSING: usize = 64;

/// Subjects that a sweep looks at, to evict those that are idle.
const LOOKS_SWEPT: usize = 1_000;
/// How much longer than its leases a subject is kept at most.
const KEPT_LONGER: Duration = Duration::from_secs(60);

/// A file has room for as many as the disk has, and finds them by itself.
struct Disk;

impl Capacity for Disk {
    fn reserve(&self, _: &mut BucketTable, _: &[Place], _: Stamp) -> Result<(), StoreError> {
        Ok(())
    }

    fn created(&self, _: &Subject) {}
}

/// A namespace.
pub(super) struct Space {
    pub(super) namespace: i64,
    hasher: foldhash::fast::RandomState,
    table: BucketTable,
    /// What the file has of each bucket on the table, by its place.
    written: Vec<Written>,
    /// Buckets that may differ from what the file has.
    touched: Vec<u32>,
    leases: Leases,
    /// No lease is past its deadline before this.
    due_at: Stamp,
    /// No ended lease is to be forgotten before this.
    forget_at: Stamp,
    /// What was ended in passing, until a sweep tells of it.
    pub(super) passed: Swept,
    pub(super) round: Round,
    /// How far time is ahead of the clock, in this transaction.
    pub(super) clock_offset: Duration,
}

#[derive(Default)]
pub(super) struct Written {
    subject: Option<i64>,
    meters: Vec<Meter>,
    is_touched: bool,
    /// No lease that drew from it is open after this, in the file and by now.
    kept_until: (Stamp, Stamp),
}

impl Space {
    /// A namespace of which nothing is known but when something is due.
    pub(super) fn open(connection: &Connection, namespace: i64) -> Result<Self, Trouble> {
        let mut space = Self {
            namespace,
            hasher: foldhash::fast::RandomState::default(),
            table: BucketTable::default(),
            written: Vec::new(),
            touched: Vec::new(),
            leases: Leases::default(),
            due_at: Stamp::MAX,
            forget_at: Stamp::MAX,
            passed: Swept::default(),
            round: Round::default(),
            clock_offset: Duration::ZERO,
        };
        space.find_due(connection)?;
        space.find_forgettable(connection)?;
        Ok(space)
    }

    /// Buckets and leases that are known.
    pub(super) fn len(&self) -> usize {
        self.table.len() + self.leases.len()
    }

    /// Decides about a lease with the buckets of these levels.
    pub(super) fn decide<T>(
        &mut self,
        connection: &Connection,
        now: Stamp,
        (lease, levels): (LeaseId, &Levels),
        decide: impl FnOnce(&mut StepContext<'_, Leases>) -> Result<T, StoreError>,
    ) -> Result<T, Trouble> {
        check_levels(levels)?;
        let mut places = places_of(&self.hasher, levels);
        for (level, place) in levels.levels().iter().zip(&mut places) {
            self.load(connection, &level.subject, place)?;
        }
        self.load_lease(connection, lease)?;
        let buckets = BucketSet { home: (0, &mut self.table), others: Vec::new(), capacity: &Disk };
        let offset = self.clock_offset;
        let mut context = StepContext { leases: &mut self.leases, buckets, places: &mut places, now, offset };
        let answer = decide(&mut context);
        let deadline = match self.leases.find(lease) {
            KnownLease::Open(open) => open.record.deadline(),
            KnownLease::Ended(_) | KnownLease::Unknown => Stamp::ZERO,
        };
        for level in levels.levels() {
            self.touch(&level.subject, deadline);
        }
        Ok(answer?)
    }

    /// Ends up to `max` leases that are past their deadline, and forgets some that ended long ago.
    pub(super) fn sweep(
        &mut self,
        connection: &Connection,
        now: Stamp,
        max: usize,
    ) -> Result<Swept, Trouble> {
        let mut swept = Swept::default();
        // What this transaction has drawn is not in the file yet.
        self.write(connection)?;
        let mut due = connection.prepare_cached(
            "SELECT id FROM leases WHERE namespace = ?1 AND how IS NULL AND deadline <= ?2
             ORDER BY deadline LIMIT ?3",
        )?;
        let bounds = (self.namespace, column(now.as_micros()), column(max as u64));
        let due = due.query_map(bounds, |row| row.get(0))?.collect::<rusqlite::Result<Vec<Vec<u8>>>>()?;
        for id in due {
            let Ok(number) = <[u8; 16]>::try_from(&id[..]) else {
                self.set_aside(connection, &id)?;
                continue;
            };
            match self.expire(connection, now, LeaseId::from_number(u128::from_be_bytes(number))) {
                Ok(one) => {
                    swept.settled += one.settled;
                    swept.returned += one.returned;
                }
                // It is not as we write it. Whoever asks for it is told so; others must not wait behind it.
                Err(Trouble::Answer(_)) => self.set_aside(connection, &id)?,
                Err(trouble @ Trouble::Engine(_)) => return Err(trouble),
            }
        }
        self.write(connection)?;
        self.find_due(connection)?;
        swept.forgotten = self.forget(connection, now, max)?;
        self.evict(connection, now, max.min(LOOKS_SWEPT))?;
        Ok(swept)
    }

    /// The same for somebody who has something else to do: the next sweep tells of it.
    pub(super) fn sweep_in_passing(
        &mut self,
        connection: &Connection,
        now: Stamp,
        max: usize,
    ) -> Result<(), Trouble> {
        let swept = self.sweep(connection, now, max)?;
        self.passed.add(swept);
        Ok(())
    }

    /// What a transaction does for this namespace before anything else.
    pub(super) fn tidy(&mut self, connection: &Connection, now: Stamp, calls: usize) -> Result<(), Trouble> {
        // More than may begin and end meanwhile: else they would be ever more.
        let max = SWEPT_IN_PASSING.max(2 * calls);
        if now >= self.due_at {
            self.sweep_in_passing(connection, now, max)?;
        }
        if now >= self.forget_at {
            self.forget(connection, now, max)?;
        }
        if self.round.added > 0 {
            self.evict(connection, now, 2 * self.round.added)?;
        }
        Ok(())
    }

    /// A lease will be due at `deadline`.
    pub(super) fn is_due_at(&mut self, deadline: Stamp) {
        self.due_at = self.due_at.min(deadline);
    }

    fn expire(&mut self, connection: &Connection, now: Stamp, lease: LeaseId) -> Result<Swept, Trouble> {
        self.load_lease(connection, lease)?;
        let KnownLease::Open(open) = self.leases.find(lease) else { return Ok(Swept::default()) };
        let levels = Arc::clone(&open.levels);
        self.decide(connection, now, (lease, &levels), |context| context.expire(lease))
    }

    /// Lets a lease that cannot be read stay as it is, for somebody to look at: it is due no more.
    fn set_aside(&self, connection: &Connection, id: &[u8]) -> Result<(), Trouble> {
        let mut update =
            connection.prepare_cached("UPDATE leases SET deadline = ?3 WHERE namespace = ?1 AND id = ?2")?;
        update.execute((self.namespace, id, i64::MAX))?;
        Ok(())
    }

    fn forget(&mut self, connection: &Connection, now: Stamp, max: usize) -> Result<u64, Trouble> {
        let Some(before) = now.as_micros().checked_sub(micros(REMEMBERED)) else { return Ok(0) };
        let mut forget = connection.prepare_cached(
            "DELETE FROM leases WHERE namespace = ?1 AND id IN (
                 SELECT id FROM leases WHERE namespace = ?1 AND how IS NOT NULL AND ended_at < ?2
                 ORDER BY ended_at LIMIT ?3)",
        )?;
        let forgotten = forget.execute((self.namespace, column(before), column(max as u64)))?;
        self.find_forgettable(connection)?;
        Ok(forgotten as u64)
    }

    fn find_due(&mut self, connection: &Connection) -> Result<(), Trouble> {
        let mut first = connection
            .prepare_cached("SELECT MIN(deadline) FROM leases WHERE namespace = ?1 AND how IS NULL")?;
        let first: Option<i64> = first.query_row([self.namespace], |row| row.get(0))?;
        self.due_at = first.map_or(Stamp::MAX, |first| Stamp::from_micros(first.unsigned_abs()));
        Ok(())
    }

    fn find_forgettable(&mut self, connection: &Connection) -> Result<(), Trouble> {
        let mut first = connection
            .prepare_cached("SELECT MIN(ended_at) FROM leases WHERE namespace = ?1 AND how IS NOT NULL")?;
        let first: Option<i64> = first.query_row([self.namespace], |row| row.get(0))?;
        self.forget_at =
            first.map_or(Stamp::MAX, |first| forgotten_at(Stamp::from_micros(first.unsigned_abs())));
        Ok(())
    }

    fn load_lease(&mut self, connection: &Connection, lease: LeaseId) -> Result<(), Trouble> {
        let hasher = &self.hasher;
        self.leases.load(connection, self.namespace, lease, |levels| places_of(hasher, levels))
    }

    /// Puts a subject's bucket on the table, if the file has one.
    fn load(&mut self, connection: &Connection, subject: &Subject, place: &mut Place) -> Result<(), Trouble> {
        place.index = self.table.find(place.hash, subject);
        if place.index.is_some() {
            return Ok(());
        }
        let mut id = connection.prepare_cached(
            "SELECT id, kept_until FROM subjects WHERE namespace = ?1 AND entity = ?2 AND resource = ?3",
        )?;
        let key = (self.namespace, subject.entity.as_str(), subject.resource.as_str());
        let found = id.query_row(key, |row| Ok((row.get(0)?, row.get::<_, i64>(1)?))).optional()?;
        let Some((id, kept_until)) = found else { return Ok(()) };
        let meters = rows::meters_of(connection, id)?;
        let rows = meters.iter().map(|meter| Row { meter: meter.clone(), usage: None }).collect();
        let index = self.table.push(place.hash, subject.clone(), rows);
        place.index = Some(index);
        let written = self.written_at(index);
        (written.subject, written.meters) = (Some(id), meters);
        written.kept_until = [stamp(kept_until)?; 2].into();
        Ok(())
    }

    fn written_at(&mut self, index: u32) -> &mut Written {
        let place = index as usize;
        if self.written.len() <= place {
            self.written.resize_with(place + 1, Written::default);
        }
        &mut self.written[place]
    }

    /// Takes a bucket off the table, unless a lease that is known holds it.
    pub(super) fn take_off(&mut self, subject: &Subject) -> bool {
        let place = place_of(&self.hasher, subject);
        let Some(index) = self.table.find(place.hash, subject) else { return true };
        let is_gone = self.table.remove(index);
        if is_gone {
            *self.written_at(index) = Written::default();
        }
        is_gone
    }

    /// A bucket may have changed, and a lease until this time holds it.
    fn touch(&mut self, subject: &Subject, deadline: Stamp) {
        let place = place_of(&self.hasher, subject);
        let Some(index) = self.table.find(place.hash, subject) else { return };
        let written = self.written_at(index);
        if deadline > written.kept_until.1 {
            // Longer than it need be, so that most draws leave it as it is.
            written.kept_until.1 = deadline + KEPT_LONGER;
        }
        if !std::mem::replace(&mut written.is_touched, true) {
            self.touched.push(index);
        }
    }

    /// Writes what has changed.
    pub(super) fn write(&mut self, connection: &Connection) -> Result<(), Trouble> {
        let mut touched = std::mem::take(&mut self.touched);
        for index in touched.drain(..) {
            self.write_bucket(connection, index)?;
        }
        self.touched = touched;
        if let Some(first) = self.leases.first_end.take() {
            self.forget_at = self.forget_at.min(forgotten_at(first));
        }
        self.leases.write(connection, self.namespace)
    }

    fn write_bucket(&mut self, connection: &Connection, index: u32) -> Result<(), Trouble> {
        self.written_at(index).is_touched = false;
        let (bucket, written) = (self.table.at_mut(index), &mut self.written[index as usize]);
        let subject = match written.subject {
            Some(subject) => subject,
            None if bucket.rows.is_empty() => return Ok(()),
            None => {
                let mut insert = connection.prepare_cached(
                    "INSERT INTO subjects (namespace, entity, resource) VALUES (?1, ?2, ?3)",
                )?;
                let Subject { entity, resource } = &bucket.subject;
                self.round.added += 1;
                *written.subject.insert(insert.insert((
                    self.namespace,
                    entity.as_str(),
                    resource.as_str(),
                ))?)
            }
        };
        let (in_file, kept_until) = written.kept_until;
        if kept_until != in_file {
            let mut keep = connection.prepare_cached("UPDATE subjects SET kept_until = ?2 WHERE id = ?1")?;
            keep.execute((subject, column(kept_until.as_micros())))?;
            written.kept_until.0 = kept_until;
        }
        for row in &mut bucket.rows {
            if let Some(usage) = row.usage.take() {
                rows::write_usage(connection, subject, row.meter.rule().name(), &usage)?;
            }
        }
        rows::write_meters(connection, subject, &bucket.rows, &mut written.meters)
    }
}

fn place_of(hasher: &foldhash::fast::RandomState, subject: &Subject) -> Place {
    Place { hash: hash_subject(hasher, subject), index: None }
}

fn places_of(hasher: &foldhash::fast::RandomState, levels: &Levels) -> Places {
    levels.levels().iter().map(|level| place_of(hasher, &level.subject)).collect()
}

fn forgotten_at(ended_at: Stamp) -> Stamp {
    ended_at + REMEMBERED + Duration::from_micros(1)
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
