//! Tests of rules and their matches.

use tidegate_core::limit::name::NAME_MAX;

use super::*;
use crate::rls::config::EntryConfig;

/// Keys and values.
type Entries<'a> = &'a [(&'a str, &'a str)];

fn entry(key: &str, value: &str) -> EntryConfig {
    EntryConfig { key: key.to_owned(), value: value.to_owned() }
}

fn rule(entries: &[(&str, &str)], entity: &str, resource: &str) -> RuleConfig {
    RuleConfig {
        entries: entries.iter().map(|(key, value)| entry(key, value)).collect(),
        entity: Some(entity.to_owned()),
        resource: Some(resource.to_owned()),
        ..RuleConfig::default()
    }
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

/// Returns the subject that a descriptor draws from, or why it does not.
fn found(rules: &EnvoyRules, domain: &str, entries: &[(&str, &str)]) -> String {
    match rules.resolve(domain, &descriptor(entries), 1) {
        RuleMatch::Unlimited => "unlimited".to_owned(),
        RuleMatch::Unknown(_) => "unknown".to_owned(),
        RuleMatch::Draw(draw) => format!("{}: {}", draw.rule.number, draw.subject),
        RuleMatch::Invalid { why, is_shadow: false } => why,
        RuleMatch::Invalid { why, is_shadow: true } => format!("shadow: {why}"),
    }
}

#[test]
fn first_rule_matching_all_entries_in_order_wins() {
    let rules = EnvoyRules::new(
        Unknown::Allow,
        &[
            RuleConfig { unlimited: true, ..rule_of(&[("user", "root")]) },
            RuleConfig { domain: Some("web".to_owned()), ..rule(&[("user", "*")], "web {user}", "shop") },
            rule(&[("user", "*")], "{user}", "shop"),
            rule(&[("path", "/api/*"), ("ip", "*")], "key {ip} of {path}!", "{path}"),
            rule(&[("path", "/"), ("ip", "*")], "everybody", "front page"),
            rule(&[("empty", "")], "no value", "x"),
            RuleConfig { unlimited: true, ..rule_of(&[("free", "*")]) },
            RuleConfig { shadow: true, ..rule(&[("try", "*"), ("rest", "*")], "{try}", "x") },
        ],
    )
    .unwrap();
    let long = "x".repeat(VALUE_MAX + 1);
    let table: [(&str, Entries<'_>, &str); 20] = [
        ("web", &[("user", "root")], "unlimited"),
        ("web", &[("user", "ada")], "2: web ada on shop"),
        ("else", &[("user", "ada")], "3: ada on shop"),
        ("", &[("user", "")], "the entity `` is empty"),
        ("", &[("user", "a#b")], "the entity `a#b` has '#' at byte 1, which is not allowed"),
        ("else", &[("user", "ada"), ("user", "ada")], "unknown"),
        ("else", &[("User", "ada")], "unknown"),
        ("web", &[("path", "/api/v1"), ("ip", "::1")], "4: key ::1 of /api/v1! on /api/v1"),
        ("web", &[("path", "/api/"), ("ip", "{path}")], "4: key {path} of /api/! on /api/"),
        ("web", &[("ip", "::1"), ("path", "/api/v1")], "unknown"),
        ("web", &[("path", "/"), ("ip", "::1")], "5: everybody on front page"),
        ("web", &[("path", "/other"), ("ip", "::1")], "unknown"),
        ("web", &[("empty", "")], "6: no value on x"),
        ("web", &[("empty", "not")], "unknown"),
        ("web", &[("user", &long)], "the entry `user` has 1025 bytes, more than 1024"),
        // Values that no template uses are unbounded, and shadow rules never refuse.
        ("web", &[("free", &long)], "unlimited"),
        ("web", &[("unknown", &long)], "unknown"),
        ("web", &[("path", "/"), ("ip", &long)], "5: everybody on front page"),
        ("web", &[("try", "a"), ("rest", &long)], "8: a on x"),
        ("web", &[("try", &long), ("rest", "")], "shadow: the entry `try` has 1025 bytes, more than 1024"),
    ];
    for (domain, entries, expected) in table {
        assert_eq!(found(&rules, domain, entries), expected, "{domain} {entries:?}");
    }
    assert_eq!((rules.len(), rules.is_empty()), (8, false));
}

fn rule_of(entries: &[(&str, &str)]) -> RuleConfig {
    RuleConfig { entity: None, resource: None, ..rule(entries, "", "") }
}

#[test]
fn ambiguous_template_values_are_invalid() {
    let keys = [("tenant", "*"), ("user", "*"), ("zone", "eu")];
    let found_by = |entity: &str, tenant: &str, user: &str| {
        let rules = EnvoyRules::new(Unknown::Allow, &[rule(&keys, entity, "x")]).unwrap();
        found(&rules, "", &[("tenant", tenant), ("user", user), ("zone", "eu")])
    };
    let ends = |end: &str| format!("the entry `tenant` contains `{end}`, which separates it in its rule");
    let table = [
        ("{tenant}:{user}", "a", "b:c", "1: a:b:c on x".to_owned()),
        ("{tenant}:{user}", "a:b", "c", ends(":")),
        ("{tenant}::{user}", "a:", "b", ends("::")),
        ("{tenant}::{user}", "a", ":b", "1: a:::b on x".to_owned()),
        ("{tenant}::{user}", "a:c", "b", "1: a:c::b on x".to_owned()),
        ("{tenant}-{zone}-{user}", "a-eu-b", "c", ends("-eu-")),
        ("{tenant}-{zone}-{user}", "a-b", "c", "1: a-b-eu-c on x".to_owned()),
        // A single value and the last value are never ambiguous.
        ("{tenant}:{zone}", "a:b", "", "1: a:b:eu on x".to_owned()),
        ("{tenant}:{user}!", "a", "b!", "1: a:b!! on x".to_owned()),
        ("{zone}{user}", "", "b", "1: eub on x".to_owned()),
    ];
    for (entity, tenant, user, expected) in table {
        assert_eq!(found_by(entity, tenant, user), expected, "{entity} {tenant} {user}");
    }
}

#[test]
fn hits_multiply_rule_cost() {
    let cost = [("requests".to_owned(), 2), ("tokens".to_owned(), 1 << 39)].into();
    let rules = [RuleConfig { cost, ..rule(&[("user", "*")], "{user}", "x") }];
    let rules = EnvoyRules::new(Unknown::Refuse, &rules).unwrap();
    let ask = |hits| match rules.resolve("", &descriptor(&[("user", "ada")]), hits) {
        RuleMatch::Draw(draw) => {
            Ok((draw.cost.iter().map(|(_, units)| *units).collect::<Vec<_>>(), draw.is_query()))
        }
        other => Err(format!("{other:?}")),
    };
    assert_eq!(ask(1), Ok((vec![2, 1 << 39], false)));
    assert_eq!(ask(2), Ok((vec![4, 1 << 40], false)));
    assert_eq!(ask(0), Ok((vec![2, 1 << 39], true)));
    assert!(ask(3).unwrap_err().contains("3 hits of 549755813888 `tokens` each are more than 1099511627776"));
    assert!(ask(u64::MAX).unwrap_err().contains("`requests`"));
}

#[test]
fn charge_and_hits_decide_what_is_asked() {
    use DrawAction::{Check, Draw, Query, Refund, Report};
    let table = [
        (Charge::Before, 0, false, Query, 3),
        (Charge::Before, 2, false, Draw, 6),
        (Charge::Before, 2, true, Refund, 6),
        (Charge::After, 0, false, Check, 1),
        (Charge::After, 2, false, Report, 6),
        (Charge::After, 2, true, Refund, 6),
    ];
    for (charge, hits, is_negative_hits, action, units) in table {
        let cost = [("tokens".to_owned(), 3)].into();
        let rules = [RuleConfig { cost, charge, ..rule(&[("user", "*")], "{user}", "x") }];
        let rules = EnvoyRules::new(Unknown::Refuse, &rules).unwrap();
        let descriptor = RateLimitDescriptor { is_negative_hits, ..descriptor(&[("user", "ada")]) };
        let RuleMatch::Draw(draw) = rules.resolve("", &descriptor, hits) else { panic!("it matches") };
        assert_eq!((draw.action, &draw.cost[..]), (action, &[("tokens", units)][..]), "{charge:?} {hits}");
    }
}

#[test]
fn request_limit_counts_hits_beside_the_rule() {
    let rules = EnvoyRules::new(Unknown::Refuse, &[rule(&[("user", "*")], "{user}", "x")]).unwrap();
    let bring = |requests_per_unit, unit: RateLimitUnit| {
        let limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into() });
        let descriptor = RateLimitDescriptor { limit, ..descriptor(&[("user", "ada")]) };
        match rules.resolve("", &descriptor, 4) {
            RuleMatch::Draw(draw) => {
                assert_eq!(draw.cost, [("requests", 4), ("override", 4)]);
                Ok(draw.limit.unwrap().check().unwrap().to_string())
            }
            RuleMatch::Invalid { why, .. } => Err(why),
            other => panic!("{other:?}"),
        }
    };
    for (unit, text) in [
        (RateLimitUnit::Second, "override:7/s"),
        (RateLimitUnit::Minute, "override:7/min"),
        (RateLimitUnit::Hour, "override:7/h"),
        (RateLimitUnit::Day, "override:7/day"),
        (RateLimitUnit::Month, "override:7/30d"),
        (RateLimitUnit::Year, "override:7/365d"),
    ] {
        assert_eq!(bring(7, unit).as_deref(), Ok(text));
    }
    assert!(bring(7, RateLimitUnit::Unknown).unwrap_err().contains("no unit"));
    assert!(bring(0, RateLimitUnit::Day).unwrap_err().contains("no hits"));
}

