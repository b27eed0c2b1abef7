//! Manifests applied to a store: planned as a readable diff, applied with optimistic locking, and then
//! enforced.

use tidegate::store::AuditQuery;
use tidegate::{
    Limit, LimitError, Limiter, Manifest, Memory, Paging, Policy, PolicyChanges, Scope, Stamp, StoreError,
    Undeclared, Version,
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

/// The stored policies, one line per scope.
async fn stored_policies(limiter: &Limiter) -> Vec<String> {
    let policies = limiter.admin("reader").policies().await.expect("the store is available");
    let line = |(scope, versioned): &(Scope, tidegate::Versioned<std::sync::Arc<Policy>>)| {
        let limits: Vec<String> = versioned.value.rules().iter().map(ToString::to_string).collect();
        format!("{scope}: {}", limits.join(", "))
    };
    policies.iter().map(line).collect()
}

async fn version(limiter: &Limiter) -> Version {
    limiter.store().version().await.expect("the store is available")
}

/// Asserts that the error is a version conflict that reports the stored version.
fn check_conflict(error: &LimitError, stored: Option<Version>) {
    let LimitError::Store(StoreError::Stale { current, .. }) = error else { panic!("{error}") };
    assert_eq!(*current, stored, "{error}");
}

#[tokio::test]
async fn manifest_is_planned_applied_and_enforced() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    // No policy exists yet, and that result is cached.
    assert!(limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.is_err());

    let plan = admin.plan(manifest(DECLARED).policies(), Undeclared::Keep).await.unwrap();
    let shown = "\
+ system
    + rpm:10/day
+ resource gpt-4
    + tpm:1k/day
+ entity acme
    + rpm:20/day:30
    + on_unavailable = \"allow\"";
    assert_eq!(plan.to_string(), shown);
    assert!(stored_policies(&limiter).await.is_empty(), "a plan changes nothing");

    assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    limiter.spend(("acme", "gpt-4"), [("rpm", 30), ("tpm", 1_000)]).await.unwrap();
    let error = limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.unwrap_err();
    assert_eq!(error.limited().unwrap().primary().unwrap().source.to_string(), "entity acme");
    limiter.spend(("other", "gpt-4"), [("rpm", 10)]).await.unwrap();
    assert!(limiter.spend(("other", "gpt-4"), [("rpm", 1)]).await.is_err());
}

#[tokio::test]
async fn unchanged_manifest_keeps_the_version() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let declared = manifest(DECLARED);
    for _ in 0..2 {
        let plan = admin.plan(declared.policies(), Undeclared::Prune).await.unwrap();
        assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    }
    let plan = admin.plan(declared.policies(), Undeclared::Prune).await.unwrap();
    assert!(plan.is_empty());
    assert_eq!(plan.to_string(), "nothing to change");
    assert_eq!(admin.apply(&PolicyChanges::default()).await.unwrap(), version(&limiter).await);
}

#[tokio::test]
async fn stale_plan_is_refused_without_changes() {
    let limiter = Limiter::new(Memory::new());
    let (ours, theirs) = (limiter.admin("ours"), limiter.admin("theirs"));
    ours.apply(&ours.plan(manifest(DECLARED).policies(), Undeclared::Keep).await.unwrap()).await.unwrap();

    // Two scopes are to change; another writer changes the second one first.
    let text = "[system]\nlimits = ['rpm:99/day']\n[entity.acme]\nlimits = ['rpm:99/day']";
    let plan = ours.plan(manifest(text).policies(), Undeclared::Keep).await.unwrap();
    assert_eq!(plan.steps().len(), 2);
    let acme = plan.steps()[1].scope.clone();
    let theirs_at = theirs.set_policy(acme.clone(), policy(&["rpm:5/day"])).await.unwrap();
    let before = stored_policies(&limiter).await;

    let error = ours.apply(&plan).await.unwrap_err();
    check_conflict(&error, Some(theirs_at));
    assert_eq!(error.to_string(), "the policy for entity acme is not as expected: it is at version 2");
    assert_eq!((stored_policies(&limiter).await, version(&limiter).await), (before, theirs_at));

    // A policy that the other writer removed, and one that it wrote first.
    theirs.remove_policy(acme).await.unwrap();
    check_conflict(&ours.apply(&plan).await.unwrap_err(), None);
    let new = ours.plan(&[(entity("zeta"), policy(&["rpm:1/s"]))], Undeclared::Keep).await.unwrap();
    let theirs_at = theirs.set_policy(entity("zeta"), policy(&["rpm:2/s"])).await.unwrap();
    check_conflict(&ours.apply(&new).await.unwrap_err(), Some(theirs_at));

    // A new plan brings the store to the declared state.
    let plan = ours.plan(manifest(text).policies(), Undeclared::Keep).await.unwrap();
    ours.apply(&plan).await.unwrap();
    assert_eq!(stored_policies(&limiter).await[0], "system: rpm:99/day");
}

