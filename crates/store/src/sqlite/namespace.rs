//! The state of a namespace in this process: loaded as calls need it, changed in memory, and written by the
//! transaction.
//!
//! It is valid only until another connection writes to the file: each transaction compares the file's data
//! version and starts with empty state if it has changed.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::errors::CallError;
use super::evict::EvictionCursor;
use super::leases::Leases;
use super::meter_rows;
use crate::error::StoreError;
use crate::shared_engine::bucket_table::Row;
use crate::shared_engine::{
    BucketSet, BucketTable, KnownLease, LeaseTable, Place, Places, StepContext, Unbounded, check_levels,
    hash_subject,
};
use crate::store::SweepReport;
use crate::tables::{column, stamp};

/// The leases that a transaction ends past their deadline, or deletes, before its calls; twice its number of
/// calls if that is more.
const CLEANUP_MIN: usize = 64;

/// The most subjects that a sweep checks for eviction.
const EVICTION_SCAN_MAX: usize = 1_000;
/// A margin added to `kept_until`, so that most draws need not write it.
const KEEP_MARGIN: Duration = Duration::from_secs(60);

/// The state of a namespace.
pub(super) struct NamespaceState {
    pub(super) namespace: i64,
    hasher: foldhash::fast::RandomState,
    table: BucketTable,
    /// The stored form of each bucket in the table, by index.
    written: Vec<StoredBucket>,
    /// Indices of buckets that may differ from the file.
    touched: Vec<u32>,
    leases: Leases,
    /// No lease is due before this.
    due_at: Stamp,
    /// No ended lease is deleted before this.
    delete_ended_at: Stamp,
    /// Sweeps that no `sweep` call has reported yet.
    pub(super) unreported: SweepReport,
    pub(super) eviction_cursor: EvictionCursor,
    /// The offset of the time from the clock, in this transaction.
    pub(super) clock_offset: Duration,
}

#[derive(Default)]
pub(super) struct StoredBucket {
    subject: Option<i64>,
    meters: Vec<Meter>,
    is_touched: bool,
    /// No lease that drew from it is open after this: in the file, and now.
    kept_until: (Stamp, Stamp),
}

impl NamespaceState {
    /// Empty state, which knows only when something is due.
    pub(super) fn open(connection: &Connection, namespace: i64) -> Result<Self, CallError> {
        let mut state = Self {
            namespace,
            hasher: foldhash::fast::RandomState::default(),
            table: BucketTable::default(),
            written: Vec::new(),
            touched: Vec::new(),
            leases: Leases::default(),
            due_at: Stamp::MAX,
            delete_ended_at: Stamp::MAX,
            unreported: SweepReport::default(),
            eviction_cursor: EvictionCursor::default(),
            clock_offset: Duration::ZERO,
        };
        state.find_due(connection)?;
        state.find_first_end(connection)?;
        Ok(state)
    }

    /// The number of buckets and leases in memory.
    pub(super) fn len(&self) -> usize {
        self.table.len() + self.leases.len()
    }

    /// Runs a decision on a lease and the buckets of these levels.
    pub(super) fn decide<T>(
        &mut self,
        connection: &Connection,
        now: Stamp,
        (lease, levels): (LeaseId, &Levels),
        decide: impl FnOnce(&mut StepContext<'_, Leases>) -> Result<T, StoreError>,
    ) -> Result<T, CallError> {
        check_levels(levels)?;
        let mut places = places_of(&self.hasher, levels);
        for (level, place) in levels.levels().iter().zip(&mut places) {
            self.load(connection, &level.subject, place)?;
        }
        self.load_lease(connection, lease)?;
        // The disk bounds the number of buckets, and SQLite reports when it is full.
        let buckets = BucketSet { home: (0, &mut self.table), others: Vec::new(), capacity: &Unbounded };
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

    /// Ends up to `max` leases past their deadline, deletes old ended ones, and evicts idle subjects.
    pub(super) fn sweep(
        &mut self,
        connection: &Connection,
        now: Stamp,
        max: usize,
    ) -> Result<SweepReport, CallError> {
        let mut swept = SweepReport::default();
        // Draws of this transaction are not in the file yet.
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
                // It cannot be decoded, which reading it reports. It must not block the others.
                Err(CallError::Reply(_)) => self.set_aside(connection, &id)?,
                Err(error @ CallError::Transaction(_)) => return Err(error),
            }
        }
        self.write(connection)?;
        self.find_due(connection)?;
        swept.forgotten = self.delete_ended(connection, now, max)?;
        self.evict(connection, now, max.min(EVICTION_SCAN_MAX))?;
        Ok(swept)
    }

