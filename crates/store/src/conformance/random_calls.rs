//! Callers that make random calls on leases, and a check that the result is exact.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::{check, check_ledger};
use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::random::Random;

use super::Fixture;
use super::kit::{RESOURCE, levels, millis, resource};
use super::ledger::usage;
use crate::wrap::Observed;
use crate::{
    Adjust, Cancel, Draw, DrawResult, Extend, Lookup, Renew, Reply, Settle, Store, StoreError, UsageOf,
};

/// The maximum number of attempts of a call.
const TRIES: u32 = 200;

/// The parameters of random calls.
#[derive(Debug, Clone, Copy)]
pub struct RandomCalls {
    /// The number of concurrent callers.
    pub callers: u64,
    /// The number of leases of each caller, one after the other.
    pub leases: u32,
    /// The seed of the random choices.
    pub seed: u64,
}

/// Runs callers that draw, extend, adjust, renew, settle and cancel at random, for four subjects under one
/// parent. They retry with the same step while the store is unavailable, and cancel a draw with unknown
/// result.
///
/// # Panics
/// If the result of a step violates the contract.
pub async fn run_random_calls(fixture: &Fixture, calls: RandomCalls) {
    let callers = (0..calls.callers).map(|number| {
        let (fixture, random) = (fixture.clone(), Random::seeded(calls.seed.wrapping_add(number)));
        tokio::spawn(async move {
            let mut caller = Caller { fixture, random };
            for _ in 0..calls.leases {
                caller.lease().await;
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        if let Err(error) = caller.await {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Checks the log of a store whose leases have all ended: it is exact, and the ledger and the buckets agree
/// with the settlements.
///
/// # Panics
/// With all violations.
pub async fn check_exact<S: Store>(fixture: &Fixture, observed: &Observed<S>) {
    assert_eq!(observed.missed(), 0, "the log is complete");
    let log = observed.log();
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    assert!(report.open.is_empty(), "every lease has ended: {:?}", report.open);
    let lines = usage(fixture, UsageOf::Resource(resource(RESOURCE)), Window::Month).await;
    let mut used = BTreeMap::new();
    for line in lines {
        *used.entry((line.subject, line.limit)).or_default() += line.tally.units;
    }
    let wrong = check_ledger(&log, &used);
    assert!(wrong.is_empty(), "{wrong:?}");
    let subjects = used.keys().map(|(subject, _)| subject.clone()).collect();
    let snapshot = fixture.store.balances(&Lookup::Subjects(subjects)).await.expect("balances are read");
    for bucket in snapshot.buckets {
        for meter in bucket.meters {
            let key = (bucket.subject.clone(), meter.rule().name().clone());
            let settled = used.get(&key).copied().unwrap_or_default();
            assert_eq!(meter.consumed(), 0_i64.saturating_add_unsigned(settled), "{key:?}");
        }
    }
}

struct Caller {
    fixture: Fixture,
    random: Random,
}

/// A lease and its last step.
struct HeldLease {
    draw: Draw,
    step: u32,
}

impl Caller {
    /// One lease from its draw to its end.
    async fn lease(&mut self) {
        let levels = self.levels();
        let cost = [("rpm", 1), ("tpm", self.random.below(80))];
        let draw = self.fixture.draw_of(&levels, &cost);
        let mut held = HeldLease { draw, step: 0 };
        match self.draw(&held.draw).await {
            Some(DrawResult::Granted(_)) => {}
            Some(DrawResult::Refused(_)) => {
                self.fixture.pass_time(millis(1)).await;
                return;
            }
            // The result is unknown.
            None => return self.cancel(&mut held).await,
        }
        for _ in 0..self.random.below(4) {
            match self.random.below(4) {
                0 => self.extend(&mut held).await,
                1 => self.adjust(&mut held).await,
                2 => self.renew(&mut held).await,
                _ => tokio::task::yield_now().await,
            }
        }
        if self.random.below(3) == 0 { self.cancel(&mut held).await } else { self.settle(&mut held).await }
    }

    fn levels(&mut self) -> Arc<Levels> {
        let child = format!("child-{}", self.random.below(4));
        let own = [Limit::per_second("rpm", 400).burst(6), Limit::per_second("tpm", 20_000).burst(300)];
        let shared = [Limit::per_second("tpm", 50_000).burst(500), Limit::per_second("rpm", 900).burst(12)];
        levels(1, &[(&child, &own), ("parent", &shared)])
    }

    /// Draws, and perhaps gives up while the store is unavailable.
    async fn draw(&mut self, draw: &Draw) -> Option<DrawResult> {
        let store = Arc::clone(&self.fixture.store);
        for tried in 0..TRIES {
            let _turn = self.fixture.turn().await;
            match store.draw(draw).await {
                // An earlier attempt may still arrive, and find more units available.
                Ok(DrawResult::Refused(_)) if tried > 0 => return None,
                Ok(result) => return Some(result),
                Err(error) if error.is_transient() => {
                    if self.random.below(2) == 0 {
                        return None;
                    }
                }
                Err(error) => panic!("a draw returns {error}"),
            }
        }
        panic!("the store was unavailable {TRIES} times");
    }

    async fn extend(&mut self, held: &mut HeldLease) {
        held.step += 1;
        let units = held.draw.levels.amounts(&[("tpm", self.random.below(100))]);
        let units = units.expect("the suite's costs are valid");
        let extend =
            Extend { lease: held.draw.lease, step: held.step, levels: held.draw.levels.clone(), units };
        retry(&self.fixture, "an extension", || self.fixture.store.extend(&extend)).await;
    }

    async fn adjust(&mut self, held: &mut HeldLease) {
        held.step += 1;
        let delta = i64::try_from(self.random.below(120)).unwrap_or(0) - 60;
        let deltas = held.draw.levels.deltas(&[("tpm", delta)]).expect("the suite's changes are valid");
        let adjust =
            Adjust { lease: held.draw.lease, step: held.step, levels: held.draw.levels.clone(), deltas };
        retry(&self.fixture, "an adjustment", || self.fixture.store.adjust(&adjust)).await;
    }

    async fn renew(&mut self, held: &mut HeldLease) {
        held.step += 1;
        let (lease, levels) = (held.draw.lease, held.draw.levels.clone());
        let renew = Renew { lease, step: held.step, levels, span: millis(self.random.below(9_000_000)) };
        retry(&self.fixture, "a renewal", || self.fixture.store.renew(&renew)).await;
    }

    async fn settle(&mut self, held: &mut HeldLease) {
        held.step += 1;
        let used = [("rpm", 1), ("tpm", self.random.below(150))];
        let named = usize::try_from(self.random.below(3)).unwrap_or(0);
        let actual = held.draw.levels.amounts(&used[..named]).expect("the suite's amounts are valid");
        let settle = Settle {
            lease: held.draw.lease,
            step: held.step,
            levels: held.draw.levels.clone(),
            actual,
            is_watched: true,
        };
        retry(&self.fixture, "a settle", || self.fixture.store.settle(&settle)).await;
    }

    async fn cancel(&mut self, held: &mut HeldLease) {
        held.step += 1;
        let cancel = Cancel {
            lease: held.draw.lease,
            step: held.step,
            levels: held.draw.levels.clone(),
            is_watched: true,
        };
        retry(&self.fixture, "a cancel", || self.fixture.store.cancel(&cancel)).await;
        let turn = self.fixture.turn().await;
        let again = self.fixture.store.draw(&held.draw).await;
        drop(turn);
        let is_refused = match &again {
            Err(StoreError::Ended { how, .. }) => *how == Ending::Cancelled,
            Err(error) => error.is_transient(),
            Ok(_) => false,
        };
        assert!(is_refused, "a draw after its cancel returns {again:?}");
    }
}

/// Retries a call until the store is available.
async fn retry<'a, T: Unpin>(fixture: &Fixture, what: &str, call: impl Fn() -> Reply<'a, T>) -> T {
    for _ in 0..TRIES {
        let _turn = fixture.turn().await;
        match call().await {
            Ok(answer) => return answer,
            Err(error) if error.is_transient() => {}
            Err(error) => panic!("{what} returns {error}"),
        }
    }
    panic!("the store was unavailable {TRIES} times");
}
