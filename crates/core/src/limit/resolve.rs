//! The effective limits of a subject: for each limit name and each kind of pool, the narrowest scope that
//! defines it. A subject's own limit does not replace a pooled one of the same name: both apply.

use std::fmt;
use std::sync::Arc;

use crate::limit::name::Subject;
use crate::limit::policy::{OnExpiry, OnUnavailable, Policy, Scope};
use crate::limit::rule::Rule;

/// The four scopes that apply to a subject, the narrowest first.
pub fn scopes(subject: &Subject) -> [Scope; 4] {
    [
        Scope::Subject(subject.clone()),
        Scope::Entity(subject.entity.clone()),
        Scope::Resource(subject.resource.clone()),
        Scope::System,
    ]
}

/// Where a limit or a setting comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A policy at this scope.
    Policy(Scope),
    /// The limiter's own defaults.
    Defaults,
    /// The call itself.
    Call,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(scope) => write!(f, "{scope}"),
            Self::Defaults => f.write_str("defaults"),
            Self::Call => f.write_str("this call"),
        }
    }
}

/// An effective limit and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveLimit {
    /// The limit.
    pub rule: Arc<Rule>,
    /// Where it comes from.
    pub source: Source,
}

/// The effective limits and settings of one subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveLimits {
    /// The limits, those of the narrowest scope first. A name occurs once for the subject's own bucket, and once
    /// for each kind of pool.
    pub limits: Vec<EffectiveLimit>,
    /// What an acquire does when the store is unavailable, and the source of the setting.
    pub on_unavailable: (OnUnavailable, Source),
    /// What to do with a lease that is never ended, and the source of the setting.
    pub on_expiry: (OnExpiry, Source),
}

