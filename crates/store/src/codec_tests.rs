//! Records roundtrip as text, and invalid text is rejected with the reason.

use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::resolve::resolve;

use super::*;

fn acme() -> Entity {
    let id = |name| EntityId::new(name).unwrap();
    Entity::new(id("acme")).name("Acme \"Inc\"").parent(id("group")).cascade().metadata("tier", "gold")
}

fn policy() -> Policy {
    let limits = [Limit::per_minute("tpm", 100_000).burst(150_000), Limit::per_minute("rpm", 60)];
    let share = OnUnavailable::LocalShare(Share::new(0.25).unwrap());
    Policy::new(limits).unwrap().only().on_unavailable(share).on_expiry(OnExpiry::Return)
}

fn entry() -> Entry {
    let change = Change::Entity { before: None, after: Some(acme()) };
    Entry {
        version: Version::new(7),
        at: Stamp::from_micros(1_769_851_800_000_250),
        actor: "ops\u{1b}\n".to_owned(),
        filed: AuditKey::entity(acme().id()),
        change,
    }
}

fn levels() -> Levels {
    let level = |entity, limits: Vec<Limit>| {
        let subject = Subject::new(entity, "gpt").unwrap();
        let policy = Policy::new(limits).unwrap().on_expiry(OnExpiry::Return);
        let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
        (subject, resolved)
    };
    let child = level("child", vec![Limit::per_minute("rpm", 60), Limit::per_minute("tpm", 10)]);
    let parent = level("parent", vec![Limit::per_minute("tpm", 100), Limit::per_day("usd", 5)]);
    let called = Limit::per_second("tpm", 7).burst(9).check().unwrap();
    Levels::new(Version::new(3), vec![child, parent]).with_call_limits([called])
}

