//! Levels, costs and pools, as tables.

use super::*;
use crate::limit::name::{EntityId, ResourceName};
use crate::limit::policy::Policy;
use crate::limit::resolve::resolve;
use crate::limit::rule::Limit;

fn resolved(entity: &str, limits: &[(&str, u64)]) -> (Subject, EffectiveLimits) {
    let subject = Subject::new(entity, "gpt").expect("valid");
    let limits = limits.iter().map(|(name, amount)| Limit::per_minute(*name, *amount));
    let policy = Policy::new(limits).expect("valid");
    let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
    (subject, resolved)
}

fn levels() -> Levels {
    let child = resolved("child", &[("rpm", 1), ("tpm", 10)]);
    Levels::new(Version::new(3), vec![child, resolved("parent", &[("tpm", 100), ("usd", 5)])])
}

#[test]
fn levels_depend_on_their_entities_and_scopes() {
    let entity = |name: &str| EntityId::new(name).expect("valid");
    let subject = |name: &str, resource: &str| Scope::Subject(Subject::new(name, resource).expect("valid"));
    let resource = |name: &str| Scope::Resource(ResourceName::new(name).expect("valid"));
    let table = [
        (About::Policy(Scope::System), true),
        (About::Policy(resource("gpt")), true),
        (About::Policy(resource("other")), false),
        (About::Policy(Scope::Entity(entity("child"))), true),
        (About::Policy(Scope::Entity(entity("parent"))), true),
        (About::Policy(Scope::Entity(entity("stranger"))), false),
        (About::Policy(subject("parent", "gpt")), true),
        (About::Policy(subject("parent", "other")), false),
        (About::Entity(entity("child")), true),
        (About::Entity(entity("parent")), true),
        (About::Entity(entity("grandparent")), false),
    ];
    for (about, wanted) in table {
        assert_eq!(levels().depend_on(&about), wanted, "{about:?}");
    }
}

#[test]
fn each_level_has_its_own_limits() {
    let levels = levels();
    let names: Vec<_> = levels.names().iter().map(LimitName::as_str).collect();
    assert_eq!(names, ["rpm", "tpm", "usd"]);
    let lines = |level: usize| levels.levels()[level].limits.iter().map(|line| line.name);
    assert_eq!((lines(0).collect(), lines(1).collect()), (vec![0, 1], vec![1, 2]));
    let digest = crate::limit::lease::digest([("usd", 3), ("rpm", 1)]);
    assert_eq!(levels.digest(&[Some(1), None, Some(3)]), digest);
    assert_eq!(levels.units(&[("usd", 1), ("rpm", 0)]), Ok(smallvec![Some(0), None, Some(1)]));
}

#[test]
fn invalid_cost_error_lists_known_limits() {
    let levels = levels();
    let table: [(&[(&str, u64)], &str); 5] = [
        (&[("typo", 1_000)], "`child on gpt` has no limit `typo`; it has `rpm`, `tpm`, `usd`"),
        (
            &[],
            "nothing is requested of `child on gpt`: at least one limit needs a cost above 0; it has `rpm`",
        ),
        (&[("rpm", 0)], "nothing is requested of `child on gpt`"),
        (&[("rpm", 1), ("rpm", 1)], "the limit `rpm` is requested twice"),
        (&[("rpm", u64::MAX)], "18446744073709551615 units of `rpm`, more than 525960000"),
    ];
    for (cost, sentence) in table {
        let error = levels.units(cost).unwrap_err().to_string();
        assert!(error.starts_with(sentence), "{error}");
    }
    assert!(levels.amounts(&[]).is_ok());
    let error = levels.deltas(&[("rpm", i64::MIN)]).unwrap_err().to_string();
    assert_eq!(error, "-9223372036854775808 units of `rpm`, more than 525960000");
    assert!(levels.deltas(&[("rpm", -1), ("rpm", 1)]).is_err());
}

#[test]
fn units_are_bounded_by_a_thousand_years_of_refill() {
    let slow = Levels::new(Version::ZERO, vec![resolved("child", &[("rpm", 1)])]);
    // One per minute for a thousand years.
    assert!(slow.deltas(&[("rpm", 525_960_000)]).is_ok());
    let error = slow.deltas(&[("rpm", 525_960_001)]).unwrap_err().to_string();
    assert_eq!(error, "525960001 units of `rpm`, more than 525960000");
    assert!(slow.check_units(0, -525_960_001).is_err());
    let error = slow.position("a\u{1b}b").unwrap_err().to_string();
    assert!(!error.contains('\u{1b}'), "{error}");
}

