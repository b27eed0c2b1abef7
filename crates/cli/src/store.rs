//! A store in this process as a [`Backend`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::archive::{ArchiveOptions, ArchivePlace, Archived, archive};
use tidegate::store::{AuditQuery, Listing, Lookup, Page, PolicyChange, Reply};
use tidegate::{
    Admin, Balance, Capacity, Entity, EntityId, Expect, Explanation, Extra, Lease, LimitError, LimitLine,
    LimitName, Limiter, Paging, Plan, Policy, ResourceName, Scope, Settled, Stamp, Store, StoreError,
    Subject, Usage, UsageQuery, UsageSum, Version, Versioned,
};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, Token, TokenId};
use tidegate_server::Secret;
use tokio::time::timeout;

use crate::backend::{Ask, Backend, Granted, Hold, MadeToken, Status, TokenAsk, Written};
use crate::failure::Failure;
use crate::place::Opened;

/// At the end nobody waits longer than this for a store to hear of what was drawn.
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
    /// Nobody waits longer for it than this, beside what they said.
    patience: Duration,
}

impl InProcess {
    /// Asks an open store, and makes changes in the name of `actor`.
    pub(crate) fn new(opened: Opened, actor: String, patience: Duration) -> Result<Self, Failure> {
        let Opened { store, url, namespace } = opened;
        let limiter = Limiter::over(Arc::clone(&store)).store_deadline(patience).build();
        let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
        let admin = limiter.admin(&actor);
        Ok(Self { store, limiter, admin, actor, url, namespace, patience })
    }

    /// Waits for a store that may be away.
    async fn ask<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failure> {
        Ok(self.answer(reply).await?)
    }

    async fn answer<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, StoreError> {
        let millis = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
        timeout(self.patience, reply).await.unwrap_or(Err(StoreError::TimedOut { millis }))
    }

    /// Waits for a change or a report: the limiter would wait for longer than whoever has said how long.
    async fn patiently<T>(&self, work: impl Future<Output = Result<T, LimitError>>) -> Result<T, Failure> {
        let millis = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
        let late = |_| Err(LimitError::Store(StoreError::TimedOut { millis }));
        Ok(timeout(self.patience, work).await.unwrap_or_else(late)?)
    }
}

impl Backend for InProcess {
    type Lease = Lease;

    async fn status(&self) -> Result<Status, Failure> {
        let capabilities = self.store.capabilities();
        let asked = Instant::now();
        let seen = self.ask(self.store.balances(&Lookup::Subjects(Vec::new()))).await?;
        let version = self.ask(self.store.version()).await?;
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
        let written = self.ask(self.store.read(std::slice::from_ref(scope))).await?;
        Ok(written.policies.into_iter().next().flatten())
    }

    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<Written>, Failure> {
        self.ask(self.store.list(listing, paging)).await
    }

    async fn change(&self, change: PolicyChange) -> Result<Version, Failure> {
        self.patiently(self.admin.change(vec![change])).await
    }

    async fn plan(&self, declared: &[(Scope, Policy)], extra: Extra) -> Result<Plan, Failure> {
        self.patiently(self.admin.plan(declared, extra)).await
    }

    async fn apply(&self, plan: &Plan) -> Result<Version, Failure> {
        self.patiently(self.admin.apply(plan)).await
    }

    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, Failure> {
        self.ask(self.store.get(id)).await
    }

    async fn entities(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        self.ask(self.store.entities(paging)).await
    }

    async fn children(&self, parent: &EntityId, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        self.ask(self.store.children(parent, paging)).await
    }

    async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, Failure> {
        self.patiently(self.admin.put_entity(entity, expect)).await
    }

    async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, Failure> {
        self.patiently(self.admin.remove_entity(id, expect)).await
    }

