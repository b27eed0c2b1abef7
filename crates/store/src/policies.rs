//! Policies: what is written at which scope.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidegate_core::limit::audit::{About, Change};
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};

use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// An actor's name has at most so many bytes.
const ACTOR_MAX: usize = 256;

/// A policy to be written or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyChange {
    /// Where.
    pub scope: Scope,
    /// What the writer believes to be there.
    pub expect: Expect,
    /// What is to be there; `None` removes it.
    pub policy: Option<Policy>,
}

/// Policies as they were read.
#[derive(Debug, Clone)]
pub struct Written {
    /// The count of changes as of which they hold.
    pub version: Version,
    /// One for each scope that was asked for, in that order.
    pub policies: Vec<Option<Versioned<Arc<Policy>>>>,
}

/// What has changed since a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The version that this is as of.
    pub version: Version,
    /// The changes, oldest first.
    pub about: Vec<About>,
}

/// Entries at the end of the audit that are searched for changes.
pub(crate) const CHANGED_MAX: usize = 64;

impl Changed {
    /// The changes after `since`, from the last entries of the audit as of `version`. `None` if they do not reach back to
    /// `since`.
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
    /// Those of entities for a resource: who has limits of its own there.
    Custom(ResourceName),
}

/// Policies by scope.
///
/// # The contract
/// Every change raises the namespace's [`Version`] by one, and what it wrote carries that version. A change whose
/// expectation does not hold is refused with the version that is there ([`Stale`](crate::StoreError::Stale)), and
/// then none of the changes it came with is made. What is made is in the audit, in the same transaction.
pub trait Policies {
    /// The policies at these scopes, in one round trip.
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written>;

    /// The count of changes.
    fn version(&self) -> Reply<'_, Version>;

    /// The changes after `since`, so that a cache of policies need not read the others again. `None` if they are not known:
    /// there were too many, or the audit does not reach back.
    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        let _ = since;
        Reply::ready(Ok(None))
    }

    /// Policies in the order of their scopes: system, resources, entities, entities with a resource.
    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>>;

    /// Makes all of these changes, or none, and answers the version they were made at. Removing what is not there
    /// is no error, unless something was expected.
    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version>;
}

/// Whether somebody of this name may make a change.
///
/// # Errors
/// [`StoreError::Invalid`] for a name that is empty, too long or holds control characters.
pub(crate) fn check_actor(actor: &str) -> Result<(), StoreError> {
    if actor.is_empty() || actor.len() > ACTOR_MAX || actor.contains(char::is_control) {
        let what =
            format!("an actor of {} bytes, outside 1..={ACTOR_MAX} without control characters", actor.len());
        return Err(StoreError::Invalid { what });
    }
    Ok(())
}

/// Those of `changes` that change something, if all may be made, given how to find the version that is there.
///
/// # Errors
/// [`StoreError::Stale`] for an expectation that does not hold, [`StoreError::Invalid`] for a scope that is changed
/// twice, and what the lookup answers.
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
        // To remove what is not there is nothing.
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
    fn changes_are_checked_together_and_those_that_change_nothing_are_left_out() {
        let there = |scope: &Scope| Ok((*scope == Scope::System).then_some(Version::new(4)));
        let resource = Scope::Resource(ResourceName::new("gpt").unwrap());
        let change = |scope: &Scope, expect, policy| PolicyChange { scope: scope.clone(), expect, policy };
        let write = change(&Scope::System, Expect::Version(Version::new(4)), Some(Policy::default()));
        let nothing = change(&resource, Expect::Absent, None);
        let both = [write.clone(), nothing.clone()];
        assert_eq!(check_changes(&both, there).unwrap(), [&write]);
        let removal = [change(&Scope::System, Expect::Any, None)];
        assert_eq!(check_changes(&removal, there).unwrap(), [&removal[0]]);

        let stale = [write.clone(), change(&resource, Expect::Version(Version::new(1)), None)];
        let error = check_changes(&stale, there).unwrap_err().to_string();
        assert_eq!(error, "the policy for resource gpt is not as expected: it is not there");
        let error = check_changes(&[nothing.clone(), write, nothing], there).unwrap_err().to_string();
        assert_eq!(error, "the policy for resource gpt is changed twice at once");
        let away = |_: &Scope| Err(StoreError::unavailable("gone"));
        assert!(check_changes(&both, away).unwrap_err().is_transient());
    }

    #[test]
    fn an_actor_has_a_name() {
        assert!(check_actor(&"x".repeat(256)).is_ok());
        for bad in ["", "a\nb", &"x".repeat(257)] {
            assert!(check_actor(bad).is_err(), "{bad}");
        }
    }
}
