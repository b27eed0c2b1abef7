//! Helpers of the cases: limits, leases, and assertions about them.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::{DEADLINE, Ending, LeaseId};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;

use super::Fixture;
use crate::{
    Adjust, Cancel, Cursor, Draw, DrawResult, Extend, Lookup, Movement, Page, Paging, PolicyChange, Reading,
    Renew, Renewal, Reply, Settle, Store, StoreError, Terms,
};

/// The resource of cases that need only one.
pub(super) const RESOURCE: &str = "gpt";
/// The actor of changes.
pub(super) const ACTOR: &str = "the suite";
/// The range of all times.
pub(super) const ALWAYS: std::ops::Range<Stamp> = Stamp::ZERO..Stamp::MAX;

/// Terms of a lease that outlives any case.
pub(super) const OPEN: Terms = Terms { deadline: DEADLINE, on_expiry: OnExpiry::Settle };

/// Normally longer than a few calls take. If they take longer, they are retried with twice the time.
const AMPLE: Duration = millis(200);
/// Longer than they take on any machine.
const AMPLE_MAX: Duration = Duration::from_secs(120);

pub(super) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A limit of `burst` units that refills one per day, which no case lasts long enough to notice.
pub(super) fn slow(name: &str, burst: u64) -> Limit {
    Limit::per_day(name, 1).burst(burst)
}

pub(super) fn entity_id(name: &str) -> EntityId {
    EntityId::new(name).expect("the suite's names are valid")
}

pub(super) fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).expect("the suite's names are valid")
}

/// An entity's use of a resource.
pub(super) fn on(entity: &str, resource: &str) -> Subject {
    Subject::new(entity, resource).expect("the suite's names are valid")
}

/// An entity's use of [`RESOURCE`].
pub(super) fn subject(entity: &str) -> Subject {
    on(entity, RESOURCE)
}

pub(super) fn policy(limits: &[Limit]) -> Policy {
    Policy::new(limits.iter().cloned()).expect("the suite's limits are valid")
}

/// The levels of these subjects as of `version`, the drawing one first. Debts are not bounded.
pub(super) fn levels_of(version: u64, rows: &[(Subject, &[Limit])]) -> Arc<Levels> {
    let row = |(subject, limits): &(Subject, &[Limit])| {
        let policy = policy(limits);
        (subject.clone(), resolve(subject, [Some(&policy), None, None, None], &Policy::default()))
    };
    let levels = Levels::new(Version::new(version), rows.iter().map(row).collect());
    Arc::new(levels.with_debt_max(|_, _| None))
}

/// The levels of these entities on [`RESOURCE`].
pub(super) fn levels(version: u64, rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    let rows: Vec<_> = rows.iter().map(|(entity, limits)| (subject(entity), *limits)).collect();
    levels_of(version, &rows)
}

/// One entity with no parent.
pub(super) fn own(entity: &str, limits: &[Limit]) -> Arc<Levels> {
    levels(0, &[(entity, limits)])
}

