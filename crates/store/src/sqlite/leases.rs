//! Leases of a file: those that a transaction has read or changed, until they are written.

use std::sync::Arc;

use foldhash::HashMap;
use rusqlite::{Connection, Row, named_params};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::errors::CallError;
use crate::codec::levels_to_text;
use crate::error::StoreError;
use crate::shared_engine::{KnownLease, LeaseState, LeaseTable, LoadedLease, Open, Places};
use crate::tables::{LeaseRow, column, ending_number, holding_from_text, holding_to_text, in_lease};

/// The capacity of the cache of texts.
const TEXTS_MAX: usize = 1_024;

/// The loaded leases of a namespace.
#[derive(Default)]
pub(super) struct Leases {
    known: HashMap<LeaseId, Entry>,
    changed: Vec<LeaseId>,
    /// Leases that had ended when they were loaded.
    ended_when_loaded: Vec<LeaseId>,
    /// When the first lease ended since the last write.
    pub(super) first_end: Option<Stamp>,
    /// Texts by the address of their levels, which stays valid because the entry holds them.
    texts: HashMap<usize, (Arc<Levels>, Arc<str>)>,
}

struct Entry {
    state: LoadedLease,
    is_written: bool,
    is_changed: bool,
}

impl LeaseTable for Leases {
    fn find(&self, lease: LeaseId) -> KnownLease<'_> {
        self.known.get(&lease).map_or(KnownLease::Unknown, |entry| entry.state.known())
    }

    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError> {
        if let KnownLease::Ended(_) | KnownLease::Unknown = self.find(lease) {
            return Err(self.not_open(lease));
        }
        self.change(lease);
        match self.known.get_mut(&lease).map(|entry| &mut entry.state) {
            Some(LoadedLease::Open(open)) => Ok(open),
            _ => Err(StoreError::NoLease { lease }),
        }
    }

    fn may_draw(&self, _: LeaseId) -> Result<(), StoreError> {
        Ok(())
    }

    fn insert(&mut self, open: Open) {
        let lease = open.lease;
        let entry = Entry { state: LoadedLease::Open(Box::new(open)), is_written: false, is_changed: false };
        self.known.insert(lease, entry);
        self.change(lease);
    }

    fn end(&mut self, lease: LeaseId, ended: EndRecord) -> u64 {
        self.first_end.get_or_insert(ended.at);
        let state = LoadedLease::Ended(ended);
        let (is_written, is_changed) =
            self.known.get(&lease).map_or((false, false), |entry| (entry.is_written, entry.is_changed));
        self.known.insert(lease, Entry { state, is_written, is_changed });
        self.change(lease);
        0
    }
}

impl Leases {
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    fn change(&mut self, lease: LeaseId) {
        if let Some(entry) = self.known.get_mut(&lease)
            && !entry.is_changed
        {
            entry.is_changed = true;
            self.changed.push(lease);
        }
    }

    /// Loads a lease from the file, unless it is loaded.
    pub(super) fn load(
        &mut self,
        connection: &Connection,
        namespace: i64,
        lease: LeaseId,
        place: impl Fn(&Levels) -> Places,
    ) -> Result<(), CallError> {
        if self.known.contains_key(&lease) {
            return Ok(());
        }
        let state = LoadedLease::new(lease, find(connection, namespace, lease)?, place);
        match state {
            LoadedLease::Unknown => return Ok(()),
            LoadedLease::Ended(_) => self.ended_when_loaded.push(lease),
            LoadedLease::Open(_) => {}
        }
        self.known.insert(lease, Entry { state, is_written: true, is_changed: false });
        Ok(())
    }

    /// Writes changed leases and drops ended ones, which are loaded again if needed.
    pub(super) fn write(&mut self, connection: &Connection, namespace: i64) -> Result<(), CallError> {
        let mut changed = std::mem::take(&mut self.changed);
        for lease in changed.drain(..) {
            let Some(entry) = self.known.get_mut(&lease) else { continue };
            entry.is_changed = false;
            let is_written = std::mem::replace(&mut entry.is_written, true);
            match &entry.state {
                LoadedLease::Unknown => {}
                LoadedLease::Ended(ended) => {
                    write_ended(connection, namespace, (lease, *ended), is_written)?;
                    self.known.remove(&lease);
                }
                LoadedLease::Open(open) if is_written => write_step(connection, namespace, open)?,
                LoadedLease::Open(open) => {
                    let text = text_of(&mut self.texts, &open.levels);
                    write_open(connection, namespace, open, &text)?;
                }
            }
        }
        self.changed = changed;
        for lease in self.ended_when_loaded.drain(..) {
            self.known.remove(&lease);
        }
        Ok(())
    }
}

