//! Looks up tokens by id in the store.
//!
//! A two-generation cache bounds memory and spares a remote store one query per request. Unknown ids are
//! cached too, so that guesses do not reach the store. While the store is unavailable, a cached token stays
//! valid for a minute, and the policy decides what happens to its limits. After that the token may have been
//! revoked, and requests fail until the store responds.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use subtle::ConstantTimeEq;
use tidegate::store::two_generations::{Hashed, TwoGenerations};
use tidegate::store::{EngineTime, Reply};
use tidegate::{Limiter, StoreError, Version};
use tidegate_core::limit::token::{Token, TokenHash, TokenId};
use tokio::time::{Instant, timeout};

use crate::token::Secret;

/// How long a cached token stays valid while the store is unavailable.
const STALE_MAX: Duration = Duration::from_mins(1);

/// How many deadlines of the store a lookup may wait in the store's own queue.
const QUEUED_MAX: u32 = 3;

/// A stored token and the hash of its secret.
#[derive(Debug, Clone)]
pub struct StoredToken {
    /// The token.
    pub token: Token,
    /// The hash of its secret, as [`Secret::hash`] makes it.
    pub hash: TokenHash,
}

impl StoredToken {
    /// Whether the secret matches, compared in constant time.
    pub fn matches(&self, secret: &Secret) -> bool {
        self.hash.as_bytes().ct_eq(secret.hash().as_bytes()).into()
    }
}

/// A source of tokens, queried with every request. [`StoreTokenCache`] is the default implementation.
pub trait TokenCache: fmt::Debug + Send + Sync + 'static {
    /// Returns the token with this id, valid or not, or `None` if there is none.
    fn get<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<Arc<StoredToken>>>;

    /// Discards what is cached about a token that was changed through this server.
    fn invalidate(&self, _id: &TokenId) {}
}

/// Looks up tokens in a limiter's store.
pub struct StoreTokenCache {
    limiter: Limiter,
    ttl: Duration,
    hasher: RandomState,
    cached: Mutex<TwoGenerations<Entry>>,
    /// The number of invalidations. A token read before one is not cached after it.
    invalidations: AtomicU64,
}

#[derive(Clone)]
struct Entry {
    id: TokenId,
    hash: u64,
    stored: Option<Arc<StoredToken>>,
    /// A remote store is queried again after the TTL, or at once if the entry was invalidated.
    queried_at: Option<Instant>,
    /// An in-process store is queried again when its version changes.
    version: Option<Version>,
}

impl StoreTokenCache {
    /// Creates a cache that keeps tokens for two seconds: one that was revoked elsewhere may stay valid that long. An
    /// in-process store is queried whenever its version has changed. While the store is unavailable, a cached
    /// token stays valid for a minute after it was read; then the lookup returns the store's error.
    pub fn new(limiter: Limiter) -> Self {
        Self::with(limiter, Duration::from_secs(2), 8_192)
    }

    /// Creates a cache of at most `tokens_max` tokens, each for `ttl`.
    pub fn with(limiter: Limiter, ttl: Duration, tokens_max: usize) -> Self {
        let cached = Mutex::new(TwoGenerations::new(tokens_max));
        Self { limiter, ttl, hasher: RandomState::new(), cached, invalidations: AtomicU64::new(0) }
    }

    async fn query(&self, id: &TokenId) -> Result<Option<Arc<StoredToken>>, StoreError> {
        let cached = self.find(id);
        if let Some(entry) = &cached
            && entry.is_younger_than(self.ttl)
        {
            return Ok(entry.stored.clone());
        }
        // The age of an entry counts from the request: the token may change before the response arrives.
        let (queried_at, invalidations) = (Instant::now(), self.invalidations());
        match self.within_deadline(self.limiter.store().token(id), cached.is_some()).await {
            Ok(found) => {
                let stored = found.map(|(hash, token)| Arc::new(StoredToken { token: token.value, hash }));
                if self.invalidations() == invalidations {
                    self.insert(id, stored.clone(), Some(queried_at), None);
                }
                Ok(stored)
            }
            Err(error) => match cached {
                Some(entry) if error.is_transient() && entry.is_younger_than(STALE_MAX) => {
                    entry.stored.map(Some).ok_or(error)
                }
                _ => Err(error),
            },
        }
    }