#[test]
fn invalid_rule_error_names_field_value_and_reason() {
    let user = || rule(&[("user", "*")], "{user}", "shop");
    let long = "x".repeat(NAME_MAX + 1);
    let table = [
        (rule(&[], "a", "b"), "`match` is `0 entries`: there are 1 to 16"),
        (rule(&[("", "*")], "a", "b"), "`match[0].key` is ``: it is empty"),
        (rule(&[("a", "x*y")], "a", "b"), "`match[0].value` is `x*y`: `*` is only allowed at the end"),
        (rule(&[("a", "**")], "a", "b"), "`match[0].value` is `**`: `*` is only allowed at the end"),
        (rule(&[("user", "*")], "{usr}", "b"), "`entity` is `{usr}`: `match` has no entry `usr`"),
        (rule(&[("user", "*")], "{user", "b"), "`entity` is `{user`: unbalanced brace"),
        (rule(&[("user", "*")], "a", "}"), "`resource` is `}`: unbalanced brace"),
        (rule(&[("k", "a"), ("k", "b")], "{k}", "b"), "`entity` is `{k}`: `match` has the entry `k` twice"),
        (rule(&[("user", "*")], "a#b", "b"), "`entity` is `a#b`: the entity `a#b` has '#' at byte 1"),
        (rule(&[("user", "*")], "a", &long), "more than 256"),
        (rule_of(&[("user", "*")]), "`entity` is ``: it is missing, and the rule is not `unlimited`"),
        (
            RuleConfig { cost: [("a b".to_owned(), 1)].into(), ..user() },
            "`cost.a b` is `a b`: the limit `a b` has ' '",
        ),
        (
            RuleConfig { cost: [("requests".to_owned(), 0)].into(), ..user() },
            "`cost.requests` is `0`: a hit costs 1 to 1099511627776",
        ),
        (RuleConfig { limits: vec!["requests".to_owned()], ..user() }, "`limits[0]` is `requests`: "),
        (
            RuleConfig { limits: vec!["a:1/s".to_owned(); 17], ..user() },
            "`limits` is `17 limits`: there are at most 16",
        ),
        (
            RuleConfig { limits: vec!["requests:5/min".to_owned(), "requests:9/h".to_owned()], ..user() },
            "`limits` is `requests:5/min, requests:9/h`: the limit `requests` is defined twice",
        ),
        (
            RuleConfig { limits: vec!["requests:5/min,across=both".to_owned()], ..user() },
            "the limit `requests` is given with a call and cannot count across=both: put it in a policy",
        ),
        (
            RuleConfig { limits: vec!["requests:5/min".to_owned(), "tokens:100/min".to_owned()], ..user() },
            "`limits[1]` is `tokens:100/min`: `cost` does not contain this limit, but `requests`",
        ),
        (
            rule(&[("a", "*"), ("b", "x*")], "{a}{b}", "x"),
            "`entity` is `{a}{b}`: two values need a text between them, or the split is ambiguous",
        ),
        (rule(&[("a", "x#")], "{a}", "x"), "`entity` is `{a}`: the entity `x#` has '#' at byte 1"),
        (
            RuleConfig { unlimited: true, ..user() },
            "`unlimited` is `true`: an unlimited rule cannot have `entity`",
        ),
        (
            RuleConfig { unlimited: true, shadow: true, ..rule_of(&[("user", "*")]) },
            "`unlimited` is `true`: an unlimited rule cannot have `shadow`",
        ),
    ];
    check_errors(table);
    let many = vec![user(); RULES_MAX + 1];
    let error = EnvoyRules::new(Unknown::Allow, &many).unwrap_err();
    assert_eq!(error.to_string(), "1001 rules, more than 1000");
}

