//! What limits whom, remembered for a while.
//!
//! A subject's levels are read once and kept for the time to live, those that nothing limits too. Where the store
//! answers at once they are kept for as long as the namespace's version stays. When the time is over, the version is asked for, and only if it has changed are they read again. A draw that was
//! decided by a newer version makes everything older stale at once. While one caller reads, others wait for it;
//! if it gives up, the next one reads. When the store is away, what was last known is used.
//!
//! Two generations bound the cache: when the young one is full it becomes the old one, and what is asked for
//! again is young again.

use std::hash::BuildHasher;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::resolve::{resolve, scopes};
use tidegate_store::{Reply, StoreError};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::acquire::SubjectRef;
use super::error::LimitError;
use super::guard::Failed;
use super::{Limiter, Shared};

const SHARDS: usize = 16;

/// Levels by subject.
pub(super) struct PolicyCache {
    shards: Box<[Mutex<Generations>]>,
    hasher: foldhash::fast::RandomState,
    ttl: Duration,
    /// Entries per generation and shard.
    generation_max: usize,
    /// The newest version any draw was decided by: what is older is stale.
    seen: AtomicU64,
}

#[derive(Default)]
struct Generations {
    young: HashTable<Arc<Entry>>,
    old: HashTable<Arc<Entry>>,
    stats: CacheStats,
}

struct Entry {
    hash: u64,
    subject: Subject,
    /// Filled by the first who needs it.
    loaded: OnceCell<Loaded>,
    /// What was known before, for when the store is away.
    before: Option<Arc<Levels>>,
}

#[derive(Clone)]
struct Loaded {
    levels: Arc<Levels>,
    /// When it has to be asked for again.
    until: Instant,
}

/// What makes an entry fresh.
#[derive(Clone, Copy)]
enum Fresh {
    /// That its time is not over at this time, and that nobody has seen a newer version.
    By(Instant),
    /// That it is of this version: the store could be asked at once.
    At(Version),
}

/// What the cache of policies has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Found, and fresh.
    pub hits: u64,
    /// Of these, subjects that nothing limits.
    pub negative_hits: u64,
    /// Read from the store.
    pub misses: u64,
    /// Found too old, and still right by the version.
    pub renewed: u64,
    /// Used too old, because the store was away.
    pub stale: u64,
    /// Subjects remembered.
    pub entries: u64,
}

impl CacheStats {
    const fn add(mut self, other: Self) -> Self {
        self.hits += other.hits;
        self.negative_hits += other.negative_hits;
        self.misses += other.misses;
        self.renewed += other.renewed;
        self.stale += other.stale;
        self.entries += other.entries;
        self
    }
}

