//! Leases that pass their deadline.

use std::time::Duration;

use tidegate_core::limit::lease::{DEADLINE, Ending};
use tidegate_core::limit::policy::OnExpiry;

use super::Fixture;
use super::kit::{Lease, granted, is_ended, levels, millis, own, repeated, slow};
use super::ledger::used_by;
use crate::Terms;

const BRIEF: Duration = millis(50);
const SETTLED: Terms = Terms { deadline: BRIEF, on_expiry: OnExpiry::Settle };
const RETURNED: Terms = Terms { deadline: BRIEF, on_expiry: OnExpiry::Return };

/// Its units stay spent and are in the ledger.
pub async fn expired_lease_is_settled_at_the_units_it_holds(fixture: Fixture) {
    let work = async |entity: &str, deadline| {
        let levels = own(entity, &[slow("rpm", 100)]);
        let mut lease = fixture.takes_on(Terms { deadline, ..SETTLED }, &levels, &[("rpm", 10)]).await;
        granted(Ok(fixture.store.extend(&lease.extension(1, &[("rpm", 5)])).await?));
        fixture.store.adjust(&lease.adjustment(2, &[("rpm", -3)])).await?;
        lease.step = 2;
        Ok(lease)
    };
    let (entity, deadline, lease) = fixture.in_time(work).await;
    fixture.time.pass(deadline + BRIEF).await;
    fixture.sweep_all().await;
    lease.has_ended(Ending::Expired, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows(&entity, "rpm").await, (88, 12));
    assert_eq!(used_by(&fixture, &entity, "rpm").await, (12, 12, 1));
}

/// Its units return, and nothing is in the ledger.
pub async fn expired_lease_is_returned_by_its_terms(fixture: Fixture) {
    let limits = [slow("rpm", 100)];
    let levels = levels(0, &[("child", &limits), ("parent", &limits)]);
    let lease = fixture.takes_on(RETURNED, &levels, &[("rpm", 10)]).await;
    fixture.time.pass(millis(60)).await;
    fixture.sweep_all().await;
    lease.has_ended(Ending::Expired, &[("rpm", 1)]).await;
    for entity in ["child", "parent"] {
        fixture.is_untouched(entity, "rpm").await;
        assert_eq!(used_by(&fixture, entity, "rpm").await, (0, 0, 0), "{entity}");
    }
}

/// Neither a settled nor a cancelled one.
pub async fn ended_lease_does_not_expire(fixture: Fixture) {
    let work = async |entity: &str, deadline| {
        let levels = own(entity, &[slow("rpm", 100)]);
        let terms = |on_expiry| Terms { deadline, on_expiry };
        let mut settled = fixture.takes_on(terms(OnExpiry::Return), &levels, &[("rpm", 10)]).await;
        let mut cancelled = fixture.takes_on(terms(OnExpiry::Settle), &levels, &[("rpm", 20)]).await;
        fixture.store.settle(&settled.settlement(1, &[("rpm", 4)])).await?;
        fixture.store.cancel(&cancelled.cancellation(1)).await?;
        (settled.step, cancelled.step) = (1, 1);
        Ok((settled, cancelled))
    };
    let (entity, deadline, (settled, cancelled)) = fixture.in_time(work).await;
    fixture.time.pass(deadline + BRIEF).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows(&entity, "rpm").await, (96, 4));
    assert_eq!(used_by(&fixture, &entity, "rpm").await, (4, 4, 1));
    settled.has_ended(Ending::Settled, &[("rpm", 1)]).await;
    cancelled.has_ended(Ending::Cancelled, &[("rpm", 1)]).await;
}

