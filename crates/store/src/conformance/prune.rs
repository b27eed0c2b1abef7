//! Pruning the ledger: old lines are deleted, in bounded steps, and nothing else.

use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::{Expect, OnExpiry, Scope, Version};
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use super::Fixture;
use super::kit::{ACTOR, ALWAYS, all_of, entity_id, own, policy, resource, slow};
use super::ledger::{usage, used_by};
use crate::{AuditQuery, Paging, PolicyChange, Prune, Terms, UsageOf};

async fn prune(fixture: &Fixture, prune: Prune, max: usize) -> u64 {
    fixture.store.prune(&prune, max).await.expect("a prune has a result")
}

async fn lines(fixture: &Fixture, entity: &str, window: Window) -> Vec<(Stamp, u64)> {
    let lines = usage(fixture, UsageOf::Entity(entity_id(entity)), window).await;
    lines.iter().map(|line| (line.start, line.tally.units)).collect()
}

async fn audit(fixture: &Fixture) -> Vec<Entry> {
    let (store, query) = (&fixture.store, &AuditQuery { filed: None, range: ALWAYS });
    let fetch = |paging| -> super::kit::Fetched<'_, Entry> {
        Box::pin(async move { store.audit(query, &paging).await.expect("the audit is listed") })
    };
    all_of(3, fetch).await
}

/// Three changes: of two policies, one, and four.
async fn changes(fixture: &Fixture) -> [Version; 3] {
    let change = |name: &str| PolicyChange {
        scope: Scope::Resource(resource(name)),
        expect: Expect::Any,
        policy: Some(policy(&[slow("rpm", 1)])),
    };
    let mut versions = [Version::ZERO; 3];
    let sets: [&[&str]; 3] = [&["a", "b"], &["a"], &["a", "b", "c", "d"]];
    for (version, names) in versions.iter_mut().zip(sets) {
        let changes: Vec<_> = names.iter().map(|name| change(name)).collect();
        *version = fixture.store.apply(&changes, ACTOR).await.expect("policies are written");
    }
    versions
}

/// A window is deleted once it has ended at the given time; windows of other lengths stay.
pub async fn usage_prune_deletes_only_ended_windows(fixture: Fixture) {
    let at = fixture.spends(&own("acme", &[slow("tpm", 100)]), &[("tpm", 10)]).await;
    for (number, window) in Window::ALL.into_iter().enumerate() {
        let around = window.around(at);
        for before in [Stamp::ZERO, around.start, Stamp::from_micros(around.end.as_micros() - 1)] {
            let old = Prune::Usage { window, before };
            assert_eq!(prune(&fixture, old, 100).await, 0, "nothing has ended yet");
        }
        assert_eq!(lines(&fixture, "acme", window).await, [(around.start, 10)], "{window:?}");
        let old = Prune::Usage { window, before: around.end };
        assert_eq!(prune(&fixture, old, 100).await, 1, "the window has ended");
        assert_eq!(prune(&fixture, old, 100).await, 0, "it is already deleted");
        assert!(lines(&fixture, "acme", window).await.is_empty(), "{window:?}");
        for other in &Window::ALL[number + 1..] {
            assert_eq!(lines(&fixture, "acme", *other).await, [(other.around(at).start, 10)], "{other:?}");
        }
    }
}

/// With all earlier changes; later ones stay.
pub async fn audit_prune_deletes_whole_changes(fixture: Fixture) {
    let [first, second, third] = changes(&fixture).await;
    let all = audit(&fixture).await;
    let before = Prune::Audit { through: Version::ZERO };
    assert_eq!(prune(&fixture, before, 100).await, 0);
    for (through, count, left) in [(first, 2, 5), (first, 0, 5), (second, 1, 4), (third, 4, 0), (third, 0, 0)]
    {
        assert_eq!(prune(&fixture, Prune::Audit { through }, 100).await, count, "through {through}");
        assert_eq!(audit(&fixture).await, all[all.len() - left..], "through {through}");
    }
    assert_eq!(fixture.store.version().await.expect("the version is read"), third, "versions continue");
    let next = fixture.writes(&Scope::System, Some(policy(&[slow("rpm", 1)]))).await;
    let versions: Vec<_> = audit(&fixture).await.iter().map(|entry| entry.version).collect();
    assert_eq!((next, versions), (third.next(), vec![next]));
}

/// Fewer lines than requested means that none are left.
pub async fn prune_is_bounded_and_counts_lines(fixture: Fixture) {
    let mut latest = Stamp::ZERO;
    for entity in ["a", "b", "c"] {
        let levels = own(entity, &[slow("rpm", 100), slow("tpm", 100)]);
        latest = fixture.spends(&levels, &[("rpm", 1), ("tpm", 10)]).await;
    }
    let [_, _, through] = changes(&fixture).await;
    let before = Window::Month.around(latest).end;
    let table = [
        (Prune::Usage { window: Window::Month, before }, [0, 2, 2, 2, 0]),
        (Prune::Audit { through }, [0, 2, 2, 2, 1]),
    ];
    for (old, expected) in table {
        let mut counts = [0; 5];
        for (count, max) in counts.iter_mut().zip([0, 2, 2, 2, 2]) {
            *count = prune(&fixture, old, max).await;
        }
        assert_eq!(counts, expected, "{old:?} deletes at most 2 at a time");
    }
    assert!(audit(&fixture).await.is_empty());
    for entity in ["a", "b", "c"] {
        assert!(lines(&fixture, entity, Window::Month).await.is_empty(), "{entity}");
        assert_eq!(used_by(&fixture, entity, "tpm").await, (10, 10, 1), "{entity}");
    }
}

