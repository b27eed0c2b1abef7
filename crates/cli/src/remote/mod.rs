//! A server as a [`Backend`]: the same verbs over HTTP, through `tidegate-client`.

mod errors;
mod lease;
mod tls;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::archive::ArchiveReport;
use tidegate::store::{AuditQuery, Cursor, Listing, Page, PolicyChange};
use tidegate::{
    Balance, BucketLimit, Capacity, Entity, EntityId, Expect, Explanation, LimitKey, LimitLine, Paging,
    Policy, PolicyChanges, ResourceName, Scope, Source, Stamp, Step, Subject, Undeclared, Usage, UsageOf,
    UsageQuery, UsageSum, Version, Versioned, Would,
};
use tidegate_client as wire;
use tidegate_client::{Backoff, Client, ClientError, InvalidResponse, Jitter, Retry, RetryBudget};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::policy_changes::plan;
use tidegate_core::limit::token::{Token, TokenId};
use tokio::time::timeout;

use crate::backend::{
    AcquireRequest, Backend, CreatedToken, Grant, LeaseHandle as _, Status, StoredPolicy, TokenRequest,
};
use crate::failure::Failure;
use lease::RemoteLease;
pub(crate) use tls::TlsFiles;

/// Maximum time to connect, even with a longer timeout.
const CONNECTED_WITHIN: Duration = Duration::from_secs(3);

/// Maximum wait on close for the server to confirm the ends of leases.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// Maximum items per page.
const PAGE_MAX: u32 = 1_000;

/// A server.
#[derive(Debug)]
pub(crate) struct Remote {
    client: Client,
    /// Timeout of every call, in addition to the wait that a caller requests.
    timeout: Duration,
}

impl Remote {
    /// A client of the server at `url`. Sends nothing yet.
    pub(crate) fn new(
        url: &str,
        token: Option<&str>,
        tls: &TlsFiles,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        // For a user at a terminal: long enough for a server to restart, and short enough to report a missing
        // one soon.
        let backoff =
            Backoff::exponential(Duration::from_millis(50), Duration::from_millis(500)).jitter(Jitter::Full);
        let client = Client::builder(url)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(timeout.min(CONNECTED_WITHIN))
            .request_timeout(timeout)
            .total_timeout(timeout)
            .retry(Retry::attempts(4).backoff(backoff).budget(RetryBudget::unlimited()));
        let client = token.into_iter().fold(client, wire::ClientBuilder::token);
        let client = tls.apply(client);
        Ok(Self { client: client.build()?, timeout })
    }

    /// The client, for event streams.
    #[allow(dead_code, reason = "only `watch` listens")]
    pub(crate) const fn client(&self) -> &Client {
        &self.client
    }

    /// The cost of a request, checked: each limit once, with valid names.
    pub(crate) fn cost(pairs: &[(&str, u64)]) -> Result<wire::Cost, Failure> {
        let twice = pairs
            .iter()
            .enumerate()
            .find(|(at, (name, _))| pairs[..*at].iter().any(|(other, _)| other == name));
        if let Some((_, (name, _))) = twice {
            return Err(Failure::usage(format!("the limit `{name}` is requested twice")));
        }
        wire::Cost::of(pairs.iter().copied()).map_err(|error| Failure::usage(error.to_string()))
    }
}

/// Maps a problem of this kind to `None`.
fn found<T>(result: Result<T, ClientError>, kind: &str) -> Result<Option<T>, Failure> {
    match result {
        Err(ClientError::Problem { problem, .. }) if problem.is(kind) => Ok(None),
        result => Ok(Some(result?)),
    }
}

/// Converts a page.
fn page<P: wire::Page, T>(page: P, item: impl Fn(P::Item) -> Result<T, Failure>) -> Result<Page<T>, Failure> {
    let next = page.next().map(Cursor::new);
    let items = page.into_items().into_iter().map(item).collect::<Result<_, _>>()?;
    Ok(Page { items, next })
}

/// The cursor and size of a page.
fn paged(paging: &Paging) -> (Option<String>, Option<u32>) {
    (paging.cursor().map(|cursor| cursor.as_str().to_owned()), u32::try_from(paging.max()).ok())
}

