//! The reference store: in the process, sharded, with nothing to wait for.
//!
//! A call locks the shards of its buckets in their order, decides and moves under all of these locks, and lets go. Its
//! lease is kept with the bucket of its own subject. Everything is bounded: buckets, entities and policies refuse to grow
//! beyond their bounds ([`StoreError::Full`](crate::StoreError::Full)), buckets that are the same as none are forgotten,
//! ended leases are forgotten early, and the oldest of the audit goes.

mod forget;
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

use crate::buckets::{Bucket, Lookup, Seen, Standing};
use crate::clock::WallClock;
use crate::cursor::UsagePlace;
use crate::engine::{Applied, Engine, Step};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::{SHARDS, hash_subject};
use crate::store::{Capabilities, Clocked, Swept};
use crate::sync::lock;
use forget::Changes;
pub use options::{MemoryOptions, MemoryStats};
use records::Kept;
use shards::{Index, Shard};

/// A store has at most so many namespaces.
const NAMESPACES_MAX: usize = 4_096;
/// Leases a call ends in passing whose deadline has passed.
const SWEPT_IN_PASSING: usize = 16;

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
    /// Which buckets there are. Locked after a shard, never before.
    index: Mutex<Index>,
    options: MemoryOptions,
    /// Buckets there are, that were forgotten, and that there was no room for.
    subjects: AtomicUsize,
    forgotten: AtomicU64,
    refused: AtomicU64,
    /// Leases that calls have ended in passing, until a sweep tells of them.
    passed: Mutex<Swept>,
    /// How far time was ahead of the wall clock at the last sweep, in microseconds: a clock is not read under a lock.
    clock_offset: AtomicU64,
    /// When the last changes were made. Locked after anything else, never before.
    changes: Mutex<Changes>,
    /// No lease is past its deadline before this, in microseconds.
    due_at: AtomicU64,
    kept: Mutex<Kept>,
    /// The version of what administrators have changed, for those who only want to know whether they have.
    version: AtomicU64,
}

impl Memory {
    /// An empty store that goes by the system's clock.
    pub fn new() -> Self {
        Self::made(MemoryOptions::new())
    }

    /// An empty store that goes by `clock`.
    pub fn with_clock(clock: impl WallClock) -> Self {
        Self::made(MemoryOptions::new().clock(clock))
    }

    fn made(options: MemoryOptions) -> Self {
        Self { space: Arc::new(Space::new(options)), spaces: Arc::default() }
    }

    /// Another namespace of the same store: whoever asks for the same name gets the same.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a name that cannot be, [`StoreError::Full`] where there are too many.
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
            clock: Clocked::Process,
            deadline: Duration::from_secs(1),
        }
    }

    #[inline]
    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, Applied> {
        Reply::ready(self.space.apply(&step))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::ready(self.space.lease(lease))
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
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
            Prune::Audit { through } => lock(&self.space.kept).prune_audit(through, max),
        } as u64))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, Swept> {
        let now = self.space.clock.now();
        let swept = self.space.sweep(now, max);
        self.space.tend(now);
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

    /// Without the lock of the records: callers with a cache of policies ask for it with every call.
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
            kept: Mutex::default(),
            version: AtomicU64::new(0),
        }
    }

    /// The time, once those leases have ended that are past it.
    fn now(&self) -> Stamp {
        let now = self.clock.now();
        if now.as_micros() >= self.due_at.load(Ordering::Relaxed) {
            self.sweep_in_passing(now, SWEPT_IN_PASSING);
        }
        now
    }

    #[inline]
    fn hash(&self, subject: &Subject) -> u64 {
        hash_subject(&self.hasher, subject)
    }
}