impl PolicyCache {
    pub(super) fn new(ttl: Duration, entries_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: foldhash::fast::RandomState::default(),
            ttl,
            generation_max: (entries_max / SHARDS / 2).max(1),
            seen: AtomicU64::new(0),
        }
    }

    pub(super) fn stats(&self) -> CacheStats {
        let stats = |shard: &Mutex<Generations>| {
            let shard = lock(shard);
            CacheStats { entries: (shard.young.len() + shard.old.len()) as u64, ..shard.stats }
        };
        self.shards.iter().map(stats).fold(CacheStats::default(), CacheStats::add)
    }

    /// Somebody's draw was decided by this version. Answers whether that is news.
    pub(super) fn saw(&self, version: Version) -> bool {
        self.seen.fetch_max(version.number(), Ordering::Relaxed) < version.number()
    }

    fn clear(&self) {
        for shard in &self.shards {
            let mut shard = lock(shard);
            let gone = (mem::take(&mut shard.young), mem::take(&mut shard.old));
            drop(shard);
            drop(gone);
        }
    }

    /// A fresh answer, if there is one.
    #[inline]
    fn fresh(&self, hash: u64, asked: SubjectRef<'_>, fresh: Fresh) -> Option<Arc<Levels>> {
        let mut shard = self.shard(hash);
        let entry = shard.find(hash, asked, self.generation_max)?;
        let loaded = entry.loaded.get().filter(|loaded| self.is_fresh(loaded, fresh))?;
        let levels = Arc::clone(&loaded.levels);
        shard.stats.hits += 1;
        shard.stats.negative_hits += u64::from(levels.is_empty());
        Some(levels)
    }

    fn is_fresh(&self, loaded: &Loaded, fresh: Fresh) -> bool {
        match fresh {
            Fresh::At(version) => loaded.levels.version() == version,
            Fresh::By(now) => {
                now < loaded.until && loaded.levels.version().number() >= self.seen.load(Ordering::Relaxed)
            }
        }
    }

    /// The entry to be filled: the one that somebody is filling, or a new one in the place of what is too old.
    fn entry(&self, hash: u64, asked: SubjectRef<'_>, fresh: Fresh) -> Result<Arc<Entry>, LimitError> {
        let subject = asked.check()?;
        let mut shard = self.shard(hash);
        let found = shard.find(hash, asked, self.generation_max).map(Arc::clone);
        let before = match found {
            // Somebody is filling it, or was faster than us.
            Some(entry) if entry.loaded.get().is_none_or(|loaded| self.is_fresh(loaded, fresh)) => {
                return Ok(entry);
            }
            Some(entry) => entry.loaded.get().map(|loaded| Arc::clone(&loaded.levels)),
            None => None,
        };
        let entry = Arc::new(Entry { hash, subject, loaded: OnceCell::new(), before });
        shard.put(Arc::clone(&entry), self.generation_max);
        Ok(entry)
    }

    /// Keeps what is known in the place of an entry that could not be filled.
    fn put_back(&self, entry: &Entry) {
        let Some(levels) = &entry.before else { return };
        let loaded = OnceCell::new_with(Some(Loaded { levels: Arc::clone(levels), until: Instant::now() }));
        let kept = Entry { hash: entry.hash, subject: entry.subject.clone(), loaded, before: None };
        self.shard(entry.hash).put(Arc::new(kept), self.generation_max);
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Generations> {
        let number = (hash >> 32) as usize % SHARDS;
        lock(&self.shards[number])
    }
}

impl Generations {
    #[inline]
    fn find(&mut self, hash: u64, asked: SubjectRef<'_>, generation_max: usize) -> Option<&Arc<Entry>> {
        if self.young.find(hash, |entry| asked.is(&entry.subject)).is_none() {
            let old = self.old.find_entry(hash, |entry| asked.is(&entry.subject)).ok()?;
            let (entry, _) = old.remove();
            self.put(entry, generation_max);
        }
        self.young.find(hash, |entry| asked.is(&entry.subject))
    }

    /// Puts an entry among the young, in the place of an older one of the same subject.
    fn put(&mut self, entry: Arc<Entry>, generation_max: usize) {
        let is_it = |other: &Arc<Entry>| other.subject == entry.subject;
        if let Ok(found) = self.young.find_entry(entry.hash, is_it) {
            *found.into_mut() = entry;
            return;
        }
        if let Ok(found) = self.old.find_entry(entry.hash, is_it) {
            found.remove();
        }
        if self.young.len() >= generation_max {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert_unique(entry.hash, entry, |entry| entry.hash);
    }
}

impl Shared {
    /// What limits a subject: from the cache, or from the store until `until`.
    pub(super) async fn levels(
        &self,
        asked: SubjectRef<'_>,
        until: Option<Instant>,
    ) -> Result<Arc<Levels>, LimitError> {
        let cache = &self.policies;
        let hash = cache.hasher.hash_one((asked.entity, asked.resource));
        let fresh = if self.is_immediate {
            Fresh::At(self.store.version().await.map_err(LimitError::Store)?)
        } else {
            Fresh::By(Instant::now())
        };
        match cache.fresh(hash, asked, fresh) {
            Some(levels) => Ok(levels),
            None => self.load(hash, asked, fresh, until).await,
        }
    }

