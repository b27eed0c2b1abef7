//! Policies: the limits of a scope, and what to do if the store is unavailable or a lease is never ended.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::limit::name::{Across, EntityId, ResourceName, Subject};
use crate::limit::rule::{InvalidLimit, Limit, Rule};

/// The maximum number of limits in a policy.
pub const LIMITS_MAX: usize = 16;

/// The number of administrative changes of a namespace. The version of an entity or a policy is the number of
/// the change that last wrote it, so that versions of different records are comparable and never repeat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// Before the first change.
    pub const ZERO: Self = Self(0);

    /// The version with this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The version after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A stored value and its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned<T> {
    /// The version at which it was last written.
    pub version: Version,
    /// The value.
    pub value: T,
}

/// The version that a writer expects (compare-and-set). A write whose expectation does not hold is refused
/// with the current version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Expect {
    /// Any version, or none.
    #[default]
    Any,
    /// No stored value.
    Absent,
    /// The value written at this version.
    Version(Version),
}

impl Expect {
    /// Whether the expectation holds for the current version.
    pub fn holds(self, current: Option<Version>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => current.is_none(),
            Self::Version(version) => current == Some(version),
        }
    }
}

/// The scope of a policy. For each limit name, the narrowest scope wins.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All entities and resources.
    System,
    /// All entities' use of a resource.
    Resource(ResourceName),
    /// An entity's use of all resources.
    Entity(EntityId),
    /// An entity's use of a resource.
    Subject(Subject),
}

impl Scope {
    /// The entity, if the scope has one.
    pub const fn entity(&self) -> Option<&EntityId> {
        match self {
            Self::System | Self::Resource(_) => None,
            Self::Entity(entity) => Some(entity),
            Self::Subject(subject) => Some(&subject.entity),
        }
    }

    /// The resource, if the scope has one.
    pub const fn resource(&self) -> Option<&ResourceName> {
        match self {
            Self::System | Self::Entity(_) => None,
            Self::Resource(resource) => Some(resource),
            Self::Subject(subject) => Some(&subject.resource),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("system"),
            Self::Resource(resource) => write!(f, "resource {resource}"),
            Self::Entity(entity) => write!(f, "entity {entity}"),
            Self::Subject(subject) => write!(f, "entity {}, resource {}", subject.entity, subject.resource),
        }
    }
}

/// What an acquire does when the store is unavailable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnUnavailable {
    /// All calls are rejected.
    #[default]
    Block,
    /// All calls are admitted, with a lease marked as degraded.
    Allow,
    /// The process enforces this share of every limit by itself, with leases marked as degraded.
    LocalShare(Share),
}

/// A fraction in (0, 1], exact to a millionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

/// Millionths in a whole.
const WHOLE: u32 = 1_000_000;

impl Share {
    /// The share with this fraction.
    ///
    /// # Errors
    /// [`InvalidPolicy::Share`] for a number outside (0, 1] or below a millionth.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in (0, 1] by then")]
    pub fn new(fraction: f64) -> Result<Self, InvalidPolicy> {
        if fraction.is_nan() || !(1e-6..=1.0).contains(&fraction) {
            return Err(InvalidPolicy::Share { fraction: fraction.to_string() });
        }
        Ok(Self((fraction * f64::from(WHOLE)).round() as u32))
    }

    /// This share of `units`, at least one.
    pub fn of(self, units: u64) -> u64 {
        let share = u128::from(units) * u128::from(self.0) / u128::from(WHOLE);
        u64::try_from(share).unwrap_or(u64::MAX).max(1)
    }

    /// The share as a fraction.
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE)
    }
}

/// What to do with a lease whose deadline passes, because its process is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnExpiry {
    /// Settle it at the units it holds: the work was probably done.
    #[default]
    Settle,
    /// Return the units it holds.
    Return,
}

/// The limits of a scope, with unique names, and the settings for failures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Arc<Rule>>,
    only: bool,
    on_unavailable: Option<OnUnavailable>,
    on_expiry: Option<OnExpiry>,
}

/// The error for an invalid policy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidPolicy {
    /// One of its limits is invalid.
    #[error(transparent)]
    Limit(#[from] InvalidLimit),
    /// A limit is defined twice.
    #[error("the limit `{name}` is defined twice")]
    Twice {
        /// The limit.
        name: String,
    },
    /// A pooled limit at a scope that does not cover its pool.
    #[error("the limit `{name}` counts across={across}, which a policy at `{scope}` cannot limit: {}", wider(*across))]
    Pool {
        /// The limit.
        name: String,
        /// How it is pooled.
        across: Across,
        /// The scope of the policy.
        scope: Box<Scope>,
    },
    /// There are too many limits.
    #[error("{count} limits in one policy, more than {LIMITS_MAX}")]
    Many {
        /// The number of limits.
        count: usize,
    },
    /// A share is out of range.
    #[error("a local share of {fraction}, outside 0.000001..=1")]
    Share {
        /// The given fraction.
        fraction: String,
    },
}

/// Where a pooled limit can be defined.
const fn wider(across: Across) -> &'static str {
    match across {
        Across::Resources => "all resources of an entity share it, so define it for the system or the entity",
        Across::Entities => {
            "all entities on a resource share it, so define it for the system or the resource"
        }
        Across::Both => "all entities on all resources share it, so define it for the system",
    }
}

