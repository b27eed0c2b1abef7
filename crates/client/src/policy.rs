//! Policies, and where they are written.

use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{self, InvalidPolicy, Scope, Share};

use crate::expect::Expect;
use crate::object;
use crate::text::{EntityId, LimitText, ResourceName};

/// The count of administrative changes at which something was last written.
pub type Version = u64;

wire! {
    /// Limits at a scope, and how to behave when things go wrong.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct Policy {
        /// The limits, each name once, at most 16.
        #[serde(default)]
        pub limits: Vec<LimitText>,
        /// Cuts inheritance: limits of wider scopes do not count.
        #[serde(default, skip_serializing_if = "is_false")]
        pub only: bool,
        /// What an acquire does when the store is away.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub on_unavailable: Option<OnUnavailable>,
        /// What becomes of leases that are never ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub on_expiry: Option<OnExpiry>,
    }

    /// What an acquire does when the store is away.
    #[derive(Copy)]
    #[serde(rename_all = "snake_case")]
    pub enum OnUnavailable {
        /// Nobody enters.
        Block,
        /// Everybody enters, with a lease that says it is degraded.
        Allow,
        /// This share of every limit, in 0.000001..=1, is kept by the server itself.
        LocalShare(f64),
    }

    /// What becomes of a lease whose deadline passes without an end.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum OnExpiry {
        /// It is settled at what it drew.
        Settle,
        /// What it drew returns.
        Return,
    }

    /// Writes a policy.
    #[serde(deny_unknown_fields)]
    pub struct PutPolicy {
        /// What is to be there.
        #[serde(deserialize_with = "object::one")]
        pub policy: Policy,
        /// What the writer believes to be there: `any`, `absent` or a version.
        #[serde(default)]
        pub expect: Expect,
    }

    /// A policy, and where and when it was written.
    #[serde(deny_unknown_fields)]
    pub struct PolicyAt {
        /// Whose, if it is one entity's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// For which resource, if it is for one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// When it was last written.
        pub version: Version,
        /// What it says.
        pub policy: Policy,
    }

    /// A change that was made.
    #[derive(Copy, Eq)]
    #[serde(deny_unknown_fields)]
    pub struct Written {
        /// The count of administrative changes, this one included.
        pub version: Version,
    }
}

query! {
    /// A scope: with neither it is the whole system, with one that resource or entity, with both the entity's use of the
    /// resource.
    #[serde(deny_unknown_fields)]
    pub struct ScopeQuery {
        /// Whose, if it is one entity's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// For which resource, if it is for one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// For a change, what the writer believes to be there: `any`, `absent` or a version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect: Option<Expect>,
    }

    /// Which policies.
    #[serde(deny_unknown_fields)]
    pub struct PolicyQuery {
        /// Those of an entity.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Those that entities have of their own for this resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub custom: Option<ResourceName>,
        /// Where the page begins: the `next` of the page before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// How many at most, in 1..=1000; 100 unless said otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// The scope of these two names.
pub(crate) fn scope(entity: Option<EntityId>, resource: Option<ResourceName>) -> Scope {
    match (entity, resource) {
        (None, None) => Scope::System,
        (None, Some(resource)) => Scope::Resource(resource.0),
        (Some(entity), None) => Scope::Entity(entity.0),
        (Some(entity), Some(resource)) => Scope::Subject(Subject { entity: entity.0, resource: resource.0 }),
    }
}

/// The two names of a scope.
pub(crate) fn names(scope: &Scope) -> (Option<EntityId>, Option<ResourceName>) {
    (scope.entity().cloned().map(EntityId), scope.resource().cloned().map(ResourceName))
}

impl From<ScopeQuery> for Scope {
    fn from(query: ScopeQuery) -> Self {
        scope(query.entity, query.resource)
    }
}

impl PolicyAt {
    /// A policy as it was written.
    pub fn new(at: &Scope, version: policy::Version, policy: &policy::Policy) -> Self {
        let (entity, resource) = names(at);
        Self { entity, resource, version: version.number(), policy: policy.into() }
    }

    /// Where it is written, and the policy with its version.
    ///
    /// # Errors
    /// [`InvalidPolicy`] says which limit is wrong, and how.
    pub fn check(self) -> Result<(Scope, policy::Versioned<policy::Policy>), InvalidPolicy> {
        let value = self.policy.try_into()?;
        let version = policy::Version::new(self.version);
        Ok((scope(self.entity, self.resource), policy::Versioned { version, value }))
    }
}

impl From<&Scope> for ScopeQuery {
    fn from(scope: &Scope) -> Self {
        let (entity, resource) = names(scope);
        Self { entity, resource, expect: None }
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
            limits: policy.rules().iter().map(|rule| LimitText(limit(rule))).collect(),
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

/// A rule as the limit it was made of.
fn limit(rule: &tidegate_core::limit::rule::Rule) -> tidegate_core::limit::rule::Limit {
    let shape = rule.shape();
    let limit = tidegate_core::limit::rule::Limit::per(rule.name().as_str(), shape.amount(), shape.period());
    // A burst that is the amount is not written.
    if shape.burst() == shape.amount() { limit } else { limit.burst(shape.burst()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_read_back_as_it_was_written_with_where_and_when() {
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
