//! Eviction of idle subjects, which are the same as new ones.
//!
//! A subject is evicted if all of its limits are full, it has no usage, no open lease drew from it, and its
//! rules are older than the time for which ended leases are remembered, so that no caller brings older ones.
//! Transactions and sweeps cycle through all subjects by name, and check more of them than were added since.

use rusqlite::Connection;
use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::errors::CallError;
use super::namespace::{NamespaceState, micros};
use crate::tables::{column, subject};

/// The position of a process in its search for idle subjects.
#[derive(Debug, Default)]
pub(super) struct EvictionCursor {
    /// The last subject that was checked.
    after: (String, String),
    /// Subjects that were added since.
    pub(super) added: usize,
}

impl NamespaceState {
    /// Checks the next `count` subjects, and evicts idle ones.
    pub(super) fn evict(
        &mut self,
        connection: &Connection,
        now: Stamp,
        count: usize,
    ) -> Result<(), CallError> {
        // After this, the file has all buckets of the table.
        self.write(connection)?;
        self.eviction_cursor.added = 0;
        let Some((settled, held)) = self.bounds(connection, now)? else { return Ok(()) };
        let mut look = connection.prepare_cached(
            "SELECT id, entity, resource, kept_until < ?4
                 AND NOT EXISTS (SELECT 1 FROM meters WHERE subject = id
                     AND (full_at > ?5 OR full_at = ?5 AND part > 0 OR version > ?6))
                 AND NOT EXISTS (SELECT 1 FROM usage WHERE subject = id)
             FROM subjects WHERE namespace = ?1 AND (entity, resource) > (?2, ?3)
             ORDER BY entity, resource LIMIT ?7",
        )?;
        let (entity, resource) = &self.eviction_cursor.after;
        let now = column(now.as_micros());
        let parameters = (self.namespace, entity, resource, held, now, settled, column(count as u64));
        let rows =
            look.query_map(parameters, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
        let rows = rows.collect::<rusqlite::Result<Vec<(i64, String, String, bool)>>>()?;
        let is_last = rows.len() < count;
        for (id, entity, resource, is_idle) in rows {
            if is_idle && self.can_evict(&entity, &resource) {
                connection.prepare_cached("DELETE FROM meters WHERE subject = ?1")?.execute([id])?;
                connection.prepare_cached("DELETE FROM subjects WHERE id = ?1")?.execute([id])?;
            }
            self.eviction_cursor.after = (entity, resource);
        }
        if is_last {
            self.eviction_cursor.after = Default::default();
        }
        Ok(())
    }

    /// A row with an invalid name stays.
    fn can_evict(&mut self, entity: &str, resource: &str) -> bool {
        subject(entity, resource).is_ok_and(|subject: Subject| self.unload(&subject))
    }

    /// The newest version that is older than any change a caller may have missed, and the earliest deadline of an
    /// open lease. `None` while a lease from before `kept_until` existed may be open.
    fn bounds(&self, connection: &Connection, now: Stamp) -> Result<Option<(i64, i64)>, CallError> {
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
        Ok((held > held_until).then_some((settled, held)))
    }
}
