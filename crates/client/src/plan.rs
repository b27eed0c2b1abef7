//! Declared policies: what would have to change, and changing it.

use tidegate_core::limit::plan;
use tidegate_core::limit::policy::{self, InvalidPolicy, Scope};

use crate::expect::Expect;
use crate::object;
use crate::policy::{Policy, names, scope};
use crate::text::{EntityId, ResourceName};

/// A declaration, and a list of changes, have at most so many policies.
pub const PLAN_MAX: usize = 1_000;

wire! {
    /// A policy that is to be.
    #[serde(deny_unknown_fields)]
    pub struct Declared {
        /// Whose, if it is one entity's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// For which resource, if it is for one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// What it says.
        #[serde(deserialize_with = "object::one")]
        pub policy: Policy,
    }

    /// All policies that are to be.
    #[serde(deny_unknown_fields)]
    pub struct Declaration {
        /// The policies, each scope once, at most 1,000.
        #[serde(deserialize_with = "object::many")]
        pub policies: Vec<Declared>,
        /// Whether policies that are not declared are to go.
        #[serde(default)]
        pub prune: bool,
    }

    /// What has to change. Nothing is changed yet: its `changes` are what `apply` takes.
    #[serde(deny_unknown_fields)]
    pub struct Plan {
        /// The changes, to be made.
        #[serde(deserialize_with = "object::many")]
        pub changes: Vec<PolicyChange>,
        /// What they change, for people to read before they say yes.
        pub steps: Vec<PlanStep>,
    }

    /// What changes at one scope, for people.
    #[serde(deny_unknown_fields)]
    pub struct PlanStep {
        /// The scope, and below it what is added, changed and removed there.
        pub text: String,
    }

    /// The change of one scope.
    #[serde(deny_unknown_fields)]
    pub struct PolicyChange {
        /// Whose, if it is one entity's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// For which resource, if it is for one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// What must be there for the change to be made: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
        /// What is to be there; without it, the policy is removed.
        #[serde(default, deserialize_with = "object::maybe", skip_serializing_if = "Option::is_none")]
        pub policy: Option<Policy>,
    }

    /// Makes all of these changes, or none.
    #[serde(deny_unknown_fields)]
    pub struct Apply {
        /// The changes, each scope once, at most 1,000.
        #[serde(deserialize_with = "object::many")]
        pub changes: Vec<PolicyChange>,
    }
}

impl Declared {
    /// The scope, and what is to be there.
    ///
    /// # Errors
    /// [`InvalidPolicy`] says which limit is wrong, and how.
    pub fn check(self) -> Result<(Scope, policy::Policy), InvalidPolicy> {
        Ok((scope(self.entity, self.resource), self.policy.try_into()?))
    }
}

impl PolicyChange {
    /// Makes this of a scope, if what is there is as expected; nothing removes it.
    pub fn new(scope: &Scope, expect: Expect, policy: Option<&policy::Policy>) -> Self {
        let (entity, resource) = names(scope);
        Self { entity, resource, expect, policy: policy.map(Policy::from) }
    }

    /// Where the change is made.
    pub fn scope(&self) -> Scope {
        scope(self.entity.clone(), self.resource.clone())
    }
}

impl From<&plan::Plan> for Plan {
    fn from(plan: &plan::Plan) -> Self {
        let change =
            |step: &plan::Step| PolicyChange::new(&step.scope, step.expect().into(), step.after.as_ref());
        let shown = |step: &plan::Step| PlanStep { text: step.to_string() };
        Self {
            changes: plan.steps().iter().map(change).collect(),
            steps: plan.steps().iter().map(shown).collect(),
        }
    }
}