fn page_query(paging: &Paging) -> wire::PageQuery {
    let (after, max) = paged(paging);
    wire::PageQuery { after, max }
}

/// The bounds of a range; `None` where it is open.
fn bounds(range: &std::ops::Range<Stamp>) -> (Option<wire::Time>, Option<wire::Time>) {
    let from = Some(range.start).filter(|start| *start > Stamp::ZERO);
    let to = Some(range.end).filter(|end| *end < Stamp::MAX);
    (from.map(wire::Time), to.map(wire::Time))
}

fn written(at: wire::PolicyAt) -> Result<StoredPolicy, Failure> {
    let (scope, Versioned { version, value }) = at
        .check()
        .map_err(|error| Failure::failed(format!("the server returned an invalid policy: {error}")))?;
    Ok((scope, Versioned { version, value: Arc::new(value) }))
}

fn entity(wire: wire::Entity) -> Versioned<Entity> {
    let version = Version::new(wire.version.unwrap_or_default());
    Versioned { version, value: wire.into() }
}

/// The state of a limit and its source; a missing source means the defaults.
fn line(state: wire::LimitState) -> Result<LimitLine, InvalidResponse> {
    let (balance, source) = state.check()?;
    Ok(LimitLine { balance, source: source.unwrap_or(Source::Defaults) })
}

fn usage_query(query: &UsageQuery, paging: Option<&Paging>) -> wire::UsageQuery {
    let system = query.of == UsageOf::all_resources();
    let (entity, resource) = match &query.of {
        UsageOf::Entity(entity) => (Some(entity.clone().into()), None),
        UsageOf::Resource(resource) => (None, (!system).then(|| resource.clone().into())),
    };
    let ((from, to), (after, max)) = (bounds(&query.range), paging.map(paged).unwrap_or_default());
    wire::UsageQuery { entity, resource, system, window: query.window.into(), from, to, after, max }
}

impl Backend for Remote {
    type Lease = RemoteLease;

    async fn status(&self) -> Result<Status, Failure> {
        let asked = Instant::now();
        let status = self.client.status().await?;
        let namespace = Namespace::new(&status.namespace);
        Ok(Status {
            kind: "server",
            url: self.client.url().to_owned(),
            namespace: namespace.map_err(|error| Failure::failed(error.to_string()))?,
            engine: status.engine,
            is_durable: status.is_durable,
            clock: status.clock,
            at: status.at.0,
            clock_offset: status.clock_offset.unwrap_or_default().as_duration(),
            version: Version::new(status.version),
            took: asked.elapsed(),
        })
    }

    async fn policy(&self, scope: &Scope) -> Result<Option<Versioned<Arc<Policy>>>, Failure> {
        let at = found(self.client.policy(&scope.into()).await, "no-policy")?;
        at.map(|at| Ok(written(at)?.1)).transpose()
    }

    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<StoredPolicy>, Failure> {
        let (entity, custom) = match listing {
            Listing::All => (None, None),
            Listing::Entity(entity) => (Some(entity.clone().into()), None),
            Listing::Custom(resource) => (None, Some(resource.clone().into())),
        };
        let (after, max) = paged(paging);
        let query = wire::PolicyQuery { entity, custom, after, max };
        page(self.client.policies(&query).await?, written)
    }

    async fn change(&self, change: PolicyChange) -> Result<Version, Failure> {
        let (scope, expect) = (wire::ScopeQuery::from(&change.scope), change.expect.into());
        let done = if let Some(policy) = &change.policy {
            let put = wire::PutPolicy { policy: policy.into(), expect };
            self.client.put_policy(&scope, &put).await?
        } else {
            let scope = wire::ScopeQuery { expect: Some(expect), ..scope };
            self.client.remove_policy(&scope).await?
        };
        Ok(Version::new(done.version))
    }

    /// Compares on the client, since the server's plan lacks the previous policies.
    async fn plan(&self, declared: &[(Scope, Policy)], extra: Undeclared) -> Result<PolicyChanges, Failure> {
        let query = wire::PolicyQuery { max: Some(PAGE_MAX), ..wire::PolicyQuery::default() };
        let (mut pages, mut all) = (self.client.all_policies(query), Vec::new());
        while let Some(page) = pages.next_page().await? {
            for at in page.items {
                all.push(written(at)?);
            }
        }
        plan(&all, declared, extra).map_err(|twice| Failure::failed(twice.to_string()))
    }

