//! The changes that turn the stored policies into the declared ones.
//!
//! [`PolicyChanges`] has one [`Step`] for each scope whose policy differs, in the order of scopes. Each step
//! carries the version it expects, so that a store that has changed since it was read rejects it (optimistic
//! locking). Displayed, the changes are a diff to review before they are applied.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::limit::name::LimitKey;
use crate::limit::policy::{Expect, OnExpiry, OnUnavailable, Policy, Scope, Versioned};
use crate::limit::rule::Rule;

/// What to do with stored policies that are not declared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Undeclared {
    /// Leave them as they are.
    #[default]
    Keep,
    /// Remove them.
    Prune,
}

/// The changes that turn the stored policies into the declared ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyChanges {
    steps: Vec<Step>,
}

/// The change of one scope. At least one of `before` and `after` is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The scope.
    pub scope: Scope,
    /// The stored policy; `None` if there is none.
    pub before: Option<Versioned<Arc<Policy>>>,
    /// The declared policy; `None` removes the stored one.
    pub after: Option<Policy>,
}

/// The error for two policies that are declared for one scope.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the policy of `{scope}` is declared twice")]
pub struct DuplicateScope {
    /// The scope.
    pub scope: Scope,
}

/// The stored and the declared policy of a scope.
type Sides<'a> = (Option<&'a Versioned<Arc<Policy>>>, Option<&'a Policy>);

/// Computes the changes that turn `current` into `declared`, in the order of scopes.
///
/// Policies that differ only in the order of their limits are equal.
///
/// # Errors
/// [`DuplicateScope`] names the first scope that is declared more than once.
pub fn plan(
    current: &[(Scope, Versioned<Arc<Policy>>)],
    declared: &[(Scope, Policy)],
    extra: Undeclared,
) -> Result<PolicyChanges, DuplicateScope> {
    let mut scopes: BTreeMap<&Scope, Sides<'_>> = BTreeMap::new();
    for (scope, policy) in declared {
        if scopes.entry(scope).or_default().1.replace(policy).is_some() {
            return Err(DuplicateScope { scope: scope.clone() });
        }
    }
    for (scope, policy) in current {
        scopes.entry(scope).or_default().0 = Some(policy);
    }
    let differs = |(before, after): &Sides<'_>| match (before, after) {
        (Some(before), Some(after)) => !is_same(&before.value, after),
        (Some(_), None) => extra == Undeclared::Prune,
        (None, _) => true,
    };
    let step = |(scope, (before, after)): (&Scope, Sides<'_>)| Step {
        scope: scope.clone(),
        before: before.cloned(),
        after: after.cloned(),
    };
    let steps = scopes.into_iter().filter(|(_, sides)| differs(sides)).map(step);
    Ok(PolicyChanges { steps: steps.collect() })
}

impl PolicyChanges {
    /// The changes, in the order of their scopes.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The changes, by value.
    pub fn into_steps(self) -> Vec<Step> {
        self.steps
    }

