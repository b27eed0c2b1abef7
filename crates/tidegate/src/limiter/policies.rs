//! TTL cache of resolved policies: the limits of each subject.
//!
//! A subject's levels are read once and kept for the TTL, including the negative result that nothing limits it. With
//! a store that replies immediately they are kept while the namespace's version stays the same. When the TTL expires,
//! one caller reads the version and, if it is newer, the changes since: only subjects that depend on those are read
//! again. Expiries are spread over the last quarter of the TTL. A draw that was decided by a newer version makes all
//! older entries stale at once. Reads are single-flight: while one caller reads, others wait for it, and if it is
//! cancelled the next one reads. If the store is unavailable, the last known levels are used.
//!
//! A two-generation cache bounds the memory.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::resolve::{resolve, scopes};
use tidegate_store::two_generations::{Hashed, TwoGenerations};
use tidegate_store::{Reply, StoreError};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::acquire::SubjectRef;
use super::breaker::CallFailure;
use super::change_log::ChangeLog;
use super::error::LimitError;
use super::{Limiter, Shared};
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;
/// How many times levels that change while they are read are read at most.
const READS_MAX: usize = 3;
/// Levels are read again after this many TTLs even if no dependency is known to have changed: a store that lost
/// writes may have reused their version numbers.
const READ_AGAIN: u32 = 10;

/// Levels by subject.
pub(super) struct PolicyCache {
    shards: Box<[Mutex<Shard>]>,
    hasher: foldhash::fast::RandomState,
    ttl: Duration,
    /// The newest version that decided a draw: older entries are stale.
    seen: AtomicU64,
    /// The number of manual invalidations.
    epoch: AtomicU64,
    checked: Mutex<Option<VersionCheck>>,
    /// Held by the caller that reads the version.
    checking: tokio::sync::Mutex<()>,
    change_log: Mutex<ChangeLog>,
}

/// The store's version when it was last read.
#[derive(Clone, Copy)]
struct VersionCheck {
    version: Version,
    /// From this time on one caller reads the version again, while it remains valid for all others.
    again: Instant,
    /// Until when entries of this version need no check: the TTL after the version was read.
    until: Instant,
    epoch: u64,
}

struct Shard {
    entries: TwoGenerations<Arc<Entry>>,
    stats: CacheStats,
}

struct Entry {
    hash: u64,
    subject: Subject,
    /// The epoch at creation: an entry created before the last invalidation is stale.
    epoch: u64,
    /// The newest version seen at creation: a read that began before a newer version was seen serves no later caller.
    seen: u64,
    /// Filled by the first caller that needs it.
    loaded: OnceCell<CachedLevels>,
    /// The previous levels, used while the store is unavailable.
    before: Option<PreviousLevels>,
}

#[derive(Clone)]
struct PreviousLevels {
    levels: Arc<Levels>,
    read_at: Instant,
    as_of: Version,
    epoch: u64,
}

#[derive(Clone)]
struct CachedLevels {
    levels: Arc<Levels>,
    read_at: Instant,
    /// The version up to which no dependency of the levels has changed.
    as_of: Version,
    /// When the levels must be checked again.
    until: Instant,
}

/// A subject's levels, and the store's error if it could not confirm that they are current.
pub(super) type LevelsResult = (Arc<Levels>, Option<StoreError>);

/// The freshness condition of an entry.
#[derive(Clone, Copy)]
enum Freshness {
    /// Not expired at this time, and no newer version was seen.
    By(Instant),
    /// Of exactly this version: the store replies immediately.
    At(Version),
}

