//! Administration: writes policies and entities, and applies declared policies.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::InvalidCost;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{Across, EntityId, InvalidLimitKey, LimitKey, LimitName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::policy_changes::{PolicyChanges, Step, Undeclared, plan};
use tidegate_core::limit::rule::{InvalidLimit, Limit};
use tidegate_store::{Listing, Paging, PolicyChange, Repair, StoreError};

use super::acquire::SubjectRef;
use super::error::LimitError;
use super::{Limiter, Shared};

/// Administrative changes on behalf of an actor. Every change is audited and takes effect at once in this
/// process; other processes notice it within their cache TTL.
#[derive(Debug, Clone)]
pub struct Admin {
    limiter: Limiter,
    actor: String,
}

/// The limit that a bucket belongs to: one of the subject's policies, or one that was given with a call.
///
/// As text it is `tpm`, `tpm,across=entities`, or the whole limit that a call has: `tpm:1k/min`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BucketLimit {
    /// A limit of a policy.
    Stored(LimitKey),
    /// A limit of a call: a [`Request`](super::Request), or a rule for Envoy. Its bucket is that of its name and shape.
    OfCall(Limit),
}

impl From<&LimitKey> for BucketLimit {
    fn from(key: &LimitKey) -> Self {
        Self::Stored(key.clone())
    }
}

impl FromStr for BucketLimit {
    type Err = InvalidBucketLimit;

    fn from_str(text: &str) -> Result<Self, InvalidBucketLimit> {
        // No name has a colon.
        Ok(if text.contains(':') { Self::OfCall(text.parse()?) } else { Self::Stored(text.parse()?) })
    }
}

impl fmt::Display for BucketLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(key) => key.fmt(f),
            Self::OfCall(limit) => limit.fmt(f),
        }
    }
}