impl Fixture {
    /// A draw with a new lease id.
    pub(super) fn draw_of(&self, levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Draw {
        let units = levels.amounts(cost).expect("the suite's costs are valid");
        Draw { lease: self.next_lease(), levels: Arc::clone(levels), units, terms: OPEN, is_watched: true }
    }

    /// Draws, and asserts a grant.
    pub(super) async fn takes(&self, levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Lease {
        self.begins(self.draw_of(levels, cost)).await
    }

    /// Draws on these terms, and asserts a grant.
    pub(super) async fn takes_on(&self, terms: Terms, levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Lease {
        self.begins(Draw { terms, ..self.draw_of(levels, cost) }).await
    }

    async fn begins(&self, draw: Draw) -> Lease {
        let moved = granted(self.store.draw(&draw).await);
        assert!(!moved.is_repeat, "a first draw is no repeat");
        Lease { store: Arc::clone(&self.store), id: draw.lease, levels: draw.levels, step: 0, at: moved.at }
    }

    /// Runs work that must complete before a deadline, for an entity and a deadline, and returns both. With a
    /// real clock a machine may take longer: the work is then retried for another entity with twice the time.
    pub(super) async fn in_time<T>(
        &self,
        work: impl AsyncFn(&str, Duration) -> Result<T, StoreError>,
    ) -> (String, Duration, T) {
        let mut deadline = AMPLE;
        loop {
            let entity = format!("acme-{}", deadline.as_millis());
            match work(&entity, deadline).await {
                Err(StoreError::Ended { how: Ending::Expired, .. })
                    if !self.time.can_jump() && deadline < AMPLE_MAX =>
                {
                    deadline *= 2;
                }
                done => return (entity, deadline, done.expect("an open lease takes any step")),
            }
        }
    }

    /// Draws, and asserts a refusal.
    pub(super) async fn is_refused(&self, levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Movement {
        refused(self.store.draw(&self.draw_of(levels, cost)).await)
    }

    /// Spends, asserts a grant, and returns its time.
    pub(super) async fn spends(&self, levels: &Arc<Levels>, cost: &[(&str, u64)]) -> Stamp {
        granted(self.store.spend(&self.draw_of(levels, cost)).await).at
    }

    /// The current time and state of a limit; `None` if it was never used.
    pub(super) async fn meter(&self, subject: &Subject, row: &str) -> (Stamp, Option<Meter>) {
        let lookup = Lookup::Subjects(vec![subject.clone()]);
        let snapshot = self.store.balances(&lookup).await.expect("balances are read");
        assert!(snapshot.buckets.len() <= 1, "one subject has one bucket");
        let meters = snapshot.buckets.into_iter().flat_map(|bucket| bucket.meters);
        (snapshot.at, meters.into_iter().find(|meter| meter.rule().row() == row))
    }

    /// The available and consumed units of an entity's limit on [`RESOURCE`].
    pub(super) async fn shows(&self, entity: &str, row: &str) -> (i64, i64) {
        let (at, meter) = self.meter(&subject(entity), row).await;
        let meter = meter.unwrap_or_else(|| panic!("`{row}` of `{entity}` was used and does not exist"));
        (meter.available(at), meter.consumed())
    }

    /// Asserts that nothing was taken from a limit: it does not exist, or is full.
    pub(super) async fn is_untouched(&self, entity: &str, row: &str) {
        let (at, meter) = self.meter(&subject(entity), row).await;
        if let Some(meter) = meter {
            assert_eq!(meter.consumed(), 0, "`{row}` of `{entity}` has consumed");
            assert!(meter.is_full(at), "`{row}` of `{entity}` is not full");
        }
    }

    /// Sweeps until no lease is due.
    pub(super) async fn sweep_all(&self) {
        loop {
            let swept = self.store.sweep(100).await.expect("a sweep has a result");
            if swept.settled + swept.returned == 0 {
                return;
            }
        }
    }

    /// Writes or removes a policy, whatever its version.
    pub(super) async fn writes(&self, scope: &Scope, policy: Option<Policy>) -> Version {
        let change = PolicyChange { scope: scope.clone(), expect: Expect::Any, policy };
        self.store.apply(&[change], ACTOR).await.expect("a policy is written")
    }

    /// Writes an entity, whatever its version.
    pub(super) async fn puts(&self, entity: &Entity) -> Version {
        self.store.put(entity, Expect::Any, ACTOR).await.expect("an entity is written")
    }
}

/// A lease held by a case.
pub(super) struct Lease {
    store: Arc<dyn Store>,
    pub(super) id: LeaseId,
    pub(super) levels: Arc<Levels>,
    pub(super) step: u32,
    /// The time of the draw.
    pub(super) at: Stamp,
}

impl Lease {
    pub(super) fn extension(&self, step: u32, cost: &[(&str, u64)]) -> Extend {
        let units = self.levels.amounts(cost).expect("the suite's costs are valid");
        Extend { lease: self.id, step, levels: Arc::clone(&self.levels), units }
    }

    pub(super) fn adjustment(&self, step: u32, changes: &[(&str, i64)]) -> Adjust {
        let deltas = self.levels.deltas(changes).expect("the suite's changes are valid");
        Adjust { lease: self.id, step, levels: Arc::clone(&self.levels), deltas }
    }

    pub(super) fn settlement(&self, step: u32, actual: &[(&str, u64)]) -> Settle {
        let actual = self.levels.amounts(actual).expect("the suite's amounts are valid");
        Settle { lease: self.id, step, levels: Arc::clone(&self.levels), actual, is_watched: true }
    }

    pub(super) fn cancellation(&self, step: u32) -> Cancel {
        Cancel { lease: self.id, step, levels: Arc::clone(&self.levels), is_watched: true }
    }

    pub(super) fn renewal(&self, step: u32, span: Duration) -> Renew {
        Renew { lease: self.id, step, levels: Arc::clone(&self.levels), span }
    }

    fn next_step(&mut self) -> u32 {
        self.step += 1;
        self.step
    }

    /// Extends, and asserts a grant.
    pub(super) async fn extends(&mut self, cost: &[(&str, u64)]) -> Movement {
        let step = self.next_step();
        granted(self.store.extend(&self.extension(step, cost)).await)
    }

    pub(super) async fn adjusts(&mut self, changes: &[(&str, i64)]) -> Movement {
        let step = self.next_step();
        self.store.adjust(&self.adjustment(step, changes)).await.expect("an adjustment is never refused")
    }

    /// Renews, and asserts success.
    pub(super) async fn renews(&mut self, span: Duration) -> Renewal {
        let step = self.next_step();
        let renewed = self.store.renew(&self.renewal(step, span)).await.expect("an open lease is renewed");
        assert!(!renewed.is_repeat, "a first renewal is no repeat");
        renewed
    }

    pub(super) async fn settles(&mut self, actual: &[(&str, u64)]) -> Movement {
        let step = self.next_step();
        self.store.settle(&self.settlement(step, actual)).await.expect("an open lease is settled")
    }

    pub(super) async fn cancels(&mut self) -> Movement {
        let step = self.next_step();
        self.store.cancel(&self.cancellation(step)).await.expect("an open lease is cancelled")
    }

    /// Asserts that every further step fails because the lease has ended this way.
    pub(super) async fn has_ended(&self, how: Ending, cost: &[(&str, u64)]) {
        let step = self.step + 1;
        is_ended(self.store.extend(&self.extension(step, cost)).await, how);
        let more: Vec<_> = cost.iter().map(|(name, _)| (*name, 1)).collect();
        is_ended(self.store.adjust(&self.adjustment(step, &more)).await, how);
        is_ended(self.store.settle(&self.settlement(step, cost)).await, how);
        is_ended(self.store.renew(&self.renewal(step, millis(50))).await, how);
        if how != Ending::Cancelled {
            is_ended(self.store.cancel(&self.cancellation(step)).await, how);
        }
    }
}

/// Asserts a grant.
pub(super) fn granted(answer: Result<DrawResult, StoreError>) -> Movement {
    match answer.expect("a draw has a result") {
        DrawResult::Granted(moved) => moved,
        DrawResult::Refused(moved) => panic!("a draw of available units was refused: {moved:?}"),
    }
}

/// Asserts a refusal that moved nothing.
pub(super) fn refused(answer: Result<DrawResult, StoreError>) -> Movement {
    match answer.expect("a draw has a result") {
        DrawResult::Granted(moved) => panic!("a draw of unavailable units was granted: {moved:?}"),
        DrawResult::Refused(moved) => {
            assert!(!moved.is_repeat, "a refusal does not count as applied, so it is never a repeat");
            assert!(moved.readings.iter().all(|reading| reading.moved == 0), "a refusal moves nothing");
            moved
        }
    }
}

/// Asserts a repeat.
pub(super) fn repeated(moved: &Movement) {
    assert!(moved.is_repeat, "the same step again is a repeat: {moved:?}");
}

/// The reading of a limit at a level.
pub(super) fn reading<'a>(moved: &'a Movement, levels: &Levels, level: usize, name: &str) -> &'a Reading {
    let name = levels.position(name).expect("the suite's names are known");
    let mut found = moved.readings.iter().filter(|reading| (reading.level, reading.name) == (level, name));
    let reading = found.next().unwrap_or_else(|| panic!("no reading of name {name} at level {level}"));
    assert!(found.next().is_none(), "a limit is read once");
    reading
}

/// The balance of a reading for a request of `units`.
pub(super) fn balance(
    moved: &Movement,
    levels: &Levels,
    (level, name): (usize, &str),
    units: u64,
) -> Balance {
    let reading = reading(moved, levels, level, name);
    Balance::of(&levels.levels()[level].subject, &reading.meter(levels), units, moved.at)
}

/// The units at `to` of a limit drained at `from`: rounded down, up to its burst.
pub(super) fn refilled(limit: &Limit, from: Stamp, to: Stamp) -> i64 {
    let rule = limit.check().expect("the suite's limits are valid");
    let shape = rule.shape();
    let units = to.since(from).as_micros() * u128::from(shape.amount()) / shape.period().as_micros();
    i64::try_from(units.min(u128::from(shape.burst()))).expect("a burst fits")
}

/// Asserts that the lease has ended this way.
pub(super) fn is_ended<T: std::fmt::Debug>(answer: Result<T, StoreError>, ending: Ending) {
    match answer {
        Err(StoreError::Ended { how, .. }) => assert_eq!(how, ending, "how the lease ended"),
        other => panic!("a lease that was {ending} returns {other:?}"),
    }
}

/// Asserts a stale expectation with this current version.
pub(super) fn is_stale<T: std::fmt::Debug>(answer: Result<T, StoreError>, version: Option<Version>) {
    match answer {
        Err(StoreError::Stale { current, .. }) => assert_eq!(current, version, "the current version"),
        other => panic!("a wrong expectation returns {other:?}"),
    }
}

/// A listing from beginning to end, in pages of `max`.
pub(super) async fn all_of<'a, T: Unpin>(max: u32, fetch: impl Fn(Paging) -> Fetched<'a, T>) -> Vec<T> {
    let first = Paging::first(max).expect("the suite's pages are within bounds");
    let mut items = Vec::new();
    let mut page = fetch(first.clone()).await;
    loop {
        assert!(page.items.len() <= first.max(), "a page of {} items", page.items.len());
        assert!(page.next.is_none() || !page.items.is_empty(), "a page before the last is not empty");
        items.extend(page.items);
        let Some(cursor) = page.next else { return items };
        page = fetch(first.clone().after(cursor)).await;
    }
}

/// A future page.
pub(super) type Fetched<'a, T> = std::pin::Pin<Box<dyn Future<Output = Page<T>> + Send + 'a>>;

/// An invalid cursor: no name contains these characters.
pub(super) fn invalid_cursor() -> Paging {
    Paging::default().after(Cursor::new("#\u{1}#no such place#"))
}

/// Asserts that a listing rejects an invalid cursor.
pub(super) async fn rejects_cursor<T: std::fmt::Debug + Unpin>(listing: &str, page: Reply<'_, Page<T>>) {
    match page.await {
        Err(StoreError::Invalid { what }) => assert!(!what.is_empty(), "the error has a message"),
        other => panic!("{listing} returns {other:?} for an invalid cursor"),
    }
}
