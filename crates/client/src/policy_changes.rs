//! Declared policies: the changes they need, and applying them.

use tidegate_core::limit::policy::{self, InvalidPolicy, Scope};
use tidegate_core::limit::policy_changes;

use crate::expect::Expect;
use crate::object;
use crate::policy::{Policy, names, scope};
use crate::text::{EntityId, ResourceName};

/// The maximum number of policies in a declaration or a list of changes.
pub const PLAN_MAX: usize = 1_000;

wire! {
    /// A declared policy.
    #[serde(deny_unknown_fields)]
    pub struct Declared {
        /// The entity, for an entity's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource, for a resource's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// The policy.
        #[serde(deserialize_with = "object::one")]
        pub policy: Policy,
    }

    /// All declared policies.
    #[serde(deny_unknown_fields)]
    pub struct Declaration {
        /// The policies, each scope once, at most 1,000.
        #[serde(deserialize_with = "object::many")]
        pub policies: Vec<Declared>,
        /// Whether to remove policies that are not declared.
        #[serde(default)]
        pub prune: bool,
    }

    /// The change of one scope, as text.
    #[serde(deny_unknown_fields)]
    pub struct PlanStep {
        /// The scope, followed by what is added, changed and removed.
        pub text: String,
    }

    /// The change of one scope.
    #[serde(deny_unknown_fields)]
    pub struct PolicyChange {
        /// The entity, for an entity's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource, for a resource's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// The expected current state: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
        /// The new policy; absent to remove the policy.
        #[serde(default, deserialize_with = "object::maybe", skip_serializing_if = "Option::is_none")]
        pub policy: Option<Policy>,
    }

    /// Applies all changes, or none.
    #[serde(deny_unknown_fields)]
    pub struct Apply {
        /// The changes, each scope once, at most 1,000.
        #[serde(deserialize_with = "object::many")]
        pub changes: Vec<PolicyChange>,
    }
}

wire_as! {
    Plan:
    /// The changes that a declaration needs. Nothing is changed yet: `apply` takes the `changes`.
    #[serde(deny_unknown_fields)]
    pub struct PolicyChanges {
        /// The changes.
        #[serde(deserialize_with = "object::many")]
        pub changes: Vec<PolicyChange>,
        /// The changes as text, for review.
        pub steps: Vec<PlanStep>,
    }
}

impl Declared {
    /// Validates the policy and returns it with its scope.
    ///
    /// # Errors
    /// [`InvalidPolicy`] names the invalid limit.
    pub fn check(self) -> Result<(Scope, policy::Policy), InvalidPolicy> {
        Ok((scope(self.entity, self.resource), self.policy.try_into()?))
    }
}

impl PolicyChange {
    /// Creates a conditional change of a scope; `None` removes the policy.
    pub fn new(scope: &Scope, expect: Expect, policy: Option<&policy::Policy>) -> Self {
        let (entity, resource) = names(scope);
        Self { entity, resource, expect, policy: policy.map(Policy::from) }
    }

    /// Returns the scope of the change.
    pub fn scope(&self) -> Scope {
        scope(self.entity.clone(), self.resource.clone())
    }
}

impl From<&policy_changes::PolicyChanges> for PolicyChanges {
    fn from(plan: &policy_changes::PolicyChanges) -> Self {
        let change = |step: &policy_changes::Step| {
            PolicyChange::new(&step.scope, step.expect().into(), step.after.as_ref())
        };
        let shown = |step: &policy_changes::Step| PlanStep { text: step.to_string() };
        Self {
            changes: plan.steps().iter().map(change).collect(),
            steps: plan.steps().iter().map(shown).collect(),
        }
    }
}
