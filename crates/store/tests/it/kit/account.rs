//! Callers whose server is lost with what it had not passed on, and the account of what that was.
//!
//! All of them draw until nothing is left, through whatever happens, and write down what they were granted. What the server in
//! the place of the lost one knows of it is asked of it lease by lease. The rest is what was lost; that nothing else went wrong
//! shows in that exactly so much more than the budget was granted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::check::{BucketId, Entry, Kind, Move, check};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::time::Stamp;
use tidegate_store::{Drawn, Standing, Store, StoreError};

use crate::kit::words::{draw_of, own, settle_of, shows, subject, until_answered, used};

const CALLERS: usize = 6;
/// More than it takes to go round all keys of a server that is this test's own.
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

/// Entities, each with so much to be had.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) entities: usize,
    pub(crate) each: u64,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    /// Draws that were granted and answered.
    pub(crate) granted: u64,
    /// Of these, those that are not known any more.
    pub(crate) lost: u64,
    /// Settles that were answered and are not known any more, of leases that are.
    pub(crate) reopened: u64,
}

fn name(entity: usize) -> String {
    format!("tenant-{entity}")
}

/// Draws until nothing is left, while `trouble` happens to the server, and judges what came of it. `trouble` is told how many
/// have been granted so far.
pub(crate) async fn settle_accounts<S: Store + Clone>(
    store: &S,
    budget: Budget,
    trouble: impl AsyncFnOnce(&AtomicU64),
) -> Account {
    let (granted, happened) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let seen = (Arc::clone(&granted), Arc::clone(&happened));
            tokio::spawn(call(store.clone(), budget, number, seen))
        })
        .collect();
    trouble(&granted).await;
    happened.store(true, Ordering::SeqCst);
    let mut grants = Vec::new();
    for caller in callers {
        let over = tokio::time::timeout(STUCK_AFTER, caller).await.expect("no caller hangs");
        grants.extend(over.expect("a caller is answered as the contract says"));
    }
    judge(store, budget, &grants).await
}

async fn call<S: Store>(
    store: S,
    budget: Budget,
    number: usize,
    (granted, happened): (Arc<AtomicU64>, Arc<AtomicBool>),
) -> Vec<Grant> {
    let (mut grants, all_there_is) = (Vec::new(), budget.entities as u64 * budget.each);
    let all: Vec<_> = (0..budget.entities).map(|entity| own(&name(entity), budget.each)).collect();
    let mut left: Vec<usize> = (0..budget.entities).collect();
    for turn in number.. {
        if left.is_empty() {
            break;
        }
        // However fast they are, some is left for after it.
        while granted.load(Ordering::SeqCst) > all_there_is / 4 * 3 && !happened.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let place = turn % left.len();
        let draw = draw_of(&all[left[place]], 1);
        match until_answered(|| store.draw(&draw)).await.expect("a draw is answered") {
            Drawn::Refused(_) => drop(left.remove(place)),
            Drawn::Granted(moved) => {
                granted.fetch_add(1, Ordering::SeqCst);
                let mut grant = Grant { entity: left[place], lease: draw.lease, at: moved.at, settled: None };
                if !turn.is_multiple_of(3) {
                    let settle = settle_of(&draw, 1);
                    match until_answered(|| store.settle(&settle)).await {
                        Ok(moved) => grant.settled = Some(moved.at),
                        // The one in the place of the lost one has never heard of it.
                        Err(StoreError::NoLease { .. }) => {}
                        Err(error) => panic!("a settle answers {error:?}"),
                    }
                }
                grants.push(grant);
            }
        }
    }
    grants
}

async fn judge<S: Store>(store: &S, budget: Budget, grants: &[Grant]) -> Account {
    let mut account = Account { granted: grants.len() as u64, lost: 0, reopened: 0 };
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
                account.lost += 1;
            }
            Ok(Standing::Open(_)) => {
                *open.entry(grant.entity).or_default() += 1;
                account.reopened += u64::from(grant.settled.is_some());
                log.push(moved(grant.at, Kind::Draw, 0));
            }
            Ok(Standing::Ended(ended)) => {
                assert_eq!(ended.how, Ending::Settled, "{}", grant.lease);
                log.extend([moved(grant.at, Kind::Draw, 0), moved(ended.at, Kind::Settle, 9)]);
            }
            Err(error) => panic!("the lease {} answers {error:?}", grant.lease),
        }
    }
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    for entity in 0..budget.entities {
        let of = |all: &BTreeMap<usize, u64>| all.get(&entity).copied().unwrap_or_default();
        let granted = grants.iter().filter(|grant| grant.entity == entity).count() as u64;
        assert_eq!(granted, budget.each + of(&lost), "{} of {entity} were lost", of(&lost));
        let shown = shows(store, &name(entity)).await.expect("it was drawn from");
        assert_eq!(shown, (0, i64::try_from(budget.each).expect("it is small")), "{entity}");
        let settled = budget.each - of(&open);
        // The index may have been lost too; a sweep finds what is there.
        let mut sweeps = 0;
        while used(store, &name(entity)).await != settled && sweeps < SWEEPS_MAX {
            store.sweep(1).await.expect("the store is there");
            sweeps += 1;
        }
        assert_eq!(used(store, &name(entity)).await, settled, "{entity}: what was settled, once");
    }
    account
}
