//! Changing what is written: policies, entities, and plans made of declared policies.

use std::sync::Arc;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::plan::{Extra, Plan, Step, plan};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_store::{Listing, Paging, PolicyChange, StoreError};

use super::Limiter;
use super::error::LimitError;

/// Changes what is written, in somebody's name. Every change is audited, and counts at once in this process;
/// others notice within the time that they remember policies for.
#[derive(Debug, Clone)]
pub struct Admin {
    limiter: Limiter,
    actor: String,
}

impl Limiter {
    /// Changes what is written, in the name of `actor`.
    pub fn admin(&self, actor: impl Into<String>) -> Admin {
        Admin { limiter: self.clone(), actor: actor.into() }
    }
}

impl Admin {
    /// Writes a policy, whatever was there.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] when the store is away, and [`LimitError::Store`] for what it refuses.
    ///
    /// # Cancel safety
    /// Dropping the future may leave it done or not.
    pub async fn set_policy(&self, scope: Scope, policy: Policy) -> Result<Version, LimitError> {
        self.change(vec![PolicyChange { scope, expect: Expect::Any, policy: Some(policy) }]).await
    }

    /// Removes a policy, whatever was there.
    ///
    /// # Errors
    /// As [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may leave it done or not.
    pub async fn remove_policy(&self, scope: Scope) -> Result<Version, LimitError> {
        self.change(vec![PolicyChange { scope, expect: Expect::Any, policy: None }]).await
    }

    /// Makes all of these changes, or none.
    ///
    /// # Errors
    /// [`StoreError::Stale`] with the version that is there, where an expectation does not hold; else as
    /// [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may leave it done or not.
    pub async fn change(&self, changes: Vec<PolicyChange>) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.ask_patiently(shared.store.apply(&changes, &self.actor)).await;
        self.is_written(answer)
    }

    /// Writes an entity. Its parent is checked, those below it are not: moved too far down, they are refused when they
    /// draw.
    ///
    /// # Errors
    /// [`StoreError::Entity`] for a parent that cannot be one, [`StoreError::Stale`] where the expectation does not
    /// hold; else as [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may leave it done or not.
    pub async fn put_entity(&self, entity: &Entity, expect: Expect) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.ask_patiently(shared.store.put(entity, expect, &self.actor)).await;
        self.is_written(answer)
    }

    /// Removes an entity and its policies.
    ///
    /// # Errors
    /// [`StoreError::HasChildren`] for one with others below it; else as [`put_entity`](Self::put_entity).
    ///
    /// # Cancel safety
    /// Dropping the future may leave it done or not.
    pub async fn remove_entity(&self, id: &EntityId, expect: Expect) -> Result<Version, LimitError> {
        let shared = &self.limiter.shared;
        let answer = shared.ask_patiently(shared.store.remove(id, expect, &self.actor)).await;
        self.is_written(answer)
    }

    /// A change was made: what depends on it is read again. All is, if it is not known whether it was made.
    fn is_written(&self, answer: Result<Version, LimitError>) -> Result<Version, LimitError> {
        match &answer {
            Ok(version) => {
                self.limiter.shared.policies.saw(*version);
                // The change may admit a waiter.
                self.limiter.shared.turns.wake();
            }
            Err(_) => self.limiter.invalidate(),
        }
        answer
    }

    /// Every policy there is, page by page.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn policies(&self) -> Result<Vec<(Scope, Versioned<Arc<Policy>>)>, LimitError> {
        let shared = &self.limiter.shared;
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut all, mut paging) = (Vec::new(), first.clone());
        loop {
            let page = shared.ask_patiently(shared.store.list(&Listing::All, &paging)).await?;
            all.extend(page.items);
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => return Ok(all),
            }
        }
    }

    /// What has to change so that what is written is what is `declared`. Nothing is changed yet: show the plan, and
    /// [`apply`](Self::apply) it.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a scope that is declared twice; [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn plan(&self, declared: &[(Scope, Policy)], extra: Extra) -> Result<Plan, LimitError> {
        let written = self.policies().await?;
        let plan = plan(&written, declared, extra);
        plan.map_err(|twice| LimitError::Store(StoreError::Invalid { what: twice.to_string() }))
    }

    /// Makes all changes of a plan, or none, and answers the version they were made at. A plan without changes changes
    /// nothing, and answers the version there is.
    ///
    /// Each change expects what its plan found. If somebody has changed one of these policies since, nothing is done:
    /// make the plan again, and look at it again.
    ///
    /// # Errors
    /// [`StoreError::Stale`] with the version that is there, where a policy has changed since the plan was made; else
    /// as [`set_policy`](Self::set_policy).
    ///
    /// # Cancel safety
    /// Dropping the future may leave all of it done, or none. Applied again, a plan that was done is refused as stale.
    pub async fn apply(&self, plan: &Plan) -> Result<Version, LimitError> {
        if plan.is_empty() {
            let shared = &self.limiter.shared;
            return shared.ask_patiently(shared.store.version()).await;
        }
        let change = |step: &Step| PolicyChange {
            scope: step.scope.clone(),
            expect: step.expect(),
            policy: step.after.clone(),
        };
        self.change(plan.steps().iter().map(change).collect()).await
    }
}
