//! A complete engine in plain maps, the example of docs/write-an-engine.md.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName, Subject};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;
use tidegate_store::record::{Key, Record, RecordWrite, Records, Scan};
use tidegate_store::shared_engine::{Decision, LeaseState, decide, expire};
use tidegate_store::{
    Bucket, BucketSnapshot, Capabilities, ClockSource, Engine, LeaseSnapshot, LeaseStatus, Lookup, Prune,
    Reply, Step, StepResult, StoreError, SweepReport, UsageOf, UsagePlace, UsageQuery, WallClock,
};

/// Due leases that a step ends before its own work.
const SWEPT_BY_STEP: usize = 16;

/// An engine in the memory of one process, with one lock for all of it.
#[derive(Debug)]
pub struct MapEngine {
    clock: Arc<dyn WallClock>,
    space: Mutex<Space>,
}

/// The data of one namespace. On a database each map is a table.
#[derive(Debug, Default)]
struct Space {
    buckets: BTreeMap<Subject, Vec<Meter>>,
    leases: BTreeMap<LeaseId, LeaseState>,
    /// When the next thing happens to each lease: an open one expires, an ended one is evicted.
    due: BTreeSet<(Stamp, LeaseId)>,
    usage: BTreeMap<(Subject, LimitName, Window, Stamp), Tally>,
    records: BTreeMap<Key, Record>,
    version: Version,
    /// Audit entries that were ever written.
    entries: u64,
    /// When the version was last raised.
    changed_at: Stamp,
}

impl MapEngine {
    /// An empty namespace that goes by `clock`, which must not run back.
    pub fn new(clock: impl WallClock) -> Self {
        Self { clock: Arc::new(clock), space: Mutex::default() }
    }

    /// Begins a transaction: takes the lock, then reads the clock once.
    fn begin(&self) -> (MutexGuard<'_, Space>, Stamp) {
        let space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        (space, now)
    }
}

impl Space {
    /// Applies a step: reads what it needs, decides, and writes what has changed.
    fn apply(&mut self, step: &Step<'_>, now: Stamp, offset: Duration) -> Result<StepResult, StoreError> {
        let lease = self.leases.get(&step.lease).cloned().unwrap_or_default();
        let buckets = self.read_buckets(step.levels);
        let decided = decide(step, lease, &buckets, now, offset);
        self.write(step.lease, step.levels, decided)
    }

    /// The limits of each level's bucket, empty where there is no bucket.
    fn read_buckets(&self, levels: &Levels) -> Vec<Vec<Meter>> {
        let bucket = |subject| self.buckets.get(subject).cloned().unwrap_or_default();
        levels.levels().iter().map(|level| bucket(&level.subject)).collect()
    }

    /// Writes all of a decision, also if its answer is an error.
    fn write<T>(&mut self, id: LeaseId, levels: &Levels, decided: Decision<T>) -> Result<T, StoreError> {
        for (level, meters) in levels.levels().iter().zip(decided.buckets) {
            if !meters.is_empty() {
                self.buckets.insert(level.subject.clone(), meters);
            }
        }
        for Usage { subject, limit, window, start, tally } in decided.usage {
            self.usage.entry((subject, limit, window, start)).or_default().add(tally);
        }
        self.write_lease(id, decided.lease);
        decided.answer
    }

    /// Keeps a lease and its next due time together.
    fn write_lease(&mut self, id: LeaseId, state: LeaseState) {
        if let Some(at) = self.leases.remove(&id).as_ref().and_then(due_at) {
            self.due.remove(&(at, id));
        }
        if let Some(at) = due_at(&state) {
            self.due.insert((at, id));
            self.leases.insert(id, state);
        }
    }

    /// Ends a lease if it is past its deadline.
    fn expire(&mut self, id: LeaseId, now: Stamp) -> Result<SweepReport, StoreError> {
        let state = self.leases.get(&id).cloned().unwrap_or_default();
        let LeaseState::Open(_, levels) = &state else { return Ok(SweepReport::default()) };
        let levels = Arc::clone(levels);
        let buckets = self.read_buckets(&levels);
        self.write(id, &levels, expire(id, state, &buckets, now))
    }

    /// Ends up to `max` leases that are past their deadline, and evicts those that ended long ago.
    fn sweep(&mut self, now: Stamp, max: usize) -> Result<SweepReport, StoreError> {
        let mut swept = SweepReport::default();
        while swept.settled + swept.returned < max as u64
            && let Some((at, id)) = self.due.first().copied()
            && at <= now
        {
            if let Some(LeaseState::Open(..)) = self.leases.get(&id) {
                let SweepReport { settled, returned, .. } = self.expire(id, now)?;
                swept.settled += settled;
                swept.returned += returned;
            } else {
                self.write_lease(id, LeaseState::Unknown);
                swept.forgotten += 1;
            }
        }
        Ok(swept)
    }

    /// Evicts buckets that are the same as new ones: full, in use by no lease, and with rules that every caller has by now.
    fn evict(&mut self, now: Stamp) {
        if self.changed_at + REMEMBERED > now {
            return;
        }
        let mut in_use = BTreeSet::new();
        for state in self.leases.values() {
            if let LeaseState::Open(_, levels) = state {
                in_use.extend(levels.levels().iter().map(|level| &level.subject));
            }
        }
        let is_unused = |meter: &Meter| meter.is_full(now) && meter.version() <= self.version;
        self.buckets.retain(|subject, meters| in_use.contains(subject) || !meters.iter().all(is_unused));
    }

