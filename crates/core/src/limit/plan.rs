//! From declared policies to the changes that make them so.
//!
//! A [`Plan`] compares what is written with what is declared, and holds a [`Step`] for each scope that differs, in the
//! order of scopes. Each step knows what it expects to find, so that a plan is refused by a store that has changed
//! since it was read. Shown as text, a plan is a diff for people to read before they say yes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::limit::policy::{Expect, OnExpiry, OnUnavailable, Policy, Scope, Versioned};

/// What becomes of policies that are written and not declared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Extra {
    /// They stay.
    #[default]
    Keep,
    /// They are removed.
    Prune,
}

/// The changes that make what is written what is declared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    steps: Vec<Step>,
}

/// The change of one scope. At least one of the two is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where.
    pub scope: Scope,
    /// What is written there.
    pub before: Option<Versioned<Arc<Policy>>>,
    /// What is to be there; `None` removes it.
    pub after: Option<Policy>,
}

/// Two policies are declared for one scope.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the policy of `{scope}` is declared twice")]
pub struct DeclaredTwice {
    /// Which one.
    pub scope: Scope,
}

/// What is written at a scope, and what is declared there.
type Sides<'a> = (Option<&'a Versioned<Arc<Policy>>>, Option<&'a Policy>);

/// Plans the changes that make `current` what is `declared`, in the order of scopes.
///
/// Policies that differ only in the order of their limits are the same.
///
/// # Errors
/// [`DeclaredTwice`] names the first scope that is declared more than once.
pub fn plan(
    current: &[(Scope, Versioned<Arc<Policy>>)],
    declared: &[(Scope, Policy)],
    extra: Extra,
) -> Result<Plan, DeclaredTwice> {
    let mut scopes: BTreeMap<&Scope, Sides<'_>> = BTreeMap::new();
    for (scope, policy) in declared {
        if scopes.entry(scope).or_default().1.replace(policy).is_some() {
            return Err(DeclaredTwice { scope: scope.clone() });
        }
    }
    for (scope, policy) in current {
        scopes.entry(scope).or_default().0 = Some(policy);
    }
    let differs = |(before, after): &Sides<'_>| match (before, after) {
        (Some(before), Some(after)) => !is_same(&before.value, after),
        (Some(_), None) => extra == Extra::Prune,
        (None, _) => true,
    };
    let step = |(scope, (before, after)): (&Scope, Sides<'_>)| Step {
        scope: scope.clone(),
        before: before.cloned(),
        after: after.cloned(),
    };
    let steps = scopes.into_iter().filter(|(_, sides)| differs(sides)).map(step);
    Ok(Plan { steps: steps.collect() })
}

impl Plan {
    /// The changes, in the order of their scopes.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The changes, to be made.
    pub fn into_steps(self) -> Vec<Step> {
        self.steps
    }

    /// Whether all is as declared.
    pub const fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl Step {
    /// What must still be there for the step to be made.
    pub fn expect(&self) -> Expect {
        self.before.as_ref().map_or(Expect::Absent, |before| Expect::Version(before.version))
    }
}

impl fmt::Display for Plan {
    /// Each step on lines of its own.
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
    /// The scope after `+`, `~` or `-`, and below it what is added, changed and removed there.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (self.before.as_ref().map(|before| &*before.value), self.after.as_ref());
        let sign = match (before, after) {
            (None, _) => '+',
            (Some(_), Some(_)) => '~',
            (Some(_), None) => '-',
        };
        write!(f, "{sign} {}", self.scope)?;
        let (before, after) = (before.map(said).unwrap_or_default(), after.map(said).unwrap_or_default());
        for (key, text) in &after {
            match before.iter().find(|(other, _)| other == key) {
                Some((_, old)) if old == text => {}
                Some((_, old)) => write!(f, "\n    ~ {old} -> {text}")?,
                None => write!(f, "\n    + {text}")?,
            }
        }
        let is_gone = |key: &str| after.iter().all(|(other, _)| other != key);
        before.iter().filter(|(key, _)| is_gone(key)).try_for_each(|(_, text)| write!(f, "\n    - {text}"))
    }
}

/// Whether two policies say the same, in whatever order.
fn is_same(one: &Policy, other: &Policy) -> bool {
    let behave = |policy: &Policy| (policy.is_only(), policy.unavailable(), policy.expiry());
    // Each name is in a policy once: as many, and each of them there, is the same.
    behave(one) == behave(other)
        && one.rules().len() == other.rules().len()
        && one.rules().iter().all(|rule| other.rules().contains(rule))
}

/// What a policy says, line by line: what it is about, and the whole of it. No limit's name holds a space.
fn said(policy: &Policy) -> Vec<(String, String)> {
    let mut lines: Vec<(String, String)> =
        policy.rules().iter().map(|rule| (rule.name().to_string(), rule.to_string())).collect();
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
    fn a_plan_tells_what_is_added_changed_and_removed_in_the_order_of_scopes() {
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
            // The same limits in another order are no change.
            (resource.clone(), policy(&["tpm:2/s", "rpm:1/s"])),
        ];
        let pruned = plan(&current, &declared, Extra::Prune).unwrap();
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
        let kept = plan(&current, &declared, Extra::Keep).unwrap();
        assert_eq!(kept.steps(), &pruned.steps()[..2]);
    }

    #[test]
    fn a_plan_of_what_is_there_is_empty() {
        let current = scopes().map(|scope| written(&scope, 1, policy(&["rpm:5/s"])));
        let declared = scopes().map(|scope| (scope, policy(&["rpm:5/s:5"])));
        let plan = plan(&current, &declared, Extra::Prune).unwrap();
        assert!(plan.is_empty());
        assert_eq!(plan.to_string(), "nothing to change");
    }

    #[test]
    fn what_is_planned_and_made_leaves_nothing_to_plan() {
        let [system, resource, entity, _] = scopes();
        let current = [written(&system, 1, policy(&["a:1/s"])), written(&resource, 2, policy(&["b:1/s"]))];
        let declared = [(resource, policy(&["b:2/s"])), (entity, policy(&[]))];
        let steps = plan(&current, &declared, Extra::Prune).unwrap().into_steps();
        let made: Vec<_> =
            steps.into_iter().filter_map(|step| Some(written(&step.scope, 3, step.after?))).collect();
        assert!(plan(&made, &declared, Extra::Prune).unwrap().is_empty());
    }

    #[test]
    fn each_way_to_behave_is_a_change_and_is_shown() {
        let limits = policy(&["rpm:5/s"]);
        let table = [
            (limits.clone().only(), "+ only = true"),
            (limits.clone().on_unavailable(OnUnavailable::Block), "+ on_unavailable = \"block\""),
            (limits.clone().on_unavailable(OnUnavailable::Allow), "+ on_unavailable = \"allow\""),
            (limits.clone().on_expiry(OnExpiry::Settle), "+ on_expiry = \"settle\""),
        ];
        for (declared, line) in table {
            let current = [written(&Scope::System, 1, limits.clone())];
            let plan = plan(&current, &[(Scope::System, declared)], Extra::Keep).unwrap();
            assert_eq!(plan.to_string(), format!("~ system\n    {line}"));
        }
    }

    #[test]
    fn a_scope_declared_twice_is_refused() {
        let [_, _, entity, _] = scopes();
        let declared = [(entity.clone(), policy(&[])), (entity, policy(&[]))];
        let error = plan(&[], &declared, Extra::Keep).unwrap_err();
        assert_eq!(error.to_string(), "the policy of `entity acme` is declared twice");
    }
}
