//! A store in this process as a [`Backend`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::archive::{ArchiveOptions, ArchivePlace, ArchiveReport, archive};
use tidegate::store::{AuditQuery, Listing, Lookup, Page, PolicyChange, Reply};
use tidegate::{
    Admin, Balance, BucketLimit, Capacity, Entity, EntityId, Expect, Explanation, Lease, LimitError,
    LimitKey, LimitLine, Limiter, Paging, Policy, PolicyChanges, ResourceName, Scope, SettleStatus, Stamp,
    Store, StoreError, Subject, Undeclared, Usage, UsageQuery, UsageSum, Version, Versioned,
};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, Token, TokenId};
use tidegate_server::Secret;
use tokio::time::timeout;

use crate::backend::{
    AcquireRequest, Backend, CreatedToken, Grant, LeaseHandle, Status, StoredPolicy, TokenRequest,
};
use crate::default_paths::OpenStore;
use crate::failure::Failure;

/// Upper bound of the wait for pending settlements on close.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// A store in this process.
#[derive(Debug)]
pub(crate) struct InProcess {
    store: Arc<dyn Store>,
    limiter: Limiter,
    admin: Admin,
    actor: String,
    url: String,
    namespace: Namespace,
    /// Timeout of every call, in addition to the wait that a caller requests.
    timeout: Duration,
}

impl InProcess {
    /// Wraps an open store. Changes are audited as made by `actor`.
    pub(crate) fn new(open_store: OpenStore, actor: String, timeout: Duration) -> Result<Self, Failure> {
        let OpenStore { store, url, namespace } = open_store;
        let limiter = Limiter::over(Arc::clone(&store)).store_deadline(timeout).build();
        let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
        let admin = limiter.admin(&actor);
        Ok(Self { store, limiter, admin, actor, url, namespace, timeout })
    }

    /// Waits for a response of the store, up to the timeout.
    async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failure> {
        Ok(self.try_call(reply).await?)
    }

    async fn try_call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, StoreError> {
        let millis = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        timeout(self.timeout, reply).await.unwrap_or(Err(StoreError::TimedOut { millis }))
    }

    /// Waits for a change or a report, up to the timeout: the limiter's own is longer.
    async fn call_limiter<T>(&self, work: impl Future<Output = Result<T, LimitError>>) -> Result<T, Failure> {
        let millis = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let late = |_| Err(LimitError::Store(StoreError::TimedOut { millis }));
        Ok(timeout(self.timeout, work).await.unwrap_or_else(late)?)
    }
}

impl Backend for InProcess {
    type Lease = Lease;

    async fn status(&self) -> Result<Status, Failure> {
        let capabilities = self.store.capabilities();
        let asked = Instant::now();
        let seen = self.call(self.store.balances(&Lookup::Subjects(Vec::new()))).await?;
        let version = self.call(self.store.version()).await?;
        Ok(Status {
            kind: "store",
            url: self.url.clone(),
            namespace: self.namespace.clone(),
            engine: capabilities.engine.to_owned(),
            is_durable: capabilities.is_durable,
            clock: capabilities.clock.as_str().to_owned(),
            at: seen.at,
            clock_offset: seen.clock_offset,
            version,
            took: asked.elapsed(),
        })
    }

    async fn policy(&self, scope: &Scope) -> Result<Option<Versioned<Arc<Policy>>>, Failure> {
        let written = self.call(self.store.read(std::slice::from_ref(scope))).await?;
        Ok(written.policies.into_iter().next().flatten())
    }

    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<StoredPolicy>, Failure> {
        self.call(self.store.list(listing, paging)).await
    }

    async fn change(&self, change: PolicyChange) -> Result<Version, Failure> {
        self.call_limiter(self.admin.change(vec![change])).await
    }

    async fn plan(&self, declared: &[(Scope, Policy)], extra: Undeclared) -> Result<PolicyChanges, Failure> {
        self.call_limiter(self.admin.plan(declared, extra)).await
    }

    async fn apply(&self, plan: &PolicyChanges) -> Result<Version, Failure> {
        self.call_limiter(self.admin.apply(plan)).await
    }

    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, Failure> {
        self.call(self.store.get(id)).await
    }

    async fn entities(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        self.call(self.store.entities(paging)).await
    }

    async fn children(&self, parent: &EntityId, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        self.call(self.store.children(parent, paging)).await
    }

    async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, Failure> {
        self.call_limiter(self.admin.put_entity(entity, expect)).await
    }