    /// The buckets of the subjects that are wanted, by entity, then by resource.
    fn look(&self, at: Stamp, is_wanted: impl Fn(&Subject) -> bool) -> impl Iterator<Item = Bucket> {
        let wanted = self.buckets.iter().filter(move |(subject, _)| is_wanted(subject));
        wanted.map(move |(subject, meters)| Bucket { subject: subject.clone(), at, meters: meters.clone() })
    }
}

/// When an open lease expires, or an ended one may be evicted.
fn due_at(state: &LeaseState) -> Option<Stamp> {
    match state {
        LeaseState::Unknown => None,
        LeaseState::Open(record, _) => Some(record.deadline()),
        LeaseState::Ended(ended) => Some(ended.at + REMEMBERED),
    }
}

impl Engine for MapEngine {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "maps",
            is_immediate: true,
            is_durable: false,
            clock: ClockSource::Process,
            deadline: Duration::from_secs(1),
        }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        let (mut space, now) = self.begin();
        let swept = space.sweep(now, SWEPT_BY_STEP);
        Reply::ready(swept.and_then(|_| space.apply(&step, now, self.clock.offset())))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        let (mut space, now) = self.begin();
        Reply::ready(space.expire(lease, now).and_then(|_| match space.leases.get(&lease) {
            Some(LeaseState::Open(record, levels)) => Ok(LeaseStatus::Open(LeaseSnapshot {
                at: now,
                levels: Arc::clone(levels),
                record: record.clone(),
            })),
            Some(LeaseState::Ended(ended)) => Ok(LeaseStatus::Ended(*ended)),
            Some(LeaseState::Unknown) | None => Err(StoreError::NoLease { lease }),
        }))
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        let (space, at) = self.begin();
        let mut buckets = Vec::new();
        match lookup {
            Lookup::Subjects(subjects) => {
                for subject in subjects {
                    buckets.extend(space.look(at, |other| other == subject));
                }
            }
            Lookup::Entities(entities) => {
                for entity in entities {
                    buckets.extend(space.look(at, |subject| subject.entity == *entity));
                }
            }
            // The layer above asks for the entities of the lineage instead.
            Lookup::Lineage(entity) => buckets.extend(space.look(at, |subject| subject.entity == *entity)),
        }
        Reply::ready(Ok(BucketSnapshot { at, clock_offset: self.clock.offset(), buckets }))
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        let (space, at) = self.begin();
        let is_next = |entity: &EntityId| after.as_ref().is_none_or(|after| entity > after);
        let buckets = space.look(at, |subject| subject.resource == *resource && is_next(&subject.entity));
        Reply::ready(Ok(buckets.take(max).collect()))
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        let (mut space, now) = self.begin();
        // The usage of leases that have expired belongs to the answer.
        if let Err(error) = space.sweep(now, usize::MAX) {
            return Reply::ready(Err(error));
        }
        let mut lines = Vec::new();
        for ((subject, limit, window, start), tally) in &space.usage {
            let (is_wanted, name) = match &query.of {
                UsageOf::Entity(entity) => (subject.entity == *entity, subject.resource.as_str()),
                UsageOf::Resource(resource) => (subject.resource == *resource, subject.entity.as_str()),
            };
            let place = (name, limit.as_str(), *start);
            if is_wanted
                && *window == query.window
                && query.range.contains(start)
                && after.is_none_or(|after| place > (after.name, after.limit, after.start))
                && lines.len() < max
            {
                let (subject, limit) = (subject.clone(), limit.clone());
                lines.push(Usage { subject, limit, window: *window, start: *start, tally: *tally });
            }
        }
        Reply::ready(Ok(lines))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        let (mut space, now) = self.begin();
        // A lease that has expired is counted before its window is deleted, not after.
        if let Err(error) = space.sweep(now, usize::MAX) {
            return Reply::ready(Err(error));
        }
        let mut count = 0;
        // Rows are visited in key order: of each limit, and of the audit, the oldest first.
        let mut is_kept = |is_old: bool| {
            let is_deleted = is_old && count < max;
            count += usize::from(is_deleted);
            !is_deleted
        };
        match *prune {
            Prune::Usage { window, before } => space.usage.retain(|(_, _, span, start), _| {
                is_kept(*span == window && window.around(*start).end <= before)
            }),
            Prune::Audit { through } => space
                .records
                .retain(|key, record| is_kept(matches!(key, Key::Entry(_)) && record.version <= through)),
        }
        Reply::ready(Ok(count as u64))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        let (mut space, now) = self.begin();
        let swept = space.sweep(now, max);
        space.evict(now);
        Reply::ready(swept)
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        let (space, at) = self.begin();
        let records = keys.iter().map(|key| space.records.get(key).cloned()).collect();
        Reply::ready(Ok(Records { version: space.version, entries: space.entries, at, records }))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        let (space, _) = self.begin();
        let from = scan.after.as_ref().map_or(Unbounded, Excluded);
        let records = space.records.range::<Key, _>((from, Unbounded)).map(|(_, record)| record);
        Reply::ready(Ok(records.filter(|record| scan.lists(record)).take(scan.max).cloned().collect()))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        let (mut space, now) = self.begin();
        if space.version != write.seen {
            return Reply::ready(Ok(false));
        }
        for change in &write.changes {
            match &change.after {
                Some(record) => space.records.insert(change.key.clone(), record.clone()),
                None => space.records.remove(&change.key),
            };
        }
        (space.version, space.entries, space.changed_at) = (write.version(), write.entries_after(), now);
        Reply::ready(Ok(true))
    }
}