/// Asserts that each rule is refused with this sentence.
fn check_errors<const COUNT: usize>(table: [(RuleConfig, &str); COUNT]) {
    for (wrong, sentence) in table {
        let rules = [rule(&[("user", "*")], "{user}", "shop"), wrong];
        let error = EnvoyRules::new(Unknown::Allow, &rules).unwrap_err().to_string();
        assert!(error.starts_with("rule 2: ") && error.contains(sentence), "{error}");
    }
}

#[test]
fn invalid_charge_and_refund_are_named() {
    let user = || rule(&[("user", "*")], "{user}", "shop");
    check_errors([
        (
            RuleConfig { cost: [("override".to_owned(), 1)].into(), ..user() },
            "`cost.override` is `override`: this name is that of limits which requests bring",
        ),
        (
            RuleConfig { refund_within: Some("soon".to_owned()), ..user() },
            "`refund_within` is `soon`: `soon` is not a duration",
        ),
        (
            RuleConfig { refund_within: Some("25h".to_owned()), ..user() },
            "`refund_within` is `25h`: it is outside 1s..=1d",
        ),
        (
            RuleConfig { refund_within: Some("1m".to_owned()), shadow: true, ..user() },
            "`refund_within` is `1m`: a shadow rule cannot have it",
        ),
        (
            RuleConfig { unlimited: true, charge: Charge::After, ..rule_of(&[("user", "*")]) },
            "`unlimited` is `true`: an unlimited rule cannot have `charge`",
        ),
    ]);
}

#[test]
fn empty_rules_allow_all_unless_unknown_is_refused() {
    let all_pass = |unknown, rules: &[RuleConfig]| EnvoyRules::new(unknown, rules).unwrap().allows_all();
    assert!(all_pass(Unknown::Allow, &[]));
    assert!(!all_pass(Unknown::Refuse, &[]));
    assert!(!all_pass(Unknown::Allow, &[rule(&[("user", "*")], "{user}", "x")]));
}
