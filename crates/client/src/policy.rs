//! Policies and their scopes.

use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{self, InvalidPolicy, Scope, Share};

use crate::expect::Expect;
use crate::object;
use crate::text::{EntityId, LimitText, ResourceName};

/// A version: the number of administrative changes at the time of the last write.
pub type Version = u64;

wire! {
    /// Limits at a scope, and what to do when the store is unavailable or a lease expires.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct Policy {
        /// The limits, at most 16. A name may occur once for the subject's own bucket, and once for each kind of
        /// pool.
        #[serde(default)]
        pub limits: Vec<LimitText>,
        /// Disables inheritance: limits of wider scopes do not apply.
        #[serde(default, skip_serializing_if = "is_false")]
        pub only: bool,
        /// What an acquire does while the store is unavailable.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub on_unavailable: Option<OnUnavailable>,
        /// What happens to leases that expire.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub on_expiry: Option<OnExpiry>,
    }

    /// What an acquire does while the store is unavailable.
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum OnUnavailable {
        /// Every request is refused.
        Block,
        /// Every request is granted a degraded lease.
        Allow,
        /// The server enforces this share of every limit by itself, in 0.000001..=1.
        LocalShare(f64),
    }

    /// What happens to a lease that passes its deadline.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum OnExpiry {
        /// It is settled at what it drew.
        Settle,
        /// Its units are returned.
        Return,
    }

    /// Creates or replaces a policy.
    #[serde(deny_unknown_fields)]
    pub struct PutPolicy {
        /// The new policy.
        #[serde(deserialize_with = "object::one")]
        pub policy: Policy,
        /// The expected current state: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
    }

    /// A stored policy with its scope and version.
    #[serde(deny_unknown_fields)]
    pub struct PolicyAt {
        /// The entity, for an entity's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource, for a resource's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// The version of the last write.
        pub version: Version,
        /// The policy.
        pub policy: Policy,
    }

    /// The result of a write.
    #[derive(Copy, Eq)]
    #[serde(deny_unknown_fields)]
    pub struct Written {
        /// The number of administrative changes, including this one.
        pub version: Version,
    }
}

query! {
    /// A scope: neither field selects the system, one field that entity or resource, both fields the entity's
    /// use of the resource.
    #[serde(deny_unknown_fields)]
    pub struct ScopeQuery {
        /// The entity, for an entity's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource, for a resource's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// `true` for the system policy, without an entity and a resource. Only a removal needs it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub system: Option<bool>,
        /// For writes, the expected current state: `any`, `absent` or a version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect: Option<Expect>,
    }

    /// Selects policies.
    #[serde(deny_unknown_fields)]
    pub struct PolicyQuery {
        /// Policies of this entity.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Policies of individual entities for this resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub custom: Option<ResourceName>,
        /// Where the page begins: the `next` of the previous page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// Maximum number of items, in 1..=1000; default 100.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Builds a scope from its names.
pub(crate) fn scope(entity: Option<EntityId>, resource: Option<ResourceName>) -> Scope {
    match (entity, resource) {
        (None, None) => Scope::System,
        (None, Some(resource)) => Scope::Resource(resource.0),
        (Some(entity), None) => Scope::Entity(entity.0),
        (Some(entity), Some(resource)) => Scope::Subject(Subject { entity: entity.0, resource: resource.0 }),
    }
}

/// Splits a scope into its names.
pub(crate) fn names(scope: &Scope) -> (Option<EntityId>, Option<ResourceName>) {
    (scope.entity().cloned().map(EntityId), scope.resource().cloned().map(ResourceName))
}

impl From<ScopeQuery> for Scope {
    fn from(query: ScopeQuery) -> Self {
        scope(query.entity, query.resource)
    }
}

impl PolicyAt {
    /// Converts a stored policy.
    pub fn new(at: &Scope, version: policy::Version, policy: &policy::Policy) -> Self {
        let (entity, resource) = names(at);
        Self { entity, resource, version: version.number(), policy: policy.into() }
    }

    /// Validates the policy and returns it with its scope and version.
    ///
    /// # Errors
    /// [`InvalidPolicy`] names the invalid limit.
    pub fn check(self) -> Result<(Scope, policy::Versioned<policy::Policy>), InvalidPolicy> {
        let value = self.policy.try_into()?;
        let version = policy::Version::new(self.version);
        Ok((scope(self.entity, self.resource), policy::Versioned { version, value }))
    }
}

impl From<&Scope> for ScopeQuery {
    fn from(scope: &Scope) -> Self {
        let (entity, resource) = names(scope);
        let system = (*scope == Scope::System).then_some(true);
        Self { entity, resource, system, expect: None }
    }
}

impl TryFrom<Policy> for policy::Policy {
    type Error = InvalidPolicy;

    fn try_from(wire: Policy) -> Result<Self, InvalidPolicy> {
        let mut policy = Self::new(wire.limits.into_iter().map(|limit| limit.0))?;
        if wire.only {
            policy = policy.only();
        }
        if let Some(behaviour) = wire.on_unavailable {
            policy = policy.on_unavailable(behaviour.try_into()?);
        }
        Ok(match wire.on_expiry {
            Some(behaviour) => policy.on_expiry(behaviour.into()),
            None => policy,
        })
    }
}

impl TryFrom<OnUnavailable> for policy::OnUnavailable {
    type Error = InvalidPolicy;

    fn try_from(wire: OnUnavailable) -> Result<Self, InvalidPolicy> {
        Ok(match wire {
            OnUnavailable::Block => Self::Block,
            OnUnavailable::Allow => Self::Allow,
            OnUnavailable::LocalShare(share) => Self::LocalShare(Share::new(share)?),
        })
    }
}

impl From<OnExpiry> for policy::OnExpiry {
    fn from(wire: OnExpiry) -> Self {
        match wire {
            OnExpiry::Settle => Self::Settle,
            OnExpiry::Return => Self::Return,
        }
    }
}

impl From<&policy::Policy> for Policy {
    fn from(policy: &policy::Policy) -> Self {
        Self {
            limits: policy.rules().iter().map(|rule| LimitText(rule.to_limit())).collect(),
            only: policy.is_only(),
            on_unavailable: policy.unavailable().map(OnUnavailable::from),
            on_expiry: policy.expiry().map(OnExpiry::from),
        }
    }
}

impl From<policy::OnUnavailable> for OnUnavailable {
    fn from(behaviour: policy::OnUnavailable) -> Self {
        match behaviour {
            policy::OnUnavailable::Block => Self::Block,
            policy::OnUnavailable::Allow => Self::Allow,
            policy::OnUnavailable::LocalShare(share) => Self::LocalShare(share.fraction()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_round_trips_with_scope_and_version() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let scopes = tidegate_core::limit::resolve::scopes(&subject);
        let limits: Vec<tidegate_core::limit::rule::Limit> =
            ["rpm:60/min", "tpm:100k/min:150k"].map(|text| text.parse().unwrap()).into();
        let policy = policy::Policy::new(limits).unwrap().only().on_expiry(policy::OnExpiry::Return);
        let policy = policy.on_unavailable(policy::OnUnavailable::LocalShare(Share::new(0.2).unwrap()));
        for scope in scopes {
            let at = PolicyAt::new(&scope, policy::Version::new(7), &policy);
            let version = policy::Version::new(7);
            assert_eq!(
                at.check().unwrap(),
                (scope.clone(), policy::Versioned { version, value: policy.clone() })
            );
            assert_eq!(Scope::from(ScopeQuery::from(&scope)), scope);
        }
    }
}