    #[cold]
    async fn load(
        &self,
        hash: u64,
        asked: SubjectRef<'_>,
        fresh: Fresh,
        until: Option<Instant>,
    ) -> Result<Arc<Levels>, LimitError> {
        let cache = &self.policies;
        let entry = cache.entry(hash, asked, fresh)?;
        let loaded = entry.loaded.get_or_try_init(|| self.read_levels(&entry, until)).await;
        match loaded {
            Ok(loaded) => Ok(Arc::clone(&loaded.levels)),
            Err(failed) => {
                cache.put_back(&entry);
                match (failed, &entry.before) {
                    (LimitError::Unavailable { .. }, Some(levels)) => {
                        cache.shard(hash).stats.stale += 1;
                        Ok(Arc::clone(levels))
                    }
                    (error, _) => Err(error),
                }
            }
        }
    }

    async fn read_levels(&self, entry: &Entry, until: Option<Instant>) -> Result<Loaded, LimitError> {
        let cache = &self.policies;
        // Asked for first: whatever is read later may be newer, and is then found stale, never the reverse.
        let version = self.ask(self.store.version(), until).await?;
        if let Some(levels) = &entry.before
            && levels.version() == version
        {
            cache.shard(entry.hash).stats.renewed += 1;
            return Ok(Loaded { levels: Arc::clone(levels), until: Instant::now() + cache.ttl });
        }
        let levels = Arc::new(self.resolve(&entry.subject, version, until).await?);
        cache.shard(entry.hash).stats.misses += 1;
        Ok(Loaded { levels, until: Instant::now() + cache.ttl })
    }

    async fn resolve(
        &self,
        subject: &Subject,
        version: Version,
        until: Option<Instant>,
    ) -> Result<Levels, LimitError> {
        let lineage = self.ask(self.store.lineage(&subject.entity), until).await?;
        if lineage.len() > LEVELS_MAX {
            return Err(LimitError::Deep { entity: subject.entity.clone() });
        }
        let above = lineage.iter().filter_map(|entity| entity.value.next());
        let above =
            above.map(|entity| Subject { entity: entity.clone(), resource: subject.resource.clone() });
        let subjects: Vec<Subject> = [subject.clone()].into_iter().chain(above).collect();
        let asked: Vec<_> = subjects.iter().flat_map(scopes).collect();
        let written = self.ask(self.store.read(&asked), until).await?;
        if written.policies.len() != asked.len() {
            let what = format!("{} policies for {} scopes", written.policies.len(), asked.len());
            return Err(LimitError::Store(StoreError::Corrupt { what }));
        }
        let level = |(number, subject): (usize, Subject)| {
            let four = std::array::from_fn(|scope| {
                written.policies[number * 4 + scope].as_ref().map(|written| &*written.value)
            });
            let resolved = resolve(&subject, four, &self.defaults);
            (subject, resolved)
        };
        Ok(Levels::new(version, subjects.into_iter().enumerate().map(level).collect()))
    }

    /// Calls the store for something that can be asked again.
    pub(super) async fn ask<T: Unpin>(
        &self,
        reply: Reply<'_, T>,
        until: Option<Instant>,
    ) -> Result<T, LimitError> {
        let answer = match until {
            None => reply.await.map_err(|error| Failed { error, may_be_done: true }),
            Some(until) => self.guard.call(reply, until).await,
        };
        answer.map_err(|failed| self.failure(failed.error))
    }

    /// The error that a failure of the store is to the caller.
    pub(super) fn failure(&self, error: StoreError) -> LimitError {
        if error.is_transient() {
            return LimitError::Unavailable { source: error, retry_after: self.guard.retry_after() };
        }
        LimitError::Store(error)
    }
}

impl Limiter {
    /// Forgets what limits whom: the next acquire of each subject reads it again.
    pub fn invalidate(&self) {
        self.shared.policies.clear();
    }
}

fn lock(shard: &Mutex<Generations>) -> MutexGuard<'_, Generations> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