/// Resolves a subject's four policies, given in the order of [`scopes`], over `defaults`.
///
/// A policy with `only` ends the search for limits, but not for settings.
pub fn resolve(subject: &Subject, policies: [Option<&Policy>; 4], defaults: &Policy) -> EffectiveLimits {
    let written = scopes(subject).into_iter().map(Source::Policy).zip(policies);
    let written = written.filter_map(|(source, policy)| Some((source, policy?)));
    let mut resolved = EffectiveLimits {
        limits: Vec::new(),
        on_unavailable: (OnUnavailable::default(), Source::Defaults),
        on_expiry: (OnExpiry::default(), Source::Defaults),
    };
    let (mut cut, mut unavailable, mut expiry) = (false, None, None);
    for (source, policy) in written.chain([(Source::Defaults, defaults)]) {
        if !cut {
            for rule in policy.rules() {
                if resolved.limits.iter().all(|held| !held.rule.counts_like(rule)) {
                    resolved.limits.push(EffectiveLimit { rule: Arc::clone(rule), source: source.clone() });
                }
            }
        }
        cut |= policy.is_only();
        unavailable = unavailable.or_else(|| policy.unavailable().map(|setting| (setting, source.clone())));
        expiry = expiry.or_else(|| policy.expiry().map(|setting| (setting, source.clone())));
    }
    if let Some(setting) = unavailable {
        resolved.on_unavailable = setting;
    }
    if let Some(setting) = expiry {
        resolved.on_expiry = setting;
    }
    resolved
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::rule::Limit;

    fn policy(limits: &[(&str, u64)]) -> Policy {
        Policy::new(limits.iter().map(|(name, amount)| Limit::per_minute(*name, *amount))).expect("valid")
    }

    fn shown(resolved: &EffectiveLimits) -> Vec<(String, u64, String)> {
        let limits = resolved.limits.iter();
        let row = |held: &EffectiveLimit| {
            (held.rule.name().to_string(), held.rule.shape().amount(), held.source.to_string())
        };
        limits.map(row).collect()
    }

    fn row(name: &str, amount: u64, source: &str) -> (String, u64, String) {
        (name.to_owned(), amount, source.to_owned())
    }

    #[test]
    fn the_narrowest_scope_wins_for_each_limit_name() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let own = policy(&[("a", 1)]);
        let entity = policy(&[("a", 2), ("b", 2)]);
        let resource = policy(&[("a", 3), ("b", 3), ("c", 3)]);
        let system = policy(&[("a", 4), ("b", 4), ("c", 4), ("d", 4)]);
        let defaults = policy(&[("d", 5), ("e", 5)]);
        let all = resolve(&subject, [Some(&own), Some(&entity), Some(&resource), Some(&system)], &defaults);
        let expected = [
            row("a", 1, "entity acme, resource gpt"),
            row("b", 2, "entity acme"),
            row("c", 3, "resource gpt"),
            row("d", 4, "system"),
            row("e", 5, "defaults"),
        ];
        assert_eq!(shown(&all), expected);
        assert!(resolve(&subject, [None; 4], &Policy::default()).limits.is_empty());
    }

    #[test]
    fn only_drops_the_limits_of_wider_scopes() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let own = policy(&[("rpm", 1)]);
        let resource = policy(&[("rpm", 9), ("tpm", 9)]).on_unavailable(OnUnavailable::Allow);
        let inherited = resolve(&subject, [Some(&own), None, Some(&resource), None], &Policy::default());
        assert_eq!(
            shown(&inherited),
            [row("rpm", 1, "entity acme, resource gpt"), row("tpm", 9, "resource gpt")]
        );
        let own = own.only();
        let cut = resolve(&subject, [Some(&own), None, Some(&resource), None], &policy(&[("tpm", 5)]));
        assert_eq!(shown(&cut), [row("rpm", 1, "entity acme, resource gpt")]);
        // Settings are still inherited.
        assert_eq!(cut.on_unavailable.0, OnUnavailable::Allow);
        assert_eq!(cut.on_unavailable.1.to_string(), "resource gpt");
    }

    #[test]
    fn own_limit_leaves_pooled_ones_of_its_name() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let policy = |texts: &[&str]| {
            Policy::new(texts.iter().map(|text| text.parse::<Limit>().expect("valid"))).expect("valid")
        };
        let own = policy(&["tpm:1/min"]);
        let entity = policy(&["tpm:2/min", "tpm:20/min,across=resources"]);
        let resource = policy(&["tpm:30/min,across=entities"]);
        let system = policy(&["tpm:4/min", "tpm:40/min,across=entities", "tpm:400/min,across=both"]);
        let scopes = [Some(&own), Some(&entity), Some(&resource), Some(&system)];
        let expected = [
            row("tpm", 1, "entity acme, resource gpt"),
            row("tpm", 20, "entity acme"),
            row("tpm", 30, "resource gpt"),
            row("tpm", 400, "system"),
        ];
        assert_eq!(shown(&resolve(&subject, scopes, &Policy::default())), expected);
        let cut = entity.only();
        let scopes = [Some(&own), Some(&cut), Some(&resource), Some(&system)];
        assert_eq!(shown(&resolve(&subject, scopes, &Policy::default())), expected[..2]);
    }

    #[test]
    fn narrowest_scope_with_a_setting_wins() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let entity = Policy::default().on_expiry(OnExpiry::Return);
        let system = Policy::default().on_expiry(OnExpiry::Settle).on_unavailable(OnUnavailable::Allow);
        let defaults = Policy::default().on_unavailable(OnUnavailable::Block);
        let resolved = resolve(&subject, [None, Some(&entity), None, Some(&system)], &defaults);
        assert_eq!(resolved.on_expiry.0, OnExpiry::Return);
        assert_eq!(resolved.on_unavailable, (OnUnavailable::Allow, Source::Policy(Scope::System)));
        let unset = resolve(&subject, [None; 4], &Policy::default());
        assert_eq!(unset.on_unavailable, (OnUnavailable::Block, Source::Defaults));
        assert_eq!(unset.on_expiry, (OnExpiry::Settle, Source::Defaults));
    }
}
