//! The in-memory store's eviction, retention and bounds.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, AuditQuery, Buckets, Cancel, Draw, DrawResult, Ledger, ManualWall, Memory, MemoryOptions, Paging,
    Policies, PolicyChange, Retention, Settle, Store, StoreError, Terms, UsageOf, UsageQuery,
};

use crate::kit::eviction;

/// 2027-01-15T08:00:00Z.
const START: Stamp = Stamp::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3_600);

struct Kit {
    clock: ManualWall,
    store: Memory,
    next: u64,
}

impl Kit {
    fn new(change: impl FnOnce(MemoryOptions) -> MemoryOptions) -> Self {
        let clock = ManualWall::new(START);
        let options = change(MemoryOptions::new().clock(clock.clone()));
        Self { clock, store: Memory::with(options).expect("valid options"), next: 0 }
    }

    /// A draw from these entities with sixty requests a minute, the drawing one first.
    fn draw(&mut self, entities: &[&str], version: u64, requests: u64) -> Draw {
        self.draw_by(&Limit::per_minute("rpm", 60), entities, version, requests)
    }

    fn draw_by(&mut self, limit: &Limit, entities: &[&str], version: u64, requests: u64) -> Draw {
        self.next += 1;
        let levels = entities.iter().map(|entity| {
            let subject = Subject::new(entity, "gpt").expect("a valid name");
            let policy = Policy::new([limit.clone()]).expect("a valid policy");
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        });
        let levels = Arc::new(Levels::new(Version::new(version), levels.collect()));
        let units = levels.units(&[("rpm", requests)]).expect("a valid cost");
        let lease = LeaseId::new(START.as_micros() / 1_000 + self.next, u128::from(self.next));
        let terms = Terms { deadline: 24 * HOUR, on_expiry: OnExpiry::Settle };
        Draw { lease, levels, units, terms, is_watched: true }
    }

    /// Draws and cancels: a bucket is created without usage.
    async fn touch(&mut self, entity: &str) -> Result<(), StoreError> {
        let draw = self.draw(&[entity], 0, 1);
        self.store.draw(&draw).await?;
        let Draw { lease, levels, .. } = draw;
        self.store.cancel(&Cancel { lease, step: 1, levels, is_watched: false }).await.map(drop)
    }

    /// Sweeps often enough to visit every bucket.
    async fn sweep(&self) {
        for _ in 0..4 {
            self.store.sweep(usize::MAX).await.expect("in memory");
        }
    }

    async fn listed(&self) -> usize {
        let resource = Subject::new("x", "gpt").expect("a valid name").resource;
        let paging = Paging::first(1_000).expect("within the bounds");
        self.store.buckets(&resource, &paging).await.expect("in memory").items.len()
    }
}

#[tokio::test]
async fn full_bucket_is_evicted_and_not_listed() {
    let mut kit = Kit::new(|options| options);
    for number in 0..500 {
        kit.touch(&format!("user-{number}")).await.unwrap();
    }
    kit.sweep().await;
    assert_eq!((kit.store.stats().subjects, kit.listed().await), (0, 0));
    assert_eq!(kit.store.stats().subjects_forgotten, 500);
    kit.touch("user-7").await.unwrap();
    assert_eq!((kit.store.stats().subjects, kit.listed().await), (1, 1));
}

/// The same tests as for the engines.
#[tokio::test]
async fn idle_subjects_are_evicted() {
    let kit = || Kit::new(|options| options.retention(eviction::SHORT_RETENTION));
    eviction::evicts_idle_subjects(&kit().store).await;
    let used = kit();
    eviction::keeps_subjects_in_use(&used.store, &used.clock).await;
    let ruled = kit();
    eviction::keeps_new_rules_for_ten_minutes(&ruled.store, &ruled.clock).await;
}

#[tokio::test]
async fn bucket_stays_until_full_and_free_of_leases() {
    let mut kit = Kit::new(|options| options);
    let draw = kit.draw(&["child", "parent"], 0, 10);
    kit.store.draw(&draw).await.unwrap();
    kit.clock.advance(HOUR);
    kit.sweep().await;
    assert_eq!(kit.store.stats().subjects, 2, "both are full and leased");
    let (lease, levels) = (draw.lease, draw.levels.clone());
    let deltas = levels.deltas(&[("rpm", 100)]).unwrap();
    kit.store.adjust(&Adjust { lease, step: 1, levels: levels.clone(), deltas }).await.unwrap();
    kit.store.cancel(&Cancel { lease, step: 2, levels, is_watched: false }).await.unwrap();
    let debt = kit.draw(&["other"], 0, 60);
    kit.store.draw(&debt).await.unwrap();
    let (lease, levels) = (debt.lease, debt.levels.clone());
    kit.store.cancel(&Cancel { lease, step: 1, levels, is_watched: false }).await.unwrap();
    kit.sweep().await;
    assert_eq!(kit.store.stats().subjects, 0, "cancelled buckets are full again");
}

#[tokio::test]
async fn debt_is_kept_longer_than_its_usage() {
    let kept = Retention {
        minutes: Some(HOUR),
        hours: Some(HOUR),
        days: Some(HOUR),
        months: Some(HOUR),
        audit: None,
    };
    let mut kit = Kit::new(|options| options.retention(kept));
    let mut draw = kit.draw(&["acme"], 0, 1);
    draw.levels = Arc::new(Levels::clone(&draw.levels).with_debt_max(|_, _| None));
    kit.store.draw(&draw).await.unwrap();
    // As much as refills in twenty days.
    let actual = draw.levels.amounts(&[("rpm", 20 * 24 * 60 * 60)]).unwrap();
    let (lease, levels) = (draw.lease, draw.levels);
    kit.store.settle(&Settle { lease, step: 1, levels, actual, is_watched: false }).await.unwrap();
    for (days, subjects) in [(0, 1), (18, 1), (2, 0)] {
        kit.clock.advance(days * 24 * HOUR);
        kit.sweep().await;
        assert_eq!(kit.store.stats().subjects, subjects, "after {days} more days");
    }
}

