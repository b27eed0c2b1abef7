//! Runs the suite on the engine of docs/write-an-engine.md, and checks that the page shows the tested code.

#[allow(unreachable_pub, reason = "the page shows it as the public type of a crate")]
mod engine;

use std::sync::Arc;

use tidegate_core::time::Stamp;
use tidegate_store::ManualWall;
use tidegate_store::conformance::random_calls::{RandomCalls, check_exact, run_random_calls};
use tidegate_store::conformance::{self, Fixture};
use tidegate_store::wrap::{FaultPlan, Faulty, Observed};

use crate::kit::eviction;
use engine::MapEngine;

/// 2027-01-15T08:00:00Z, so that no case starts near the end of an hour.
const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(_namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    Fixture::new(Arc::new(MapEngine::new(clock.clone())), Arc::new(clock))
}

conformance::suite!(suite, open, jumps);

/// Callers retry with the same step and cancel draws whose answer was lost: each unit is charged once and returned once.
#[test]
fn bad_network_neither_loses_nor_repeats_units() {
    for seed in 0..4 {
        let case = async |fixture: Fixture| {
            let observed = Arc::new(Observed::new(fixture.store.clone()));
            let plan = FaultPlan::seeded(seed).fails(100).loses(100).repeats(100).defers(150);
            let faulty = Arc::new(Faulty::new(observed.clone(), plan).unwrap());
            run_random_calls(
                &fixture.clone().with_store(faulty.clone()),
                RandomCalls { callers: 6, leases: 30, seed },
            )
            .await;
            faulty.deliver().await;
            check_exact(&fixture.with_store(observed.clone()), &observed).await;
        };
        conformance::run(&format!("seed {seed}"), open, case);
    }
}

#[tokio::test]
async fn idle_subjects_are_evicted() {
    eviction::evicts_idle_subjects(&MapEngine::new(ManualWall::new(START))).await;
    let clock = ManualWall::new(START);
    eviction::keeps_new_rules_for_ten_minutes(&MapEngine::new(clock.clone()), &clock).await;
}

/// The page's `rust` blocks, joined with empty lines, are the file.
#[test]
fn page_shows_the_engine_that_is_tested() {
    let page = include_str!("../../../../../docs/write-an-engine.md");
    let mut shown: Vec<&str> = Vec::new();
    let mut is_code = false;
    for line in page.lines() {
        match line {
            "```rust" => {
                is_code = true;
                shown.extend((!shown.is_empty()).then_some(""));
            }
            "```" => is_code = false,
            line if is_code => shown.push(line),
            _ => {}
        }
    }
    let written: Vec<&str> = include_str!("engine.rs").lines().collect();
    for (number, (shown, written)) in shown.iter().zip(&written).enumerate() {
        assert_eq!(shown, written, "line {} of engine.rs is shown differently", number + 1);
    }
    assert_eq!(shown.len(), written.len(), "the page ends before the file does, or after it");
}
