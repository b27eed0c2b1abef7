//! Differential test: a store in memory that evicts full buckets gives the same answers as a file that keeps
//! all.
//!
//! Holds for callers that know the current rules, as callers of a limiter do, that draw from all limits they
//! settle, and whose bursts are not raised. Decision 036 lists the differences for other callers.

use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{LeaseStatus, ManualWall, Memory, PolicyChange, Sqlite, Store, WallClock as _};

use super::like_memory::{Step, levels, run_step, step, visible_state};
use crate::kit::common::START;
use crate::kit::sqlite::TempFile;

/// Lease ids in use at a time; those of the previous epoch are used too while they are open.
const LEASES: u8 = 6;

#[derive(Debug, Clone)]
enum Turn {
    /// A step of a lease of the previous or the current epoch.
    Ask(Step, bool),
    /// An administrative change.
    Change,
    /// Long enough for ended leases to be evicted: later steps use new leases.
    Jump(u16),
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        20 => (step(), prop::bool::weighted(0.2))
            .prop_map(|(step, is_previous)| Turn::Ask(step.drawing_all(), is_previous)),
        2 => Just(Turn::Change),
        2 => (601..4_000_u16).prop_map(Turn::Jump),
    ]
}

/// The state that the callers share.
#[derive(Default)]
struct World {
    /// The number of administrative changes.
    changes: u64,
    /// The number of jumps.
    epoch: u8,
}

impl World {
    fn lease(&self, lease: u8, is_previous: bool) -> u8 {
        // A multiple of the kinds of levels, so that a lease always has the same holder.
        LEASES * self.epoch.saturating_sub(u8::from(is_previous)) + lease % LEASES
    }

    fn id(lease: u8) -> LeaseId {
        LeaseId::new(1_800_000_000_000 + u64::from(lease), u128::from(lease))
    }
}

async fn change(store: &dyn Store, number: u64) {
    let policy = Policy::new([Limit::per_minute("rpm", 1 + number)]).expect("a valid policy");
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    store.apply(&[change], "a test").await.expect("the change is applied");
}

async fn is_open(store: &dyn Store, lease: u8) -> bool {
    matches!(store.lease(World::id(lease)).await, Ok(LeaseStatus::Open(_)))
}

/// A file that evicts nothing: it treats all subjects as held by leases from before an upgrade.
async fn keeps_all(clock: &ManualWall) -> (TempFile, Sqlite) {
    let place = TempFile::new();
    place.open(clock).await.close().await;
    place
        .outside()
        .execute("UPDATE clock SET held_until = 9223372036854775807", [])
        .expect("the clock row is updated");
    let keeps = place.open(clock).await;
    (place, keeps)
}

async fn check_equivalence(turns: Vec<Turn>) -> Result<u64, TestCaseError> {
    let clock = ManualWall::new(START);
    let evicts = Memory::with_clock(clock.clone());
    let (_place, keeps) = keeps_all(&clock).await;
    let mut world = World::default();
    for (number, turn) in turns.iter().enumerate() {
        match turn {
            Turn::Change => {
                world.changes += 1;
                change(&evicts, world.changes).await;
                change(&keeps, world.changes).await;
            }
            Turn::Jump(seconds) => {
                clock.advance(Duration::from_secs((*seconds).into()));
                world.epoch += 1;
                for store in [&evicts as &dyn Store, &keeps] {
                    store.sweep(1_000).await.expect("the sweep succeeds");
                }
            }
            Turn::Ask(step, is_previous) => {
                if let Step::Pass { millis } = step {
                    clock.advance(Duration::from_millis(*millis));
                }
                if let Some(lease) = step.lease()
                    && *is_previous
                    && !is_open(&keeps, world.lease(lease, true)).await
                {
                    continue;
                }
                let of = |lease: u8, _: u8| {
                    let lease = world.lease(lease, *is_previous);
                    // The burst never grows: a kept bucket has its level under the smaller one, while an
                    // evicted bucket starts full, like that of an unused subject.
                    let burst = 100_u64.saturating_sub(7 * world.changes).max(50);
                    (World::id(lease), levels(lease, world.changes, burst))
                };
                let wanted = run_step(&keeps, step, clock.now(), &of).await;
                prop_assert_eq!(
                    &run_step(&evicts, step, clock.now(), &of).await,
                    &wanted,
                    "turn {} is {:?}",
                    number,
                    turn
                );
            }
        }
        prop_assert_eq!(
            visible_state(&evicts).await,
            visible_state(&keeps).await,
            "after turn {}, {:?}",
            number,
            turn
        );
    }
    Ok(evicts.stats().subjects_forgotten)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).map_or(80, |cases: u32| cases.min(2_000))
    ))]

    #[test]
    fn evicting_store_matches_one_that_keeps_all(turns in prop::collection::vec(turn(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(check_equivalence(turns))?;
    }
}
