//! Who may come in: tokens by their id, as the store has them.
//!
//! A store far away is not asked with every request: what it said is remembered for a short time, what it does not know
//! too, so that guesses do not reach it either. Two generations bound what is remembered. While the store is away, what was
//! last known of a token holds for a minute: what is to happen to its limits then is the policy's affair. After that nobody can
//! say whether it was revoked, and nobody is let in until the store answers.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use subtle::ConstantTimeEq;
use tidegate::store::Reply;
use tidegate::{Limiter, StoreError, Version};
use tidegate_core::limit::token::{Token, TokenHash, TokenId};
use tokio::time::{Instant, timeout};

use crate::token::Secret;

/// How long what the store said of a token holds while the store is away.
const STALE_MAX: Duration = Duration::from_mins(1);

/// A token as it is kept, and the hash that its secret must have.
#[derive(Debug, Clone)]
pub struct Key {
    /// The token.
    pub token: Token,
    /// The hash of its secret, as [`Secret::hash`] makes it.
    pub hash: TokenHash,
}

impl Key {
    /// Whether this is the key of that secret. It takes the same time for every one that is not.
    pub fn fits(&self, secret: &Secret) -> bool {
        self.hash.as_bytes().ct_eq(secret.hash().as_bytes()).into()
    }
}

/// Where tokens are kept. It is asked with every request.
pub trait Keyring: fmt::Debug + Send + Sync + 'static {
    /// The token of this id, good or not; `None` where there is none.
    fn key<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<Arc<Key>>>;
}

/// The tokens of a limiter's store.
pub struct StoreKeyring {
    limiter: Limiter,
    ttl: Duration,
    generation_max: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    young: HashMap<TokenId, Entry>,
    old: HashMap<TokenId, Entry>,
}

#[derive(Clone)]
struct Entry {
    key: Option<Arc<Key>>,
    /// A store far away is asked again some time after that.
    asked_at: Instant,
    /// One in this process when it has changed.
    version: Option<Version>,
}

impl StoreKeyring {
    /// The tokens of the limiter's store, remembered for two seconds: so long a token that was revoked may still be good. A
    /// store in this process is asked whenever something has changed there. While the store is away, what it last said of a token holds for a minute
    /// after it said so, and no longer: then the answer is what is wrong with the store.
    pub fn new(limiter: Limiter) -> Self {
        Self::with(limiter, Duration::from_secs(2), 8_192)
    }

    /// The same, remembered for `ttl`, and at most so many of them.
    pub fn with(limiter: Limiter, ttl: Duration, tokens_max: usize) -> Self {
        Self { limiter, ttl, generation_max: (tokens_max / 2).max(1), known: Mutex::default() }
    }