    async fn apply(&self, plan: &PolicyChanges) -> Result<Version, Failure> {
        let change =
            |step: &Step| wire::PolicyChange::new(&step.scope, step.expect().into(), step.after.as_ref());
        let changes = plan.steps().iter().map(change).collect();
        Ok(Version::new(self.client.apply(&wire::Apply { changes }).await?.version))
    }

    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, Failure> {
        Ok(found(self.client.entity(&id.clone().into()).await, "no-entity")?.map(entity))
    }

    async fn entities(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        page(self.client.entities(&page_query(paging)).await?, |wire| Ok(entity(wire)))
    }

    async fn children(&self, parent: &EntityId, paging: &Paging) -> Result<Page<Versioned<Entity>>, Failure> {
        match found(self.client.children(&parent.clone().into(), &page_query(paging)).await, "no-entity")? {
            Some(children) => page(children, |wire| Ok(entity(wire))),
            // As at a store: an unknown entity has no children.
            None => Ok(Page { items: Vec::new(), next: None }),
        }
    }

    async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, Failure> {
        let put = wire::PutEntity::new(entity, expect.into());
        let done = self.client.put_entity(&entity.id().clone().into(), &put).await?;
        Ok(Version::new(done.version))
    }

    async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, Failure> {
        let query = wire::RemoveQuery { expect: Some(expect.into()) };
        match self.client.remove_entity(&id.clone().into(), &query).await {
            Err(ClientError::Problem { problem, .. }) if problem.is("has-children") => {
                Err(Failure::has_children(problem.detail, id))
            }
            Err(ClientError::Problem { problem, .. }) if problem.is("no-entity") => {
                Err(Failure::no_entity(problem.detail, id))
            }
            done => Ok(Version::new(done?.version)),
        }
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<RemoteLease, Failure> {
        RemoteLease::acquire(&self.client, request, Self::cost(&request.pairs())?, self.timeout).await
    }

    /// Uses a lease, which reports whether the store granted it.
    async fn spend(&self, request: &AcquireRequest) -> Result<Grant, Failure> {
        let mut lease = self.acquire(request).await?;
        lease.settle().await?;
        Ok(lease.grant())
    }

    async fn balances(&self, subject: &Subject) -> Result<Vec<LimitLine>, Failure> {
        let entity = Some(subject.entity.clone().into());
        let query = wire::BalanceQuery { entity, resource: Some(subject.resource.clone().into()) };
        let balances = self.client.balances(&query).await?;
        Ok(balances.limits.into_iter().map(line).collect::<Result<_, _>>()?)
    }

    async fn balances_of_entity(&self, entity: &EntityId) -> Result<Vec<Balance>, Failure> {
        let query = wire::BalanceQuery { entity: Some(entity.clone().into()), resource: None };
        let balances = self.client.balances(&query).await?;
        let balances = balances.limits.into_iter().map(|state| Ok(state.check()?.0));
        Ok(balances.collect::<Result<_, InvalidResponse>>()?)
    }

    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitKey, Capacity>, Failure> {
        let query = wire::CapacityQuery { resource: Some(resource.clone().into()) };
        let limit = |sum: wire::Capacity| {
            let limit = sum.key()?;
            let wire::Capacity { buckets, burst, available, consumed, .. } = sum;
            Ok((limit, Capacity { buckets, burst, available, consumed }))
        };
        let sums = self.client.capacity(&query).await?.limits;
        Ok(sums.into_iter().map(limit).collect::<Result<_, InvalidResponse>>()?)
    }

    async fn set_bucket(
        &self,
        subject: &Subject,
        limit: &BucketLimit,
        units: Option<u64>,
    ) -> Result<Versioned<Balance>, Failure> {
        let Subject { entity, resource } = subject.clone();
        let limit = limit.to_string();
        let put = wire::PutBucket { entity: entity.into(), resource: resource.into(), limit, units };
        let set = self.client.put_bucket(&put).await?;
        Ok(Versioned { version: Version::new(set.version), value: set.limit.check()?.0 })
    }

    async fn explain(&self, request: &AcquireRequest) -> Result<Explanation, Failure> {
        let Subject { entity, resource } = request.subject.clone();
        let (entity, resource) = (entity.into(), resource.into());
        let asked = wire::Ask { entity, resource, cost: Self::cost(&request.pairs())?, limits: Vec::new() };
        let explained = self
            .client
            .explain(&asked)
            .await
            .map_err(|error| errors::for_subject(error, &request.subject))?;
        let (on_unavailable, on_expiry) = explained.behaviour(&request.subject)?;
        Ok(Explanation {
            subject: request.subject.clone(),
            would: match explained.would {
                wire::Forecast::Grant => Would::Grant,
                wire::Forecast::Wait => Would::Wait(explained.retry_after.unwrap_or_default().as_duration()),
                wire::Forecast::Never => Would::Never,
            },
            lines: explained.limits.into_iter().map(line).collect::<Result<_, _>>()?,
            on_unavailable,
            on_expiry,
            version: Version::new(explained.version),
        })
    }

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, Failure> {
        page(self.client.usage(&usage_query(query, Some(paging))).await?, |wire| Ok(wire.try_into()?))
    }

    async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, Failure> {
        let summary = self.client.usage_summary(&usage_query(query, None)).await?;
        let windows = summary.windows;
        Ok(UsageSum { limits: summary.check()?, windows })
    }

    async fn audit(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, Failure> {
        let ((from, to), (after, max)) = (bounds(&query.range), paged(paging));
        let asked = wire::AuditQuery { from, to, after, max, ..wire::AuditQuery::default() };
        let asked = query.filed.iter().fold(asked, wire::AuditQuery::filed);
        page(self.client.audit(&asked).await?, |wire| Ok(wire.try_into()?))
    }

    async fn archive(&self, folder: &Path, _: Stamp) -> Result<ArchiveReport, Failure> {
        let what = "an archive moves changes out of the store, which a server does not allow";
        let next = format!("run it at the store: tidegate --store URL audit archive {}", folder.display());
        Err(Failure::usage(what).next(next))
    }

    async fn create_token(&self, request: TokenRequest) -> Result<CreatedToken, Failure> {
        let TokenRequest { id, name, scopes, entity, expires_at, secret } = request;
        if secret.is_some() {
            let what = format!("the token `{id}` has a secret, and a server generates those of its tokens");
            return Err(Failure::usage(what).next("create it at the store, with --store URL"));
        }
        let expires_at = expires_at.map(wire::Time);
        let put = wire::PutToken {
            id: id.clone().into(),
            name: Some(name),
            scopes: scopes.into(),
            entity: entity.map(Into::into),
            expires_at,
        };
        match self.client.create_token(&put).await {
            Err(ClientError::Problem { problem, .. }) if problem.is("stale") => {
                Err(Failure::token_taken(&id))
            }
            Err(ClientError::Problem { problem, .. }) if problem.is("invalid") => {
                Err(Failure::usage(problem.detail))
            }
            made => {
                let wire::CreatedToken { token, version, secret } = made?;
                let token = Versioned { version: Version::new(version), value: token.try_into()? };
                Ok(CreatedToken { token, secret })
            }
        }
    }

    async fn tokens(&self, paging: &Paging) -> Result<Page<Versioned<Token>>, Failure> {
        page(self.client.tokens(&page_query(paging)).await?, |wire| {
            let version = Version::new(wire.version.unwrap_or_default());
            Ok(Versioned { version, value: wire.try_into()? })
        })
    }

    async fn revoke_token(&self, id: &TokenId) -> Result<Version, Failure> {
        let done = self.client.revoke_token(&id.clone().into(), &wire::RemoveQuery::default()).await?;
        Ok(Version::new(done.version))
    }

    async fn close(self) -> usize {
        // Ends that are still pending are counted below.
        let _ = timeout(self.timeout.min(CLOSED_WITHIN), self.client.drain()).await;
        let stats = self.client.stats();
        usize::try_from(stats.endings_pending + stats.endings_lost).unwrap_or(usize::MAX)
    }
}
