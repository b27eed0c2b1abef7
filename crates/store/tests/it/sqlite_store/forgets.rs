//! A store in memory forgets buckets that are the same as none. A file that keeps every bucket answers the same: whatever is asked, whatever is
//! changed and however long it takes, both answer the same. Who asks knows the rules that hold, as whoever asks through a
//! limiter does, draws of all limits that it settles, and bursts are not raised: what else a forgotten subject is told is in
//! decision 036.

use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{ManualWall, Memory, PolicyChange, Sqlite, Standing, Store};

use super::like_memory::{Step, ask, levels, look, step};
use crate::kit::sqlite::Place;
use crate::kit::words::START;

/// Leases that are asked for at a time; those of the time before are asked for too, while they are open.
const LEASES: u8 = 6;

#[derive(Debug, Clone)]
enum Turn {
    /// A step, of a lease of the time before or of now.
    Ask(Step, bool),
    /// Administrators change something.
    Change,
    /// Long enough for ended leases to be forgotten: from here on there are others.
    Jump(u16),
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        20 => (step(), prop::bool::weighted(0.2))
            .prop_map(|(step, is_of_before)| Turn::Ask(step.drawing_all(), is_of_before)),
        2 => Just(Turn::Change),
        2 => (601..4_000_u16).prop_map(Turn::Jump),
    ]
}

/// What the callers know.
#[derive(Default)]
struct World {
    /// How often administrators have changed something.
    changes: u64,
    /// How often there was a jump.
    epoch: u8,
}

impl World {
    fn lease(&self, lease: u8, is_of_before: bool) -> u8 {
        // As many as there are kinds of levels, so that a lease is always the same one's.
        LEASES * self.epoch.saturating_sub(u8::from(is_of_before)) + lease % LEASES
    }

    fn id(lease: u8) -> LeaseId {
        LeaseId::new(1_800_000_000_000 + u64::from(lease), u128::from(lease))
    }
}

async fn change(store: &dyn Store, number: u64) {
    let policy = Policy::new([Limit::per_minute("rpm", 1 + number)]).expect("a valid policy");
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    store.apply(&[change], "a test").await.expect("it is changed");
}

async fn is_open(store: &dyn Store, lease: u8) -> bool {
    matches!(store.lease(World::id(lease)).await, Ok(Standing::Open(_)))
}

/// A file that evicts nothing: it takes all subjects to be held by leases from before an upgrade.
async fn keeps_all(clock: &ManualWall) -> (Place, Sqlite) {
    let place = Place::new();
    place.open(clock).await.close().await;
    place.outside().execute("UPDATE clock SET held_until = 9223372036854775807", []).expect("it is written");
    let keeps = place.open(clock).await;
    (place, keeps)
}

async fn is_alike(turns: Vec<Turn>) -> Result<u64, TestCaseError> {
    let clock = ManualWall::new(START);
    let forgets = Memory::with_clock(clock.clone());
    let (_place, keeps) = keeps_all(&clock).await;
    let mut world = World::default();
    for (number, turn) in turns.iter().enumerate() {
        match turn {
            Turn::Change => {
                world.changes += 1;
                change(&forgets, world.changes).await;
                change(&keeps, world.changes).await;
            }
            Turn::Jump(seconds) => {
                clock.advance(Duration::from_secs((*seconds).into()));
                world.epoch += 1;
                for store in [&forgets as &dyn Store, &keeps] {
                    store.sweep(1_000).await.expect("it is swept");
                }
            }
            Turn::Ask(step, is_of_before) => {
                if let Step::Pass { millis } = step {
                    clock.advance(Duration::from_millis(*millis));
                }
                if let Some(lease) = step.lease()
                    && *is_of_before
                    && !is_open(&keeps, world.lease(lease, true)).await
                {
                    continue;
                }
                let of = |lease: u8, _: u8| {
                    let lease = world.lease(lease, *is_of_before);
                    // Never a larger one: a bucket that is kept has what it had under the smaller, and one that is
                    // forgotten begins full, as that of a subject that nobody has seen.
                    let burst = 100_u64.saturating_sub(7 * world.changes).max(50);
                    (World::id(lease), levels(lease, world.changes, burst))
                };
                let wanted = ask(&keeps, step, &of).await;
                prop_assert_eq!(&ask(&forgets, step, &of).await, &wanted, "turn {} is {:?}", number, turn);
            }
        }
        prop_assert_eq!(look(&forgets).await, look(&keeps).await, "after turn {}, {:?}", number, turn);
    }
    Ok(forgets.stats().subjects_forgotten)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).map_or(80, |cases: u32| cases.min(2_000))
    ))]

    #[test]
    fn a_store_that_forgets_full_buckets_answers_as_one_that_keeps_all(turns in prop::collection::vec(turn(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(is_alike(turns))?;
    }
}
