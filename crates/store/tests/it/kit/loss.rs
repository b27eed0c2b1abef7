//! Measures what is lost when a server with unreplicated writes is lost.
//!
//! Callers draw until nothing is left, whatever happens to the server, and record their grants. Each grant is
//! then looked up on the server that replaced it: a missing lease was lost. Grants beyond the budget must
//! equal the lost ones, so nothing else went wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, check};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::time::Stamp;
use tidegate_store::{DrawResult, LeaseStatus, Store, StoreError};

use crate::kit::common::{balance, draw_of, own, settle_of, subject, until_answered, used};

const CALLERS: usize = 6;
/// More than enough sweeps for all keys of a server that the test has to itself.
const SWEEPS_MAX: usize = 100;
/// A caller that takes longer hangs.
const STUCK_AFTER: Duration = Duration::from_secs(240);

/// A grant of one caller.
#[derive(Debug, Clone)]
struct Grant {
    entity: usize,
    lease: LeaseId,
    at: Stamp,
    /// When it was settled, if it was.
    settled: Option<Stamp>,
}

/// Entities, and the units of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) entities: usize,
    pub(crate) each: u64,
}

/// The result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LossReport {
    /// Granted draws.
    pub(crate) granted: u64,
    /// Granted draws that the new server does not know.
    pub(crate) lost: u64,
    /// Answered settles that the new server does not know, of leases that it knows.
    pub(crate) reopened: u64,
}

fn name(entity: usize) -> String {
    format!("tenant-{entity}")
}

/// Draws until nothing is left while `fault` happens to the server, and checks the result. `fault` gets the
/// number of grants so far.
pub(crate) async fn measure_loss<S: Store + Clone>(
    store: &S,
    budget: Budget,
    fault: impl AsyncFnOnce(&AtomicU64),
) -> LossReport {
    let (granted, has_happened) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let seen = (Arc::clone(&granted), Arc::clone(&has_happened));
            tokio::spawn(call(store.clone(), budget, number, seen))
        })
        .collect();
    fault(&granted).await;
    has_happened.store(true, Ordering::SeqCst);
    let mut grants = Vec::new();
    for caller in callers {
        let finished = tokio::time::timeout(STUCK_AFTER, caller).await.expect("no caller hangs");
        grants.extend(finished.expect("a caller gets contractual answers"));
    }
    check_grants(store, budget, &grants).await
}

async fn call<S: Store>(
    store: S,
    budget: Budget,
    number: usize,
    (granted, has_happened): (Arc<AtomicU64>, Arc<AtomicBool>),
) -> Vec<Grant> {
    let (mut grants, total) = (Vec::new(), budget.entities as u64 * budget.each);
    let all: Vec<_> = (0..budget.entities).map(|entity| own(&name(entity), budget.each)).collect();
    let mut left: Vec<usize> = (0..budget.entities).collect();
    for turn in number.. {
        if left.is_empty() {
            break;
        }
        // However fast the callers are, some units are left for after the fault.
        while granted.load(Ordering::SeqCst) > total / 4 * 3 && !has_happened.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let place = turn % left.len();
        let draw = draw_of(&all[left[place]], 1);
        match until_answered(|| store.draw(&draw)).await.expect("the store responds") {
            DrawResult::Refused(_) => drop(left.remove(place)),
            DrawResult::Granted(moved) => {
                granted.fetch_add(1, Ordering::SeqCst);
                let mut grant = Grant { entity: left[place], lease: draw.lease, at: moved.at, settled: None };
                if !turn.is_multiple_of(3) {
                    let settle = settle_of(&draw, 1);
                    match until_answered(|| store.settle(&settle)).await {
                        Ok(moved) => grant.settled = Some(moved.at),
                        // The new server never received the draw.
                        Err(StoreError::NoLease { .. }) => {}
                        Err(error) => panic!("a settle returned {error:?}"),
                    }
                }
                grants.push(grant);
            }
        }
    }
    grants
}

async fn check_grants<S: Store>(store: &S, budget: Budget, grants: &[Grant]) -> LossReport {
    let mut report = LossReport { granted: grants.len() as u64, lost: 0, reopened: 0 };
    let (mut lost, mut open): (BTreeMap<usize, u64>, BTreeMap<usize, u64>) = Default::default();
    let mut log = Vec::new();
    for entity in 0..budget.entities {
        let levels = own(&name(entity), budget.each);
        let rule = &levels.levels()[0].limits[0].rule;
        log.push(Entry::shape(Stamp::ZERO, BucketId::new(&subject(&name(entity)), rule), *rule.shape()));
    }
    for grant in grants {
        let levels = own(&name(grant.entity), budget.each);
        let bucket = BucketId::new(&subject(&name(grant.entity)), &levels.levels()[0].limits[0].rule);
        let moved = |at, kind, step| Entry::moved(at, bucket.clone(), Move::new(kind, grant.lease, step, 1));
        match until_answered(|| store.lease(grant.lease)).await {
            Err(StoreError::NoLease { .. }) => {
                *lost.entry(grant.entity).or_default() += 1;
                report.lost += 1;
            }
            Ok(LeaseStatus::Open(_)) => {
                *open.entry(grant.entity).or_default() += 1;
                report.reopened += u64::from(grant.settled.is_some());
                log.push(moved(grant.at, Kind::Draw, 0));
            }
            Ok(LeaseStatus::Ended(ended)) => {
                assert_eq!(ended.how, Ending::Settled, "{}", grant.lease);
                log.extend([moved(grant.at, Kind::Draw, 0), moved(ended.at, Kind::Settle, 9)]);
            }
            Err(error) => panic!("the lease {} returned {error:?}", grant.lease),
        }
    }
    let verdict = check(&log);
    assert!(verdict.is_exact(), "{verdict}");
    for entity in 0..budget.entities {
        let of = |all: &BTreeMap<usize, u64>| all.get(&entity).copied().unwrap_or_default();
        let granted = grants.iter().filter(|grant| grant.entity == entity).count() as u64;
        assert_eq!(granted, budget.each + of(&lost), "{} of {entity} were lost", of(&lost));
        let shown = balance(store, &name(entity)).await.expect("the bucket exists");
        assert_eq!(shown, (0, i64::try_from(budget.each).expect("it is small")), "{entity}");
        let settled = budget.each - of(&open);
        // The index may have been lost too; sweeps rebuild it.
        let mut sweeps = 0;
        while used(store, &name(entity)).await != settled && sweeps < SWEEPS_MAX {
            store.sweep(1).await.expect("the store responds");
            sweeps += 1;
        }
        assert_eq!(used(store, &name(entity)).await, settled, "{entity}: each settle is counted once");
    }
    report
}
