//! A server as a [`Backend`]: the same verbs over HTTP, by the client of this project.

mod lease;
mod trouble;
mod trust;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::archive::Archived;
use tidegate::store::{AuditQuery, Cursor, Listing, Page, PolicyChange};
use tidegate::{
    Balance, Capacity, Entity, EntityId, Expect, Explanation, Extra, LimitLine, LimitName, Paging, Plan,
    Policy, ResourceName, Scope, Source, Stamp, Step, Subject, Usage, UsageOf, UsageQuery, UsageSum, Version,
    Versioned, Would,
};
use tidegate_client as wire;
use tidegate_client::{Backoff, Client, ClientError, InvalidAnswer, Jitter, Retry};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::plan::plan;
use tidegate_core::limit::token::{Token, TokenId};
use tokio::time::timeout;

use crate::backend::{Ask, Backend, Granted, Hold as _, MadeToken, Status, TokenAsk, Written};
use crate::failure::Failure;
use lease::Held;
pub(crate) use trust::Trust;

/// A connection that is not made within this time is none, however patient its user is.
const CONNECTED_WITHIN: Duration = Duration::from_secs(3);

/// At the end nobody waits longer than this for a server to hear of what was drawn.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// The most that a page holds.
const PAGE_MAX: u32 = 1_000;

/// A server.
#[derive(Debug)]
pub(crate) struct Remote {
    client: Client,
    /// Nobody waits longer for it than this, beside what they said.
    patience: Duration,
}

impl Remote {
    /// Asks the server at `url`, with what the token allows. Nothing is sent yet.
    pub(crate) fn new(
        url: &str,
        token: Option<&str>,
        trust: &Trust,
        patience: Duration,
    ) -> Result<Self, Failure> {
        // Somebody waits at a terminal: a server that restarts is waited for, and one that is not there is told soon.
        let backoff =
            Backoff::exponential(Duration::from_millis(50), Duration::from_millis(500)).jitter(Jitter::Full);
        let client = Client::builder(url)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(patience.min(CONNECTED_WITHIN))
            .request_timeout(patience)
            .total_timeout(patience)
            .retry(Retry::attempts(4).backoff(backoff));
        let client = token.into_iter().fold(client, wire::ClientBuilder::token);
        let client = trust.apply(client);
        Ok(Self { client: client.build()?, patience })
    }

    /// The client, for who listens.
    #[allow(dead_code, reason = "only `watch` listens")]
    pub(crate) const fn client(&self) -> &Client {
        &self.client
    }

    /// What to ask for: each limit once, by names that can be.
    fn cost(ask: &Ask) -> Result<wire::Cost, Failure> {
        let pairs = ask.pairs();
        let twice = pairs
            .iter()
            .enumerate()
            .find(|(at, (name, _))| pairs[..*at].iter().any(|(other, _)| other == name));
        if let Some((_, (name, _))) = twice {
            return Err(Failure::usage(format!("the limit `{name}` is asked for twice")));
        }
        wire::Cost::of(pairs).map_err(|error| Failure::usage(error.to_string()))
    }
}

/// What is there, or nothing where the server says that there is nothing of this kind.
fn found<T>(answer: Result<T, ClientError>, kind: &str) -> Result<Option<T>, Failure> {
    match answer {
        Err(ClientError::Problem { problem, .. }) if problem.is(kind) => Ok(None),
        answer => Ok(Some(answer?)),
    }
}

/// A page as a store has it.
fn page<P: wire::Page, T>(page: P, item: impl Fn(P::Item) -> Result<T, Failure>) -> Result<Page<T>, Failure> {
    let next = page.next().map(Cursor::new);
    let items = page.into_items().into_iter().map(item).collect::<Result<_, _>>()?;
    Ok(Page { items, next })
}

/// Where a page begins, and how much is on it.
fn paged(paging: &Paging) -> (Option<String>, Option<u32>) {
    (paging.cursor().map(|cursor| cursor.as_str().to_owned()), u32::try_from(paging.max()).ok())
}

fn page_query(paging: &Paging) -> wire::PageQuery {
    let (after, max) = paged(paging);
    wire::PageQuery { after, max }
}

/// The bounds of a range that are bounds.
fn bounds(range: &std::ops::Range<Stamp>) -> (Option<wire::Time>, Option<wire::Time>) {
    let from = Some(range.start).filter(|start| *start > Stamp::ZERO);
    let to = Some(range.end).filter(|end| *end < Stamp::MAX);
    (from.map(wire::Time), to.map(wire::Time))
}

fn written(at: wire::PolicyAt) -> Result<Written, Failure> {
    let (scope, Versioned { version, value }) = at
        .check()
        .map_err(|error| Failure::failed(format!("what the server has written cannot be: {error}")))?;
    Ok((scope, Versioned { version, value: Arc::new(value) }))
}