/// Counters of the policy cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Lookups that found a fresh entry.
    pub hits: u64,
    /// Hits for subjects that nothing limits.
    pub negative_hits: u64,
    /// Levels read from the store.
    pub misses: u64,
    /// Expired entries that the version check confirmed.
    pub renewed: u64,
    /// Expired entries used because the store was unavailable.
    pub stale: u64,
    /// Subjects cached.
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
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(entries_max / SHARDS))).collect(),
            hasher: foldhash::fast::RandomState::default(),
            ttl,
            seen: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            checked: Mutex::default(),
            checking: tokio::sync::Mutex::new(()),
            change_log: Mutex::default(),
        }
    }

    fn hash(&self, key: SubjectRef<'_>) -> u64 {
        self.hasher.hash_one((key.entity, key.resource))
    }

    pub(super) const fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(super) fn stats(&self) -> CacheStats {
        let stats = |shard: &Mutex<Shard>| {
            let shard = shard.lock();
            CacheStats { entries: shard.entries.len() as u64, ..shard.stats }
        };
        self.shards.iter().map(stats).fold(CacheStats::default(), CacheStats::add)
    }

    /// Records the version that decided a draw. Returns whether it is new.
    pub(super) fn record_seen(&self, version: Version) -> bool {
        self.seen.fetch_max(version.number(), Ordering::SeqCst) < version.number()
    }

    /// The store reported this version; `seen` was the newest one when the call began. A store restored to an earlier
    /// state has lost its newer versions, so `seen` moves back, unless a newer version was seen during the call.
    fn reset_seen(&self, version: Version, seen: u64) {
        if version.number() < seen {
            let at = version.number();
            // On failure a concurrent caller has stored a more recent value.
            let _ = self.seen.compare_exchange(seen, at, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// The last version check, if it is still valid: not expired, not older than a version seen since, and of the
    /// current epoch. Near its end one caller gets `None` and refreshes it for all.
    fn checked(&self, epoch: u64) -> Option<VersionCheck> {
        let now = Instant::now();
        let mut checked = self.checked.lock();
        let checked = checked.as_mut()?;
        let is_newest = checked.version.number() >= self.seen.load(Ordering::Relaxed);
        if checked.epoch != epoch || !is_newest || now >= checked.until {
            return None;
        }
        if now >= checked.again {
            checked.again = checked.until;
            return None;
        }
        Some(*checked)
    }

    /// Stores a version check, unless a later one is stored.
    fn check(&self, new: VersionCheck) {
        let mut checked = self.checked.lock();
        if checked.is_none_or(|old| (old.epoch, old.until) <= (new.epoch, new.until)) {
            *checked = Some(new);
        }
    }

    /// The store is no longer at this version.
    fn discard_check(&self, version: Version) {
        let mut checked = self.checked.lock();
        if checked.is_some_and(|checked| checked.version == version) {
            *checked = None;
        }
    }

    /// Spreads expiries over the last quarter of the TTL, so that entries read together do not expire together.
    fn spread(&self, until: Instant, hash: u64) -> Instant {
        let part = u32::try_from(hash & 0xFF).unwrap_or(0);
        until.checked_sub(self.ttl / 4 * part / 256).unwrap_or(until)
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// The cached levels, if they are fresh.
    #[inline]
    fn fresh(&self, hash: u64, key: SubjectRef<'_>, fresh: Freshness) -> Option<Arc<Levels>> {
        let mut shard = self.shard(hash);
        let entry = shard.find(hash, key)?;
        let loaded = entry.loaded.get().filter(|loaded| self.is_fresh(entry, loaded, fresh))?;
        let levels = Arc::clone(&loaded.levels);
        shard.stats.hits += 1;
        shard.stats.negative_hits += u64::from(levels.is_empty());
        Some(levels)
    }

    fn is_fresh(&self, entry: &Entry, loaded: &CachedLevels, fresh: Freshness) -> bool {
        if entry.epoch != self.epoch() {
            return false;
        }
        match fresh {
            Freshness::At(version) => loaded.as_of == version,
            Freshness::By(now) => {
                now < loaded.until && loaded.as_of.number() >= self.seen.load(Ordering::Relaxed)
            }
        }
    }

    /// The entry to fill: the one being filled by another caller, or a new one that replaces an expired one.
    fn entry(&self, hash: u64, key: SubjectRef<'_>, fresh: Freshness) -> Result<Arc<Entry>, LimitError> {
        let subject = key.check()?;
        let mut shard = self.shard(hash);
        let found = shard.find(hash, key).map(Arc::clone);
        // Read before calling the store, so that an invalidation during the call is detected.
        let (epoch, seen) = (self.epoch(), self.seen.load(Ordering::SeqCst));
        let before = match found {
            Some(entry) => match entry.loaded.get() {
                // Another caller is filling it, or has just filled it.
                None if entry.epoch == epoch && entry.seen >= seen => return Ok(entry),
                Some(loaded) if self.is_fresh(&entry, loaded, fresh) => return Ok(entry),
                None => entry.before.clone(),
                Some(loaded) => Some(PreviousLevels {
                    levels: Arc::clone(&loaded.levels),
                    read_at: loaded.read_at,
                    as_of: loaded.as_of,
                    epoch: entry.epoch,
                }),
            },
            None => None,
        };
        let entry = Arc::new(Entry { hash, subject, epoch, seen, loaded: OnceCell::new(), before });
        shard.put(Arc::clone(&entry));
        Ok(entry)
    }

    /// Restores the previous levels in place of an entry that could not be filled, unless it has been replaced.
    fn put_back(&self, entry: &Entry) {
        let Some(PreviousLevels { levels, read_at, as_of, epoch }) = entry.before.clone() else { return };
        let mut shard = self.shard(entry.hash);
        let key = SubjectRef::from(&entry.subject);
        let found = shard.find(entry.hash, key);
        if found.is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), entry)) {
            let loaded =
                OnceCell::new_with(Some(CachedLevels { levels, read_at, as_of, until: Instant::now() }));
            let (hash, subject) = (entry.hash, entry.subject.clone());
            let kept = Entry { hash, subject, epoch, seen: entry.seen, loaded, before: None };
            shard.put(Arc::new(kept));
        }
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let number = (hash >> 32) as usize % SHARDS;
        self.shards[number].lock()
    }
}

