//! The engine: steps are conditional writes of items, records and buckets are read beside them.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::lease::{LeaseId, Record};
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::keys::{DUE_PARTS, GSI1, GSI2, Item, Key};
use super::lease_item::{OldLease, ended_in};
use super::link::Range;
use super::marks::{end_name, open_name};
use super::phases::Turn;
use super::step::Step;
use super::view::{View, number_of};
use crate::buckets::{Bucket, Held, Lookup, Seen, Standing};
use crate::cursor::UsagePlace;
use crate::engine::{self, Applied, Change, Engine, Taking};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{self, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::{check_levels, fits};
use crate::store::{Capabilities, Clocked, Swept};

/// Buckets that are looked through at a time, for a lease that another process drew.
const SEARCHED_AT_ONCE: usize = 100;
/// An index follows its table within this, mostly.
const INDEXED_WITHIN: Duration = Duration::from_secs(10);
/// When it is looked through again for a lease that is younger.
const LOOKED_AGAIN_AFTER: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(600)];

impl Engine for DynamoDb {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "dynamodb",
            is_immediate: false,
            is_durable: true,
            clock: Clocked::Caller,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: engine::Step<'a>) -> Reply<'a, Applied> {
        Reply::later(self.within(self.apply_one(step)))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            match self.standing(lease).await? {
                Standing::Open(held) if held.record.is_due(held.at) => {
                    self.expire(lease, &held.levels, &mut Swept::default()).await?;
                    self.standing(lease).await
                }
                standing => Ok(standing),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(self.within(async move {
            let at = self.now();
            let buckets = match lookup {
                Lookup::Subjects(subjects) => self.buckets_of(subjects).await?,
                Lookup::Entities(entities) => self.buckets_of_entities(entities).await?,
                Lookup::Lineage(entity) => self.buckets_of_entities(std::slice::from_ref(entity)).await?,
            };
            let at = at.max(self.now());
            Ok(Seen {
                at,
                // Buckets are kept at the callers' clocks: a step back only refuses.
                clock_offset: Duration::ZERO,
                buckets: buckets.into_iter().map(|(subject, view)| bucket(subject, &view, at)).collect(),
            })
        }))
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        Reply::later(async move {
            let mut after = after.map(|entity| format!("BUCKET#{entity}"));
            let mut found = Vec::new();
            while found.len() < max {
                let range = Range::new(Some(GSI2), self.inner.keys.resource(resource), "BUCKET#".to_owned());
                let keys = self.inner.link.range(&range.after(after), max).await?;
                let is_last = keys.len() < max;
                after = keys.last().and_then(|item| item.get("GSI2SK")?.as_s().ok().cloned());
                let subjects =
                    keys.iter().filter_map(Key::of).filter_map(|key| self.inner.keys.subject(&key));
                let at = self.now();
                let buckets = self.buckets_of(&subjects.collect::<Vec<_>>()).await?;
                found.extend(buckets.into_iter().map(|(subject, view)| bucket(subject, &view, at)));
                if is_last {
                    break;
                }
            }
            found.truncate(max);
            Ok(found)
        })
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        Reply::later(self.used(query, after, max))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(async move {
            match *prune {
                Prune::Usage { window, before } => self.prune_usage(window, before, max).await,
                Prune::Audit { through } => {
                    let is_old = |item: &Item| Ok(number_of::<u64>(item, "version")? <= through.number());
                    self.prune_audit(max, is_old).await
                }
            }
        })
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, Swept> {
        Reply::later(self.sweep_up_to(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [record::Key]) -> Reply<'a, Records> {
        Reply::later(self.within(self.read_all(keys)))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<record::Record>> {
        Reply::later(self.scan(scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(self.write_changes(write))
    }

    fn newest_version(&self) -> Reply<'_, Version> {
        Reply::later(self.within(self.version_there()))
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<record::Record>> {
        Reply::later(self.within(self.ancestors(id, max)))
    }

    fn warning(&self) -> Option<String> {
        let is_ignored = self.inner.is_speculative_given;
        is_ignored.then(|| "the option `speculative` is ignored: remove it from the address".to_owned())
    }
}

impl DynamoDb {
    async fn apply_one(&self, step: engine::Step<'_>) -> Result<Applied, StoreError> {
        let engine::Step { lease, levels, change, .. } = step;
        let turn = match change {
            Change::Take(units, taking) => {
                check_levels(levels)?;
                fits(levels, units.len())?;
                if taking != Taking::Extend {
                    self.sweep_now_and_then();
                }
                Some(Turn::Asking)
            }
            Change::Shift(_) | Change::End(None) => Some(Turn::Giving),
            Change::Renew(_) => None,
            Change::End(Some(actual)) => {
                fits(levels, actual.len())?;
                // A lease that is settled at what it holds gives nothing back.
                actual.iter().any(Option::is_some).then_some(Turn::Giving)
            }
        };
        let _turn = match turn {
            Some(turn) => Some(self.inner.phases.enter(levels, turn).await),
            None => None,
        };
        self.step(&Step { lease, levels, change: Some(change) }, |context| context.apply(&step)).await
    }

    /// Buckets that are there and have limits, in the order they are asked for, each once.
    async fn buckets_of(&self, subjects: &[Subject]) -> Result<Vec<(Subject, View)>, StoreError> {
        let keys: Vec<Key> = subjects.iter().map(|subject| self.inner.keys.bucket(subject)).collect();
        let mut items = self.inner.link.get_all(&keys).await?;
        let mut found = Vec::new();
        for (subject, key) in subjects.iter().zip(&keys) {
            let Some(item) = items.remove(key) else { continue };
            let view = View::read(Some(&item))?;
            if !view.meters.is_empty() {
                found.push((subject.clone(), view));
            }
        }
        Ok(found)
    }

    async fn buckets_of_entities(&self, entities: &[EntityId]) -> Result<Vec<(Subject, View)>, StoreError> {
        let mut found = Vec::new();
        for entity in entities {
            let range = Range::new(None, self.inner.keys.entity_pk(entity), "#BUCKET#".to_owned());
            for item in self.inner.link.range(&range, usize::MAX).await? {
                let subject = Key::of(&item).and_then(|key| self.inner.keys.subject(&key));
                let view = View::read(Some(&item))?;
                if let Some(subject) = subject.filter(|_| !view.meters.is_empty()) {
                    found.push((subject, view));
                }
            }
        }
        Ok(found)
    }

    /// What is known of a lease, by its id alone.
    async fn standing(&self, lease: LeaseId) -> Result<Standing, StoreError> {
        let now = self.now();
        if let Some(home) = self.inner.cache.home(lease) {
            let item = self.inner.link.get(&self.inner.keys.bucket(&home)).await?;
            if let Some(standing) = marked(item.as_ref(), lease, now)? {
                return Ok(standing);
            }
        }
        if let Some(standing) = self.standing_apart(lease, now).await? {
            return Ok(standing);
        }
        // Another process drew it, and its home is not known: it is searched for. The index follows the table with a
        // delay. An id that its caller has chosen has no time.
        let made_at = Stamp::from_micros(lease.millis().saturating_mul(1_000));
        let is_young = lease.millis() == 0 || now < made_at + INDEXED_WITHIN;
        for pause in std::iter::once(Duration::ZERO).chain(LOOKED_AGAIN_AFTER) {
            if !pause.is_zero() && !is_young {
                break;
            }
            tokio::time::sleep(pause).await;
            if let Some(standing) = self.search(lease, now).await? {
                return Ok(standing);
            }
            // It may have been counted while it was searched for.
            if let Some(standing) = self.standing_apart(lease, now).await? {
                return Ok(standing);
            }
        }
        Err(StoreError::NoLease { lease })
    }

    /// What the item of a lease says of it.
    async fn standing_apart(&self, lease: LeaseId, now: Stamp) -> Result<Option<Standing>, StoreError> {
        let item = self.inner.link.get(&self.inner.keys.lease(lease)).await?;
        let Some(old) = item.as_ref().map(OldLease::read).transpose()?.flatten() else {
            return Ok(ended_in(item.as_ref(), now)?.map(Standing::Ended));
        };
        self.adopt(lease, &old).await?;
        let home = old.levels.subject();
        self.inner.cache.drew(lease, home);
        marked(self.inner.link.get(&self.inner.keys.bucket(home)).await?.as_ref(), lease, now)
    }

    /// Searches for the mark of a lease in all buckets that have any: these are in the index of what is due.
    async fn search(&self, lease: LeaseId, now: Stamp) -> Result<Option<Standing>, StoreError> {
        let (open, end) = (open_name(lease), end_name(lease));
        for part in 0..DUE_PARTS {
            let range = Range::new(Some(GSI1), self.inner.keys.due(part), String::new());
            let found = self.inner.link.range(&range, usize::MAX).await?;
            let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
            for keys in keys.chunks(SEARCHED_AT_ONCE) {
                for (key, item) in self.inner.link.get_all(keys).await? {
                    let is_marked = item.contains_key(&open) || item.contains_key(&end);
                    let Some(subject) = self.inner.keys.subject(&key).filter(|_| is_marked) else { continue };
                    if let Some(standing) = marked(Some(&item), lease, now)? {
                        self.inner.cache.drew(lease, &subject);
                        return Ok(Some(standing));
                    }
                }
            }
        }
        Ok(None)
    }
}

/// What the home of a lease says of it.
fn marked(item: Option<&Item>, lease: LeaseId, now: Stamp) -> Result<Option<Standing>, StoreError> {
    let view = View::read(item)?;
    if let Some(mark) = view.open.get(&lease).filter(|mark| mark.level == 0) {
        let levels = view.levels_of(mark)?;
        let record: Record = mark.record.clone();
        return Ok(Some(Standing::Open(Held { at: now, levels: Arc::clone(&levels), record })));
    }
    let own = view.end_of(lease, now).filter(|mark| mark.is_own);
    Ok(own.map(|mark| Standing::Ended(mark.ended)))
}

fn bucket(subject: Subject, view: &View, at: Stamp) -> Bucket {
    Bucket { subject, at, meters: view.meters.values().cloned().collect() }
}
