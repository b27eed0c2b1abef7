//! Policies: limits written at a scope, and what to do when the store is away or a lease is never ended.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::limit::name::{EntityId, ResourceName, Subject};
use crate::limit::rule::{InvalidLimit, Limit, Rule};

/// A policy holds at most so many limits.
pub const LIMITS_MAX: usize = 16;

/// The count of all administrative changes of a namespace. An entity's or a policy's version is the count at
/// which it was last written, so that versions of different records compare, and none comes twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// Before the first change.
    pub const ZERO: Self = Self(0);

    /// The version of this number.
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

/// Something written, and the version it was written at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned<T> {
    /// When it was last written.
    pub version: Version,
    /// What was written.
    pub value: T,
}

/// What a writer believes to be there. A belief that is wrong is refused, with what is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Expect {
    /// Whatever it is.
    #[default]
    Any,
    /// Nothing.
    Absent,
    /// What was written at this version.
    Version(Version),
}

impl Expect {
    /// Whether the belief holds of what is there.
    pub fn holds(self, current: Option<Version>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => current.is_none(),
            Self::Version(version) => current == Some(version),
        }
    }
}

/// Where a policy is written. The narrower one wins, for each limit name by itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// For everybody and everything.
    System,
    /// For everybody's use of a resource.
    Resource(ResourceName),
    /// For an entity's use of anything.
    Entity(EntityId),
    /// For an entity's use of a resource.
    Subject(Subject),
}

impl Scope {
    /// The entity whose policy it is, if it is one's.
    pub const fn entity(&self) -> Option<&EntityId> {
        match self {
            Self::System | Self::Resource(_) => None,
            Self::Entity(entity) => Some(entity),
            Self::Subject(subject) => Some(&subject.entity),
        }
    }

    /// The resource it is for, if it is for one.
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

/// What an acquire does when the store is away.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnUnavailable {
    /// Nobody enters.
    #[default]
    Block,
    /// Everybody enters, with a lease that says it is degraded.
    Allow,
    /// This share of every limit is kept by the process itself, with leases that say they are degraded.
    LocalShare(Share),
}

/// A share of a whole: more than nothing, at most all of it. Exact to a millionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

/// Millionths in a whole.
const WHOLE: u32 = 1_000_000;

impl Share {
    /// The share `fraction` of a whole.
    ///
    /// # Errors
    /// [`InvalidPolicy::Share`] for what is no number in (0, 1], or less than a millionth.
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

/// What becomes of a lease whose deadline passes without an end: its process is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnExpiry {
    /// It is settled at what it drew: the work was probably done.
    #[default]
    Settle,
    /// What it drew returns.
    Return,
}

/// Limits at a scope, each name once, and how to behave when things go wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Arc<Rule>>,
    only: bool,
    on_unavailable: Option<OnUnavailable>,
    on_expiry: Option<OnExpiry>,
}

/// A policy that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidPolicy {
    /// One of its limits cannot be.
    #[error(transparent)]
    Limit(#[from] InvalidLimit),
    /// A limit is there twice.
    #[error("the limit `{name}` is there twice")]
    Twice {
        /// Which one.
        name: String,
    },
    /// There are too many.
    #[error("{count} limits in one policy, more than {LIMITS_MAX}")]
    Many {
        /// How many.
        count: usize,
    },
    /// A share that is none.
    #[error("a local share of {fraction}, outside 0.000001..=1")]
    Share {
        /// The fraction as it was given.
        fraction: String,
    },
}

impl Policy {
    /// A policy of these limits.
    ///
    /// # Errors
    /// [`InvalidPolicy`] says which limit is wrong, and how.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Result<Self, InvalidPolicy> {
        let mut rules: Vec<Arc<Rule>> = Vec::new();
        for limit in limits {
            let rule = limit.check()?;
            if rules.iter().any(|other| other.name() == rule.name()) {
                return Err(InvalidPolicy::Twice { name: rule.name().to_string() });
            }
            rules.push(Arc::new(rule));
        }
        if rules.len() > LIMITS_MAX {
            return Err(InvalidPolicy::Many { count: rules.len() });
        }
        Ok(Self { rules, ..Self::default() })
    }

    /// Cuts inheritance: limits of wider scopes do not count beside this policy's.
    #[must_use]
    pub const fn only(mut self) -> Self {
        self.only = true;
        self
    }

    /// What an acquire does when the store is away.
    #[must_use]
    pub const fn on_unavailable(mut self, behaviour: OnUnavailable) -> Self {
        self.on_unavailable = Some(behaviour);
        self
    }

    /// What becomes of a lease that is never ended.
    #[must_use]
    pub const fn on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.on_expiry = Some(behaviour);
        self
    }

    /// The limits, in the order they were written in.
    pub fn rules(&self) -> &[Arc<Rule>] {
        &self.rules
    }

    /// Whether wider scopes' limits do not count.
    pub const fn is_only(&self) -> bool {
        self.only
    }

    /// What it says about a store that is away, if it does.
    pub const fn unavailable(&self) -> Option<OnUnavailable> {
        self.on_unavailable
    }

    /// What it says about leases that are never ended, if it does.
    pub const fn expiry(&self) -> Option<OnExpiry> {
        self.on_expiry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_refuses_a_name_twice_and_too_many() {
        let twice = [Limit::per_minute("rpm", 1), Limit::per_hour("rpm", 5)];
        assert_eq!(Policy::new(twice).unwrap_err().to_string(), "the limit `rpm` is there twice");
        let many = (0..17).map(|number| Limit::per_minute(format!("l{number}"), 1));
        assert_eq!(Policy::new(many).unwrap_err().to_string(), "17 limits in one policy, more than 16");
    }

    #[test]
    fn a_share_is_a_number_above_nothing_and_at_most_all() {
        for bad in [0.0, -0.5, 1.1, f64::NAN, f64::INFINITY, 1e-9] {
            let error = Share::new(bad).unwrap_err().to_string();
            assert!(error.contains("outside 0.000001..=1"), "{error}");
        }
        let tenth = Share::new(0.1).unwrap();
        assert_eq!((tenth.of(1_000), tenth.of(5), tenth.of(u64::MAX)), (100, 1, u64::MAX / 10));
        assert!((tenth.fraction() - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_belief_is_about_a_version() {
        let (one, two) = (Version::new(1), Version::new(2));
        assert!(Expect::Any.holds(None) && Expect::Any.holds(Some(one)));
        assert!(Expect::Absent.holds(None) && !Expect::Absent.holds(Some(one)));
        assert!(Expect::Version(one).holds(Some(one)));
        assert!(!Expect::Version(one).holds(Some(two)) && !Expect::Version(one).holds(None));
        assert_eq!(Version::ZERO.next(), one);
    }

    #[test]
    fn a_scope_says_where_it_is() {
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
