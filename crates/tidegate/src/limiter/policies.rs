//! What limits whom, remembered for a while.
//!
//! A subject's levels are read once and kept for the time to live, also if nothing limits it. If the store answers at once
//! they are kept while the namespace's version stays the same. When the time is over, one caller asks for the version, and for
//! the changes since if it is newer: only subjects that depend on those are read again. Subjects come up one after the other,
//! in the last quarter of the time. A draw that was decided by a newer version makes everything older stale at once. While one
//! caller reads, others wait for it; if it gives up, the next one reads. If the store is unavailable, the last known is used.
//!
//! Two generations bound the cache: when the young one is full it becomes the old one, and an entry that is asked for again
//! becomes young again.

use std::hash::BuildHasher;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
use super::recent::Recent;
use super::{Limiter, Shared};
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;
/// What changes while it is read is read again, up to so often.
const READS_MAX: usize = 3;
/// Levels are read again after so many times to live, though nothing they depend on is known to have changed: a store that
/// lost writes may have numbered others alike.
const READ_AGAIN: u32 = 10;

/// Levels by subject.
pub(super) struct PolicyCache {
    shards: Box<[Mutex<Generations>]>,
    hasher: foldhash::fast::RandomState,
    ttl: Duration,
    /// Entries per generation and shard.
    generation_max: usize,
    /// The newest version any draw was decided by: what is older is stale.
    seen: AtomicU64,
    /// How often everything was made stale by hand.
    epoch: AtomicU64,
    checked: Mutex<Option<Checked>>,
    /// Held by the caller that asks for the version.
    checking: tokio::sync::Mutex<()>,
    recent: Mutex<Recent>,
}

/// What version the store said that it is at, when it was asked last.
#[derive(Clone, Copy)]
struct Checked {
    version: Version,
    /// From when on one caller asks again, while it still counts for all others.
    again: Instant,
    /// Until when what is of this version need not be asked for: the time to live after it was asked.
    until: Instant,
    epoch: u64,
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
    /// When it was made: one that was made before everything became stale is stale.
    epoch: u64,
    /// The newest version that was seen by then: a read that began before a newer one was seen answers no later caller.
    seen: u64,
    /// Filled by the first who needs it.
    loaded: OnceCell<Loaded>,
    /// What was known before, for when the store is away.
    before: Option<Before>,
}

#[derive(Clone)]
struct Before {
    levels: Arc<Levels>,
    read_at: Instant,
    as_of: Version,
    epoch: u64,
}

#[derive(Clone)]
struct Loaded {
    levels: Arc<Levels>,
    read_at: Instant,
    /// The version up to which nothing that the levels depend on has changed.
    as_of: Version,
    /// When it has to be asked for again.
    until: Instant,
}