fn entity(wire: wire::Entity) -> Versioned<Entity> {
    let version = Version::new(wire.version.unwrap_or_default());
    Versioned { version, value: wire.into() }
}

/// A limit's state, and where it is written; where that is not said, nobody wrote it.
fn line(state: wire::LimitState) -> Result<LimitLine, InvalidAnswer> {
    let (balance, source) = state.check()?;
    Ok(LimitLine { balance, source: source.unwrap_or(Source::Defaults) })
}

fn usage_query(query: &UsageQuery, paging: Option<&Paging>) -> wire::UsageQuery {
    let (entity, resource) = match &query.of {
        UsageOf::Entity(entity) => (Some(entity.clone().into()), None),
        UsageOf::Resource(resource) => (None, Some(resource.clone().into())),
    };
    let ((from, to), (after, max)) = (bounds(&query.range), paging.map(paged).unwrap_or_default());
    wire::UsageQuery { entity, resource, window: query.window.into(), from, to, after, max }
}

impl Backend for Remote {
    type Lease = Held;

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

    async fn policies(&self, listing: &Listing, paging: &Paging) -> Result<Page<Written>, Failure> {
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

    /// Compares here, with what was there: the server tells what would change, and not from what.
    async fn plan(&self, declared: &[(Scope, Policy)], extra: Extra) -> Result<Plan, Failure> {
        let query = wire::PolicyQuery { max: Some(PAGE_MAX), ..wire::PolicyQuery::default() };
        let (mut pages, mut all) = (self.client.all_policies(query), Vec::new());
        while let Some(page) = pages.next_page().await? {
            for at in page.items {
                all.push(written(at)?);
            }
        }
        plan(&all, declared, extra).map_err(|twice| Failure::failed(twice.to_string()))
    }

    async fn apply(&self, plan: &Plan) -> Result<Version, Failure> {
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
            // As at a store: below what is not there is nobody.
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

    async fn acquire(&self, ask: &Ask) -> Result<Held, Failure> {
        Held::draw(&self.client, ask, Self::cost(ask)?, self.patience).await
    }

    /// By a lease, which says whether the store has heard of it.
    async fn spend(&self, ask: &Ask) -> Result<Granted, Failure> {
        let mut lease = self.acquire(ask).await?;
        lease.settle().await?;
        Ok(lease.granted())
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
        Ok(balances.collect::<Result<_, InvalidAnswer>>()?)
    }

    async fn capacity(&self, resource: &ResourceName) -> Result<BTreeMap<LimitName, Capacity>, Failure> {
        let query = wire::CapacityQuery { resource: Some(resource.clone().into()) };
        let limit = |sum: wire::Capacity| {
            let limit = sum.name()?;
            let wire::Capacity { buckets, burst, available, consumed, .. } = sum;
            Ok((limit, Capacity { buckets, burst, available, consumed }))
        };
        let sums = self.client.capacity(&query).await?.limits;
        Ok(sums.into_iter().map(limit).collect::<Result<_, InvalidAnswer>>()?)
    }

    async fn explain(&self, ask: &Ask) -> Result<Explanation, Failure> {
        let Subject { entity, resource } = ask.subject.clone();
        let (entity, resource) = (entity.into(), resource.into());
        let asked = wire::Ask { entity, resource, cost: Self::cost(ask)?, limits: Vec::new() };
        let explained =
            self.client.explain(&asked).await.map_err(|error| trouble::of(error, &ask.subject))?;
        let (on_unavailable, on_expiry) = explained.behaviour(&ask.subject)?;
        Ok(Explanation {
            subject: ask.subject.clone(),
            would: match explained.would {
                wire::Would::Grant => Would::Grant,
                wire::Would::Wait => Would::Wait(explained.retry_after.unwrap_or_default().as_duration()),
                wire::Would::Never => Would::Never,
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

    async fn archive(&self, folder: &Path, _: Stamp) -> Result<Archived, Failure> {
        let what = "an archive takes changes out of the store, and a server lets nobody do that";
        let next = format!("where the store is: tidegate --store URL audit archive {}", folder.display());
        Err(Failure::usage(what).next(next))
    }

    async fn create_token(&self, ask: TokenAsk) -> Result<MadeToken, Failure> {
        let TokenAsk { id, name, scopes, expires_at } = ask;
        let expires_at = expires_at.map(wire::Time);
        let put =
            wire::PutToken { id: id.clone().into(), name: Some(name), scopes: scopes.into(), expires_at };
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
                Ok(MadeToken { token, secret })
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
        // What is not done by then is counted below.
        let _ = timeout(self.patience.min(CLOSED_WITHIN), self.client.drain()).await;
        let stats = self.client.stats();
        usize::try_from(stats.endings_pending + stats.endings_lost).unwrap_or(usize::MAX)
    }
}
