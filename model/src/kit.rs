//! Explores a model as it is, and then with each planted bug, which it must find.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use tidegate::fault_injection::{Bug, inject};

/// Ten times as many as the rarest planted bug needs with this seed.
const SCHEDULES: usize = 10_000;
const SCHEDULES_DEEP: usize = 500_000;
/// The usual run explores the same schedules every time; a deep run explores new ones.
const SEED: u64 = 1;
/// Preemption points that PCT places in a schedule.
const DEPTH: usize = 3;

/// A bug is planted for the whole process, so only one model runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn explore(model: fn()) {
    let run = |scheduler: Box<dyn Scheduler + Send>| Runner::new(scheduler, Config::new()).run(model);
    if std::env::var_os("MODEL_DEEP").is_some() {
        run(Box::new(RandomScheduler::new(SCHEDULES_DEEP)));
        run(Box::new(PctScheduler::new(DEPTH, SCHEDULES_DEEP)));
    } else {
        run(Box::new(RandomScheduler::new_from_seed(SEED, SCHEDULES)));
        run(Box::new(PctScheduler::new_from_seed(SEED, DEPTH, SCHEDULES)));
    }
}

/// Runs the model as it is, and then with each planted bug.
///
/// # Panics
/// If the model fails as it is, or does not find a bug.
pub(crate) fn holds_and_catches(model: fn(), bugs: &[Bug]) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    inject(None);
    explore(model);
    for bug in bugs {
        inject(Some(*bug));
        let found = catch_unwind(AssertUnwindSafe(|| explore(model))).is_err();
        inject(None);
        assert!(found, "the model did not find {bug:?}");
    }
}
