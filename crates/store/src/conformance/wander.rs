//! Callers who do what they like with leases, and the judge who looks at what became of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::check::{check, check_ledger};
use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::random::Random;

use super::Fixture;
use super::kit::{RESOURCE, levels, millis, resource};
use super::ledger::usage;
use crate::wrap::Observed;
use crate::{Adjust, Cancel, Draw, Drawn, Extend, Lookup, Renew, Reply, Settle, Store, StoreError, UsageOf};

/// How often a call is made before its caller gives up on the store altogether.
const TRIES: u32 = 200;

/// How many callers there are, what each does, and from which seed.
#[derive(Debug, Clone, Copy)]
pub struct Wander {
    /// Callers at once.
    pub callers: u64,
    /// Leases of each, one after the other.
    pub leases: u32,
    /// Where the choices come from.
    pub seed: u64,
}

/// Lets callers draw, extend, adjust, renew, settle and cancel at random, for four subjects under one parent. Each asks
/// again with the same step when the store is away, and cancels what it does not know to be drawn.
///
/// # Panics
/// If the store answers a lease's steps with what the contract does not allow.
pub async fn wander(fixture: &Fixture, wander: Wander) {
    let callers = (0..wander.callers).map(|number| {
        let (fixture, random) = (fixture.clone(), Random::seeded(wander.seed.wrapping_add(number)));
        tokio::spawn(async move {
            let mut caller = Caller { fixture, random };
            for _ in 0..wander.leases {
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

/// Judges what was observed of a store whose leases have all ended: the log is exact, the ledger has what was
/// settled, and so do the buckets.
///
/// # Panics
/// With all that is wrong.
pub async fn judge<S: Store>(fixture: &Fixture, observed: &Observed<S>) {
    assert_eq!(observed.missed(), 0, "the log is whole");
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
    let seen = fixture.store.balances(&Lookup::Subjects(subjects)).await.expect("balances are answered");
    for bucket in seen.buckets {
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

/// A lease as its holder sees it.
struct Held {
    draw: Draw,
    step: u32,
}

impl Caller {
    /// One lease from its draw to its end.
    async fn lease(&mut self) {
        let levels = self.levels();
        let cost = [("rpm", 1), ("tpm", self.random.below(80))];
        let draw = self.fixture.draw_of(&levels, &cost);
        let mut held = Held { draw, step: 0 };
        match self.draw(&held.draw).await {
            Some(Drawn::Granted(_)) => {}
            Some(Drawn::Refused(_)) => {
                self.fixture.pass_in_turn(millis(1)).await;
                return;
            }
            // Not known to be drawn.
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

    /// Draws, and perhaps gives up when the store is away.
    async fn draw(&mut self, draw: &Draw) -> Option<Drawn> {
        let store = Arc::clone(&self.fixture.store);
        for tried in 0..TRIES {
            let _turn = self.fixture.turn().await;
            match store.draw(draw).await {
                // An earlier try may still be on its way, and find more there than this one.
                Ok(Drawn::Refused(_)) if tried > 0 => return None,
                Ok(drawn) => return Some(drawn),
                Err(error) if error.is_transient() => {
                    if self.random.below(2) == 0 {
                        return None;
                    }
                }
                Err(error) => panic!("a draw answers {error}"),
            }
        }
        panic!("a store that is away {TRIES} times");
    }

    async fn extend(&mut self, held: &mut Held) {
        held.step += 1;
        let units = held.draw.levels.amounts(&[("tpm", self.random.below(100))]);
        let units = units.expect("the suite's costs are valid");
        let extend =
            Extend { lease: held.draw.lease, step: held.step, levels: held.draw.levels.clone(), units };
        insist(&self.fixture, "an extension", || self.fixture.store.extend(&extend)).await;
    }

    async fn adjust(&mut self, held: &mut Held) {
        held.step += 1;
        let delta = i64::try_from(self.random.below(120)).unwrap_or(0) - 60;
        let deltas = held.draw.levels.deltas(&[("tpm", delta)]).expect("the suite's changes are valid");
        let adjust =
            Adjust { lease: held.draw.lease, step: held.step, levels: held.draw.levels.clone(), deltas };
        insist(&self.fixture, "an adjustment", || self.fixture.store.adjust(&adjust)).await;
    }

    async fn renew(&mut self, held: &mut Held) {
        held.step += 1;
        let (lease, levels) = (held.draw.lease, held.draw.levels.clone());
        let renew = Renew { lease, step: held.step, levels, span: millis(self.random.below(9_000_000)) };
        insist(&self.fixture, "a renewal", || self.fixture.store.renew(&renew)).await;
    }

    async fn settle(&mut self, held: &mut Held) {
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
        insist(&self.fixture, "a settle", || self.fixture.store.settle(&settle)).await;
    }

    async fn cancel(&mut self, held: &mut Held) {
        held.step += 1;
        let cancel = Cancel {
            lease: held.draw.lease,
            step: held.step,
            levels: held.draw.levels.clone(),
            is_watched: true,
        };
        insist(&self.fixture, "a cancel", || self.fixture.store.cancel(&cancel)).await;
        let turn = self.fixture.turn().await;
        let again = self.fixture.store.draw(&held.draw).await;
        drop(turn);
        let is_refused = match &again {
            Err(StoreError::Ended { how, .. }) => *how == Ending::Cancelled,
            Err(error) => error.is_transient(),
            Ok(_) => false,
        };
        assert!(is_refused, "a draw after its cancel answers {again:?}");
    }
}

/// Makes a call until the store is not away.
async fn insist<'a, T: Unpin>(fixture: &Fixture, what: &str, call: impl Fn() -> Reply<'a, T>) -> T {
    for _ in 0..TRIES {
        let _turn = fixture.turn().await;
        match call().await {
            Ok(answer) => return answer,
            Err(error) if error.is_transient() => {}
            Err(error) => panic!("{what} answers {error}"),
        }
    }
    panic!("a store that is away {TRIES} times");
}
