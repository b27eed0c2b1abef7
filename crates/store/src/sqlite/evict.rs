//! Eviction of idle subjects, which are the same as new ones.
//!
//! A subject is evicted when all of its limits are full, no line of its usage is kept, no open lease drew from it, and its rules
//! have stood for as long as an ended lease is remembered, so that no caller brings older ones. A transaction looks at more
//! subjects than the one before has added, and so does a sweep. They go round all subjects by name.

use rusqlite::Connection;
use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::space::{Space, micros};
use super::trouble::Trouble;
use crate::tables::{column, subject};

/// The position of a process in its search for idle subjects.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// The last subject that was looked at.
    after: (String, String),
    /// Subjects that were added since.
    pub(super) added: usize,
}

/// The bounds within which a subject is idle.
struct Bounds {
    now: i64,
    /// The newest version that is older than any change a caller may have missed.
    settled: i64,
    /// The earliest deadline of an open lease.
    held: i64,
}

impl Space {
    /// Looks at the next `looks` subjects, and evicts those that are idle.
    pub(super) fn evict(&mut self, connection: &Connection, now: Stamp, looks: usize) -> Result<(), Trouble> {
        // Afterwards the file holds all that is on the table.
        self.write(connection)?;
        self.round.added = 0;
        let Some(bounds) = self.bounds(connection, now)? else { return Ok(()) };
        let mut look = connection.prepare_cached(
            "SELECT id, entity, resource, kept_until < ?4
                 AND NOT EXISTS (SELECT 1 FROM meters WHERE subject = id
                     AND (full_at > ?5 OR full_at = ?5 AND part > 0 OR version > ?6))
                 AND NOT EXISTS (SELECT 1 FROM usage WHERE subject = id)
             FROM subjects WHERE namespace = ?1 AND (entity, resource) > (?2, ?3)
             ORDER BY entity, resource LIMIT ?7",
        )?;
        let (entity, resource) = &self.round.after;
        let Bounds { now, settled, held } = bounds;
        let parameters = (self.namespace, entity, resource, held, now, settled, column(looks as u64));
        let rows =
            look.query_map(parameters, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
        let rows = rows.collect::<rusqlite::Result<Vec<(i64, String, String, bool)>>>()?;
        let is_last = rows.len() < looks;
        for (id, entity, resource, is_idle) in rows {
            if is_idle && self.may_go(&entity, &resource) {
                connection.prepare_cached("DELETE FROM meters WHERE subject = ?1")?.execute([id])?;
                connection.prepare_cached("DELETE FROM subjects WHERE id = ?1")?.execute([id])?;
            }
            self.round.after = (entity, resource);
        }
        if is_last {
            self.round.after = Default::default();
        }
        Ok(())
    }

    /// A row that we did not write stays.
    fn may_go(&mut self, entity: &str, resource: &str) -> bool {
        subject(entity, resource).is_ok_and(|subject: Subject| self.take_off(&subject))
    }

    /// Nothing where a lease from before the file knew of `kept_until` may be open.
    fn bounds(&self, connection: &Connection, now: Stamp) -> Result<Option<Bounds>, Trouble> {
        let mut read = connection.prepare_cached(
            "SELECT COALESCE(
                    (SELECT MIN(version) - 1 FROM records INDEXED BY records_by_age WHERE namespace = ?1 AND at > ?2),
                    (SELECT version FROM namespaces WHERE id = ?1), 0),
                COALESCE((SELECT MIN(deadline) FROM leases WHERE namespace = ?1 AND how IS NULL), 9223372036854775807),
                held_until
             FROM clock",
        )?;
        let recent = now.as_micros().saturating_sub(micros(REMEMBERED));
        let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get::<_, i64>(2)?));
        let (settled, held, held_until) = read.query_row((self.namespace, column(recent)), row)?;
        Ok((held > held_until).then_some(Bounds { now: column(now.as_micros()), settled, held }))
    }
}
