//! The reference store: in process, sharded, and immediate.
//!
//! A call locks the shards of its buckets in order, decides and moves units under these locks, and releases
//! them. A lease is kept in the shard of its subject's bucket. Everything is bounded: buckets, entities and
//! policies are refused beyond their bounds ([`StoreError::Full`](crate::StoreError::Full)), buckets that
//! equal unused ones are evicted, records of ended leases are dropped early, and the oldest audit entries are
//! deleted.

mod evict;
mod leases;
mod listing;
mod options;
mod prune;
mod records;
mod shards;
mod steps;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, Namespace, ResourceName, Subject};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup};
use crate::clock::WallClock;
use crate::cursor::UsagePlace;
use crate::engine::{Engine, Step, StepResult};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::{SHARDS, hash_subject};
use crate::store::{Capabilities, ClockSource, SweepReport};
use crate::sync::lock;
use evict::RecentChanges;
pub use options::{MemoryOptions, MemoryStats};
use records::RecordTable;
use shards::{Index, Shard};

/// The maximum number of namespaces.
const NAMESPACES_MAX: usize = 4_096;
/// The maximum number of due leases that a call ends before its own work.
const DUE_PER_CALL: usize = 16;

/// A store in this process's memory. Clones are the same store.
///
/// ```
/// use tidegate_store::{Memory, Store};
///
/// let store = Memory::new();
/// assert_eq!(store.capabilities().engine, "memory");
/// ```
#[derive(Clone)]
pub struct Memory {
    space: Arc<Space>,
    spaces: Arc<Mutex<BTreeMap<Namespace, Arc<Space>>>>,
}

/// One namespace.
struct Space {
    clock: Arc<dyn WallClock>,
    hasher: foldhash::fast::RandomState,
    shards: Box<[Mutex<Shard>]>,
    /// The existing buckets in order. Lock order: after a shard.
    index: Mutex<Index>,
    options: MemoryOptions,
    /// The number of buckets, of evicted buckets, and of refused ones.
    subjects: AtomicUsize,
    forgotten: AtomicU64,
    refused: AtomicU64,
    /// Leases ended by other calls, until a sweep reports them.
    passed: Mutex<SweepReport>,
    /// The offset of the time to the wall clock at the last sweep, in microseconds. Cached, because a clock
    /// is not read under a lock.
    clock_offset: AtomicU64,
    /// The times of the last changes. Lock order: last.
    changes: Mutex<RecentChanges>,
    /// A lower bound of the earliest deadline, in microseconds.
    due_at: AtomicU64,
    records: Mutex<RecordTable>,
    /// A copy of the records' version, to read it without their lock.
    version: AtomicU64,
}

impl Memory {
    /// An empty store with the system's clock.
    pub fn new() -> Self {
        Self::made(MemoryOptions::new())
    }

    /// An empty store with this clock.
    pub fn with_clock(clock: impl WallClock) -> Self {
        Self::made(MemoryOptions::new().clock(clock))
    }

    fn made(options: MemoryOptions) -> Self {
        Self { space: Arc::new(Space::new(options)), spaces: Arc::default() }
    }

    /// A namespace of the same store. The same name returns the same namespace.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid name, [`StoreError::Full`] for too many namespaces.
    pub fn namespace(&self, name: &str) -> Result<Self, StoreError> {
        let name = Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        let mut spaces = lock(&self.spaces);
        if spaces.len() >= NAMESPACES_MAX && !spaces.contains_key(&name) {
            return Err(StoreError::Full { what: "namespaces", max: NAMESPACES_MAX as u64 });
        }
        let space = spaces.entry(name).or_insert_with(|| Arc::new(Space::new(self.space.options.clone())));
        Ok(Self { space: Arc::clone(space), spaces: Arc::clone(&self.spaces) })
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("clock", &self.space.clock).finish_non_exhaustive()
    }
}

impl Engine for Memory {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "memory",
            is_immediate: true,
            is_durable: false,
            clock: ClockSource::Process,
            deadline: Duration::from_secs(1),
        }
    }

    #[inline]
    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        Reply::ready(self.space.apply(&step))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        Reply::ready(self.space.lease(lease))
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        Reply::ready(Ok(self.space.look(lookup)))
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        Reply::ready(Ok(self.space.scan_buckets(resource, after.as_ref(), max)))
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        Reply::ready(Ok(self.space.scan_usage(query, after, max)))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::ready(Ok(match *prune {
            Prune::Usage { window, before } => self.space.prune_usage(window, before, max),
            Prune::Audit { through } => lock(&self.space.records).prune_audit(through, max),
        } as u64))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        let now = self.space.clock.now();
        let swept = self.space.sweep(now, max);
        self.space.run_housekeeping(now);
        Reply::ready(Ok(swept.with(&mut lock(&self.space.passed), max)))
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        Reply::ready(Ok(self.space.read_records(keys)))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        Reply::ready(Ok(self.space.scan_records(scan)))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::ready(self.space.write_records(write))
    }

    /// Without the lock of the records, because a cache of policies reads it with every call.
    #[inline]
    fn newest_version(&self) -> Reply<'_, Version> {
        Reply::ready(Ok(Version::new(self.space.version.load(Ordering::Acquire))))
    }
}

impl Space {
    fn new(options: MemoryOptions) -> Self {
        Self {
            clock: Arc::clone(&options.clock),
            options,
            subjects: AtomicUsize::new(0),
            forgotten: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            passed: Mutex::default(),
            clock_offset: AtomicU64::new(0),
            changes: Mutex::default(),
            hasher: foldhash::fast::RandomState::default(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            index: Mutex::default(),
            due_at: AtomicU64::new(u64::MAX),
            records: Mutex::default(),
            version: AtomicU64::new(0),
        }
    }

    /// The current time, after ending some leases that are due.
    fn now(&self) -> Stamp {
        let now = self.clock.now();
        if now.as_micros() >= self.due_at.load(Ordering::Relaxed) {
            self.sweep_before_call(now, DUE_PER_CALL);
        }
        now
    }

    #[inline]
    fn hash(&self, subject: &Subject) -> u64 {
        hash_subject(&self.hasher, subject)
    }
}
