//! Policies, entities, tokens and the audit of a namespace, under one lock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::sync::atomic::Ordering;

use tidegate_core::limit::policy::{Scope, Version};
use tidegate_core::time::Stamp;

use super::Space;
use crate::error::StoreError;
use crate::record::{Key, Kind, Of, Record, RecordChange, RecordWrite, Records, Scan, Value};
use crate::sync::lock;

/// The maximum number of entities, and of policies, of a namespace.
const RECORDS_MAX: usize = 1 << 22;
/// The maximum number of tokens of a namespace, including revoked ones.
const TOKENS_MAX: usize = 1 << 17;
/// The maximum number of audit entries; the oldest are deleted first.
const AUDIT_MAX: usize = 100_000;

/// The records of a namespace.
#[derive(Default)]
pub(super) struct RecordTable {
    version: Version,
    /// By kind.
    records: [BTreeMap<Key, Record>; 4],
    /// Records by their link, and policies by their entity.
    links: BTreeSet<(Kind, String, Key)>,
    /// The number of the first audit entry, and of the next one.
    first_entry: u64,
    next_entry: u64,
}

impl Space {
    pub(super) fn read_records(&self, keys: &[Key]) -> Records {
        let at = self.clock.now();
        let table = lock(&self.records);
        let records = keys.iter().map(|key| table.of(key).get(key).cloned()).collect();
        Records { version: table.version, entries: table.next_entry, at, records }
    }

    pub(super) fn write_records(&self, write: &RecordWrite) -> Result<bool, StoreError> {
        let now = self.clock.now();
        let mut table = lock(&self.records);
        if table.version != write.seen {
            return Ok(false);
        }
        table.check_space(&write.changes)?;
        for change in &write.changes {
            table.change(change);
        }
        table.version = write.version();
        table.next_entry = write.entries_after();
        while table.next_entry - table.first_entry > AUDIT_MAX as u64 {
            table.delete_entry();
        }
        lock(&self.changes).note(table.version, now);
        self.version.store(table.version.number(), Ordering::Release);
        Ok(true)
    }

    pub(super) fn scan_records(&self, scan: &Scan) -> Vec<Record> {
        lock(&self.records).scan(scan)
    }
}

impl RecordTable {
    /// The records of a key's kind.
    fn of(&self, key: &Key) -> &BTreeMap<Key, Record> {
        &self.records[key.kind() as usize]
    }

    fn check_space(&self, changes: &[RecordChange]) -> Result<(), StoreError> {
        let bounds = [
            (Kind::Policy, "policies", RECORDS_MAX),
            (Kind::Entity, "entities", RECORDS_MAX),
            (Kind::Token, "tokens", TOKENS_MAX),
        ];
        for (kind, what, max) in bounds {
            let of_kind = changes.iter().filter(|change| change.key.kind() == kind);
            let added = of_kind.filter(|change| change.after.is_some() && change.before.is_none()).count();
            if added > 0 && self.records[kind as usize].len() + added > max {
                return Err(StoreError::Full { what, max: max as u64 });
            }
        }
        Ok(())
    }

    fn change(&mut self, change: &RecordChange) {
        self.delete(&change.key);
        if let Some(record) = &change.after {
            self.links.extend(links(record));
            self.records[record.key.kind() as usize].insert(record.key.clone(), record.clone());
        }
    }

    fn delete(&mut self, key: &Key) {
        if let Some(record) = self.records[key.kind() as usize].remove(key) {
            for link in links(&record) {
                self.links.remove(&link);
            }
        }
    }

    fn scan(&self, scan: &Scan) -> Vec<Record> {
        let after = scan.after.as_ref();
        let link = match &scan.of {
            Of::All => {
                let from = after.map_or(Unbounded, Excluded);
                let records = self.records[scan.kind as usize].range::<Key, _>((from, Unbounded));
                return records.take(scan.max).map(|(_, record)| record.clone()).collect();
            }
            Of::Link(link) => link.clone(),
            Of::Entity(entity) => entity_link(entity.as_str()),
        };
        let first = Key::Policy(Scope::System);
        let from = (scan.kind, link.clone(), after.unwrap_or(&first).clone());
        let from = if after.is_some() { Excluded(from) } else { Included(from) };
        let links = self.links.range((from, Unbounded));
        let links = links.take_while(|(kind, other, _)| (*kind, other) == (scan.kind, &link));
        links.filter_map(|(_, _, key)| self.of(key).get(key)).take(scan.max).cloned().collect()
    }

    /// Deletes up to `max` of the oldest audit entries, up to those of the change `through`.
    pub(super) fn prune_audit(&mut self, through: Version, max: usize) -> usize {
        self.delete_entries(max, |record| record.version <= through)
    }

    /// Deletes up to `max` of the audit entries that were written before `before`.
    pub(super) fn prune_audit_before(&mut self, before: Stamp, max: usize) {
        self.delete_entries(max, |record| matches!(&record.value, Value::Entry(entry) if entry.at < before));
    }

    fn delete_entries(&mut self, max: usize, is_old: impl Fn(&Record) -> bool) -> usize {
        let mut count = 0;
        while count < max
            && self.records[Kind::Entry as usize].get(&Key::Entry(self.first_entry)).is_some_and(&is_old)
        {
            self.delete_entry();
            count += 1;
        }
        count
    }

    fn delete_entry(&mut self) {
        self.delete(&Key::Entry(self.first_entry));
        self.first_entry += 1;
    }
}

/// The secondary keys of a record.
fn links(record: &Record) -> impl Iterator<Item = (Kind, String, Key)> + use<> {
    let entity = match &record.key {
        Key::Policy(Scope::Subject(subject)) => Some(entity_link(subject.entity.as_str())),
        _ => None,
    };
    let (kind, key) = (record.key.kind(), record.key.clone());
    record.link().into_iter().chain(entity).map(move |link| (kind, link, key.clone()))
}

/// The link of an entity's policies. Names do not contain `#`, so it never equals another link.
fn entity_link(entity: &str) -> String {
    format!("#{entity}")
}