impl Shard {
    fn new(entries_max: usize) -> Self {
        Self { entries: TwoGenerations::new(entries_max), stats: CacheStats::default() }
    }

    #[inline]
    fn find(&mut self, hash: u64, key: SubjectRef<'_>) -> Option<&Arc<Entry>> {
        self.entries.find(hash, |entry| key.is(&entry.subject))
    }

    /// Inserts an entry, replacing an older one of the same subject.
    fn put(&mut self, entry: Arc<Entry>) {
        let new = Arc::clone(&entry);
        self.entries.insert(entry, |other| other.subject == new.subject);
    }
}

impl Hashed for Entry {
    fn key_hash(&self) -> u64 {
        self.hash
    }
}

impl Shared {
    /// A subject's cached levels, if the store confirms immediately that they are current.
    #[inline]
    pub(super) fn levels_now(&self, key: SubjectRef<'_>) -> Option<Arc<Levels>> {
        let version = self.store.version().now()?.ok()?;
        let hash = self.policies.hash(key);
        self.policies.fresh(hash, key, Freshness::At(version))
    }

    /// A subject's levels, from the cache or the store. If the store is unavailable, the last known levels and the
    /// store's error.
    pub(super) async fn levels(&self, key: SubjectRef<'_>) -> Result<LevelsResult, LimitError> {
        let cache = &self.policies;
        let hash = cache.hash(key);
        let fresh = if self.is_immediate {
            Freshness::At(self.store.version().await.map_err(LimitError::Store)?)
        } else {
            self.read_announced_version();
            Freshness::By(Instant::now())
        };
        match cache.fresh(hash, key, fresh) {
            Some(levels) => Ok((levels, None)),
            None => self.load(hash, key, fresh).await,
        }
    }

