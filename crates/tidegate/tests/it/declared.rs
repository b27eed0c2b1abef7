//! Declared policies: from the text of a manifest to a plan that people read, and from the plan to limits that count.

use tidegate::store::AuditQuery;
use tidegate::{
    Extra, Limit, LimitError, Limiter, Manifest, Memory, Paging, Plan, Policy, Scope, Stamp, StoreError,
    Version,
};

const DECLARED: &str = r#"
    [system]
    limits = ["rpm:10/day"]

    [resource."gpt-4"]
    limits = ["tpm:1k/day"]

    [entity.acme]
    limits = ["rpm:20/day:30"]
    on_unavailable = "allow"
"#;

fn manifest(text: &str) -> Manifest {
    Manifest::from_toml(text).expect("a manifest")
}

fn policy(limits: &[&str]) -> Policy {
    Policy::new(limits.iter().map(|text| text.parse::<Limit>().expect("a limit"))).expect("a policy")
}

/// What is written, one line for each scope.
async fn written(limiter: &Limiter) -> Vec<String> {
    let policies = limiter.admin("reader").policies().await.expect("the store is there");
    let line = |(scope, written): &(Scope, tidegate::Versioned<std::sync::Arc<Policy>>)| {
        let limits: Vec<String> = written.value.rules().iter().map(ToString::to_string).collect();
        format!("{scope}: {}", limits.join(", "))
    };
    policies.iter().map(line).collect()
}

async fn version(limiter: &Limiter) -> Version {
    limiter.store().version().await.expect("the store is there")
}

/// Asserts that the error is a stale expectation, with what is there.
fn check_stale(error: &LimitError, there: Option<Version>) {
    let LimitError::Store(StoreError::Stale { current, .. }) = error else { panic!("{error}") };
    assert_eq!(*current, there, "{error}");
}

#[tokio::test]
async fn a_manifest_is_planned_shown_applied_and_counts() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    // Nothing limits anybody yet, and that is remembered.
    assert!(limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.is_err());

    let plan = admin.plan(manifest(DECLARED).policies(), Extra::Keep).await.unwrap();
    let shown = "\
+ system
    + rpm:10/day
+ resource gpt-4
    + tpm:1k/day
+ entity acme
    + rpm:20/day:30
    + on_unavailable = \"allow\"";
    assert_eq!(plan.to_string(), shown);
    assert!(written(&limiter).await.is_empty(), "a plan changes nothing");

    assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    limiter.spend(("acme", "gpt-4"), [("rpm", 30), ("tpm", 1_000)]).await.unwrap();
    let error = limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.unwrap_err();
    assert_eq!(error.limited().unwrap().primary().unwrap().source.to_string(), "entity acme");
    limiter.spend(("other", "gpt-4"), [("rpm", 10)]).await.unwrap();
    assert!(limiter.spend(("other", "gpt-4"), [("rpm", 1)]).await.is_err());
}

#[tokio::test]
async fn what_is_as_declared_needs_no_change_and_raises_no_version() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let declared = manifest(DECLARED);
    for _ in 0..2 {
        let plan = admin.plan(declared.policies(), Extra::Prune).await.unwrap();
        assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    }
    let plan = admin.plan(declared.policies(), Extra::Prune).await.unwrap();
    assert!(plan.is_empty());
    assert_eq!(plan.to_string(), "nothing to change");
    assert_eq!(admin.apply(&Plan::default()).await.unwrap(), version(&limiter).await);
}

