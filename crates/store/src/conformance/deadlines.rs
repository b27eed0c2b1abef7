//! Leases that nobody ends.

use std::time::Duration;

use tidegate_core::limit::lease::{DEADLINE, Ending};
use tidegate_core::limit::policy::OnExpiry;

use super::Fixture;
use super::kit::{granted, is_ended, levels, millis, own, slow};
use super::ledger::used_by;
use crate::Terms;

const BRIEF: Duration = millis(50);
const SETTLED: Terms = Terms { deadline: BRIEF, on_expiry: OnExpiry::Settle };
const RETURNED: Terms = Terms { deadline: BRIEF, on_expiry: OnExpiry::Return };

/// The work was probably done: what it holds stays spent, and is in the ledger.
pub async fn a_lease_past_its_deadline_is_settled_at_what_it_holds(fixture: Fixture) {
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

/// Where the policy says so it returns, and the ledger knows nothing of it.
pub async fn a_lease_past_its_deadline_is_returned_where_its_terms_say_so(fixture: Fixture) {
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

/// A lease that has ended does not expire as well.
pub async fn a_lease_that_has_ended_does_not_expire(fixture: Fixture) {
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

/// A sweep leaves alone what still has time.
pub async fn a_sweep_ends_no_lease_before_its_deadline(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    fixture.takes_on(RETURNED, &levels, &[("rpm", 20)]).await;
    fixture.time.pass(millis(60)).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    lease.settles(&[("rpm", 7)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (93, 7));
}

/// A sweep ends no more leases than it is told to, and counts them.
pub async fn a_sweep_has_a_bound_and_counts_what_it_ends(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    for terms in [SETTLED, SETTLED, RETURNED, RETURNED, RETURNED] {
        fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    }
    fixture.time.pass(millis(60)).await;
    let (mut settled, mut returned) = (0, 0);
    for _ in 0..6 {
        let swept = fixture.store.sweep(1).await.expect("a sweep is answered");
        assert!(swept.settled + swept.returned <= 1, "a sweep of one ends one: {swept:?}");
        settled += swept.settled;
        returned += swept.returned;
    }
    // A store ends them by itself as well.
    assert!(settled <= 2 && returned <= 3, "{settled} settled and {returned} returned, of 2 and 3");
    assert_eq!(fixture.shows("acme", "rpm").await, (80, 20));
}

/// A repeat of the ending that was on its way is told that the lease expired, and changes nothing.
pub async fn a_settle_after_the_deadline_changes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let lease = fixture.takes_on(SETTLED, &levels, &[("rpm", 10)]).await;
    fixture.time.pass(millis(60)).await;
    fixture.sweep_all().await;
    is_ended(fixture.store.settle(&lease.settlement(1, &[("rpm", 3)])).await, Ending::Expired);
    is_ended(fixture.store.cancel(&lease.cancellation(1)).await, Ending::Expired);
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (10, 10, 1));
}

/// An hour, which is how long a lease has unless said otherwise.
pub async fn a_lease_has_all_of_its_hour(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets an hour pass");
    let levels = own("acme", &[slow("rpm", 100)]);
    let terms = Terms { deadline: DEADLINE, on_expiry: OnExpiry::Return };
    let mut kept = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    let lost = fixture.takes_on(terms, &levels, &[("rpm", 20)]).await;
    fixture.time.pass(millis(3_599_999)).await;
    fixture.sweep_all().await;
    kept.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (70, 30));
    fixture.time.pass(millis(2)).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    lost.has_ended(Ending::Expired, &[("rpm", 1)]).await;
}
