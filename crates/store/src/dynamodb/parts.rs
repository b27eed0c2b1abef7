//! What a call knows of the items of its levels.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::{Level, Levels};
use tidegate_core::limit::lease::{Ended, LeaseId};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use super::DynamoDb;
use super::expression::Write;
use super::keys::{Item, Key};
use super::lease_item::{OldLease, ended_in};
use super::link::Action;
use super::trouble::{Failed, Unmet};
use super::view::View;
use crate::buckets::{Reading, Readings};
use crate::engine::Applied;
use crate::error::StoreError;
use crate::store::Swept;

/// A level's item, as far as the call knows it.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) view: Arc<View>,
    /// It was read during this call, so an answer may be based on it.
    pub(super) is_fresh: bool,
}

/// What a call knows of the tombstone of its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tombstone {
    Unread,
    Absent,
    Ended(Ended),
}

/// What a call knows of the items of its levels and of its lease.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) levels: Vec<Part>,
    pub(super) tombstone: Tombstone,
    /// The lease was read again after all of them, and is as they say.
    pub(super) is_confirmed: bool,
}

impl Parts {
    /// The item of the lease's home.
    pub(super) fn home(&self) -> &View {
        &self.levels[0].view
    }

    pub(super) fn views(&self) -> Vec<&View> {
        self.levels.iter().map(|part| &*part.view).collect()
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.levels.iter().all(|part| part.is_fresh)
    }

    /// A write may have been made since they were read.
    pub(super) fn invalidate(&mut self) {
        for part in &mut self.levels {
            part.is_fresh = false;
        }
        (self.tombstone, self.is_confirmed) = (Tombstone::Unread, false);
    }

    /// Whether both say the same of a lease.
    pub(super) fn agree_on(&self, lease: LeaseId, other: &Self) -> bool {
        let (home, others) = (self.home(), other.home());
        home.open.get(&lease) == others.open.get(&lease)
            && home.ended.get(&lease) == others.ended.get(&lease)
            && self.tombstone == other.tombstone
    }
}

/// An answer that may have readings of limits.
pub(super) trait Answer {
    fn readings(&mut self) -> Option<&mut Readings> {
        None
    }

    /// Whether units are not available.
    fn is_refusal(&self) -> bool {
        false
    }

    /// The answer of a call that finds its own write: it is no repeat.
    fn claim(&mut self, _readings: Readings) {}
}

impl Answer for Applied {
    fn readings(&mut self) -> Option<&mut Readings> {
        match self {
            Self::Granted(moved) | Self::Refused(moved) => Some(&mut moved.readings),
            Self::Renewed(_) => None,
        }
    }

    fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    fn claim(&mut self, readings: Readings) {
        if let Self::Granted(moved) = self
            && moved.is_repeat
        {
            (moved.is_repeat, moved.readings) = (false, readings);
        }
    }
}

impl Answer for Swept {}

/// Replaces the readings of what was decided by those of what the item has: other calls may have moved the same limits.
pub(super) fn correct(readings: &mut Readings, levels: &Levels, number: usize, is: &BTreeMap<String, Meter>) {
    for reading in readings.iter_mut().filter(|reading| reading.level == number) {
        let level: &Level = &levels.levels()[number];
        let line = level.limits.iter().find(|line| line.name == reading.name);
        if let Some((line, meter)) = line.and_then(|line| Some((line, is.get(line.rule.row())?))) {
            *reading = Reading::new(number, line, reading.moved, meter);
        }
    }
}

/// The readings of a draw of these units.
pub(super) fn readings_of(levels: &Levels, parts: &Parts, units: &[Option<u64>]) -> Readings {
    let mut readings = Readings::new();
    for (number, (level, view)) in levels.levels().iter().zip(parts.views()).enumerate() {
        for line in &level.limits {
            if let (Some(units), Some(meter)) = (units[line.name], view.meters.get(line.rule.row())) {
                readings.push(Reading::new(number, line, 0_i64.saturating_add_unsigned(units), meter));
            }
        }
    }
    readings
}

impl DynamoDb {
    /// The items of these levels as they were seen last, and nothing of those that were never seen.
    pub(super) fn guess(&self, levels: &Levels) -> Parts {
        let guess = |level: &Level| {
            let view = self.inner.cache.view(&level.subject).unwrap_or_default();
            Part { view, is_fresh: false }
        };
        let levels = levels.levels().iter().map(guess).collect();
        Parts { levels, tombstone: Tombstone::Unread, is_confirmed: false }
    }

    /// Whether all of them were seen before.
    pub(super) fn has_seen(&self, levels: &Levels) -> bool {
        levels.levels().iter().all(|level| self.inner.cache.view(&level.subject).is_some())
    }

    /// The items of these levels and the tombstone of a lease as they are now, in one round trip. The engine reads one item
    /// after the other.
    pub(super) async fn look_at(
        &self,
        levels: &Levels,
        lease: LeaseId,
        now: Stamp,
    ) -> Result<Parts, StoreError> {
        let keys: Vec<Key> =
            levels.levels().iter().map(|level| self.inner.keys.bucket(&level.subject)).collect();
        let tombstone = self.inner.keys.lease(lease);
        let asked: Vec<Key> = keys.iter().cloned().chain([tombstone.clone()]).collect();
        let mut sent = Instant::now();
        let mut found = self.inner.link.get_all(&asked).await?;
        if let Some(old) = found.get(&tombstone).map(OldLease::read).transpose()?.flatten() {
            self.adopt(lease, &old).await?;
            sent = Instant::now();
            found = self.inner.link.get_all(&asked).await?;
        }
        let mut parts = Vec::with_capacity(keys.len());
        for (level, key) in levels.levels().iter().zip(&keys) {
            let view = Arc::new(View::read(found.get(key))?);
            self.inner.cache.looked(&level.subject, &view, sent);
            parts.push(Part { view, is_fresh: true });
        }
        let tombstone = ended_in(found.get(&tombstone), now)?.map_or(Tombstone::Absent, Tombstone::Ended);
        Ok(Parts { levels: parts, tombstone, is_confirmed: false })
    }

    /// Takes in what the items have whose conditions failed, of writes to these levels. Returns whether the condition of
    /// another item failed.
    pub(super) fn take_in(
        &self,
        levels: &Levels,
        parts: &mut Parts,
        unmet: Vec<Unmet>,
        numbers: &[Option<usize>],
    ) -> Result<bool, StoreError> {
        let mut is_other = false;
        parts.is_confirmed = false;
        for (unmet, number) in unmet.into_iter().zip(numbers) {
            let Unmet::Yes(item) = unmet else { continue };
            let Some(number) = *number else {
                is_other = true;
                continue;
            };
            let view = Arc::new(View::read(item.as_ref())?);
            self.inner.cache.saw(&levels.levels()[number].subject, &view);
            parts.levels[number] = Part { view, is_fresh: true };
        }
        Ok(is_other)
    }

    /// Makes one write by itself, and several together or not at all. Returns what was set where there was only one.
    pub(super) async fn send(&self, writes: &[Action]) -> Result<Option<Item>, Failed> {
        match writes {
            [Action::Update(write)] => self.inner.link.update(write).await.map(Some),
            writes => self.inner.link.transact(writes).await.map(|()| None),
        }
    }
}

/// A write of a level's item.
pub(super) fn write_of(store: &DynamoDb, level: &Level) -> Write {
    Write::new(store.inner.keys.bucket(&level.subject))
}