#[test]
fn records_are_written_as_readable_text() {
    let text = r#"{"limits":["tpm:100k/min:150k","rpm:60/min"],"only":true,"on_unavailable":{"local_share":0.25},"on_expiry":"return"}"#;
    assert_eq!(policy_to_text(&policy()), text);
    assert_eq!(policy_from_text(text).unwrap(), policy());
    assert_eq!(policy_to_text(&Policy::default()), "{}");
    for (setting, word) in [(OnUnavailable::Block, "block"), (OnUnavailable::Allow, "allow")] {
        let policy = Policy::default().on_unavailable(setting).on_expiry(OnExpiry::Settle);
        let text = format!(r#"{{"on_unavailable":"{word}","on_expiry":"settle"}}"#);
        assert_eq!(policy_to_text(&policy), text);
        assert_eq!(policy_from_text(&text).unwrap(), policy);
    }

    let text =
        r#"{"id":"acme","name":"Acme \"Inc\"","parent":"group","cascade":true,"metadata":{"tier":"gold"}}"#;
    assert_eq!(entity_to_text(&acme()), text);
    assert_eq!(entity_from_text(text).unwrap(), acme());

    let subject = Subject::new("a", "b").unwrap();
    let scopes = [
        (Scope::System, "{}"),
        (Scope::Resource(subject.resource.clone()), r#"{"resource":"b"}"#),
        (Scope::Entity(subject.entity.clone()), r#"{"entity":"a"}"#),
        (Scope::Subject(subject), r#"{"entity":"a","resource":"b"}"#),
    ];
    for (scope, text) in scopes {
        let change = Change::Policy { scope, before: None, after: Some(Policy::default()) };
        let text = format!(r#"{{"policy":{{"scope":{text},"after":{{}}}}}}"#);
        assert_eq!(change_to_text(&change), text);
        assert_eq!(change_from_text(&text).unwrap().0, change);
    }
}

#[test]
fn entry_is_one_line_with_a_readable_date() {
    let line = entry_to_line(&entry());
    let start = r#"{"version":7,"at":"2026-01-31T09:30:00.000250Z","at_micros":1769851800000250,"#;
    assert!(line.starts_with(start), "{line}");
    assert!(line.ends_with(r#","cascade":true,"metadata":{"tier":"gold"}}}}}"#), "{line}");
    assert!(!line.contains(char::is_control), "{line}");
    assert_eq!(entry_from_line(&line).unwrap(), entry());
    let undated = line.replace("2026-01-31T09:30:00.000250Z", "yesterday");
    assert_eq!(entry_from_line(&undated).unwrap(), entry());
}

#[test]
fn levels_are_written_with_short_keys() {
    let text = r#"{"v":3,"n":["rpm","tpm","usd"],"l":[{"e":"child","r":"gpt","l":["rpm:60/min!600","~tpm:7/s:9!90"]},{"e":"parent","r":"gpt","l":["tpm:100/min!1000","usd:5/day!50"]}],"x":"return"}"#;
    assert_eq!(levels_to_text(&levels()), text);
    same_levels(&levels_from_text(text).unwrap(), &levels());
    // Leases of earlier versions have no bounds of debts.
    let older =
        ["!600", "!90", "!1000", "!50"].iter().fold(text.to_owned(), |text, debt| text.replace(debt, ""));
    same_levels(&levels_from_text(&older).unwrap(), &levels());
    let back = levels_from_text(text).unwrap();
    assert_eq!(back.levels()[0].limits[1].source, Source::Call);
    assert_eq!(back.levels()[1].limits[1].source, Source::Defaults);
}

#[test]
fn invalid_text_is_rejected_with_the_reason() {
    let policy = |text| policy_from_text(text).unwrap_err().to_string();
    let entity = |text| entity_from_text(text).unwrap_err().to_string();
    let change = |text| change_from_text(text).unwrap_err().to_string();
    let levels = |text| levels_from_text(text).unwrap_err().to_string();
    let moved = r#"{"entity":{"before":{"id":"a"},"after":{"id":"b"}}}"#;
    let table = [
        (policy(""), "the store has corrupt data: a policy: EOF while parsing"),
        (policy(r#"{"limits":["x:1/m"],"color":1}"#), "a policy: unknown field `color`"),
        (policy(r#"{"limits":["x:0/m"]}"#), "a policy: the limit `x`: 0 units per period"),
        (policy(r#"{"limits":["x:1/m","x:2/m"]}"#), "a policy: the limit `x` is defined twice"),
        (policy(r#"{"on_unavailable":{"local_share":0}}"#), "a local share of 0, outside"),
        (policy(r#"{"on_unavailable":"wait"}"#), "unknown variant `wait`"),
        (policy("{} x"), "trailing characters"),
        (entity("{}"), "an entity: missing field `id`"),
        (entity(r#"{"id":"$SYSTEM"}"#), "the entity `$SYSTEM` is reserved"),
        (entity(r#"{"id":"a","parent":""}"#), "the entity `` is empty"),
        (entity(r#"{"id":"a","\u001b[2J":1}"#), r"unknown field `\u{1b}[2J`"),
        (change("{}"), "a change: expected value"),
        (change(r#"{"entity":{}}"#), "a change: no entity, before or after"),
        (change(moved), "a change: `a` cannot become `b`"),
        (change(r#"{"policy":{"scope":{"tenant":"a"}}}"#), "unknown field `tenant`"),
        (change(r#"{"policy":{"after":{}}}"#), "missing field `scope`"),
        (change(r#"{"entity":{"after":{"id":"a"}},"policy":{"scope":{}}}"#), "a change: "),
        (levels(r#"{"v":1,"n":[],"l":[]}"#), "the levels of a lease: there is no level"),
        (levels(r#"{"v":1,"n":[],"l":[{"e":"a","r":"b","l":["x:1/m"]}]}"#), "`x` is not among the names"),
        (levels(r#"{"v":1,"n":["x","x"],"l":[{"e":"a","r":"b","l":[]}]}"#), "`x` is named twice"),
        (levels(r#"{"v":-1,"n":[],"l":[]}"#), "invalid value"),
    ];
    for (error, sentence) in table {
        assert!(error.contains(sentence), "{error}");
    }
    let foreign = entry_to_line(&entry()).replace(r#""filed":"acme""#, r#""filed":"other""#);
    let error = entry_from_line(&foreign).unwrap_err().to_string();
    assert!(error.contains("a change of `acme` is filed under `other`"), "{error}");
    let long = policy(&format!(r#"{{"{}":1}}"#, "x".repeat(10_000)));
    assert!(long.ends_with('…') && long.len() < 400, "{long}");
}

fn same_levels(back: &Levels, was: &Levels) {
    assert_eq!((back.version(), back.names()), (was.version(), was.names()));
    assert_eq!(back.on_expiry().0, was.on_expiry().0);
    assert_eq!(back.levels().len(), was.levels().len());
    for (back, was) in back.levels().iter().zip(was.levels()) {
        assert_eq!((&back.subject, back.limits.len()), (&was.subject, was.limits.len()));
        for (back, was) in back.limits.iter().zip(&was.limits) {
            assert_eq!((back.name, &back.rule), (was.name, &was.rule));
            assert_eq!(back.rule.row(), was.rule.row());
        }
    }
}

fn names() -> impl Strategy<Value = String> {
    "[^#$\\p{Cc}][^#\\p{Cc}]{0,20}"
        .prop_filter("reserved", |name| EntityId::new(name).is_ok_and(|id| id.as_str() == name))
}

fn limits() -> impl Strategy<Value = Limit> {
    let amounts = prop_oneof![1_u64..100, (1_u64..1_000).prop_map(|thousands| thousands * 1_000)];
    let micros = prop_oneof![1_u64..3_600_000_000, (1_u64..366).prop_map(|days| days * 86_400_000_000)];
    ("[a-z0-9_.-]{1,9}", amounts, micros, prop::option::of(1_u64..1_000))
        .prop_map(|(name, amount, micros, burst)| {
            let limit = Limit::per(name, amount, Duration::from_micros(micros));
            burst.map_or_else(|| limit.clone(), |burst| limit.clone().burst(burst))
        })
        .prop_filter("no limit", |limit| limit.check().is_ok())
}

prop_compose! {
    fn policies()(
        limits in prop::collection::vec(limits(), 0..6),
        only in any::<bool>(),
        unavailable in prop::option::of(0_u32..=1_000_000),
        expiry in prop::option::of(any::<bool>()),
    ) -> Policy {
        let mut unique: Vec<Limit> = Vec::new();
        for limit in limits {
            if unique.iter().all(|other| other.name() != limit.name()) {
                unique.push(limit);
            }
        }
        let mut policy = Policy::new(unique).unwrap();
        if only {
            policy = policy.only();
        }
        if let Some(unavailable) = unavailable {
            policy = policy.on_unavailable(match unavailable {
                0 => OnUnavailable::Block,
                millionths if millionths % 10 == 0 => OnUnavailable::Allow,
                millionths => OnUnavailable::LocalShare(Share::new(f64::from(millionths) / 1e6).unwrap()),
            });
        }
        match expiry {
            Some(settles) => policy.on_expiry(if settles { OnExpiry::Settle } else { OnExpiry::Return }),
            None => policy,
        }
    }
}

prop_compose! {
    fn entities()(
        id in names(),
        name in prop::option::of(".{0,20}"),
        parent in prop::option::of(names()),
        cascade in any::<bool>(),
        metadata in prop::collection::btree_map(any::<String>(), any::<String>(), 0..4),
    ) -> Entity {
        let mut entity = Entity::new(EntityId::new(&id).unwrap());
        if let Some(name) = name {
            entity = entity.name(name);
        }
        if let Some(parent) = parent {
            entity = entity.parent(EntityId::new(&parent).unwrap());
        }
        if cascade {
            entity = entity.cascade();
        }
        metadata.into_iter().fold(entity, |entity, (key, value)| entity.metadata(key, value))
    }
}

fn tokens() -> impl Strategy<Value = Token> {
    let times = (any::<u64>(), any::<Option<u64>>(), any::<Option<u64>>());
    let parts = ("[a-zA-Z0-9_.-]{1,64}", any::<String>(), names(), prop::collection::vec(0..3_usize, 0..4));
    (parts, times, any::<String>(), prop::option::of(names()))
        .prop_filter("a reserved name", |(parts, ..)| TokenId::new(&parts.0).is_ok())
        .prop_map(
            |((id, name, namespace, scopes), (created_at, expires_at, revoked_at), created_by, entity)| {
                Token {
                    entity: entity.map(|entity| EntityId::new(&entity).unwrap()),
                    id: TokenId::new(&id).unwrap(),
                    name,
                    namespace: Namespace::new(&namespace).unwrap(),
                    scopes: scopes.into_iter().map(|scope| TokenScope::ALL[scope]).collect(),
                    created_at: Stamp::from_micros(created_at),
                    created_by,
                    expires_at: expires_at.map(Stamp::from_micros),
                    revoked_at: revoked_at.map(Stamp::from_micros),
                }
            },
        )
}

fn changes() -> impl Strategy<Value = Change> {
    let scopes = (prop::option::of(names()), prop::option::of(names())).prop_map(|(entity, resource)| {
        let entity = entity.map(Cow::Owned);
        ScopeText { entity, resource: resource.map(Cow::Owned) }.scope().unwrap()
    });
    let entity = (entities(), 0..3).prop_map(|(entity, case)| Change::Entity {
        before: (case != 0).then(|| entity.clone().name("before")),
        after: (case != 1).then_some(entity),
    });
    let policy = (scopes, prop::option::of(policies()), prop::option::of(policies()))
        .prop_map(|(scope, before, after)| Change::Policy { scope, before, after });
    let token = (tokens(), any::<bool>()).prop_map(|(token, is_new)| Change::Token {
        before: (!is_new).then(|| Token { revoked_at: None, ..token.clone() }),
        after: token,
    });
    let bucket = (prop::option::of(names()), prop::option::of(names()), any::<i64>(), any::<u64>());
    let bucket = bucket.prop_map(|(entity, resource, before, after)| Change::Bucket {
        bucket: Subject::pool(
            entity.map(|name| EntityId::new(&name).unwrap()),
            resource.map(|name| ResourceName::new(&name).unwrap()),
        ),
        limit: LimitName::new("tpm").unwrap(),
        before,
        after,
    });
    prop_oneof![entity, policy, bucket, token]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_roundtrips(policy in policies()) {
        prop_assert_eq!(policy_from_text(&policy_to_text(&policy)).unwrap(), policy);
    }

    #[test]
    fn every_entity_roundtrips(entity in entities()) {
        prop_assert_eq!(entity_from_text(&entity_to_text(&entity)).unwrap(), entity);
    }

    #[test]
    fn every_token_roundtrips(token in tokens()) {
        prop_assert_eq!(token_from_text(&token_to_text(&token)).unwrap(), token);
    }

    #[test]
    fn every_change_roundtrips(change in changes()) {
        prop_assert_eq!(change_from_text(&change_to_text(&change)).unwrap().0, change);
    }

    #[test]
    fn every_entry_roundtrips(
        change in changes(),
        version in any::<u64>(),
        micros in any::<u64>(),
        actor in any::<String>(),
    ) {
        let filed = match &change {
            Change::Entity { before, after } => AuditKey::entity(before.as_ref().or(after.as_ref()).unwrap().id()),
            Change::Policy { scope, .. } => AuditKey::scope(scope),
            Change::Bucket { bucket, .. } => AuditKey::bucket(bucket),
            Change::Token { after, .. } => AuditKey::token(&after.id),
        };
        let (version, at) = (Version::new(version), Stamp::from_micros(micros));
        let entry = Entry { version, at, actor, filed, change };
        let line = entry_to_line(&entry);
        prop_assert!(!line.contains(['\n', '\r']));
        prop_assert_eq!(entry_from_line(&line).unwrap(), entry);
    }

    #[test]
    fn levels_of_every_lease_roundtrip(
        parts in prop::collection::vec((names(), names(), policies()), 1..5),
        called in prop::collection::vec(limits(), 0..3),
        version in any::<u64>(),
    ) {
        let level = |(entity, resource, policy): (String, String, Policy)| {
            let subject = Subject::new(&entity, &resource).unwrap();
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        };
        let levels = Levels::new(Version::new(version), parts.into_iter().map(level).collect());
        let levels = levels.with_call_limits(called.iter().map(|limit| limit.check().unwrap()));
        same_levels(&levels_from_text(&levels_to_text(&levels)).unwrap(), &levels);
    }

    #[test]
    fn arbitrary_text_does_not_panic(text in any::<String>(), cut in 0_usize..200, letter in any::<char>()) {
        let mut spoilt: String = entry_to_line(&entry()).chars().take(cut).collect();
        spoilt.push(letter);
        let lines = levels_to_text(&levels());
        let spoilt_levels: String = lines.chars().map(|old| if old == 'p' { letter } else { old }).collect();
        for text in [&text, &spoilt, &spoilt_levels] {
            let _ = (policy_from_text(text), entity_from_text(text), change_from_text(text));
            let _ = (entry_from_line(text), levels_from_text(text));
        }
    }
}