#[tokio::test]
async fn applied_plan_cannot_be_applied_again() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let plan = admin.plan(manifest(DECLARED).policies(), Undeclared::Keep).await.unwrap();
    let done = admin.apply(&plan).await.unwrap();
    check_conflict(&admin.apply(&plan).await.unwrap_err(), Some(done));
    assert_eq!(version(&limiter).await, done);
}

#[tokio::test]
async fn undeclared_policies_are_kept_or_pruned() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    admin.apply(&admin.plan(manifest(DECLARED).policies(), Undeclared::Keep).await.unwrap()).await.unwrap();

    let less = manifest("[system]\nlimits = ['rpm:10/day']");
    assert!(admin.plan(less.policies(), Undeclared::Keep).await.unwrap().is_empty());
    let plan = admin.plan(less.policies(), Undeclared::Prune).await.unwrap();
    let shown = "\
- resource gpt-4
    - tpm:1k/day
- entity acme
    - rpm:20/day:30
    - on_unavailable = \"allow\"";
    assert_eq!(plan.to_string(), shown);
    admin.apply(&plan).await.unwrap();
    assert_eq!(stored_policies(&limiter).await, ["system: rpm:10/day"]);
    // The remaining policy governs the existing bucket: consumed units stay consumed.
    limiter.spend(("acme", "gpt-4"), [("rpm", 10)]).await.unwrap();
    assert!(limiter.spend(("acme", "gpt-4"), [("rpm", 1)]).await.is_err());
}

#[tokio::test]
async fn duplicate_scope_is_rejected() {
    let limiter = Limiter::new(Memory::new());
    let twice = [(Scope::System, policy(&["rpm:1/s"])), (Scope::System, policy(&["rpm:2/s"]))];
    let error = limiter.admin("ops").plan(&twice, Undeclared::Keep).await.unwrap_err();
    assert_eq!(error.to_string(), "the policy of `system` is declared twice");
    assert!(error.is_final());
}

#[tokio::test]
async fn plan_larger_than_a_page_is_applied_atomically() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let declared: Vec<(Scope, Policy)> =
        (0..2_500).map(|number| (entity(&format!("e{number:04}")), policy(&["rpm:5/s"]))).collect();
    let plan = admin.plan(&declared, Undeclared::Prune).await.unwrap();
    assert_eq!(admin.apply(&plan).await.unwrap(), Version::new(1));
    assert!(admin.plan(&declared, Undeclared::Prune).await.unwrap().is_empty());
    let plan = admin.plan(&declared[..10], Undeclared::Prune).await.unwrap();
    assert_eq!(plan.steps().len(), 2_490);
}

#[tokio::test]
async fn audit_records_actor_and_previous_policy() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("pipeline");
    admin.apply(&admin.plan(manifest(DECLARED).policies(), Undeclared::Keep).await.unwrap()).await.unwrap();
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let page = limiter.store().audit(&query, &Paging::default()).await.unwrap();
    let filed: Vec<_> = page.items.iter().map(|entry| (entry.filed.as_str(), entry.actor.as_str())).collect();
    assert_eq!(filed, [("$SYSTEM", "pipeline"), ("$RESOURCE:gpt-4", "pipeline"), ("acme", "pipeline")]);
    assert!(page.items.iter().all(|entry| entry.version == Version::new(1)));
}

fn entity(name: &str) -> Scope {
    Scope::Entity(tidegate::EntityId::new(name).expect("a valid name"))
}