    /// Awaits a reply for the store's deadline. Time in the store's own queue does not count, up to three deadlines,
    /// unless a cached token can answer instead.
    async fn within_deadline<T: Unpin>(&self, reply: Reply<'_, T>, is_cached: bool) -> Result<T, StoreError> {
        let (deadline, began, time) = (self.limiter.store_deadline(), Instant::now(), EngineTime::default());
        let (mut reply, mut wait) = (pin!(time.follow(reply)), deadline);
        loop {
            if let Ok(answer) = timeout(wait, reply.as_mut()).await {
                return answer;
            }
            wait = match time.elapsed() {
                None if !is_cached && began.elapsed() < deadline.saturating_mul(QUEUED_MAX) => deadline,
                Some(elapsed) if elapsed < deadline => deadline.saturating_sub(elapsed),
                _ => {
                    let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
                    return Err(StoreError::TimedOut { millis });
                }
            };
        }
    }

    /// Answers synchronously from an in-process store, which is queried only if its version has changed.
    fn query_now(&self, id: &TokenId) -> Option<Result<Option<Arc<StoredToken>>, StoreError>> {
        let store = self.limiter.store();
        if !store.capabilities().is_immediate {
            return None;
        }
        // Read before the token: if the token changes in between, the next lookup queries again.
        let version = store.version().now()?.ok();
        if let Some(entry) = self.find(id)
            && entry.version.is_some()
            && entry.version == version
        {
            return Some(Ok(entry.stored));
        }
        let found = match store.token(id).now()? {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let stored = found.map(|(hash, token)| Arc::new(StoredToken { token: token.value, hash }));
        self.insert(id, stored.clone(), Some(Instant::now()), version);
        Some(Ok(stored))
    }

    fn find(&self, id: &TokenId) -> Option<Entry> {
        self.lock().find(self.hasher.hash_one(id), |entry| entry.id == *id).cloned()
    }

    fn insert(
        &self,
        id: &TokenId,
        stored: Option<Arc<StoredToken>>,
        queried_at: Option<Instant>,
        version: Option<Version>,
    ) {
        let hash = self.hasher.hash_one(id);
        let entry = Entry { id: id.clone(), hash, stored, queried_at, version };
        self.lock().insert(entry, |other| other.id == *id);
    }

    fn invalidations(&self) -> u64 {
        self.invalidations.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, TwoGenerations<Entry>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn is_younger_than(&self, span: Duration) -> bool {
        self.queried_at.is_some_and(|queried_at| queried_at.elapsed() < span)
    }
}

impl Hashed for Entry {
    fn key_hash(&self) -> u64 {
        self.hash
    }
}

impl TokenCache for StoreTokenCache {
    fn get<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<Arc<StoredToken>>> {
        match self.query_now(id) {
            Some(answer) => Reply::ready(answer),
            None => Reply::later(self.query(id)),
        }
    }

    fn invalidate(&self, id: &TokenId) {
        self.invalidations.fetch_add(1, Ordering::AcqRel);
        self.insert(id, None, None, None);
    }
}

impl fmt::Debug for StoreTokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreTokenCache").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate::store::Tokens;
    use tidegate::store::wrap::{FaultPlan, Faulty};
    use tidegate::{Expect, Memory};
    use tidegate_core::limit::name::Namespace;
    use tidegate_core::limit::token::{NewToken, TokenScope, TokenScopes};

    use super::*;

    fn id(name: &str) -> TokenId {
        TokenId::new(name).expect("valid")
    }

    async fn create(store: &impl Tokens, name: &str) -> Secret {
        let secret = Secret::generate(&id(name));
        let token = NewToken {
            id: id(name),
            name: name.to_owned(),
            namespace: Namespace::new("default").expect("valid"),
            scopes: TokenScopes::new([TokenScope::Read]),
            entity: None,
            expires_at: None,
        };
        store.create_token(&token, secret.hash(), "test").await.expect("made");
        secret
    }

    /// A cache of eight tokens for two seconds, over a store that can become unavailable.
    async fn token_cache() -> (Arc<Faulty<Memory>>, StoreTokenCache, Secret) {
        let store = Arc::new(Faulty::new(Memory::new(), FaultPlan::seeded(1)).expect("a plan"));
        let secret = create(&*store, "ci").await;
        let shared: Arc<dyn tidegate::Store> = store.clone();
        let limiter = Limiter::over(shared).build().expect("a limiter");
        (store, StoreTokenCache::with(limiter, Duration::from_secs(2), 8), secret)
    }

    #[tokio::test(start_paused = true)]
    async fn token_changes_are_visible_after_ttl() {
        let (store, token_cache, secret) = token_cache().await;
        let ci = async || token_cache.get(&id("ci")).await.unwrap().unwrap();
        let has_new = async || token_cache.get(&id("new")).await.unwrap().is_some();
        assert!(ci().await.matches(&secret) && !ci().await.matches(&Secret::generate(&id("ci"))));
        assert!(!has_new().await);
        store.revoke_token(&id("ci"), Expect::Any, "test").await.unwrap();
        create(&*store, "new").await;
        assert!(ci().await.token.revoked_at.is_none() && !has_new().await);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(ci().await.token.revoked_at.is_some() && has_new().await);
    }

    #[tokio::test(start_paused = true)]
    async fn invalidated_token_is_read_again() {
        let (store, token_cache, _) = token_cache().await;
        let ci = id("ci");
        let is_revoked = async || token_cache.get(&ci).await.map(|ci| ci.unwrap().token.revoked_at.is_some());
        assert!(!is_revoked().await.unwrap());
        store.revoke_token(&ci, Expect::Any, "test").await.unwrap();
        token_cache.invalidate(&ci);
        store.go_away();
        assert!(is_revoked().await.is_err(), "the cached state is not used, not even in an outage");
        store.come_back();
        assert!(is_revoked().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn cached_token_survives_store_outage_for_a_minute() {
        let (store, token_cache, secret) = token_cache().await;
        for silence in [Faulty::go_away, Faulty::hang] {
            store.come_back();
            assert!(token_cache.get(&id("ci")).await.unwrap().is_some());
            silence(&store);
            for _ in 0..2 {
                tokio::time::advance(Duration::from_secs(20)).await;
                assert!(token_cache.get(&id("ci")).await.unwrap().unwrap().matches(&secret));
                assert!(token_cache.get(&id("unknown")).await.unwrap_err().is_transient());
            }
            tokio::time::advance(Duration::from_secs(20)).await;
            assert!(token_cache.get(&id("ci")).await.unwrap_err().is_transient(), "it may have been revoked");
        }
    }

    /// A lookup behind other calls failed, although the store answered each at once.
    #[tokio::test(start_paused = true)]
    async fn time_in_the_stores_queue_is_not_its_own() {
        let (_, token_cache, _) = token_cache().await;
        let deadline = token_cache.limiter.store_deadline();
        let lookup = async |queued: u32, engine: Duration, is_cached| {
            let reply = Reply::later(async move {
                let time = EngineTime::current();
                time.wait("readers");
                tokio::time::sleep(deadline * queued).await;
                time.send();
                tokio::time::sleep(engine).await;
                Ok(())
            });
            token_cache.within_deadline(reply, is_cached).await.is_ok()
        };
        assert!(lookup(2, deadline / 2, false).await);
        assert!(!lookup(0, deadline * 2, false).await, "the store is slow");
        assert!(!lookup(9, Duration::ZERO, false).await, "the queue is stuck");
        assert!(!lookup(2, Duration::ZERO, true).await, "the cached token is used");
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_tokens_do_not_grow_cache() {
        let (_, token_cache, _) = token_cache().await;
        for number in 0..100 {
            assert!(token_cache.get(&id(&format!("guess-{number}"))).await.unwrap().is_none());
            assert!(token_cache.lock().len() <= 8);
        }
    }
}
