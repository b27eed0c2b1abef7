//! The policies of a store.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidegate_core::limit::audit::{About, Change};
use tidegate_core::limit::name::{Across, EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};

use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// The maximum length of an actor's name, in bytes.
const ACTOR_MAX: usize = 256;

/// A policy to write or remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyChange {
    /// The scope.
    pub scope: Scope,
    /// The version that the writer expects.
    pub expect: Expect,
    /// The new policy; `None` removes it.
    pub policy: Option<Policy>,
}

/// Policies read at one version.
#[derive(Debug, Clone)]
pub struct PolicySnapshot {
    /// The version of the namespace.
    pub version: Version,
    /// The policy of each requested scope, in that order.
    pub policies: Vec<Option<Versioned<Arc<Policy>>>>,
}

/// The changes since a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangesSince {
    /// The current version.
    pub version: Version,
    /// The changes, oldest first.
    pub about: Vec<About>,
}

/// Entries at the end of the audit that are searched for changes.
pub(crate) const CHANGED_MAX: usize = 64;

impl ChangesSince {
    /// The changes after `since`, from the last entries of the audit as of `version`. `None` if they do not
    /// reach back to `since`.
    pub(crate) fn since(
        since: Version,
        version: Version,
        entries: impl IntoIterator<Item = (Version, Change)>,
    ) -> Option<Self> {
        let (mut is_known, mut about) = (since == version, Vec::new());
        for (version, change) in entries {
            if version <= since {
                is_known = true;
            } else {
                about.extend(change.about());
            }
        }
        is_known.then_some(Self { version, about })
    }
}

/// Which policies to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listing {
    /// All of them.
    All,
    /// Those of an entity.
    Entity(EntityId),
    /// Those of entities for a resource: the entities with custom limits.
    Custom(ResourceName),
}

/// Policies by scope.
///
/// # The contract
/// Every change raises the namespace's [`Version`] by one, and what it wrote carries that version. A change
/// whose expectation does not hold is refused with the current version ([`Stale`](crate::StoreError::Stale)),
/// and none of the changes of the call is made. Changes are audited in the same transaction.
pub trait Policies {
    /// The policies at these scopes, in one round trip.
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, PolicySnapshot>;

    /// The namespace's version.
    fn version(&self) -> Reply<'_, Version>;

    /// The changes after `since`, so that a cache of policies need not read the others again. `None` if they
    /// are not known: there were too many, or the audit does not reach back.
    fn changed(&self, since: Version) -> Reply<'_, Option<ChangesSince>> {
        let _ = since;
        Reply::ready(Ok(None))
    }

    /// Policies in the order of their scopes: system, resources, entities, entities with a resource.
    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>>;

    /// Applies all of these changes, or none, and returns their version. Removing a policy that does not
    /// exist is no error, unless a version was expected.
    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version>;
}

/// Checks the name of an actor.
///
/// # Errors
/// [`StoreError::Invalid`] for a name that is empty, too long or has control characters.
pub(crate) fn check_actor(actor: &str) -> Result<(), StoreError> {
    if actor.is_empty() || actor.len() > ACTOR_MAX || actor.contains(char::is_control) {
        let what =
            format!("an actor of {} bytes, outside 1..={ACTOR_MAX} without control characters", actor.len());
        return Err(StoreError::Invalid { what });
    }
    Ok(())
}

/// Checks that policies are for scopes that cover their pools, and that the engine can count in these.
///
/// # Errors
/// [`StoreError::Invalid`] with the limit and the reason.
pub(crate) fn check_pools(
    changes: &[PolicyChange],
    refusal: impl Fn(Across) -> Option<&'static str>,
) -> Result<(), StoreError> {
    for (scope, policy) in changes.iter().filter_map(|change| Some((&change.scope, change.policy.as_ref()?)))
    {
        policy.check_scope(scope).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        for rule in policy.rules() {
            if let Some((across, why)) = rule.across().and_then(|across| Some((across, refusal(across)?))) {
                let what = format!("the limit `{}` cannot count across={across}: {why}", rule.name());
                return Err(StoreError::Invalid { what });
            }
        }
    }
    Ok(())
}

/// Checks `changes` against the current versions and returns those that change something.
///
/// # Errors
/// [`StoreError::Stale`] for an expectation that does not hold, [`StoreError::Invalid`] for a scope that is
/// changed twice, and errors of the lookup.
pub(crate) fn check_changes(
    changes: &[PolicyChange],
    mut version_at: impl FnMut(&Scope) -> Result<Option<Version>, StoreError>,
) -> Result<Vec<&PolicyChange>, StoreError> {
    let (mut scopes, mut made) = (BTreeSet::new(), Vec::with_capacity(changes.len()));
    for change in changes {
        let current = version_at(&change.scope)?;
        if !change.expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the policy for {}", change.scope), current });
        }
        if !scopes.insert(&change.scope) {
            let what = format!("the policy for {} is changed twice at once", change.scope);
            return Err(StoreError::Invalid { what });
        }
        // Removing a policy that does not exist changes nothing.
        if change.policy.is_some() || current.is_some() {
            made.push(change);
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_checked_and_no_ops_are_dropped() {
        let current = |scope: &Scope| Ok((*scope == Scope::System).then_some(Version::new(4)));
        let resource = Scope::Resource(ResourceName::new("gpt").unwrap());
        let change = |scope: &Scope, expect, policy| PolicyChange { scope: scope.clone(), expect, policy };
        let write = change(&Scope::System, Expect::Version(Version::new(4)), Some(Policy::default()));
        let nothing = change(&resource, Expect::Absent, None);
        let both = [write.clone(), nothing.clone()];
        assert_eq!(check_changes(&both, current).unwrap(), [&write]);
        let removal = [change(&Scope::System, Expect::Any, None)];
        assert_eq!(check_changes(&removal, current).unwrap(), [&removal[0]]);

        let stale = [write.clone(), change(&resource, Expect::Version(Version::new(1)), None)];
        let error = check_changes(&stale, current).unwrap_err().to_string();
        assert_eq!(error, "the policy for resource gpt is not as expected: it does not exist");
        let error = check_changes(&[nothing.clone(), write, nothing], current).unwrap_err().to_string();
        assert_eq!(error, "the policy for resource gpt is changed twice at once");
        let unavailable = |_: &Scope| Err(StoreError::unavailable("gone"));
        assert!(check_changes(&both, unavailable).unwrap_err().is_transient());
    }

    #[test]
    fn invalid_actor_name_is_rejected() {
        assert!(check_actor(&"x".repeat(256)).is_ok());
        for bad in ["", "a\nb", &"x".repeat(257)] {
            assert!(check_actor(bad).is_err(), "{bad}");
        }
    }
}
