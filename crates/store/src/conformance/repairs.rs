//! Repairs: an administrator sets the units available in a bucket.

use std::sync::Arc;

use tidegate_core::limit::audit::{AuditKey, Change};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::{LimitName, Subject};

use super::Fixture;
use super::kit::{ACTOR, ALWAYS, entity_id, levels_of, on, own, reading, slow};
use super::ledger::used_by;
use crate::{AuditQuery, Movement, Paging, Repair, StoreError};

impl Fixture {
    /// A repair of the limit `tpm` of the first level.
    fn repair_of(&self, levels: &Levels, units: u64) -> Repair {
        let levels = levels.single(None, "tpm").expect("a limit named `tpm`");
        Repair { lease: self.next_lease(), levels: Arc::new(levels), units }
    }

    /// Repairs the limit `tpm`.
    async fn repairs(&self, levels: &Levels, units: u64) -> Movement {
        let repair = self.repair_of(levels, units);
        self.store.repair(&repair, ACTOR).await.expect("a repair within the burst is made").value
    }
}

/// Whether it is in debt, partly used or full. Consumed and used units stay as they are.
pub async fn repair_sets_the_units_available(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100), slow("rpm", 100)]);
    fixture.takes(&levels, &[("tpm", 50), ("rpm", 5)]).await.settles(&[("tpm", 1_000)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-900, 1_000));
    for units in [30, 0, 100, 7] {
        let moved = fixture.repairs(&levels, units).await;
        let single = levels.single(None, "tpm").expect("it has this limit");
        let left = reading(&moved, &single, 0, "tpm").meter(&single).available(moved.at);
        assert_eq!((left, moved.is_repeat), (i64::try_from(units).unwrap_or(i64::MAX), false));
        assert_eq!(fixture.shows("acme", "tpm").await.0, left);
    }
    assert_eq!(fixture.shows("acme", "tpm").await, (7, 1_000));
    assert_eq!(fixture.shows("acme", "rpm").await, (95, 5));
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (1_000, 1_000, 1));
    fixture.is_refused(&levels, &[("tpm", 8)]).await;
    fixture.takes(&levels, &[("tpm", 7)]).await;
}

/// By its id, as a retry after a lost reply is.
pub async fn repeated_repair_changes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let repair = fixture.repair_of(&levels, 60);
    let first = fixture.store.repair(&repair, ACTOR).await.expect("the bucket is repaired").value;
    fixture.takes(&levels, &[("tpm", 25)]).await;
    let again = fixture.store.repair(&repair, ACTOR).await.expect("a repeat").value;
    assert_eq!((again.is_repeat, again.at), (true, first.at));
    assert_eq!(fixture.shows("acme", "tpm").await.0, 35);
}

/// They return their held units, and the bucket never holds more than its burst.
pub async fn open_leases_survive_a_repair(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut one = fixture.takes(&levels, &[("tpm", 40)]).await;
    let mut other = fixture.takes(&levels, &[("tpm", 50)]).await;
    fixture.repairs(&levels, 80).await;
    one.settles(&[("tpm", 30)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await.0, 90);
    other.cancels().await;
    assert_eq!(fixture.shows("acme", "tpm").await.0, 100);
}

/// Like any other bucket.
pub async fn pool_is_repaired_by_its_key(fixture: Fixture) {
    let pool = Subject::pool(Some(entity_id("acme")), None);
    let levels = levels_of(0, &[(pool.clone(), &[slow("tpm", 100)])]);
    fixture.takes(&levels, &[("tpm", 90)]).await.settles(&[("tpm", 400)]).await;
    fixture.repairs(&levels, 100).await;
    let (at, meter) = fixture.meter(&pool, "tpm").await;
    assert_eq!(meter.expect("it was used").available(at), 100);
    let elsewhere = levels_of(0, &[(on("acme", "gpt"), &[slow("tpm", 100)])]);
    fixture.takes(&elsewhere, &[("tpm", 100)]).await;
}

/// With the units before and after, by its actor.
pub async fn repair_is_audited(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    fixture.takes(&levels, &[("tpm", 10)]).await.settles(&[("tpm", 250)]).await;
    let before = fixture.store.version().await.expect("the version is read");
    fixture.repairs(&levels, 20).await;
    let query = AuditQuery { filed: Some(AuditKey::entity(&entity_id("acme"))), range: ALWAYS };
    let page = fixture.store.audit(&query, &Paging::default()).await.expect("the audit is read");
    let [entry] = &page.items[..] else { panic!("one change: {:?}", page.items) };
    assert_eq!((entry.version, entry.actor.as_str()), (before.next(), ACTOR));
    let limit = LimitName::new("tpm").expect("a valid name");
    let bucket = on("acme", "gpt");
    assert_eq!(entry.change, Change::Bucket { bucket, limit, before: -150, after: 20 });
}

/// More than the burst, or several limits at once: nothing is changed or audited.
pub async fn invalid_repair_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100), slow("rpm", 100)]);
    let wide = Repair { levels: Arc::clone(&levels), ..fixture.repair_of(&levels, 1) };
    for repair in [fixture.repair_of(&levels, 101), wide] {
        let error = fixture.store.repair(&repair, ACTOR).await.expect_err("an invalid repair");
        assert!(matches!(&error, StoreError::Invalid { .. }), "{error}");
    }
    fixture.is_untouched("acme", "tpm").await;
    let all = AuditQuery { filed: None, range: ALWAYS };
    let page = fixture.store.audit(&all, &Paging::default()).await.expect("the audit is read");
    assert!(page.items.is_empty(), "{:?}", page.items);
}

/// A bucket has at most 64 limits, with those of calls. A repair adds none to them, as a draw adds none.
pub async fn repair_adds_no_limit_to_a_full_bucket(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 100)]);
    for burst in 1..=64 {
        let rule = slow("rpm", burst).check().expect("the suite's limits are valid");
        fixture.takes(&Arc::new(levels.with_call_limits([rule])), &[("rpm", 1)]).await;
    }
    let error =
        fixture.store.draw(&fixture.draw_of(&levels, &[("tpm", 1)])).await.expect_err("a full bucket");
    assert!(matches!(&error, StoreError::Full { max: 64, .. }), "{error}");
    let error = fixture.store.repair(&fixture.repair_of(&levels, 1), ACTOR).await.expect_err("a full bucket");
    assert!(matches!(&error, StoreError::Full { max: 64, .. }), "{error}");
    fixture.is_untouched("acme", "tpm").await;
}