    /// Like [`sweep`](Self::sweep), for callers that do not report it: the next sweep does.
    pub(super) fn sweep_unreported(
        &mut self,
        connection: &Connection,
        now: Stamp,
        max: usize,
    ) -> Result<(), CallError> {
        let swept = self.sweep(connection, now, max)?;
        self.unreported.add(swept);
        Ok(())
    }

    /// Housekeeping at the start of a transaction.
    pub(super) fn clean_up(
        &mut self,
        connection: &Connection,
        now: Stamp,
        calls: usize,
    ) -> Result<(), CallError> {
        // More than the calls can add, so that the number does not grow.
        let max = CLEANUP_MIN.max(2 * calls);
        if now >= self.due_at {
            self.sweep_unreported(connection, now, max)?;
        }
        if now >= self.delete_ended_at {
            self.delete_ended(connection, now, max)?;
        }
        if self.eviction_cursor.added > 0 {
            self.evict(connection, now, 2 * self.eviction_cursor.added)?;
        }
        Ok(())
    }

    /// Notes the deadline of a lease.
    pub(super) fn note_deadline(&mut self, deadline: Stamp) {
        self.due_at = self.due_at.min(deadline);
    }

    fn expire(
        &mut self,
        connection: &Connection,
        now: Stamp,
        lease: LeaseId,
    ) -> Result<SweepReport, CallError> {
        self.load_lease(connection, lease)?;
        let KnownLease::Open(open) = self.leases.find(lease) else { return Ok(SweepReport::default()) };
        let levels = Arc::clone(&open.levels);
        self.decide(connection, now, (lease, &levels), |context| context.expire(lease))
    }

    /// Removes the deadline of a lease that cannot be decoded, so that it is not due again and an operator
    /// can inspect it.
    fn set_aside(&self, connection: &Connection, id: &[u8]) -> Result<(), CallError> {
        let mut update =
            connection.prepare_cached("UPDATE leases SET deadline = ?3 WHERE namespace = ?1 AND id = ?2")?;
        update.execute((self.namespace, id, i64::MAX))?;
        Ok(())
    }