    async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, Failure> {
        self.call_limiter(self.admin.remove_entity(id, expect)).await
    }

    async fn acquire(&self, wanted: &AcquireRequest) -> Result<Lease, Failure> {
        let cost = wanted.pairs();
        let request = self.limiter.request(&wanted.subject, &cost).deadline(wanted.deadline);
        Ok(match wanted.within {
            Some(within) => request.acquire_within(within).await?,
            None => request.try_acquire().await?,
        })
    }

    async fn spend(&self, wanted: &AcquireRequest) -> Result<Grant, Failure> {
        if wanted.within.is_some() {
            let mut lease = self.acquire(wanted).await?;
            lease.settle_full().await?;
        } else {
            self.limiter.request(&wanted.subject, &wanted.pairs()).spend().await?;
        }
        // A spend keeps no lease that could report it.
        Ok(grant(self.limiter.stats().degraded > 0))
    }

    async fn balances(&self, subject: &Subject) -> Result<Vec<LimitLine>, Failure> {
        Ok(self.limiter.balances(subject).await?)
    }

    async fn balances_of_entity(&self, entity: &EntityId) -> Result<Vec<Balance>, Failure> {
        Ok(self.limiter.balances_of_entity(entity.as_str()).await?)
    }

    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitKey, Capacity>, Failure> {
        Ok(self.limiter.capacity(resource.as_str()).await?)
    }

    async fn set_bucket(
        &self,
        subject: &Subject,
        limit: &BucketLimit,
        units: Option<u64>,
    ) -> Result<Versioned<Balance>, Failure> {
        self.call_limiter(self.admin.set_bucket(subject, limit.clone(), units)).await
    }

    async fn explain(&self, wanted: &AcquireRequest) -> Result<Explanation, Failure> {
        Ok(self.limiter.explain(&wanted.subject, wanted.pairs()).await?)
    }

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, Failure> {
        self.call(self.store.usage(query, paging)).await
    }

    async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, Failure> {
        self.call_limiter(self.limiter.usage_sum(query)).await
    }

    async fn audit(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, Failure> {
        self.call(self.store.audit(query, paging)).await
    }

    async fn archive(&self, folder: &Path, before: Stamp) -> Result<ArchiveReport, Failure> {
        let place = match folder.to_str() {
            Some(address) => {
                ArchivePlace::open(address).map_err(|error| Failure::usage(error.to_string()))?
            }
            None => ArchivePlace::folder(folder),
        };
        Ok(archive(&*self.store, &ArchiveOptions::at(place, before)).await?)
    }

    async fn create_token(&self, wanted: TokenRequest) -> Result<CreatedToken, Failure> {
        let TokenRequest { id, name, scopes, entity, expires_at, secret } = wanted;
        let secret = secret.unwrap_or_else(|| Secret::generate(&id));
        let new = NewToken { id, name, namespace: self.namespace.clone(), scopes, entity, expires_at };
        match self.try_call(self.store.create_token(&new, secret.hash(), &self.actor)).await {
            Ok(token) => Ok(CreatedToken { token, secret: secret.reveal().to_owned() }),
            Err(StoreError::Stale { .. }) => Err(Failure::token_taken(&new.id)),
            Err(error) => Err(error.into()),
        }
    }

    async fn tokens(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, Failure> {
        let mut page = self.call(self.store.tokens(paging)).await?;
        page.items.retain(|token| !token.value.id.is_reserved());
        Ok(page)
    }

    async fn revoke_token(&self, id: &TokenId) -> Result<Version, Failure> {
        self.call(self.store.revoke_token(id, Expect::Any, &self.actor)).await
    }

    async fn close(self) -> usize {
        let is_done = timeout(self.timeout.min(CLOSED_WITHIN), self.limiter.drain()).await.is_ok();
        let stats = self.limiter.stats();
        if is_done { usize::try_from(stats.unsettled).unwrap_or(usize::MAX) } else { stats.settling.max(1) }
    }
}

const fn grant(is_degraded: bool) -> Grant {
    if is_degraded { Grant::WithoutStore } else { Grant::ByStore }
}

impl LeaseHandle for Lease {
    fn grant(&self) -> Grant {
        grant(self.degraded().is_some())
    }

    async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
        Ok(Self::renew(self, span).await?)
    }

    async fn settle(&mut self) -> Result<SettleStatus, Failure> {
        Ok(self.settle_full().await?)
    }

    async fn cancel(&mut self) -> Result<SettleStatus, Failure> {
        Ok(Self::cancel(self).await?)
    }
}
