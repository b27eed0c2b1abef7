//! The snapshot of the items that a step is decided on.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::{Level, Levels};
use tidegate_core::limit::lease::{EndRecord, LeaseId};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use super::DynamoDb;
use super::bucket_view::BucketView;
use super::client::Action;
use super::errors::{ItemCondition, RequestError};
use super::expression::UpdateExpression;
use super::keys::{Item, Key};
use super::lease_item::{LegacyLease, tombstone_in};
use crate::buckets::{Reading, Readings};
use crate::error::StoreError;

/// The item of a level.
#[derive(Debug, Clone)]
pub(super) struct LevelSnapshot {
    pub(super) view: Arc<BucketView>,
    /// Whether it was read during this call, so that a result may be based on it.
    pub(super) is_fresh: bool,
}

/// The tombstone of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tombstone {
    Unread,
    Absent,
    Ended(EndRecord),
}

/// The items of the levels of a call, and the tombstone of its lease.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) levels: Vec<LevelSnapshot>,
    pub(super) tombstone: Tombstone,
    /// Whether a second read has confirmed the state of the lease.
    pub(super) is_confirmed: bool,
}

impl Snapshot {
    /// The item of the lease's home.
    pub(super) fn home(&self) -> &BucketView {
        &self.levels[0].view
    }

    pub(super) fn views(&self) -> Vec<&BucketView> {
        self.levels.iter().map(|part| &*part.view).collect()
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.levels.iter().all(|part| part.is_fresh)
    }

    /// Marks the items as stale: a write may have been applied since.
    pub(super) fn invalidate(&mut self) {
        for part in &mut self.levels {
            part.is_fresh = false;
        }
        (self.tombstone, self.is_confirmed) = (Tombstone::Unread, false);
    }

    /// Whether both have the same state of a lease.
    pub(super) fn agree_on(&self, lease: LeaseId, other: &Self) -> bool {
        let (home, others) = (self.home(), other.home());
        home.open.get(&lease) == others.open.get(&lease)
            && home.ended.get(&lease) == others.ended.get(&lease)
            && self.tombstone == other.tombstone
    }
}

/// Replaces readings of the decision by those of the item, because concurrent calls may have changed the
/// limits.
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
pub(super) fn readings_of(levels: &Levels, snapshot: &Snapshot, units: &[Option<u64>]) -> Readings {
    let mut readings = Readings::new();
    for (number, (level, view)) in levels.levels().iter().zip(snapshot.views()).enumerate() {
        for line in &level.limits {
            if let (Some(units), Some(meter)) = (units[line.name], view.meters.get(line.rule.row())) {
                readings.push(Reading::new(number, line, 0_i64.saturating_add_unsigned(units), meter));
            }
        }
    }
    readings
}

impl DynamoDb {
    /// The cached items of these levels; empty for those that are not cached.
    pub(super) fn cached_snapshot(&self, levels: &Levels) -> Snapshot {
        let cached = |level: &Level| {
            let view = self.inner.cache.view(&level.subject).unwrap_or_default();
            LevelSnapshot { view, is_fresh: false }
        };
        let levels = levels.levels().iter().map(cached).collect();
        Snapshot { levels, tombstone: Tombstone::Unread, is_confirmed: false }
    }

    /// Whether all of their items are cached.
    pub(super) fn has_seen(&self, levels: &Levels) -> bool {
        levels.levels().iter().all(|level| self.inner.cache.view(&level.subject).is_some())
    }

    /// Reads the items of these levels and the tombstone of a lease, in one round trip. The engine reads one
    /// item after the other.
    pub(super) async fn read_items(
        &self,
        levels: &Levels,
        lease: LeaseId,
        now: Stamp,
    ) -> Result<Snapshot, StoreError> {
        let keys: Vec<Key> =
            levels.levels().iter().map(|level| self.inner.keys.bucket(&level.subject)).collect();
        let tombstone = self.inner.keys.lease(lease);
        let requested: Vec<Key> = keys.iter().cloned().chain([tombstone.clone()]).collect();
        let mut sent = Instant::now();
        let mut found = self.inner.client.get_all(&requested).await?;
        if let Some(old) = found.get(&tombstone).map(LegacyLease::read).transpose()?.flatten() {
            self.migrate_lease(lease, &old).await?;
            sent = Instant::now();
            found = self.inner.client.get_all(&requested).await?;
        }
        let mut items = Vec::with_capacity(keys.len());
        for (level, key) in levels.levels().iter().zip(&keys) {
            let view = Arc::new(BucketView::read(found.get(key))?);
            self.inner.cache.record_read(&level.subject, &view, sent);
            items.push(LevelSnapshot { view, is_fresh: true });
        }
        let tombstone = tombstone_in(found.get(&tombstone), now)?.map_or(Tombstone::Absent, Tombstone::Ended);
        Ok(Snapshot { levels: items, tombstone, is_confirmed: false })
    }

    /// Takes over the items whose conditions failed. Returns whether the condition of another item failed.
    pub(super) fn absorb_unmet(
        &self,
        levels: &Levels,
        snapshot: &mut Snapshot,
        unmet: Vec<ItemCondition>,
        numbers: &[Option<usize>],
    ) -> Result<bool, StoreError> {
        let mut is_other = false;
        snapshot.is_confirmed = false;
        for (unmet, number) in unmet.into_iter().zip(numbers) {
            let ItemCondition::Unmet(item) = unmet else { continue };
            let Some(number) = *number else {
                is_other = true;
                continue;
            };
            let view = Arc::new(BucketView::read(item.as_ref())?);
            self.inner.cache.update_view(&levels.levels()[number].subject, &view);
            snapshot.levels[number] = LevelSnapshot { view, is_fresh: true };
        }
        Ok(is_other)
    }

    /// Sends a single write, or several in a transaction. Returns the attributes that a single write set.
    pub(super) async fn send(&self, writes: &[Action]) -> Result<Option<Item>, RequestError> {
        match writes {
            [Action::Update(write)] => self.inner.client.update(write).await.map(Some),
            writes => self.inner.client.transact(None, writes).await.map(|()| None),
        }
    }
}

/// An update of a level's item.
pub(super) fn write_of(store: &DynamoDb, level: &Level) -> UpdateExpression {
    UpdateExpression::new(store.inner.keys.bucket(&level.subject))
}