#[test]
fn call_limit_replaces_the_subjects_own() {
    let rules = [Limit::per_second("tpm", 7), Limit::per_second("new", 1)];
    let called = levels().with_call_limits(rules.map(|limit| limit.check().unwrap()));
    let rows = |level: usize| -> Vec<&str> {
        called.levels()[level].limits.iter().map(|line| line.rule.row()).collect()
    };
    assert_eq!(rows(0), ["rpm", "tpm~7/1000000/7", "new~1/1000000/1"]);
    assert_eq!(rows(1), ["tpm", "usd"]);
    assert_eq!(called.position("new"), Ok(3));
}

#[test]
fn restored_levels_equal_the_original_if_valid() {
    let was = levels();
    let (names, parts) = (was.names().to_vec(), was.levels().to_vec());
    let restored = |names, levels| Levels::restored(Version::new(3), names, levels, OnExpiry::Return);
    let back = restored(names.clone(), parts.clone()).unwrap();
    assert_eq!((back.names(), back.levels(), back.version()), (was.names(), was.levels(), was.version()));
    assert_eq!(back.check_units(0, 525_960_001), was.check_units(0, 525_960_001));
    assert_eq!(*back.on_expiry(), (OnExpiry::Return, Source::Defaults));
    let swapped = vec![names[1].clone(), names[0].clone(), names[2].clone()];
    let table = [
        (restored(names.clone(), Vec::new()), "there is no level"),
        (restored([names.clone(), names].concat(), parts.clone()), "the limit `rpm` is named twice"),
        (restored(swapped, parts.clone()), "the limit `rpm` is not the one at index 0 of the names"),
        (restored(Vec::new(), parts), "the limit `rpm` is not the one at index 0 of the names"),
    ];
    for (levels, sentence) in table {
        assert_eq!(levels.unwrap_err().to_string(), sentence);
    }
}

#[test]
fn pools_are_levels_and_count_once() {
    let policy = |texts: &[&str]| {
        Policy::new(texts.iter().map(|text| text.parse::<Limit>().expect("valid"))).expect("valid")
    };
    let system = policy(&["rpm:5/min,across=both", "tpm:9/min,across=resources,debt=7", "tpm:3/min"]);
    let resource = policy(&["rpm:2/min,across=entities", "tpm:8/min,across=entities"]);
    let resolved = |entity: &str| {
        let subject = Subject::new(entity, "gpt").expect("valid");
        let all = resolve(&subject, [None, None, Some(&resource), Some(&system)], &Policy::default());
        (subject, all)
    };
    let levels = Levels::new(Version::new(3), vec![resolved("child"), resolved("parent")]);
    let shown: Vec<(String, Vec<(&str, u64)>)> = levels
        .levels()
        .iter()
        .map(|level| {
            let line = |line: &Line| (levels.names()[line.name].as_str(), line.rule.shape().amount());
            (level.subject.to_string(), level.limits.iter().map(line).collect())
        })
        .collect();
    let row = |key: &str, lines: &[(&'static str, u64)]| (key.to_owned(), lines.to_vec());
    assert_eq!(
        shown,
        [
            row("child on gpt", &[("tpm", 3)]),
            row("parent on gpt", &[("tpm", 3)]),
            row("all entities on gpt", &[("rpm", 2), ("tpm", 8)]),
            row("all entities on all resources", &[("rpm", 5)]),
            row("child on all resources", &[("tpm", 9)]),
            row("parent on all resources", &[("tpm", 9)]),
        ]
    );
    let pool = levels.single(Some(Across::Resources), "tpm").unwrap();
    assert_eq!(pool.levels()[0].subject.to_string(), "child on all resources");
    assert_eq!((pool.levels()[0].limits[0].debt_max, pool.names().len()), (Some(7), 1));
    assert_eq!(levels.single(None, "tpm").unwrap().levels()[0].limits[0].debt_max, Some(30));
    assert!(levels.single(None, "rpm").is_none() && levels.single(Some(Across::Both), "tpm").is_none());
}

#[test]
fn map_rules_maps_every_level() {
    let tenth = levels().map_rules(|rule| {
        Limit::per_minute(rule.name().as_str(), rule.shape().amount().div_ceil(10)).check().unwrap()
    });
    let amounts = tenth.levels().iter().flat_map(|level| &level.limits);
    assert_eq!(amounts.map(|line| line.rule.shape().amount()).collect::<Vec<_>>(), [1, 1, 10, 1]);
}