    /// Whether the stored policies are already as declared.
    pub const fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl Step {
    /// The version that must still be stored when the step is applied.
    pub fn expect(&self) -> Expect {
        self.before.as_ref().map_or(Expect::Absent, |before| Expect::Version(before.version))
    }
}

impl fmt::Display for PolicyChanges {
    /// The steps, each starting on its own line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steps.is_empty() {
            return f.write_str("nothing to change");
        }
        for (number, step) in self.steps.iter().enumerate() {
            let line = if number > 0 { "\n" } else { "" };
            write!(f, "{line}{step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    /// `+`, `~` or `-` and the scope, followed by the lines that are added, changed and removed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (self.before.as_ref().map(|before| &*before.value), self.after.as_ref());
        let sign = match (before, after) {
            (None, _) => '+',
            (Some(_), Some(_)) => '~',
            (Some(_), None) => '-',
        };
        write!(f, "{sign} {}", self.scope)?;
        let (before, after) =
            (before.map(lines_of).unwrap_or_default(), after.map(lines_of).unwrap_or_default());
        for (key, text) in &after {
            match before.iter().find(|(other, _)| other == key) {
                Some((_, old)) if old == text => {}
                Some((_, old)) => write!(f, "\n    ~ {old} -> {text}")?,
                None => write!(f, "\n    + {text}")?,
            }
        }
        let is_removed = |key: &str| after.iter().all(|(other, _)| other != key);
        before.iter().filter(|(key, _)| is_removed(key)).try_for_each(|(_, text)| write!(f, "\n    - {text}"))
    }
}

/// Whether two policies are equal, regardless of the order of their limits.
fn is_same(one: &Policy, other: &Policy) -> bool {
    let behave = |policy: &Policy| (policy.is_only(), policy.unavailable(), policy.expiry());
    // Limits are unique within a policy, so equal length and inclusion mean equal sets.
    behave(one) == behave(other)
        && one.rules().len() == other.rules().len()
        && one.rules().iter().all(|rule| other.rules().contains(rule))
}

/// The lines of a policy: a key and the text. The key of a limit never contains a space, so the keys of settings
/// do.
fn lines_of(policy: &Policy) -> Vec<(String, String)> {
    let key = |rule: &Rule| LimitKey { name: rule.name().clone(), across: rule.across() }.to_string();
    let mut lines: Vec<(String, String)> =
        policy.rules().iter().map(|rule| (key(rule), rule.to_string())).collect();
    let mut behaves = |what: &str, how: String| lines.push((format!("{what} "), format!("{what} = {how}")));
    if policy.is_only() {
        behaves("only", "true".to_owned());
    }
    if let Some(behaviour) = policy.unavailable() {
        let how = match behaviour {
            OnUnavailable::Block => "\"block\"".to_owned(),
            OnUnavailable::Allow => "\"allow\"".to_owned(),
            OnUnavailable::LocalShare(share) => format!("{{ local_share = {:?} }}", share.fraction()),
        };
        behaves("on_unavailable", how);
    }
    if let Some(behaviour) = policy.expiry() {
        let how = match behaviour {
            OnExpiry::Settle => "\"settle\"",
            OnExpiry::Return => "\"return\"",
        };
        behaves("on_expiry", how.to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::name::Subject;
    use crate::limit::policy::{Share, Version};
    use crate::limit::rule::Limit;

    fn policy(limits: &[&str]) -> Policy {
        Policy::new(limits.iter().map(|text| text.parse::<Limit>().expect("a limit"))).expect("a policy")
    }

    fn scopes() -> [Scope; 4] {
        let subject = Subject::new("acme", "gpt").expect("valid");
        [
            Scope::System,
            Scope::Resource(subject.resource.clone()),
            Scope::Entity(subject.entity.clone()),
            Scope::Subject(subject),
        ]
    }

    fn written(scope: &Scope, version: u64, policy: Policy) -> (Scope, Versioned<Arc<Policy>>) {
        (scope.clone(), Versioned { version: Version::new(version), value: Arc::new(policy) })
    }

    #[test]
    fn changes_are_listed_as_a_diff_in_scope_order() {
        let [system, resource, entity, subject] = scopes();
        let current = [
            written(&subject, 7, policy(&["rpm:5/s"]).only()),
            written(&system, 3, policy(&["rpm:1k/min", "tpm:5/min", "usd:9/day"])),
            written(&resource, 4, policy(&["rpm:1/s", "tpm:2/s"])),
        ];
        let share = OnUnavailable::LocalShare(Share::new(0.2).unwrap());
        let declared = [
            (entity.clone(), policy(&["tpm:100k/min:150k"]).only().on_expiry(OnExpiry::Return)),
            (system.clone(), policy(&["tpm:5/min", "rpm:2k/min", "jobs:1/h"]).on_unavailable(share)),
            // Reordered limits are not a change.
            (resource.clone(), policy(&["tpm:2/s", "rpm:1/s"])),
        ];
        let pruned = plan(&current, &declared, Undeclared::Prune).unwrap();
        assert_eq!(
            pruned.to_string(),
            "~ system\n    ~ rpm:1k/min -> rpm:2k/min\n    + jobs:1/h\n    \
             + on_unavailable = { local_share = 0.2 }\n    - usd:9/day\n\
             + entity acme\n    + tpm:100k/min:150k\n    + only = true\n    + on_expiry = \"return\"\n\
             - entity acme, resource gpt\n    - rpm:5/s\n    - only = true"
        );
        let expects: Vec<Expect> = pruned.steps().iter().map(Step::expect).collect();
        let version = |number| Expect::Version(Version::new(number));
        assert_eq!(expects, [version(3), Expect::Absent, version(7)]);
        let kept = plan(&current, &declared, Undeclared::Keep).unwrap();
        assert_eq!(kept.steps(), &pruned.steps()[..2]);
    }

    #[test]
    fn equal_policies_need_no_changes() {
        let current = scopes().map(|scope| written(&scope, 1, policy(&["rpm:5/s"])));
        let declared = scopes().map(|scope| (scope, policy(&["rpm:5/s:5"])));
        let changes = plan(&current, &declared, Undeclared::Prune).unwrap();
        assert!(changes.is_empty());
        assert_eq!(changes.to_string(), "nothing to change");
    }

    #[test]
    fn applied_changes_leave_nothing_to_change() {
        let [system, resource, entity, _] = scopes();
        let current = [written(&system, 1, policy(&["a:1/s"])), written(&resource, 2, policy(&["b:1/s"]))];
        let declared = [(resource, policy(&["b:2/s"])), (entity, policy(&[]))];
        let steps = plan(&current, &declared, Undeclared::Prune).unwrap().into_steps();
        let made: Vec<_> =
            steps.into_iter().filter_map(|step| Some(written(&step.scope, 3, step.after?))).collect();
        assert!(plan(&made, &declared, Undeclared::Prune).unwrap().is_empty());
    }

    #[test]
    fn each_setting_is_a_change_and_is_shown() {
        let limits = policy(&["rpm:5/s"]);
        let table = [
            (limits.clone().only(), "+ only = true"),
            (limits.clone().on_unavailable(OnUnavailable::Block), "+ on_unavailable = \"block\""),
            (limits.clone().on_unavailable(OnUnavailable::Allow), "+ on_unavailable = \"allow\""),
            (limits.clone().on_expiry(OnExpiry::Settle), "+ on_expiry = \"settle\""),
        ];
        for (declared, line) in table {
            let current = [written(&Scope::System, 1, limits.clone())];
            let changes = plan(&current, &[(Scope::System, declared)], Undeclared::Keep).unwrap();
            assert_eq!(changes.to_string(), format!("~ system\n    {line}"));
        }
    }

    #[test]
    fn a_scope_declared_twice_is_refused() {
        let [_, _, entity, _] = scopes();
        let declared = [(entity.clone(), policy(&[])), (entity, policy(&[]))];
        let error = plan(&[], &declared, Undeclared::Keep).unwrap_err();
        assert_eq!(error.to_string(), "the policy of `entity acme` is declared twice");
    }
}