    async fn acquire(&self, ask: &Ask) -> Result<Lease, Failure> {
        let cost = ask.pairs();
        let request = self.limiter.request(&ask.subject, &cost).deadline(ask.deadline);
        Ok(match ask.within {
            Some(within) => request.acquire_within(within).await?,
            None => request.acquire().await?,
        })
    }

    async fn spend(&self, ask: &Ask) -> Result<Granted, Failure> {
        if ask.within.is_some() {
            let mut lease = self.acquire(ask).await?;
            lease.settle_as_held().await?;
        } else {
            self.limiter.request(&ask.subject, &ask.pairs()).spend().await?;
        }
        // A spend keeps no lease that could say so.
        Ok(granted(self.limiter.stats().degraded > 0))
    }

    async fn balances(&self, subject: &Subject) -> Result<Vec<LimitLine>, Failure> {
        Ok(self.limiter.balances(subject).await?)
    }

    async fn balances_of_entity(&self, entity: &EntityId) -> Result<Vec<Balance>, Failure> {
        Ok(self.limiter.balances_of_entity(entity.as_str()).await?)
    }

    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitName, Capacity>, Failure> {
        Ok(self.limiter.capacity(resource.as_str()).await?)
    }

    async fn explain(&self, ask: &Ask) -> Result<Explanation, Failure> {
        Ok(self.limiter.explain(&ask.subject, ask.pairs()).await?)
    }

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, Failure> {
        self.ask(self.store.usage(query, paging)).await
    }

    async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, Failure> {
        self.patiently(self.limiter.usage_sum(query)).await
    }

    async fn audit(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, Failure> {
        self.ask(self.store.audit(query, paging)).await
    }

    async fn archive(&self, folder: &Path, before: Stamp) -> Result<Archived, Failure> {
        let place = match folder.to_str() {
            Some(address) => {
                ArchivePlace::open(address).map_err(|error| Failure::usage(error.to_string()))?
            }
            None => ArchivePlace::folder(folder),
        };
        Ok(archive(&*self.store, &ArchiveOptions::at(place, before)).await?)
    }

    async fn create_token(&self, wanted: TokenAsk) -> Result<MadeToken, Failure> {
        let TokenAsk { id, name, scopes, expires_at } = wanted;
        let secret = Secret::generate(&id);
        let new = NewToken { id, name, namespace: self.namespace.clone(), scopes, expires_at };
        match self.answer(self.store.create_token(&new, secret.hash(), &self.actor)).await {
            Ok(token) => Ok(MadeToken { token, secret: secret.reveal().to_owned() }),
            Err(StoreError::Stale { .. }) => Err(Failure::token_taken(&new.id)),
            Err(error) => Err(error.into()),
        }
    }

    async fn tokens(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, Failure> {
        let mut page = self.ask(self.store.tokens(paging)).await?;
        page.items.retain(|token| !token.value.id.is_reserved());
        Ok(page)
    }

    async fn revoke_token(&self, id: &TokenId) -> Result<Version, Failure> {
        self.ask(self.store.revoke_token(id, Expect::Any, &self.actor)).await
    }

    async fn close(self) -> usize {
        let is_done = timeout(self.patience.min(CLOSED_WITHIN), self.limiter.drain()).await.is_ok();
        let stats = self.limiter.stats();
        if is_done { usize::try_from(stats.unsettled).unwrap_or(usize::MAX) } else { stats.settling.max(1) }
    }
}

const fn granted(is_degraded: bool) -> Granted {
    if is_degraded { Granted::WithoutStore } else { Granted::ByStore }
}

impl Hold for Lease {
    fn granted(&self) -> Granted {
        granted(self.degraded().is_some())
    }

    async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
        Ok(Self::renew(self, span).await?)
    }

    async fn settle(&mut self) -> Result<Settled, Failure> {
        Ok(self.settle_as_held().await?)
    }

    async fn cancel(&mut self) -> Result<Settled, Failure> {
        Ok(Self::cancel(self).await?)
    }
}
