//! The in-memory store passes the suite: on time that is set by hand, and on the system's clock.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{Buckets, Draw, Drawn, Lookup, ManualWall, Memory, StoreError, Terms};

/// 2027-01-15T08:00:00Z, so that no case begins near the end of an hour.
const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = Memory::with_clock(clock.clone()).namespace(namespace).expect("a case's name is valid");
    Fixture::new(Arc::new(store), Arc::new(clock))
}

async fn open_on_real_time(namespace: &str) -> Fixture {
    let store = Arc::new(Memory::new().namespace(namespace).expect("a case's name is valid"));
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}

conformance::suite!(suite, open, jumps);
conformance::suite!(on_real_time, open_on_real_time);

/// The store remembers so many ended leases and no more. What it has forgotten is refused, never drawn again.
#[tokio::test]
async fn a_lease_that_is_forgotten_early_is_not_drawn_again() {
    let fixture = open("forgotten").await;
    let subject = Subject::new("acme", "gpt").unwrap();
    let policy = Policy::new([Limit::per_day("rpm", 1_000_000)]).unwrap();
    let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
    let levels = Arc::new(Levels::new(Version::ZERO, vec![(subject.clone(), resolved)]));
    let terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };
    let draw = || Draw {
        lease: fixture.next_lease(),
        levels: levels.clone(),
        units: levels.units(&[("rpm", 1)]).unwrap(),
        terms,
        is_watched: true,
    };
    let first = draw();
    fixture.store.spend(&first).await.unwrap();
    for _ in 1..300_000 {
        assert!(matches!(fixture.store.spend(&draw()).await.unwrap(), Drawn::Granted(_)));
    }
    for again in [fixture.store.spend(&first).await, fixture.store.draw(&first).await] {
        match again {
            Ok(Drawn::Granted(moved)) => assert!(moved.is_repeat),
            Err(StoreError::Ended { lease, .. }) => assert_eq!(lease, first.lease),
            other => panic!("a lease that was spent answers {other:?}"),
        }
    }
    let seen = fixture.store.balances(&Lookup::Subjects(vec![subject])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 300_000);
}

/// A draw with a lease's id and other levels was answered as that lease's, over shelves that were not locked: a panic.
#[tokio::test]
async fn a_lease_that_is_drawn_again_from_other_levels_is_refused() {
    let store = Memory::new();
    let levels = |entities: &[&str]| {
        let resolved = entities.iter().map(|entity| {
            let subject = Subject::new(entity, "gpt").expect("a valid name");
            let policy = Policy::new([Limit::per_day("rpm", 100)]).expect("a valid limit");
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        });
        Arc::new(Levels::new(Version::ZERO, resolved.collect()))
    };
    for number in 0..50_u128 {
        let (child, parent) = (format!("child-{number}"), format!("parent-{number}"));
        let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Settle };
        let draw = |levels: Arc<Levels>| {
            let units = levels.units(&[("rpm", 1)]).expect("a valid cost");
            Draw { lease: LeaseId::new(1_800_000_000_000, number), levels, units, terms, is_watched: true }
        };
        store.draw(&draw(levels(&[&child, &parent]))).await.unwrap();
        let answer = store.draw(&draw(levels(&[&child]))).await;
        assert!(matches!(answer, Err(StoreError::Invalid { .. })), "{answer:?}");
    }
}

#[test]
fn a_store_has_a_bound_of_namespaces() {
    let store = Memory::new();
    for number in 0..4_096 {
        store.namespace(&number.to_string()).unwrap();
    }
    assert!(store.namespace("7").is_ok(), "this one is there");
    let error = store.namespace("one more").unwrap_err();
    assert_eq!(error.to_string(), "the store is full: 4096 namespaces");
    assert!(matches!(store.namespace("a#b"), Err(StoreError::Invalid { .. })));
}