    fn delete_ended(&mut self, connection: &Connection, now: Stamp, max: usize) -> Result<u64, CallError> {
        let Some(before) = now.as_micros().checked_sub(micros(REMEMBERED)) else { return Ok(0) };
        let mut delete = connection.prepare_cached(
            "DELETE FROM leases WHERE namespace = ?1 AND id IN (
                 SELECT id FROM leases WHERE namespace = ?1 AND how IS NOT NULL AND ended_at < ?2
                 ORDER BY ended_at LIMIT ?3)",
        )?;
        let forgotten = delete.execute((self.namespace, column(before), column(max as u64)))?;
        self.find_first_end(connection)?;
        Ok(forgotten as u64)
    }

    fn find_due(&mut self, connection: &Connection) -> Result<(), CallError> {
        let mut first = connection
            .prepare_cached("SELECT MIN(deadline) FROM leases WHERE namespace = ?1 AND how IS NULL")?;
        let first: Option<i64> = first.query_row([self.namespace], |row| row.get(0))?;
        self.due_at = first.map_or(Stamp::MAX, |first| Stamp::from_micros(first.unsigned_abs()));
        Ok(())
    }

    fn find_first_end(&mut self, connection: &Connection) -> Result<(), CallError> {
        let mut first = connection
            .prepare_cached("SELECT MIN(ended_at) FROM leases WHERE namespace = ?1 AND how IS NOT NULL")?;
        let first: Option<i64> = first.query_row([self.namespace], |row| row.get(0))?;
        self.delete_ended_at =
            first.map_or(Stamp::MAX, |first| deletable_at(Stamp::from_micros(first.unsigned_abs())));
        Ok(())
    }

    fn load_lease(&mut self, connection: &Connection, lease: LeaseId) -> Result<(), CallError> {
        let hasher = &self.hasher;
        self.leases.load(connection, self.namespace, lease, |levels| places_of(hasher, levels))
    }

    /// Loads a subject's bucket into the table, if the file has one.
    fn load(
        &mut self,
        connection: &Connection,
        subject: &Subject,
        place: &mut Place,
    ) -> Result<(), CallError> {
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
        let meters = meter_rows::meters_of(connection, id)?;
        let rows = meters.iter().map(|meter| Row { meter: meter.clone(), usage: None }).collect();
        let index = self.table.push(place.hash, subject.clone(), rows);
        place.index = Some(index);
        let written = self.written_at(index);
        (written.subject, written.meters) = (Some(id), meters);
        written.kept_until = [stamp(kept_until)?; 2].into();
        Ok(())
    }

    fn written_at(&mut self, index: u32) -> &mut StoredBucket {
        let place = index as usize;
        if self.written.len() <= place {
            self.written.resize_with(place + 1, StoredBucket::default);
        }
        &mut self.written[place]
    }

    /// Removes a bucket from the table, unless a loaded lease holds it.
    pub(super) fn unload(&mut self, subject: &Subject) -> bool {
        let place = place_of(&self.hasher, subject);
        let Some(index) = self.table.find(place.hash, subject) else { return true };
        let is_gone = self.table.remove(index);
        if is_gone {
            *self.written_at(index) = StoredBucket::default();
        }
        is_gone
    }

    /// Marks a bucket as changed, and held by a lease until `deadline`.
    fn touch(&mut self, subject: &Subject, deadline: Stamp) {
        let place = place_of(&self.hasher, subject);
        let Some(index) = self.table.find(place.hash, subject) else { return };
        let written = self.written_at(index);
        if deadline > written.kept_until.1 {
            // With a margin, so that most draws need not write it.
            written.kept_until.1 = deadline + KEEP_MARGIN;
        }
        if !std::mem::replace(&mut written.is_touched, true) {
            self.touched.push(index);
        }
    }

    /// Writes all changes.
    pub(super) fn write(&mut self, connection: &Connection) -> Result<(), CallError> {
        let mut touched = std::mem::take(&mut self.touched);
        for index in touched.drain(..) {
            self.write_bucket(connection, index)?;
        }
        self.touched = touched;
        if let Some(first) = self.leases.first_end.take() {
            self.delete_ended_at = self.delete_ended_at.min(deletable_at(first));
        }
        self.leases.write(connection, self.namespace)
    }

    fn write_bucket(&mut self, connection: &Connection, index: u32) -> Result<(), CallError> {
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
                self.eviction_cursor.added += 1;
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
                meter_rows::write_usage(connection, subject, row.meter.rule().name(), &usage)?;
            }
        }
        meter_rows::write_meters(connection, subject, &bucket.rows, &mut written.meters)
    }
}

fn place_of(hasher: &foldhash::fast::RandomState, subject: &Subject) -> Place {
    Place { hash: hash_subject(hasher, subject), index: None }
}

fn places_of(hasher: &foldhash::fast::RandomState, levels: &Levels) -> Places {
    levels.levels().iter().map(|level| place_of(hasher, &level.subject)).collect()
}

fn deletable_at(ended_at: Stamp) -> Stamp {
    ended_at + REMEMBERED + Duration::from_micros(1)
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