/// Nor does it end others.
pub async fn sweep_ends_no_lease_before_its_deadline(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    fixture.takes_on(RETURNED, &levels, &[("rpm", 20)]).await;
    fixture.time.pass(millis(60)).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    lease.settles(&[("rpm", 7)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (93, 7));
}

/// It ends at most the requested number of leases.
pub async fn sweep_is_bounded_and_counts_leases(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    for terms in [SETTLED, SETTLED, RETURNED, RETURNED, RETURNED] {
        fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    }
    fixture.time.pass(millis(60)).await;
    let (mut settled, mut returned) = (0, 0);
    for _ in 0..6 {
        let swept = fixture.store.sweep(1).await.expect("a sweep has a result");
        assert!(swept.settled + swept.returned <= 1, "a sweep of one ends one: {swept:?}");
        settled += swept.settled;
        returned += swept.returned;
    }
    // The store may have ended some itself.
    assert!(settled <= 2 && returned <= 3, "{settled} settled and {returned} returned, of 2 and 3");
    assert_eq!(fixture.shows("acme", "rpm").await, (80, 20));
}

/// A step after the deadline fails with `Expired` without a prior sweep. The lease ends once, by its terms.
pub async fn late_step_ends_lease_as_expired(fixture: Fixture) {
    for terms in [SETTLED, RETURNED] {
        for late in Late::ALL {
            let entity = format!("{late:?}-{:?}", terms.on_expiry);
            let parent = format!("{entity}-parent");
            let limits = [slow("rpm", 100)];
            let levels = levels(0, &[(&entity, &limits), (&parent, &limits)]);
            let lease = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
            fixture.time.pass(millis(60)).await;
            late.is_expired(&fixture, &lease).await;
            lease.has_ended(Ending::Expired, &[("rpm", 1)]).await;
            fixture.sweep_all().await;
            for entity in [&entity, &parent] {
                if terms.on_expiry == OnExpiry::Return {
                    fixture.is_untouched(entity, "rpm").await;
                    assert_eq!(used_by(&fixture, entity, "rpm").await, (0, 0, 0), "{entity}");
                } else {
                    assert_eq!(fixture.shows(entity, "rpm").await, (90, 10), "{entity}");
                    let (units, _, leases) = used_by(&fixture, entity, "rpm").await;
                    assert_eq!((units, leases), (10, 1), "{entity}");
                }
            }
        }
    }
}

/// A call may end a bounded number of due leases before its own work. A late step fails the same way beyond
/// that bound.
pub async fn late_step_behind_many_due_is_expired(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 1_000)]);
    let last = Terms { deadline: BRIEF + millis(5), ..SETTLED };
    for (late, sum) in Late::ALL.into_iter().zip([80, 160, 240, 320]) {
        for _ in 0..70 {
            fixture.takes_on(SETTLED, &levels, &[("rpm", 1)]).await;
        }
        let lease = fixture.takes_on(last, &levels, &[("rpm", 10)]).await;
        fixture.time.pass(millis(60)).await;
        late.is_expired(&fixture, &lease).await;
        fixture.sweep_all().await;
        assert_eq!(fixture.shows("acme", "rpm").await, (1_000 - sum, sum), "{late:?}");
    }
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (320, 320, 284));
}

/// A repeated ending from before the deadline returns its first result. A repeat of any other step does not:
/// a sweep may have been first.
pub async fn repeat_after_deadline_is_of_endings_only(fixture: Fixture) {
    let work = async |entity: &str, deadline| {
        let levels = own(entity, &[slow("rpm", 100)]);
        let terms = Terms { deadline, ..SETTLED };
        let mut leases = Vec::new();
        for _ in 0..4 {
            leases.push(fixture.takes_on(terms, &levels, &[("rpm", 10)]).await);
        }
        fixture.store.settle(&leases[0].settlement(1, &[("rpm", 4)])).await?;
        fixture.store.cancel(&leases[1].cancellation(1)).await?;
        granted(Ok(fixture.store.extend(&leases[2].extension(1, &[("rpm", 5)])).await?));
        fixture.store.adjust(&leases[3].adjustment(1, &[("rpm", -3)])).await?;
        Ok(leases)
    };
    let (entity, deadline, leases) = fixture.in_time(work).await;
    fixture.time.pass(deadline + BRIEF).await;
    let settled = fixture.store.settle(&leases[0].settlement(1, &[("rpm", 4)])).await;
    repeated(&settled.expect("a repeated settle has a result"));
    repeated(
        &fixture.store.cancel(&leases[1].cancellation(1)).await.expect("a repeated cancel has a result"),
    );
    is_ended(fixture.store.extend(&leases[2].extension(1, &[("rpm", 5)])).await, Ending::Expired);
    is_ended(fixture.store.adjust(&leases[3].adjustment(1, &[("rpm", -3)])).await, Ending::Expired);
    fixture.sweep_all().await;
    assert_eq!(fixture.shows(&entity, "rpm").await, (74, 26));
    assert_eq!(used_by(&fixture, &entity, "rpm").await, (26, 26, 3));
}

/// A step after the deadline.
#[derive(Debug, Clone, Copy)]
enum Late {
    Settle,
    Cancel,
    Extend,
    Adjust,
}

impl Late {
    const ALL: [Self; 4] = [Self::Settle, Self::Cancel, Self::Extend, Self::Adjust];

    async fn is_expired(self, fixture: &Fixture, lease: &Lease) {
        let (store, expired) = (&fixture.store, Ending::Expired);
        match self {
            Self::Settle => is_ended(store.settle(&lease.settlement(1, &[("rpm", 3)])).await, expired),
            Self::Cancel => is_ended(store.cancel(&lease.cancellation(1)).await, expired),
            Self::Extend => is_ended(store.extend(&lease.extension(1, &[("rpm", 5)])).await, expired),
            Self::Adjust => is_ended(store.adjust(&lease.adjustment(1, &[("rpm", -3)])).await, expired),
        }
    }
}

/// The default deadline of an hour.
pub async fn lease_lasts_until_its_deadline(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets an hour pass");
    let levels = own("acme", &[slow("rpm", 100)]);
    let terms = Terms { deadline: DEADLINE, on_expiry: OnExpiry::Return };
    let mut open = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    let lost = fixture.takes_on(terms, &levels, &[("rpm", 20)]).await;
    fixture.time.pass(millis(3_599_999)).await;
    fixture.sweep_all().await;
    open.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (70, 30));
    fixture.time.pass(millis(2)).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    lost.has_ended(Ending::Expired, &[("rpm", 1)]).await;
}