/// A lease in the file.
pub(super) fn find(connection: &Connection, namespace: i64, lease: LeaseId) -> Result<LeaseState, CallError> {
    let mut found = connection.prepare_cached(
        "SELECT levels, held, step, drawn_at, stepped_at, deadline, on_expiry, how, ended_at, digest
         FROM leases WHERE namespace = ?1 AND id = ?2",
    )?;
    let mut rows = found.query((namespace, lease.number().to_be_bytes()))?;
    let Some(row) = rows.next()? else { return Ok(LeaseState::Unknown) };
    read(row).map_err(|error| match error {
        CallError::Reply(error) => in_lease(lease, error).into(),
        transaction @ CallError::Transaction(_) => transaction,
    })
}

fn read(row: &Row<'_>) -> Result<LeaseState, CallError> {
    let (levels, held): (Option<String>, Option<String>) = (row.get(0)?, row.get(1)?);
    let columns = LeaseRow {
        levels: levels.as_deref(),
        step: row.get(2)?,
        times: [row.get(3)?, row.get(4)?, row.get(5)?],
        on_expiry: row.get(6)?,
        how: row.get(7)?,
        ended_at: row.get(8)?,
        digest: row.get(9)?,
    };
    Ok(columns.state(|_| held.as_deref().map(holding_from_text).transpose())?)
}

fn write_open(connection: &Connection, namespace: i64, open: &Open, levels: &str) -> rusqlite::Result<()> {
    let mut insert = connection.prepare_cached(
        "INSERT INTO leases (namespace, id, levels, held, step, drawn_at, stepped_at, deadline, on_expiry)
         VALUES (:namespace, :id, :levels, :held, :step, :drawn_at, :stepped_at, :deadline, :on_expiry)",
    )?;
    let record = &open.record;
    insert.execute(named_params! {
        ":namespace": namespace,
        ":id": open.lease.number().to_be_bytes(),
        ":levels": levels,
        ":held": holding_to_text(record),
        ":step": record.step(),
        ":drawn_at": column(record.drawn_at().as_micros()),
        ":stepped_at": column(record.stepped_at().as_micros()),
        ":deadline": column(record.deadline().as_micros()),
        ":on_expiry": i64::from(record.on_expiry() == OnExpiry::Return),
    })?;
    Ok(())
}

fn write_step(connection: &Connection, namespace: i64, open: &Open) -> rusqlite::Result<()> {
    let mut update = connection.prepare_cached(
        "UPDATE leases SET held = ?3, step = ?4, stepped_at = ?5, deadline = ?6 WHERE namespace = ?1 AND id = ?2",
    )?;
    let (id, record) = (open.lease.number().to_be_bytes(), &open.record);
    let [stepped_at, deadline] = [record.stepped_at(), record.deadline()].map(|at| column(at.as_micros()));
    update.execute((namespace, id, holding_to_text(record), record.step(), stepped_at, deadline))?;
    Ok(())
}

fn write_ended(
    connection: &Connection,
    namespace: i64,
    (lease, ended): (LeaseId, EndRecord),
    is_written: bool,
) -> rusqlite::Result<()> {
    let sql = if is_written {
        "UPDATE leases SET levels = NULL, held = NULL, step = ?3, how = ?4, ended_at = ?5, digest = ?6
         WHERE namespace = ?1 AND id = ?2"
    } else {
        "INSERT INTO leases (namespace, id, step, how, ended_at, digest, drawn_at, stepped_at, deadline, on_expiry)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, 0, 0, 0, 0)"
    };
    let how = ending_number(ended.how);
    let (id, at) = (lease.number().to_be_bytes(), column(ended.at.as_micros()));
    let mut write = connection.prepare_cached(sql)?;
    write.execute((namespace, id, ended.step, how, at, ended.digest.cast_signed()))?;
    Ok(())
}

fn text_of(texts: &mut HashMap<usize, (Arc<Levels>, Arc<str>)>, levels: &Arc<Levels>) -> Arc<str> {
    if texts.len() >= TEXTS_MAX {
        texts.clear();
    }
    let address = Arc::as_ptr(levels).addr();
    let make = || (Arc::clone(levels), levels_to_text(levels).into());
    Arc::clone(&texts.entry(address).or_insert_with(make).1)
}
