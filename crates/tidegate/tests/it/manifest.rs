//! Parsing of manifests (policies in TOML), and every kind of error.

use proptest::prelude::*;
use tidegate::{Entity, EntityId, Manifest, ManifestError};
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, OnUnavailable, Policy, Scope, Share};
use tidegate_core::limit::policy_changes::{Undeclared, plan};
use tidegate_core::limit::rule::Limit;

fn manifest(text: &str) -> Manifest {
    Manifest::from_toml(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The errors of a text, one sentence each.
fn errors_of(text: &str) -> Vec<String> {
    let error = Manifest::from_toml(text).expect_err(text);
    error.problems().iter().map(ToString::to_string).collect()
}

fn policy(limits: &[&str]) -> Policy {
    Policy::new(limits.iter().map(|text| text.parse::<Limit>().expect("a limit"))).expect("a policy")
}

#[test]
fn every_scope_and_policy_field_is_read() {
    let manifest = manifest(
        r#"
        [entity.acme.resource."gpt-4"]
        limits = ["rpm:5/s"]
        on_unavailable = "block"
        on_expiry = "settle"

        [entity.acme]
        limits = []
        only = true

        [resource."gpt-4"]
        limits = ["tpm:1M/min"]
        only = false
        on_unavailable = "allow"

        [system]
        limits = ["rpm:1000/min", "tpm:100k/min:150k"]
        on_unavailable = { local_share = 0.2 }
        on_expiry = "return"
        "#,
    );
    let subject = Subject::new("acme", "gpt-4").unwrap();
    let share = OnUnavailable::LocalShare(Share::new(0.2).unwrap());
    let system = policy(&["rpm:1k/min", "tpm:100k/min:150k"]);
    let own = policy(&["rpm:5/s"]).on_unavailable(OnUnavailable::Block).on_expiry(OnExpiry::Settle);
    let expected = [
        (Scope::System, system.on_unavailable(share).on_expiry(OnExpiry::Return)),
        (
            Scope::Resource(subject.resource.clone()),
            policy(&["tpm:1M/min"]).on_unavailable(OnUnavailable::Allow),
        ),
        (Scope::Entity(subject.entity.clone()), policy(&[]).only()),
        (Scope::Subject(subject), own),
    ];
    assert_eq!(manifest.policies(), expected);
}

#[test]
fn entities_and_tokens_are_read() {
    let manifest = manifest(
        r#"
        [entity.bot]
        parent = "acme"
        cascade = true
        notes = { team = "search", "a b" = "c" }
        limits = ["rpm:5/s"]

        [entity.acme]
        parent = "org"
        name = "Acme"

        [entity.org]
        cascade = false

        [entity.other]
        limits = ["rpm:5/s"]

        [token.ci]
        scopes = ["acquire", "read"]
        entity = "acme"
        expires = 2030-01-31

        [token.ops]
        name = "Operators"
        scopes = ["admin"]
        expires = "2030-01-31T09:30:00Z"
        secret_env = "OPS_TOKEN"
        "#,
    );
    let id = |name: &str| EntityId::new(name).unwrap();
    let bot = Entity::new(id("bot")).parent(id("acme")).cascade();
    let expected = [
        Entity::new(id("org")),
        Entity::new(id("acme")).parent(id("org")).name("Acme"),
        bot.metadata("team", "search").metadata("a b", "c"),
    ];
    assert_eq!(manifest.entities(), expected, "parents come first");
    assert_eq!(manifest.policies().len(), 2);
    let shown = manifest.tokens().iter().map(|token| {
        let expires = token.expires_at.map(|at| at.to_string()).unwrap_or_default();
        let entity = token.entity.as_ref().map_or("-", EntityId::as_str);
        format!("{} {} {} {entity} {expires} {:?}", token.id, token.name, token.scopes, token.secret_env)
    });
    assert_eq!(
        shown.collect::<Vec<_>>(),
        [
            "ci ci acquire,read acme 2030-01-31T00:00:00Z None",
            "ops Operators admin - 2030-01-31T09:30:00Z Some(\"OPS_TOKEN\")"
        ]
    );
}

#[test]
fn invalid_entities_and_tokens_name_their_path() {
    let long = format!("entity.a.name = '{}'", "x".repeat(1_025));
    check_errors(&[
        ("entity.a.name = 5", "`entity.a.name` is 5 in TOML, and must be a text"),
        ("entity.a.cascade = 'x'", "`entity.a.cascade` is \"x\" in TOML, and must be true or false"),
        (
            &long,
            "`entity.a` is the entity `a` in TOML, and must be within its bounds; the name of entity `a` has \
             1025 bytes, more than 1024",
        ),
        (
            "entity.a.parent = 'b'\nentity.b.parent = 'a'",
            "`entity.a.parent` is \"b\" in TOML, and must be no descendant of the entity, and have fewer than 7 \
             ancestors",
        ),
        (
            "entity.a.parents = 'b'",
            "`entity.a.parents` in TOML is not a key, did you mean `entity.a.parent`?",
        ),
        (
            "token.a.name = 'A'",
            "`token.a.scopes` is missing in TOML, and must be an array of acquire, read and admin",
        ),
        (
            "token.a.scopes = []",
            "`token.a.scopes` is empty in TOML, and must be an array of acquire, read and admin",
        ),
        (
            "token.a.scopes = ['root']",
            "`token.a.scopes[0]` is \"root\" in TOML, and must be acquire, read or admin",
        ),
        ("token.a = { scopes = ['read'], secret = 'x' }", "`token.a.secret` in TOML is not a key"),
        (
            "token.a = { scopes = ['admin'], entity = 'acme' }",
            "`token.a.scopes` is admin, bound to `acme` in TOML, and must be without the scope admin, which reaches \
             all entities",
        ),
        (
            "token.a = { scopes = ['read'], expires = 'soon' }",
            "`token.a.expires` is \"soon\" in TOML, and must be a time such as 2030-01-31 or 2030-01-31T09:30:00Z",
        ),
        (
            "token.a = { scopes = ['read'], secret_env = '' }",
            "`token.a.secret_env` is \"\" in TOML, and must be the name of an environment variable",
        ),
        (
            "token.'.x'.scopes = ['read']",
            "`token.\".x\"` is \".x\" in TOML, and must be an id that does not begin with `.`: those are the \
             server's",
        ),
    ]);
}

#[test]
fn empty_table_declares_nothing() {
    for text in ["", "[system]", "[resource]", "[entity.a]", "[entity.a.resource.b]", "[entity.a.resource]"] {
        assert_eq!(manifest(text), Manifest::default(), "{text}");
    }
    let only_inner = manifest("[entity.a.resource.b]\nlimits = ['x:1/s']");
    assert_eq!(only_inner.policies().len(), 1);
}

#[test]
fn names_that_look_like_keys_are_accepted() {
    let manifest = manifest(
        "
        [entity.resource]
        limits = ['x:1/s']
        [entity.resource.resource.resource]
        limits = ['x:2/s']
        [entity.limits.resource.system]
        limits = ['x:3/s']
        [resource.'a.b c']
        limits = ['x:4/s']
        ",
    );
    let scopes: Vec<String> = manifest.policies().iter().map(|(scope, _)| scope.to_string()).collect();
    let expected = [
        "resource a.b c",
        "entity resource",
        "entity limits, resource system",
        "entity resource, resource resource",
    ];
    assert_eq!(scopes, expected);
}

#[test]
fn manifest_plan_is_shown_as_a_diff() {
    let manifest = manifest("[system]\nlimits = ['tpm:100000/minute']\nonly = true");
    let plan = plan(&[], manifest.policies(), Undeclared::Keep).unwrap();
    assert_eq!(plan.to_string(), "+ system\n    + tpm:100k/min\n    + only = true");
}

/// Asserts that each text has exactly this error.
fn check_errors(table: &[(&str, &str)]) {
    for (text, sentence) in table {
        assert_eq!(errors_of(text), [*sentence], "{text}");
    }
}

#[test]
fn unknown_keys_and_non_tables_name_their_path() {
    check_errors(&[
        ("sytem.limits = []", "`sytem` in TOML is not a key, did you mean `system`?"),
        ("whatever = 1", "`whatever` in TOML is not a key"),
        ("system = 1", "`system` is 1 in TOML, and must be a table"),
        ("resource = []", "`resource` is an array in TOML, and must be a table"),
        ("entity.a = 'x'", "`entity.a` is \"x\" in TOML, and must be a table"),
        ("entity.a.resource = 1", "`entity.a.resource` is 1 in TOML, and must be a table"),
        ("entity.a.limit = []", "`entity.a.limit` in TOML is not a key, did you mean `entity.a.limits`?"),
        (
            "entity.a.resources = {}",
            "`entity.a.resources` in TOML is not a key, did you mean `entity.a.resource`?",
        ),
        ("system.resource = {}", "`system.resource` in TOML is not a key"),
        ("system.on_unavailable = { share = 1 }", "`system.on_unavailable.share` in TOML is not a key"),
    ]);
}

#[test]
fn invalid_names_report_the_reason() {
    check_errors(&[
        (
            "[entity.'a#b']",
            "`entity.\"a#b\"` is \"a#b\" in TOML, and must be a valid name; the entity has '#' at byte 1, which \
             is not allowed",
        ),
        ("[resource.'']", "`resource.\"\"` is \"\" in TOML, and must be a valid name; the resource is empty"),
        (
            "[entity.a.resource._default_]",
            "`entity.a.resource._default_` is \"_default_\" in TOML, and must be a valid name; the resource is \
             reserved: a leading `$` and `_default_` belong to the system",
        ),
    ]);
}

#[test]
fn invalid_limits_report_path_and_expected_form() {
    let limit = "and must be name:amount/period[:burst], such as \"tpm:100k/min:150k\"";
    for (value, errors) in [("5", "5"), ("nan", "NaN"), ("{}", "a table"), ("true", "true")] {
        let wanted = format!("`system.limits[0]` is {errors} in TOML, {limit}");
        assert_eq!(errors_of(&format!("system.limits = [{value}]")), [wanted]);
    }
    let negative = format!(
        "`system.limits[1]` is \"b:-1/s\" in TOML, {limit}; the amount `-1` is not a number: \
         expected digits, optionally followed by k, M or G"
    );
    check_errors(&[
        ("system.limits = ['a:1/s', 'b:-1/s']", &negative),
        (
            "system.limits = 'rpm:5/s'",
            "`system.limits` is \"rpm:5/s\" in TOML, and must be an array of limits such as \"tpm:100k/min:150k\"",
        ),
        (
            "system.limits = ['a:0/s']",
            "`system.limits[0]` is \"a:0/s\" in TOML, and must be a valid limit; the limit `a`: 0 \
             units per period, outside 1..=1099511627776",
        ),
        (
            "system.limits = ['a:1/s', 'a:1/m']",
            "`system.limits[1]` is \"a:1/m\" in TOML, and must be a limit with another name: `a` occurs twice",
        ),
    ]);
}

#[test]
fn unknown_behaviour_lists_valid_ones() {
    let unavailable = "\"block\", \"allow\" or { local_share = 0.2 }";
    let never = format!("`system.on_unavailable` is \"never\" in TOML, and must be {unavailable}");
    let empty = format!("`system.on_unavailable` is an empty table in TOML, and must be {unavailable}");
    check_errors(&[
        ("system.only = 'yes'", "`system.only` is \"yes\" in TOML, and must be true or false"),
        ("system.on_unavailable = 'never'", &never),
        ("system.on_unavailable = {}", &empty),
    ]);
}

#[test]
fn invalid_share_is_rejected() {
    for share in ["0", "-0.1", "1.5", "nan", "inf", "'0.2'", "true", "1e-9", "[]"] {
        let errors = errors_of(&format!("system.on_unavailable.local_share = {share}"));
        let names_key = errors[0].starts_with("`system.on_unavailable.local_share` is ");
        assert!(errors.len() == 1 && names_key && errors[0].contains("and must be "), "{errors:?}");
    }
    for share in ["1", "1.0", "0.000001", "2e-1"] {
        manifest(&format!("system.on_unavailable.local_share = {share}"));
    }
    let errors = errors_of("system.on_expiry = 'never'");
    assert!(errors[0].starts_with("`system.on_expiry` is \"never\" in TOML, and must be "), "{errors:?}");
}

#[test]
fn number_of_limits_is_bounded() {
    let limits: Vec<String> = (0..17).map(|number| format!("'l{number}:1/s'")).collect();
    let text = format!("system.limits = [{}]", limits.join(", "));
    assert_eq!(errors_of(&text), ["`system.limits` is 17 limits in TOML, and must be at most 16"]);
}

#[test]
fn all_errors_are_reported_together() {
    let text = "
        [system]
        limits = ['rpm:5', 'tpm:1/s']
        only = 0
        [entity.'$x']
        limits = []
        [entity.y.resource.z]
        on_expiry = 5
        [other]
    ";
    assert_eq!(errors_of(text).len(), 5);
    let error: ManifestError = Manifest::from_toml(text).unwrap_err();
    assert_eq!(error.to_string().matches("; ").count(), 6, "{error}");
}

#[test]
fn syntax_errors_and_duplicates_report_the_line() {
    for (text, wanted) in [
        ("[system", "line 1"),
        ("[system]\nonly = true\nonly = true", "line 3"),
        ("[entity.a]\n[entity.a]", "line 2"),
        ("a = {b={c={d={e={f={g={h={i={}}}}}}}}}", "nested tables"),
    ] {
        let errors = errors_of(text);
        assert!(errors.len() == 1 && errors[0].contains(wanted), "{errors:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in any::<String>(), lines in prop::collection::vec(
        "(\\[(system|resource|entity|token)(\\.[a-z\"#$]{1,3}){0,3}\\])|(limits|only|on_expiry|on_unavailable|parent|notes|scopes|expires)(\\.local_share)? = ([a-z0-9.'\"]{0,6}|\\['[a-z]:[0-9]{1,3}/[smhd]'\\])", 0..8)) {
        let _ = Manifest::from_toml(&text);
        let _ = Manifest::from_toml(&lines.join("\n"));
    }
}