/// Both are one line of usage.
pub async fn call_limit_is_pruned_with_the_stored_one(fixture: Fixture) {
    let stored = own("acme", &[slow("tpm", 100)]);
    let rule = slow("tpm", 7).check().expect("the suite's limits are valid");
    let called = std::sync::Arc::new(stored.with_call_limits([rule]));
    fixture.spends(&stored, &[("tpm", 20)]).await;
    let at = fixture.spends(&called, &[("tpm", 3)]).await;
    let old = Prune::Usage { window: Window::Month, before: Window::Month.around(at).end };
    assert_eq!(lines(&fixture, "acme", Window::Month).await, [(Window::Month.around(at).start, 23)]);
    assert_eq!(prune(&fixture, old, 1).await, 1);
    assert!(lines(&fixture, "acme", Window::Month).await.is_empty());
    assert_eq!(prune(&fixture, old, 1).await, 0);
}

/// It counts in a pruned window as in a new one.
pub async fn settlement_after_a_prune_is_counted(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    fixture.spends(&levels, &[("tpm", 10)]).await;
    let mut open = fixture.takes(&levels, &[("tpm", 5)]).await;
    for window in [Window::Hour, Window::Month] {
        let old = Prune::Usage { window, before: window.around(open.at).end };
        assert_eq!(prune(&fixture, old, 100).await, 1, "{window:?}");
    }
    open.settles(&[]).await;
    let at = fixture.spends(&levels, &[("tpm", 1)]).await;
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (6, 6, 2));
    let month = lines(&fixture, "acme", Window::Month).await;
    assert_eq!(month.iter().map(|(_, units)| units).sum::<u64>(), 6);
    let days = lines(&fixture, "acme", Window::Day).await;
    assert_eq!(days.iter().map(|(_, units)| units).sum::<u64>(), 16, "up to {at}");
}

/// A cursor from before the prune continues with the remaining entries.
pub async fn listing_continues_after_a_prune(fixture: Fixture) {
    let [first, second, _] = changes(&fixture).await;
    let all = audit(&fixture).await;
    let query = AuditQuery { filed: None, range: ALWAYS };
    let paging = |max| Paging::first(max).expect("the suite's pages are within bounds");
    let page = fixture.store.audit(&query, &paging(1)).await.expect("the audit is listed");
    let cursor = page.next.expect("there is more");
    let rest = async || {
        let after = paging(100).after(cursor.clone());
        fixture.store.audit(&query, &after).await.expect("the audit is listed").items
    };
    assert_eq!(rest().await, all[1..]);
    // Up to the cursor, then past it.
    for (through, max, from) in [(first, 1, 1), (first, 1, 2), (second, 9, 3)] {
        assert_eq!(prune(&fixture, Prune::Audit { through }, max).await, 1);
        assert_eq!(rest().await, all[from..], "through {through}");
    }
}

/// Buckets, policies and versions stay.
pub async fn prune_changes_only_the_ledger(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let at = fixture.spends(&levels, &[("tpm", 10)]).await;
    let [_, _, through] = changes(&fixture).await;
    let scopes = ["a", "b", "c", "d"].map(|name| Scope::Resource(resource(name)));
    let before = fixture.store.read(&scopes).await.expect("policies are read");
    for window in Window::ALL {
        prune(&fixture, Prune::Usage { window, before: window.around(at).end }, 100).await;
    }
    prune(&fixture, Prune::Audit { through }, 100).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (90, 10));
    let after = fixture.store.read(&scopes).await.expect("policies are read");
    assert_eq!((after.version, after.policies), (before.version, before.policies));
}

/// The current hour stays, and so do the sums of days and months.
pub async fn oldest_hours_are_pruned_and_days_stay(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets hours pass");
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut expected = Vec::new();
    for units in [1, 2, 3, 4] {
        let at = fixture.spends(&levels, &[("tpm", units)]).await;
        expected.push((Window::Hour.around(at).start, units));
        fixture.time.pass(Duration::from_secs(3_600)).await;
    }
    let old = Prune::Usage { window: Window::Hour, before: expected[3].0 + Duration::from_secs(1_800) };
    for (max, left) in [(0, 4), (1, 3), (1, 2), (9, 1), (9, 1)] {
        let before = lines(&fixture, "acme", Window::Hour).await.len();
        let count = prune(&fixture, old, max).await;
        assert_eq!(lines(&fixture, "acme", Window::Hour).await, expected[4 - left..]);
        assert_eq!(count, (before - left) as u64);
    }
    for window in [Window::Day, Window::Month] {
        let sum: u64 = lines(&fixture, "acme", window).await.iter().map(|(_, units)| units).sum();
        assert_eq!(sum, 10, "{window:?}");
    }
}

/// It counts before its window is pruned, not after.
pub async fn expired_lease_is_pruned_with_its_window(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets days pass");
    let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Settle };
    let lease = fixture.takes_on(terms, &own("acme", &[slow("tpm", 100)]), &[("tpm", 10)]).await;
    fixture.time.pass(Duration::from_secs(172_800)).await;
    let old = Prune::Usage { window: Window::Hour, before: Window::Hour.around(lease.at).end };
    assert_eq!(prune(&fixture, old, 100).await, 1, "the expired lease is pruned");
    assert!(lines(&fixture, "acme", Window::Hour).await.is_empty());
    assert_eq!(lines(&fixture, "acme", Window::Day).await.len(), 1);
}