impl Scope {
    /// Whether a policy at this scope may define a limit that is pooled so: one policy alone must decide how
    /// large a pool is, whichever of its subjects draws.
    const fn covers(&self, across: Across) -> bool {
        match self {
            Self::System => true,
            Self::Resource(_) => matches!(across, Across::Entities),
            Self::Entity(_) => matches!(across, Across::Resources),
            Self::Subject(_) => false,
        }
    }
}

impl Policy {
    /// A policy of these limits. A name may occur once for the subject's own bucket, and once for each kind of
    /// pool.
    ///
    /// # Errors
    /// [`InvalidPolicy`] with the wrong limit and the reason.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Result<Self, InvalidPolicy> {
        let mut rules: Vec<Arc<Rule>> = Vec::new();
        for limit in limits {
            let rule = limit.check()?;
            if rules.iter().any(|other| other.counts_like(&rule)) {
                return Err(InvalidPolicy::Twice { name: rule.name().to_string() });
            }
            rules.push(Arc::new(rule));
        }
        if rules.len() > LIMITS_MAX {
            return Err(InvalidPolicy::Many { count: rules.len() });
        }
        Ok(Self { rules, ..Self::default() })
    }

    /// Checks that the policy can be written at `scope`.
    ///
    /// # Errors
    /// [`InvalidPolicy::Pool`] for a pooled limit whose pool the scope does not cover.
    pub fn check_scope(&self, scope: &Scope) -> Result<(), InvalidPolicy> {
        for rule in &self.rules {
            if let Some(across) = rule.across().filter(|across| !scope.covers(*across)) {
                let (name, scope) = (rule.name().to_string(), Box::new(scope.clone()));
                return Err(InvalidPolicy::Pool { name, across, scope });
            }
        }
        Ok(())
    }

    /// Checks that the limits can be given with a call.
    ///
    /// # Errors
    /// [`InvalidLimit::PoolOfCall`] for a pooled limit.
    pub fn check_call(&self) -> Result<(), InvalidPolicy> {
        match self.rules.iter().find_map(|rule| Some((rule.name().to_string(), rule.across()?))) {
            Some((name, across)) => Err(InvalidLimit::PoolOfCall { name, across }.into()),
            None => Ok(()),
        }
    }

    /// Cuts inheritance: limits of wider scopes are ignored, pooled ones too.
    #[must_use]
    pub const fn only(mut self) -> Self {
        self.only = true;
        self
    }

    /// What an acquire does when the store is unavailable.
    #[must_use]
    pub const fn on_unavailable(mut self, behaviour: OnUnavailable) -> Self {
        self.on_unavailable = Some(behaviour);
        self
    }

    /// Sets what to do with a lease that is never ended.
    #[must_use]
    pub const fn on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.on_expiry = Some(behaviour);
        self
    }

    /// The limits, in the order of definition.
    pub fn rules(&self) -> &[Arc<Rule>] {
        &self.rules
    }

    /// Whether limits of wider scopes are ignored.
    pub const fn is_only(&self) -> bool {
        self.only
    }

    /// The setting for an unavailable store, if any.
    pub const fn unavailable(&self) -> Option<OnUnavailable> {
        self.on_unavailable
    }

    /// The setting for leases that are never ended, if any.
    pub const fn expiry(&self) -> Option<OnExpiry> {
        self.on_expiry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_rejects_duplicate_names_and_too_many() {
        let twice = [Limit::per_minute("rpm", 1), Limit::per_hour("rpm", 5)];
        assert_eq!(Policy::new(twice).unwrap_err().to_string(), "the limit `rpm` is defined twice");
        let many = (0..17).map(|number| Limit::per_minute(format!("l{number}"), 1));
        assert_eq!(Policy::new(many).unwrap_err().to_string(), "17 limits in one policy, more than 16");
    }

    #[test]
    fn share_is_above_zero_and_at_most_one() {
        for bad in [0.0, -0.5, 1.1, f64::NAN, f64::INFINITY, 1e-9] {
            let error = Share::new(bad).unwrap_err().to_string();
            assert!(error.contains("outside 0.000001..=1"), "{error}");
        }
        let tenth = Share::new(0.1).unwrap();
        assert_eq!((tenth.of(1_000), tenth.of(5), tenth.of(u64::MAX)), (100, 1, u64::MAX / 10));
        assert!((tenth.fraction() - 0.1).abs() < 1e-9);
    }

    #[test]
    fn expectation_is_about_a_version() {
        let (one, two) = (Version::new(1), Version::new(2));
        assert!(Expect::Any.holds(None) && Expect::Any.holds(Some(one)));
        assert!(Expect::Absent.holds(None) && !Expect::Absent.holds(Some(one)));
        assert!(Expect::Version(one).holds(Some(one)));
        assert!(!Expect::Version(one).holds(Some(two)) && !Expect::Version(one).holds(None));
        assert_eq!(Version::ZERO.next(), one);
    }

    #[test]
    fn scope_has_its_entity_and_resource() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let table = [
            (Scope::System, "system", None, None),
            (Scope::Resource(subject.resource.clone()), "resource gpt-4", None, Some(&subject.resource)),
            (Scope::Entity(subject.entity.clone()), "entity acme", Some(&subject.entity), None),
            (
                Scope::Subject(subject.clone()),
                "entity acme, resource gpt-4",
                Some(&subject.entity),
                Some(&subject.resource),
            ),
        ];
        for (scope, text, entity, resource) in table {
            assert_eq!(scope.to_string(), text);
            assert_eq!((scope.entity(), scope.resource()), (entity, resource));
        }
    }
}