    /// Records the newest version that the store announced.
    fn read_announced_version(&self) {
        if let Some(changes) = &self.changes {
            self.policies.record_seen(changes.newest());
        }
    }

    #[cold]
    async fn load(
        &self,
        hash: u64,
        key: SubjectRef<'_>,
        fresh: Freshness,
    ) -> Result<LevelsResult, LimitError> {
        let cache = &self.policies;
        let entry = cache.entry(hash, key, fresh)?;
        let loaded = entry.loaded.get_or_try_init(|| self.read_levels(&entry)).await;
        match loaded {
            Ok(loaded) => Ok((Arc::clone(&loaded.levels), None)),
            Err(failed) => {
                cache.put_back(&entry);
                match (failed, &entry.before) {
                    (LimitError::Unavailable { source, .. }, Some(before)) => {
                        cache.shard(hash).stats.stale += 1;
                        Ok((Arc::clone(&before.levels), Some(source)))
                    }
                    (error, _) => Err(error),
                }
            }
        }
    }

    async fn read_levels(&self, entry: &Entry) -> Result<CachedLevels, LimitError> {
        let cache = &self.policies;
        // The version is read first: levels read after it may be newer and are then found stale, never the reverse.
        let checked = if self.is_immediate { None } else { cache.checked(entry.epoch) };
        let VersionCheck { version, until, .. } = match checked {
            Some(checked) => checked,
            None => self.check_version(entry.epoch).await?,
        };
        if let Some(PreviousLevels { levels, read_at, as_of, epoch }) = &entry.before
            && *epoch == entry.epoch
            && (levels.version() == version
                || read_at.elapsed() < cache.ttl.saturating_mul(READ_AGAIN)
                    && (*as_of == version || cache.change_log.lock().is_current(levels, *as_of, version)))
        {
            cache.shard(entry.hash).stats.renewed += 1;
            let (levels, until) = (Arc::clone(levels), cache.spread(until, entry.hash));
            return Ok(CachedLevels { levels, read_at: *read_at, as_of: version, until });
        }
        let levels = Arc::new(self.read_consistently(&entry.subject, version).await?);
        let as_of = levels.version();
        if as_of != version {
            cache.discard_check(version);
        }
        cache.shard(entry.hash).stats.misses += 1;
        let read_at = Instant::now();
        Ok(CachedLevels { levels, read_at, as_of, until: cache.spread(read_at + cache.ttl, entry.hash) })
    }

    /// Reads the store's version and the changes since the last one, for all callers until the check expires. One
    /// caller reads at a time.
    async fn check_version(&self, epoch: u64) -> Result<VersionCheck, LimitError> {
        let cache = &self.policies;
        let checking = cache.checking.try_lock().ok();
        if checking.is_none() && !self.is_immediate {
            // Released before calling the store: if the store hangs, callers do not wait for each other's timeouts.
            drop(cache.checking.lock().await);
            if let Some(checked) = cache.checked(epoch) {
                return Ok(checked);
            }
        }
        let (seen, now) = (cache.seen.load(Ordering::Relaxed), Instant::now());
        let version = self.call_store(self.store.version()).await?;
        cache.reset_seen(version, seen);
        let known = cache.change_log.lock().to();
        if version != known {
            let is_next = known > Version::ZERO && version > known;
            // If the store cannot list the changes, all levels are read again.
            let changed =
                if is_next { self.call_store(self.store.changed(known)).await.unwrap_or(None) } else { None };
            let changed = changed.filter(|changed| changed.version >= version);
            // The list may include changes made after the version was read, which is harmless.
            cache.change_log.lock().add(version, changed.map(|changed| changed.about));
        }
        let checked = VersionCheck { version, again: now + cache.ttl / 4 * 3, until: now + cache.ttl, epoch };
        cache.check(checked);
        Ok(checked)
    }