    async fn ask(&self, id: &TokenId) -> Result<Option<Arc<Key>>, StoreError> {
        let known = self.lock().find(id, self.generation_max);
        if let Some(entry) = &known
            && entry.asked_at.elapsed() < self.ttl
        {
            return Ok(entry.key.clone());
        }
        // What it answers was so when it was asked, and may be otherwise when the answer is here.
        let asked_at = Instant::now();
        let deadline = self.limiter.store_deadline();
        let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let answer = timeout(deadline, self.limiter.store().token(id)).await;
        match answer.unwrap_or(Err(StoreError::TimedOut { millis })) {
            Ok(found) => {
                let key = found.map(|(hash, token)| Arc::new(Key { token: token.value, hash }));
                let entry = Entry { key: key.clone(), asked_at, version: None };
                self.lock().put(id.clone(), entry, self.generation_max);
                Ok(key)
            }
            Err(error) if error.is_transient() => match known {
                Some(Entry { key: Some(key), asked_at, .. }) if asked_at.elapsed() < STALE_MAX => {
                    Ok(Some(key))
                }
                _ => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// What a store in this process answers at once: it is asked again only if something has changed there since.
    fn ask_now(&self, id: &TokenId) -> Option<Result<Option<Arc<Key>>, StoreError>> {
        let store = self.limiter.store();
        if !store.capabilities().is_immediate {
            return None;
        }
        // Read before the token: if that changes in between, the next one asks again.
        let version = store.version().now()?.ok();
        if let Some(entry) = self.lock().find(id, self.generation_max)
            && entry.version.is_some()
            && entry.version == version
        {
            return Some(Ok(entry.key));
        }
        let found = match store.token(id).now()? {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let key = found.map(|(hash, token)| Arc::new(Key { token: token.value, hash }));
        let entry = Entry { key: key.clone(), asked_at: Instant::now(), version };
        self.lock().put(id.clone(), entry, self.generation_max);
        Some(Ok(key))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn find(&mut self, id: &TokenId, generation_max: usize) -> Option<Entry> {
        if let Some(entry) = self.young.get(id) {
            return Some(entry.clone());
        }
        let (id, entry) = self.old.remove_entry(id)?;
        self.put(id, entry.clone(), generation_max);
        Some(entry)
    }

    fn put(&mut self, id: TokenId, entry: Entry, generation_max: usize) {
        if self.young.len() >= generation_max {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(id, entry);
    }
}

impl Keyring for StoreKeyring {
    fn key<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<Arc<Key>>> {
        match self.ask_now(id) {
            Some(answer) => Reply::ready(answer),
            None => Reply::later(self.ask(id)),
        }
    }
}

impl fmt::Debug for StoreKeyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreKeyring").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate::store::Tokens;
    use tidegate::store::wrap::{Faulty, Plan};
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
            expires_at: None,
        };
        store.create_token(&token, secret.hash(), "test").await.expect("made");
        secret
    }

    /// A keyring that remembers eight tokens for two seconds, over a store that may go away.
    async fn keyring() -> (Arc<Faulty<Memory>>, StoreKeyring, Secret) {
        let store = Arc::new(Faulty::new(Memory::new(), Plan::seeded(1)).expect("a plan"));
        let secret = create(&*store, "ci").await;
        let shared: Arc<dyn tidegate::Store> = store.clone();
        let limiter = Limiter::over(shared).build().expect("a limiter");
        (store, StoreKeyring::with(limiter, Duration::from_secs(2), 8), secret)
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_revoked_or_made_is_noticed_within_the_time_that_tokens_are_remembered_for() {
        let (store, keyring, secret) = keyring().await;
        let ci = async || keyring.key(&id("ci")).await.unwrap().unwrap();
        let is_new_there = async || keyring.key(&id("new")).await.unwrap().is_some();
        assert!(ci().await.fits(&secret) && !ci().await.fits(&Secret::generate(&id("ci"))));
        assert!(!is_new_there().await);
        store.revoke_token(&id("ci"), Expect::Any, "test").await.unwrap();
        create(&*store, "new").await;
        assert!(ci().await.token.revoked_at.is_none() && !is_new_there().await);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(ci().await.token.revoked_at.is_some() && is_new_there().await);
    }

    #[tokio::test(start_paused = true)]
    async fn while_the_store_is_away_or_silent_those_who_are_known_are_let_in_for_a_minute() {
        let (store, keyring, secret) = keyring().await;
        for silence in [Faulty::go_away, Faulty::hang] {
            store.come_back();
            assert!(keyring.key(&id("ci")).await.unwrap().is_some());
            silence(&store);
            for _ in 0..2 {
                tokio::time::advance(Duration::from_secs(20)).await;
                assert!(keyring.key(&id("ci")).await.unwrap().unwrap().fits(&secret));
                assert!(keyring.key(&id("stranger")).await.unwrap_err().is_transient());
            }
            tokio::time::advance(Duration::from_secs(20)).await;
            assert!(keyring.key(&id("ci")).await.unwrap_err().is_transient(), "it may be revoked by now");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_who_guess_take_no_room() {
        let (_, keyring, _) = keyring().await;
        for number in 0..100 {
            assert!(keyring.key(&id(&format!("guess-{number}"))).await.unwrap().is_none());
            let known = keyring.lock();
            assert!(known.young.len() + known.old.len() <= 8);
        }
    }
}