#[tokio::test]
async fn usage_keeps_its_subject_until_it_is_too_old() {
    let kept = Retention {
        minutes: Some(HOUR),
        hours: Some(HOUR),
        days: Some(HOUR),
        months: Some(HOUR),
        audit: Some(HOUR),
    };
    let mut kit = Kit::new(|options| options.retention(kept));
    let policy = Policy::new([Limit::per_minute("rpm", 60)]).unwrap();
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    kit.store.apply(&[change], "a test").await.unwrap();
    let draw = kit.draw(&["acme"], 0, 1);
    kit.store.spend(&draw).await.unwrap();
    let query = UsageQuery {
        of: UsageOf::Resource(Subject::new("x", "gpt").unwrap().resource),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let audit = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    for (days, lines, entries) in [(0, 1, 1), (10, 1, 0), (8, 0, 0)] {
        kit.clock.advance(days * 24 * HOUR);
        kit.sweep().await;
        let usage = kit.store.usage(&query, &Paging::default()).await.unwrap();
        assert_eq!(usage.items.len(), lines, "after {days} more days");
        assert_eq!(kit.store.stats().subjects, lines as u64);
        assert_eq!(kit.store.audit(&audit, &Paging::default()).await.unwrap().items.len(), entries);
    }
}

/// A bucket follows the newest rules of any caller. Evicted too early, a caller with older rules would be
/// decided by rules that no longer hold.
#[tokio::test]
async fn bucket_stays_while_callers_may_have_older_rules() {
    let mut kit = Kit::new(|options| options);
    let policy = Policy::new([Limit::per_minute("rpm", 60)]).unwrap();
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    let version = kit.store.apply(&[change], "a test").await.unwrap();
    let draw = kit.draw(&["acme"], version.number(), 1);
    kit.store.draw(&draw).await.unwrap();
    let (lease, levels) = (draw.lease, draw.levels);
    kit.store.cancel(&Cancel { lease, step: 1, levels, is_watched: false }).await.unwrap();
    for (minutes, kept) in [(0, 1), (9, 1), (1, 0)] {
        kit.clock.advance(Duration::from_secs(minutes * 60));
        kit.sweep().await;
        assert_eq!(kit.store.stats().subjects, kept, "after {minutes} more minutes");
    }
}

#[tokio::test]
async fn full_store_refuses_only_new_subjects() {
    let mut kit = Kit::new(|options| options.subjects_max(100));
    for number in 0..100 {
        let draw = kit.draw(&[&format!("user-{number}")], 0, 1);
        assert!(matches!(kit.store.spend(&draw).await.unwrap(), DrawResult::Granted(_)));
    }
    let late = kit.draw(&["late"], 0, 1);
    for refused in 1..=3 {
        let error = kit.store.draw(&late).await.unwrap_err();
        assert_eq!(error.to_string(), "the store is full: 100 subjects");
        assert!(matches!(error, StoreError::Full { what: "subjects", max: 100 }));
        assert_eq!(kit.store.stats().subjects_refused, refused);
    }
    let again = kit.draw(&["user-5"], 0, 1);
    assert!(matches!(kit.store.draw(&again).await.unwrap(), DrawResult::Granted(_)));
    assert_eq!((kit.store.stats().subjects, kit.listed().await), (100, 100));
    let other = kit.store.namespace("other").unwrap();
    assert!(other.draw(&late).await.is_ok(), "each namespace has its own bound");
}

#[tokio::test]
async fn transient_subjects_never_fill_the_store() {
    let mut kit = Kit::new(|options| options.subjects_max(2_000));
    for number in 0..50_000 {
        kit.touch(&format!("user-{number}")).await.unwrap();
    }
    let stats = kit.store.stats();
    assert!(stats.subjects <= 64, "creating a subject evicts others: {stats:?}");
    assert_eq!((stats.subjects + stats.subjects_forgotten, stats.subjects_refused), (50_000, 0));
}

#[test]
fn invalid_bound_is_refused() {
    for bound in [0, usize::MAX] {
        let error = Memory::with(MemoryOptions::new().subjects_max(bound)).unwrap_err();
        assert_eq!(error.to_string(), format!("subjects_max is {bound}, outside 1..=268435456"));
    }
}

/// The only difference between a kept and an evicted bucket, and its bound.
#[tokio::test]
async fn evicted_subject_starts_full_under_new_rules() {
    let mut kit = Kit::new(|options| options);
    kit.touch("acme").await.unwrap();
    kit.sweep().await;
    let raised = kit.draw_by(&Limit::per_minute("rpm", 60).burst(100), &["acme"], 0, 100);
    assert!(matches!(kit.store.draw(&raised).await.unwrap(), DrawResult::Granted(_)));
    let more = kit.draw_by(&Limit::per_minute("rpm", 60).burst(100), &["acme"], 0, 1);
    assert!(
        matches!(kit.store.draw(&more).await.unwrap(), DrawResult::Refused(_)),
        "it has only the new burst"
    );
}