    /// Reads a subject's levels as of one version. New rules under an old version would be taken for the old ones,
    /// and two processes would keep changing a bucket's shape back and forth.
    async fn read_consistently(&self, subject: &Subject, mut version: Version) -> Result<Levels, LimitError> {
        for _ in 1..READS_MAX {
            let (levels, read_at) = self.resolve(subject, version).await?;
            if read_at == version {
                return Ok(levels);
            }
            version = read_at;
        }
        // Policies change faster than they can be read.
        self.resolve(subject, version).await.map(|(levels, _)| levels)
    }

    /// Resolves a subject's levels, labelled with `version`, and returns the version that the policies were read at.
    async fn resolve(&self, subject: &Subject, version: Version) -> Result<(Levels, Version), LimitError> {
        let lineage = self.call_store(self.store.lineage(&subject.entity)).await?;
        if lineage.len() > LEVELS_MAX {
            return Err(LimitError::Deep { entity: subject.entity.clone() });
        }
        let above = lineage.iter().filter_map(|entity| entity.value.next());
        let above =
            above.map(|entity| Subject { entity: entity.clone(), resource: subject.resource.clone() });
        let subjects: Vec<Subject> = [subject.clone()].into_iter().chain(above).collect();
        let wanted: Vec<_> = subjects.iter().flat_map(scopes).collect();
        let written = self.call_store(self.store.read(&wanted)).await?;
        if written.policies.len() != wanted.len() {
            let what = format!("{} policies for {} scopes", written.policies.len(), wanted.len());
            return Err(LimitError::Store(StoreError::Corrupt { what }));
        }
        let level = |(number, subject): (usize, Subject)| {
            let four = std::array::from_fn(|scope| {
                written.policies[number * 4 + scope].as_ref().map(|written| &*written.value)
            });
            let resolved = resolve(&subject, four, &self.defaults);
            (subject, resolved)
        };
        let levels = Levels::new(version, subjects.into_iter().enumerate().map(level).collect());
        let disabled = lineage.iter().find(|entity| entity.value.is_disabled());
        let disabled = disabled.map(|entity| entity.value.id().clone());
        Ok((levels.with_disabled(disabled), written.version))
    }

    /// Calls the store for an operation that can be retried.
    pub(super) async fn call_store<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, LimitError> {
        let answer = if self.is_immediate {
            reply.await.map_err(|error| CallFailure { error, may_be_done: true })
        } else {
            self.breaker.call(reply).await
        };
        answer.map_err(|failed| self.failure(failed.error))
    }

    /// The same for a change, a report or a lookup of a lease, with a longer timeout: a slow reply does not mean
    /// an unavailable store.
    pub(super) async fn call_store_slow<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, LimitError> {
        let answer = if self.is_immediate {
            reply.await
        } else {
            self.breaker.call_slow(reply).await.map_err(StoreError::from)
        };
        answer.map_err(|error| self.failure(error))
    }

    /// Maps a store error to the caller's error.
    pub(super) fn failure(&self, error: StoreError) -> LimitError {
        match error {
            StoreError::Busy { waiting_max, retry_after, .. } => {
                let retry_after = retry_after.max(self.breaker.deadline());
                LimitError::Busy { waiters_max: waiting_max, retry_after: Some(retry_after) }
            }
            error if error.is_unavailable() => {
                LimitError::Unavailable { source: error, retry_after: self.breaker.retry_after() }
            }
            error => LimitError::Store(error),
        }
    }
}

impl Limiter {
    /// Invalidates all cached policies: the next acquire of each subject reads them again. If the store is
    /// unavailable by then, the last known policies are used.
    pub fn invalidate(&self) {
        self.shared.policies.epoch.fetch_add(1, Ordering::SeqCst);
        // A waiter may be admitted by the policies written since.
        self.shared.waiters.wake();
    }
}

#[cfg(test)]
#[path = "policies_tests.rs"]
mod tests;