#[tokio::test]
async fn a_plan_made_before_someone_elses_change_is_refused_and_nothing_is_changed() {
    let limiter = Limiter::new(Memory::new());
    let (ours, theirs) = (limiter.admin("ours"), limiter.admin("theirs"));
    ours.apply(&ours.plan(manifest(DECLARED).policies(), Extra::Keep).await.unwrap()).await.unwrap();

    // Two scopes are to change; somebody else is faster on the second.
    let text = "[system]\nlimits = ['rpm:99/day']\n[entity.acme]\nlimits = ['rpm:99/day']";
    let plan = ours.plan(manifest(text).policies(), Extra::Keep).await.unwrap();
    assert_eq!(plan.steps().len(), 2);
    let acme = plan.steps()[1].scope.clone();
    let theirs_at = theirs.set_policy(acme.clone(), policy(&["rpm:5/day"])).await.unwrap();
    let before = written(&limiter).await;

    let error = ours.apply(&plan).await.unwrap_err();
    check_stale(&error, Some(theirs_at));
    assert_eq!(error.to_string(), "the policy for entity acme is not as expected: it is at version 2");
    assert_eq!((written(&limiter).await, version(&limiter).await), (before, theirs_at));

    // One that they removed, and one that they were faster to write.
    theirs.remove_policy(acme).await.unwrap();
    check_stale(&ours.apply(&plan).await.unwrap_err(), None);
    let new = ours.plan(&[(entity("zeta"), policy(&["rpm:1/s"]))], Extra::Keep).await.unwrap();
    let theirs_at = theirs.set_policy(entity("zeta"), policy(&["rpm:2/s"])).await.unwrap();
    check_stale(&ours.apply(&new).await.unwrap_err(), Some(theirs_at));

    // Planned anew, it is as declared.
    let plan = ours.plan(manifest(text).policies(), Extra::Keep).await.unwrap();
    ours.apply(&plan).await.unwrap();
    assert_eq!(written(&limiter).await[0], "system: rpm:99/day");
}

#[tokio::test]
async fn a_plan_that_was_applied_is_refused_the_second_time() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let plan = admin.plan(manifest(DECLARED).policies(), Extra::Keep).await.unwrap();
    let done = admin.apply(&plan).await.unwrap();
    check_stale(&admin.apply(&plan).await.unwrap_err(), Some(done));
    assert_eq!(version(&limiter).await, done);
}

#[tokio::test]
async fn what_is_not_declared_is_kept_or_pruned() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    admin.apply(&admin.plan(manifest(DECLARED).policies(), Extra::Keep).await.unwrap()).await.unwrap();

    let less = manifest("[system]\nlimits = ['rpm:10/day']");
    assert!(admin.plan(less.policies(), Extra::Keep).await.unwrap().is_empty());
    let plan = admin.plan(less.policies(), Extra::Prune).await.unwrap();
    let shown = "\
- resource gpt-4
    - tpm:1k/day
- entity acme
    - rpm:20/day:30
    - on_unavailable = \"allow\"";
    assert_eq!(plan.to_string(), shown);
    admin.apply(&plan).await.unwrap();
    assert_eq!(written(&limiter).await, ["system: rpm:10/day"]);
    // The bucket of before is decided by the rule that is left: what it has used stays used.
    limiter.spend(("acme", "gpt-4"), [("rpm", 10)]).await.unwrap();
    assert!(limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.is_err());
}

#[tokio::test]
async fn a_scope_that_is_declared_twice_is_refused() {
    let limiter = Limiter::new(Memory::new());
    let twice = [(Scope::System, policy(&["rpm:1/s"])), (Scope::System, policy(&["rpm:2/s"]))];
    let error = limiter.admin("ops").plan(&twice, Extra::Keep).await.unwrap_err();
    assert_eq!(error.to_string(), "the policy of `system` is declared twice");
    assert!(error.is_final());
}

#[tokio::test]
async fn more_policies_than_a_page_holds_are_planned_and_applied_at_once() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let declared: Vec<(Scope, Policy)> =
        (0..2_500).map(|number| (entity(&format!("e{number:04}")), policy(&["rpm:5/s"]))).collect();
    let plan = admin.plan(&declared, Extra::Prune).await.unwrap();
    assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    assert!(admin.plan(&declared, Extra::Prune).await.unwrap().is_empty());
    let plan = admin.plan(&declared[..10], Extra::Prune).await.unwrap();
    assert_eq!(plan.steps().len(), 2_490);
}

#[tokio::test]
async fn the_audit_says_who_applied_a_plan_and_what_was_there_before() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("pipeline");
    admin.apply(&admin.plan(manifest(DECLARED).policies(), Extra::Keep).await.unwrap()).await.unwrap();
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let page = limiter.store().audit(&query, &Paging::default()).await.unwrap();
    let filed: Vec<_> = page.items.iter().map(|entry| (entry.filed.as_str(), entry.actor.as_str())).collect();
    assert_eq!(filed, [("$SYSTEM", "pipeline"), ("$RESOURCE:gpt-4", "pipeline"), ("acme", "pipeline")]);
    assert!(page.items.iter().all(|entry| entry.version == Version::new(1)));
}

fn entity(name: &str) -> Scope {
    Scope::Entity(tidegate::EntityId::new(name).expect("a valid name"))
}
