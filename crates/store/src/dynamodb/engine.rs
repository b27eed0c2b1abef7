//! The engine trait on DynamoDB: steps are conditional writes of items; records and buckets are read from the
//! table and its indexes.

use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::{BucketView, number_of};
use super::client::Range;
use super::group_lock::Group;
use super::keys::{DUE_PARTS, GSI2, Item, Key};
use super::lease_item::{LegacyLease, tombstone_in};
use super::lease_marks::{end_name, open_name};
use super::ledger::BUCKET_BATCH;
use super::step::Step;
use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup};
use crate::cursor::UsagePlace;
use crate::engine::{self, Change, Engine, StepResult, TakeMode};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{self, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::LeaseState;
use crate::store::{Capabilities, ClockSource, SweepReport};

/// The most expired leases that a step ends to make space for a lease.
const DUE_PER_STEP: usize = 16;
/// How long an index usually lags behind the table at most.
const INDEX_LAG_MAX: Duration = Duration::from_secs(10);
/// The delays before the search is repeated for a younger lease.
const SEARCH_RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(600)];

impl Engine for DynamoDb {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "dynamodb",
            is_immediate: false,
            is_durable: true,
            clock: ClockSource::Caller,
            deadline: self.inner.options.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: engine::Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(self.with_timeout(self.apply_one(step)))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        Reply::later(async move {
            let at = self.now();
            let mut found = self.standing(lease, at).await?;
            if let LeaseState::Open(record, levels) = &found
                && record.is_due(at)
            {
                self.expire(lease, levels).await?;
                found = self.standing(lease, at).await?;
            }
            found.status(lease, at)
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        Reply::later(self.with_timeout(async move {
            let at = self.now();
            let buckets = match lookup {
                Lookup::Subjects(subjects) => self.buckets_of(subjects).await?,
                Lookup::Entities(entities) => self.buckets_of_entities(entities).await?,
                Lookup::Lineage(entity) => self.buckets_of_entities(std::slice::from_ref(entity)).await?,
            };
            let at = at.max(self.now());
            Ok(BucketSnapshot {
                at,
                // Buckets are stored by the callers' clocks: a step back only refuses.
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
                let keys = self.inner.client.range(&range.after(after), max).await?;
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
        Reply::later(self.query_usage(query, after, max))
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

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        Reply::later(self.sweep_up_to(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [record::Key]) -> Reply<'a, Records> {
        Reply::later(self.with_timeout(self.read_all(keys)))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<record::Record>> {
        Reply::later(self.scan(scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(self.write_changes(write))
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<record::Record>> {
        Reply::later(self.with_timeout(self.ancestors(id, max)))
    }

    fn warning(&self) -> Option<String> {
        let is_ignored = self.inner.options.is_speculative_given;
        is_ignored.then(|| "the option `speculative` is ignored: remove it from the address".to_owned())
    }
}

impl DynamoDb {
    async fn apply_one(&self, step: engine::Step<'_>) -> Result<StepResult, StoreError> {
        if matches!(step.change, Change::Take(_, TakeMode::Open(_) | TakeMode::Spend)) {
            self.sweep_if_due();
        }
        let group = match step.change {
            Change::Take(..) => Some(Group::Takers),
            Change::Renew(_) => None,
            // A settle at what the lease holds returns nothing.
            Change::End(Some(actual)) if actual.iter().all(Option::is_none) => None,
            Change::Shift(_) | Change::End(_) | Change::Set(_) => Some(Group::Returners),
        };
        let once = async || {
            let _guard = match group {
                Some(group) => Some(self.inner.group_lock.enter(step.levels, group).await?),
                None => None,
            };
            self.step(&Step { of: step, is_expiry: false }).await
        };
        match once().await {
            // Leases past their deadline fill an item until a sweep ends them.
            Err(error @ StoreError::Full { .. }) => {
                if self.end_due_of(step.levels.subject(), DUE_PER_STEP).await? {
                    once().await
                } else {
                    Err(error)
                }
            }
            result => result,
        }
    }

    /// The existing buckets with limits, in the order of the request, without duplicates.
    async fn buckets_of(&self, subjects: &[Subject]) -> Result<Vec<(Subject, BucketView)>, StoreError> {
        let keys: Vec<Key> = subjects.iter().map(|subject| self.inner.keys.bucket(subject)).collect();
        let mut items = self.inner.client.get_all(&keys).await?;
        let mut found = Vec::new();
        for (subject, key) in subjects.iter().zip(&keys) {
            let Some(item) = items.remove(key) else { continue };
            let view = BucketView::read(Some(&item))?;
            if !view.meters.is_empty() {
                found.push((subject.clone(), view));
            }
        }
        Ok(found)
    }

    async fn buckets_of_entities(
        &self,
        entities: &[EntityId],
    ) -> Result<Vec<(Subject, BucketView)>, StoreError> {
        let mut found = Vec::new();
        for entity in entities {
            let range = Range::new(None, self.inner.keys.entity_pk(entity), "#BUCKET#".to_owned());
            for item in self.inner.client.range(&range, usize::MAX).await? {
                let subject = Key::of(&item).and_then(|key| self.inner.keys.subject(&key));
                let view = BucketView::read(Some(&item))?;
                if let Some(subject) = subject.filter(|_| !view.meters.is_empty()) {
                    found.push((subject, view));
                }
            }
        }
        Ok(found)
    }

    /// The state of a lease, by its id.
    async fn standing(&self, lease: LeaseId, now: Stamp) -> Result<LeaseState, StoreError> {
        if let Some(home) = self.inner.cache.home(lease) {
            let found = self.standing_at(&home, lease, now).await?;
            if found != LeaseState::Unknown {
                return Ok(found);
            }
        }
        // Another process may have drawn it, and its home is unknown: it is searched for. The index lags behind
        // the table. An id that the caller chose has no time.
        let made_at = Stamp::from_micros(lease.millis().saturating_mul(1_000));
        let is_young = lease.millis() == 0 || now < made_at + INDEX_LAG_MAX;
        let mut pauses = SEARCH_RETRY_DELAYS.into_iter().filter(|_| is_young);
        loop {
            let found = match self.standing_by_lease_item(lease, now).await? {
                LeaseState::Unknown => self.search(lease, now).await?,
                found => found,
            };
            if found != LeaseState::Unknown {
                return Ok(found);
            }
            let Some(pause) = pauses.next() else { break };
            tokio::time::sleep(pause).await;
        }
        // It may have been counted during the search.
        self.standing_by_lease_item(lease, now).await
    }

    async fn standing_at(
        &self,
        home: &Subject,
        lease: LeaseId,
        now: Stamp,
    ) -> Result<LeaseState, StoreError> {
        let item = self.inner.client.get(&self.inner.keys.bucket(home)).await?;
        BucketView::read(item.as_ref())?.lease(lease, now)
    }

    /// The state of a lease by its own item.
    async fn standing_by_lease_item(&self, lease: LeaseId, now: Stamp) -> Result<LeaseState, StoreError> {
        let item = self.inner.client.get(&self.inner.keys.lease(lease)).await?;
        let Some(old) = item.as_ref().map(LegacyLease::read).transpose()?.flatten() else {
            let ended = tombstone_in(item.as_ref(), now)?;
            return Ok(ended.map_or(LeaseState::Unknown, LeaseState::Ended));
        };
        self.migrate_lease(lease, &old).await?;
        let home = old.levels.subject();
        self.inner.cache.remember_home(lease, home);
        self.standing_at(home, lease, now).await
    }

    /// Searches all buckets with marks, which are in the index of due items, for the mark of a lease.
    async fn search(&self, lease: LeaseId, now: Stamp) -> Result<LeaseState, StoreError> {
        let (open, end) = (open_name(lease), end_name(lease));
        for part in 0..DUE_PARTS {
            for keys in self.due_buckets(part, None).await?.chunks(BUCKET_BATCH) {
                for (key, item) in self.inner.client.get_all(keys).await? {
                    let is_marked = item.contains_key(&open) || item.contains_key(&end);
                    let Some(subject) = self.inner.keys.subject(&key).filter(|_| is_marked) else { continue };
                    let found = BucketView::read(Some(&item))?.lease(lease, now)?;
                    if found != LeaseState::Unknown {
                        self.inner.cache.remember_home(lease, &subject);
                        return Ok(found);
                    }
                }
            }
        }
        Ok(LeaseState::Unknown)
    }
}

fn bucket(subject: Subject, view: &BucketView, at: Stamp) -> Bucket {
    Bucket { subject, at, meters: view.meters.values().cloned().collect() }
}
