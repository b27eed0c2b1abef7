//! Runs the suite on the in-memory store, with manual time and with the system clock.

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
use tidegate_store::{Buckets, Draw, DrawResult, Lookup, ManualWall, Memory, StoreError, Terms};

/// 2027-01-15T08:00:00Z, so that no case starts near the end of an hour.
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

/// The store remembers a bounded number of ended leases. A repeat of an evicted one is refused, never drawn
/// again.
#[tokio::test]
async fn evicted_lease_is_not_drawn_again() {
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
        assert!(matches!(fixture.store.spend(&draw()).await.unwrap(), DrawResult::Granted(_)));
    }
    for again in [fixture.store.spend(&first).await, fixture.store.draw(&first).await] {
        match again {
            Ok(DrawResult::Granted(moved)) => assert!(moved.is_repeat),
            Err(StoreError::Ended { lease, .. }) => assert_eq!(lease, first.lease),
            other => panic!("a spent lease returned {other:?}"),
        }
    }
    let seen = fixture.store.balances(&Lookup::Subjects(vec![subject])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 300_000);
}

/// A repeated draw with other levels was answered with the lease's data while those buckets were not locked,
/// and panicked.
#[tokio::test]
async fn repeated_draw_from_other_levels_is_refused() {
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
fn namespaces_are_bounded() {
    let store = Memory::new();
    for number in 0..4_096 {
        store.namespace(&number.to_string()).unwrap();
    }
    assert!(store.namespace("7").is_ok(), "an existing namespace is opened");
    let error = store.namespace("one more").unwrap_err();
    assert_eq!(error.to_string(), "the store is full: 4096 namespaces");
    assert!(matches!(store.namespace("a#b"), Err(StoreError::Invalid { .. })));
}