/// What limits a subject, and what is wrong with the store if it could not be asked whether that still holds.
pub(super) type Known = (Arc<Levels>, Option<StoreError>);

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
            epoch: AtomicU64::new(0),
            checked: Mutex::default(),
            checking: tokio::sync::Mutex::new(()),
            recent: Mutex::default(),
        }
    }

    fn hash(&self, asked: SubjectRef<'_>) -> u64 {
        self.hasher.hash_one((asked.entity, asked.resource))
    }

    pub(super) const fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(super) fn stats(&self) -> CacheStats {
        let stats = |shard: &Mutex<Generations>| {
            let shard = shard.lock();
            CacheStats { entries: (shard.young.len() + shard.old.len()) as u64, ..shard.stats }
        };
        self.shards.iter().map(stats).fold(CacheStats::default(), CacheStats::add)
    }

    /// Somebody's draw was decided by this version. Answers whether that is news.
    pub(super) fn saw(&self, version: Version) -> bool {
        self.seen.fetch_max(version.number(), Ordering::SeqCst) < version.number()
    }

    /// The store says that it is at this version; `seen` was the newest when it was asked. A store that was restored to an earlier
    /// state knows no newer one any more, but one that somebody has seen since it was asked is newer all the same.
    fn is_at(&self, version: Version, seen: u64) {
        if version.number() < seen {
            let at = version.number();
            // Whoever was faster knows better.
            let _ = self.seen.compare_exchange(seen, at, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// What the store said a while ago that still counts: its time is not over, and nobody has seen a newer version or has made
    /// stale what was known then. Towards its end one caller is told nothing, and asks for all.
    fn checked(&self, epoch: u64) -> Option<Checked> {
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

    /// What the store has said, unless it has said something since.
    fn check(&self, new: Checked) {
        let mut checked = self.checked.lock();
        if checked.is_none_or(|old| (old.epoch, old.until) <= (new.epoch, new.until)) {
            *checked = Some(new);
        }
    }

    /// The store is no longer at this version.
    fn is_past(&self, version: Version) {
        let mut checked = self.checked.lock();
        if checked.is_some_and(|checked| checked.version == version) {
            *checked = None;
        }
    }

    /// When what counts until then is to be asked for: those of one moment come one after the other, in the last quarter of the time.
    fn spread(&self, until: Instant, hash: u64) -> Instant {
        let part = u32::try_from(hash & 0xFF).unwrap_or(0);
        until.checked_sub(self.ttl / 4 * part / 256).unwrap_or(until)
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// A fresh answer, if there is one.
    #[inline]
    fn fresh(&self, hash: u64, asked: SubjectRef<'_>, fresh: Fresh) -> Option<Arc<Levels>> {
        let mut shard = self.shard(hash);
        let entry = shard.find(hash, asked, self.generation_max)?;
        let loaded = entry.loaded.get().filter(|loaded| self.is_fresh(entry, loaded, fresh))?;
        let levels = Arc::clone(&loaded.levels);
        shard.stats.hits += 1;
        shard.stats.negative_hits += u64::from(levels.is_empty());
        Some(levels)
    }

    fn is_fresh(&self, entry: &Entry, loaded: &Loaded, fresh: Fresh) -> bool {
        if entry.epoch != self.epoch() {
            return false;
        }
        match fresh {
            Fresh::At(version) => loaded.as_of == version,
            Fresh::By(now) => {
                now < loaded.until && loaded.as_of.number() >= self.seen.load(Ordering::Relaxed)
            }
        }
    }

    /// The entry to be filled: the one that somebody is filling, or a new one in the place of what is too old.
    fn entry(&self, hash: u64, asked: SubjectRef<'_>, fresh: Fresh) -> Result<Arc<Entry>, LimitError> {
        let subject = asked.check()?;
        let mut shard = self.shard(hash);
        let found = shard.find(hash, asked, self.generation_max).map(Arc::clone);
        // Read before anything is asked of the store: what becomes stale meanwhile is found so.
        let (epoch, seen) = (self.epoch(), self.seen.load(Ordering::SeqCst));
        let before = match found {
            Some(entry) => match entry.loaded.get() {
                // Somebody is filling it, or was faster than us.
                None if entry.epoch == epoch && entry.seen >= seen => return Ok(entry),
                Some(loaded) if self.is_fresh(&entry, loaded, fresh) => return Ok(entry),
                None => entry.before.clone(),
                Some(loaded) => Some(Before {
                    levels: Arc::clone(&loaded.levels),
                    read_at: loaded.read_at,
                    as_of: loaded.as_of,
                    epoch: entry.epoch,
                }),
            },
            None => None,
        };
        let entry = Arc::new(Entry { hash, subject, epoch, seen, loaded: OnceCell::new(), before });
        shard.put(Arc::clone(&entry), self.generation_max);
        Ok(entry)
    }

    /// Keeps what is known in the place of an entry that could not be filled, unless somebody has filled another.
    fn put_back(&self, entry: &Entry) {
        let Some(Before { levels, read_at, as_of, epoch }) = entry.before.clone() else { return };
        let mut shard = self.shard(entry.hash);
        let asked = SubjectRef::from(&entry.subject);
        let found = shard.find(entry.hash, asked, self.generation_max);
        if found.is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), entry)) {
            let loaded = OnceCell::new_with(Some(Loaded { levels, read_at, as_of, until: Instant::now() }));
            let (hash, subject) = (entry.hash, entry.subject.clone());
            let kept = Entry { hash, subject, epoch, seen: entry.seen, loaded, before: None };
            shard.put(Arc::new(kept), self.generation_max);
        }
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Generations> {
        let number = (hash >> 32) as usize % SHARDS;
        self.shards[number].lock()
    }
}

impl Generations {
    #[inline]
    fn find(&mut self, hash: u64, asked: SubjectRef<'_>, generation_max: usize) -> Option<&Arc<Entry>> {
        let is_it = |entry: &Arc<Entry>| asked.is(&entry.subject);
        if let Some(place) = self.young.find_bucket_index(hash, is_it) {
            return self.young.get_bucket(place);
        }
        let (entry, _) = self.old.find_entry(hash, is_it).ok()?.remove();
        self.put(entry, generation_max);
        self.young.find(hash, is_it)
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
    /// What limits a subject, if it is known and the store says at once that it still holds.
    #[inline]
    pub(super) fn levels_now(&self, asked: SubjectRef<'_>) -> Option<Arc<Levels>> {
        let version = self.store.version().now()?.ok()?;
        let hash = self.policies.hash(asked);
        self.policies.fresh(hash, asked, Fresh::At(version))
    }

    /// What limits a subject: from the cache, or from the store. If the store is away it is what was known, and what is
    /// wrong with the store.
    pub(super) async fn levels(&self, asked: SubjectRef<'_>) -> Result<Known, LimitError> {
        let cache = &self.policies;
        let hash = cache.hash(asked);
        let fresh = if self.is_immediate {
            Fresh::At(self.store.version().await.map_err(LimitError::Store)?)
        } else {
            self.hear_of_changes();
            Fresh::By(Instant::now())
        };
        match cache.fresh(hash, asked, fresh) {
            Some(levels) => Ok((levels, None)),
            None => self.load(hash, asked, fresh).await,
        }
    }

    /// Takes in what the store has announced.
    fn hear_of_changes(&self) {
        if let Some(changes) = &self.changes {
            self.policies.saw(changes.newest());
        }
    }

    #[cold]
    async fn load(&self, hash: u64, asked: SubjectRef<'_>, fresh: Fresh) -> Result<Known, LimitError> {
        let cache = &self.policies;
        let entry = cache.entry(hash, asked, fresh)?;
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

    async fn read_levels(&self, entry: &Entry) -> Result<Loaded, LimitError> {
        let cache = &self.policies;
        // Known first: whatever is read later may be newer, and is then found stale, never the reverse.
        let checked = if self.is_immediate { None } else { cache.checked(entry.epoch) };
        let Checked { version, until, .. } = match checked {
            Some(checked) => checked,
            None => self.check_version(entry.epoch).await?,
        };
        if let Some(Before { levels, read_at, as_of, epoch }) = &entry.before
            && *epoch == entry.epoch
            && (levels.version() == version
                || read_at.elapsed() < cache.ttl.saturating_mul(READ_AGAIN)
                    && (*as_of == version || cache.recent.lock().still_holds(levels, *as_of, version)))
        {
            cache.shard(entry.hash).stats.renewed += 1;
            let (levels, until) = (Arc::clone(levels), cache.spread(until, entry.hash));
            return Ok(Loaded { levels, read_at: *read_at, as_of: version, until });
        }
        let levels = Arc::new(self.read_consistently(&entry.subject, version).await?);
        let as_of = levels.version();
        if as_of != version {
            cache.is_past(version);
        }
        cache.shard(entry.hash).stats.misses += 1;
        let read_at = Instant::now();
        Ok(Loaded { levels, read_at, as_of, until: cache.spread(read_at + cache.ttl, entry.hash) })
    }

    /// Asks what version the store is at, and what has changed, for all who want to know for a while. One caller asks at a time.
    async fn check_version(&self, epoch: u64) -> Result<Checked, LimitError> {
        let cache = &self.policies;
        let checking = cache.checking.try_lock().ok();
        if checking.is_none() && !self.is_immediate {
            // Not held while it asks in turn: if the store does not answer, no caller waits for another's deadline.
            drop(cache.checking.lock().await);
            if let Some(checked) = cache.checked(epoch) {
                return Ok(checked);
            }
        }
        let (seen, now) = (cache.seen.load(Ordering::Relaxed), Instant::now());
        let version = self.ask(self.store.version()).await?;
        cache.is_at(version, seen);
        let known = cache.recent.lock().to();
        if version != known {
            let is_next = known > Version::ZERO && version > known;
            // A store that cannot tell has all of it read again.
            let changed =
                if is_next { self.ask(self.store.changed(known)).await.unwrap_or(None) } else { None };
            let changed = changed.filter(|changed| changed.version >= version);
            // Changes made after the version was read are among them, which does no harm.
            cache.recent.lock().add(version, changed.map(|changed| changed.about));
        }
        let checked = Checked { version, again: now + cache.ttl / 4 * 3, until: now + cache.ttl, epoch };
        cache.check(checked);
        Ok(checked)
    }

    /// What limits a subject, all of it as of one version. New rules under an old version would be taken for the
    /// old ones: two processes would turn a bucket's shape to and fro.
    async fn read_consistently(&self, subject: &Subject, mut version: Version) -> Result<Levels, LimitError> {
        for _ in 1..READS_MAX {
            let (levels, read_at) = self.resolve(subject, version).await?;
            if read_at == version {
                return Ok(levels);
            }
            version = read_at;
        }
        // It changes faster than we read.
        self.resolve(subject, version).await.map(|(levels, _)| levels)
    }

    /// What limits a subject, said to be as of `version`, and the version that the policies were of.
    async fn resolve(&self, subject: &Subject, version: Version) -> Result<(Levels, Version), LimitError> {
        let lineage = self.ask(self.store.lineage(&subject.entity)).await?;
        if lineage.len() > LEVELS_MAX {
            return Err(LimitError::Deep { entity: subject.entity.clone() });
        }
        let above = lineage.iter().filter_map(|entity| entity.value.next());
        let above =
            above.map(|entity| Subject { entity: entity.clone(), resource: subject.resource.clone() });
        let subjects: Vec<Subject> = [subject.clone()].into_iter().chain(above).collect();
        let asked: Vec<_> = subjects.iter().flat_map(scopes).collect();
        let written = self.ask(self.store.read(&asked)).await?;
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
        let levels = Levels::new(version, subjects.into_iter().enumerate().map(level).collect());
        Ok((levels, written.version))
    }

    /// Calls the store for something that can be asked again.
    pub(super) async fn ask<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, LimitError> {
        let answer = if self.is_immediate {
            reply.await.map_err(|error| Failed { error, may_be_done: true })
        } else {
            self.guard.call(reply).await
        };
        answer.map_err(|failed| self.failure(failed.error))
    }

    /// The same for a change or a report: one that takes longer than a decision may is no store that is away.
    pub(super) async fn ask_patiently<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, LimitError> {
        let answer = if self.is_immediate {
            reply.await
        } else {
            self.guard.call_patiently(reply).await.map_err(StoreError::from)
        };
        answer.map_err(|error| self.failure(error))
    }

    /// The error that a failure of the store is to the caller.
    pub(super) fn failure(&self, error: StoreError) -> LimitError {
        match error {
            StoreError::Busy { waiting_max, retry_after, .. } => {
                let retry_after = retry_after.max(self.guard.deadline());
                LimitError::Busy { waiters_max: waiting_max, retry_after: Some(retry_after) }
            }
            error if error.is_unavailable() => {
                LimitError::Unavailable { source: error, retry_after: self.guard.retry_after() }
            }
            error => LimitError::Store(error),
        }
    }
}

impl Limiter {
    /// Makes stale what is known of who is limited by what: the next acquire of each subject reads it again. Should
    /// the store be away then, what was known is used.
    pub fn invalidate(&self) {
        self.shared.policies.epoch.fetch_add(1, Ordering::SeqCst);
        // Whoever waits may be let in by what is written now.
        self.shared.turns.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_the_store_said_counts_for_all_until_one_asks_again_or_it_is_found_to_be_past() {
        let cache = PolicyCache::new(Duration::from_secs(60), 64);
        let said = |version, epoch| {
            let now = Instant::now();
            let (again, until) = (now + Duration::from_secs(45), now + Duration::from_secs(60));
            Checked { version: Version::new(version), again, until, epoch }
        };
        let version = |epoch| cache.checked(epoch).map(|checked| checked.version.number());
        assert_eq!(version(0), None);
        let first = said(5, 0);
        cache.check(first);
        tokio::time::advance(Duration::from_secs(45)).await;
        assert_eq!((version(0), version(0)), (None, Some(5)), "one asks");
        // It was overtaken: what was said later counts, and so does what was asked for since all became stale.
        cache.check(said(6, 0));
        cache.check(first);
        assert_eq!(version(0), Some(6));
        cache.check(said(6, 1));
        cache.check(said(6, 0));
        assert_eq!((version(0), version(1)), (None, Some(6)));
        cache.saw(Version::new(7));
        assert_eq!(version(1), None);
        // The store was restored to an earlier state, and somebody has read so.
        cache.is_at(Version::new(6), 7);
        assert_eq!(version(1), Some(6));
        cache.is_past(Version::new(5));
        assert_eq!(version(1), Some(6));
        cache.is_past(Version::new(6));
        assert_eq!(version(1), None);
    }

    #[test]
    fn times_are_over_in_the_last_quarter() {
        let cache = PolicyCache::new(Duration::from_secs(60), 64);
        let until = Instant::now() + cache.ttl;
        for hash in 0..1_000 {
            let early = until - cache.spread(until, hash);
            assert!(early < Duration::from_secs(15), "{early:?}");
        }
        assert_ne!(cache.spread(until, 1), cache.spread(until, 2));
    }

    #[test]
    fn an_answer_that_was_overtaken_does_not_hide_a_newer_version() {
        let cache = PolicyCache::new(Duration::from_secs(60), 64);
        let seen = || cache.seen.load(Ordering::Relaxed);
        cache.saw(Version::new(5));
        // Asked at 5, and answered with that after somebody's draw was decided by 6.
        cache.saw(Version::new(6));
        cache.is_at(Version::new(5), 5);
        assert_eq!(seen(), 6);
        // The store was restored to an earlier state.
        cache.is_at(Version::new(3), 6);
        assert_eq!(seen(), 3);
        // And has gone on from there meanwhile.
        cache.saw(Version::new(4));
        cache.is_at(Version::new(2), 3);
        assert_eq!(seen(), 4);
    }
}