/// The error for text that is no [`BucketLimit`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidBucketLimit {
    /// The name of a limit of a policy.
    #[error(transparent)]
    Stored(#[from] InvalidLimitKey),
    /// The limit of a call.
    #[error(transparent)]
    OfCall(#[from] InvalidLimit),
}

impl Limiter {
    /// Administrative changes on behalf of `actor`.
    pub fn admin(&self, actor: impl Into<String>) -> Admin {
        Admin { limiter: self.clone(), actor: actor.into() }
    }
}

impl Admin {
    /// Writes a policy, replacing any existing one.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] if the store is unavailable, and [`LimitError::Store`] if it refuses.
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done.
    pub async fn set_policy(&self, scope: Scope, policy: Policy) -> Result<Version, LimitError> {
        self.change(vec![PolicyChange { scope, expect: Expect::Any, policy: Some(policy) }]).await
    }

    /// Removes a policy, if it exists.
    ///
    /// # Errors
    /// As [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done.
    pub async fn remove_policy(&self, scope: Scope) -> Result<Version, LimitError> {
        self.change(vec![PolicyChange { scope, expect: Expect::Any, policy: None }]).await
    }

    /// Applies all of these changes, or none.
    ///
    /// # Errors
    /// [`StoreError::Stale`] with the current version if an expectation does not hold; otherwise as
    /// [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done.
    pub async fn change(&self, changes: Vec<PolicyChange>) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.call_store_slow(shared.store.apply(&changes, &self.actor)).await;
        self.is_written(answer)
    }

    /// Writes an entity. Its parent is checked, its descendants are not: if they end up too deep, their draws
    /// are refused.
    ///
    /// # Errors
    /// [`StoreError::Entity`] for an invalid parent, [`StoreError::Stale`] if the expectation does not hold;
    /// otherwise as [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done.
    pub async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.call_store_slow(shared.store.put(entity, expect, &self.actor)).await;
        self.is_written(answer)
    }

    /// Removes an entity and its policies.
    ///
    /// # Errors
    /// [`StoreError::HasChildren`] if it has children; otherwise as [`put_entity`](Self::put_entity).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done.
    pub async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.call_store_slow(shared.store.remove(id, expect, &self.actor)).await;
        self.is_written(answer)
    }

    /// Sets the units available in the bucket of one limit that a subject draws from, and returns its balance and
    /// the version of the change. It repairs a bucket after a wrong settlement: no caller needs to wait until the debt
    /// is paid. Without `units` the bucket is full again. A limit of a call has a bucket of its own for each name and shape.
    ///
    /// # Errors
    /// [`LimitError::Cost`] if the subject has no such limit, [`LimitError::Policy`] for an invalid limit of a call,
    /// [`StoreError::Invalid`] for more units than the burst; otherwise as [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave the change done. If the audit has it, it may not have been made.
    pub async fn set_bucket<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        limit: impl Into<BucketLimit>,
        units: Option<u64>,
    ) -> Result<Versioned<Balance>, LimitError> {
        let shared = &self.limiter.shared;
        let (all, _) = shared.levels(subject.into()).await?;
        let (all, limit) = match limit.into() {
            BucketLimit::Stored(key) => (all, key),
            BucketLimit::OfCall(limit) => {
                let key = LimitName::new(limit.name())?.into();
                (shared.call_levels.extended(&all, &[limit])?, key)
            }
        };
        let Some(levels) = all.single(limit.across, limit.name.as_str()).map(Arc::new) else {
            let subject = all.subject();
            let pools = [Across::Resources, Across::Entities, Across::Both].into_iter();
            let mut pools = pools.filter(|across| all.single(Some(*across), limit.name.as_str()).is_some());
            if let (None, Some(across)) = (limit.across, pools.next()) {
                let (subject, name) = (subject.clone(), limit.name.clone());
                return Err(LimitError::from(InvalidCost::Pooled { subject, name, across }));
            }
            let subject = limit.across.map_or_else(|| subject.clone(), |across| subject.pooled(across));
            let (name, known) = (limit.name.to_string(), all.names().to_vec());
            return Err(LimitError::from(InvalidCost::Unknown { subject, name, known }));
        };
        let level = &levels.levels()[0];
        let burst = level.limits[0].rule.shape().burst();
        let lease = Shared::new_id();
        let repair = Repair { lease, levels: Arc::clone(&levels), units: units.unwrap_or(burst) };
        let Versioned { version, value: moved } =
            shared.call_store_slow(shared.store.repair(&repair, &self.actor)).await?;
        shared.waiters.returned(&levels);
        let meter = moved.readings.first().map(|reading| reading.meter(&levels));
        let meter = meter.unwrap_or_else(|| Meter::new(Arc::clone(&level.limits[0].rule), levels.version()));
        Ok(Versioned { version, value: Balance::of(&level.subject, &meter, 0, moved.at) })
    }

    /// Invalidates what a change affects; everything, if it is unknown whether the change was made.
    fn is_written(&self, answer: Result<Version, LimitError>) -> Result<Version, LimitError> {
        match &answer {
            Ok(version) => {
                self.limiter.shared.policies.record_seen(*version);
                // The change may admit a waiter.
                self.limiter.shared.waiters.wake();
            }
            Err(_) => self.limiter.invalidate(),
        }
        answer
    }

    /// Reads all policies, page by page.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] if the store is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn policies(&self) -> Result<Vec<(Scope, Versioned<Arc<Policy>>)>, LimitError> {
        let shared = &self.limiter.shared;
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut all, mut paging) = (Vec::new(), first.clone());
        loop {
            let page = shared.call_store_slow(shared.store.list(&Listing::All, &paging)).await?;
            all.extend(page.items);
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => return Ok(all),
            }
        }
    }

    /// Computes the changes that make the stored policies equal to `declared`. Nothing is changed yet: review
    /// the plan, then [`apply`](Self::apply) it.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a scope that is declared twice; [`LimitError::Unavailable`] if the store
    /// is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn plan(
        &self,
        declared: &[(Scope, Policy)],
        extra: Undeclared,
    ) -> Result<PolicyChanges, LimitError> {
        let written = self.policies().await?;
        let plan = plan(&written, declared, extra);
        plan.map_err(|twice| LimitError::Store(StoreError::Invalid { what: twice.to_string() }))
    }

    /// Applies all changes of a plan, or none, and returns their version. An empty plan changes nothing, and
    /// returns the current version.
    ///
    /// Optimistic locking: each change expects the policy that its plan found. If one of these policies has
    /// changed since, nothing is done: compute and review the plan again.
    ///
    /// # Errors
    /// [`StoreError::Stale`] with the current version if a policy has changed since the plan was computed;
    /// otherwise as [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future leaves all changes done, or none. Applying a plan twice fails as stale.
    pub async fn apply(&self, plan: &PolicyChanges) -> Result<Version, LimitError> {
        if plan.is_empty() {
            let shared = &self.limiter.shared;
            return shared.call_store_slow(shared.store.version()).await;
        }
        let change = |step: &Step| PolicyChange {
            scope: step.scope.clone(),
            expect: step.expect(),
            policy: step.after.clone(),
        };
        self.change(plan.steps().iter().map(change).collect()).await
    }
}
