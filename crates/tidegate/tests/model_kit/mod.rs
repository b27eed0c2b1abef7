//! How a model is explored: as it is, and then with each bug planted, which it must find.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use tidegate::planted::{Bug, plant};

/// What is planted is planted for the whole process: one model at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn schedules() -> usize {
    if std::env::var_os("MODEL_DEEP").is_some() { 1_000_000 } else { 100_000 }
}

fn explore(model: fn()) {
    let half = schedules() / 2;
    shuttle::check_random(model, half);
    shuttle::check_pct(model, half, 3);
}

/// Runs the model as it is, and then with each bug planted, which it must find.
pub(crate) fn holds_and_catches(model: fn(), bugs: &[Bug]) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    plant(None);
    explore(model);
    for bug in bugs {
        plant(Some(*bug));
        let found = catch_unwind(AssertUnwindSafe(|| explore(model))).is_err();
        plant(None);
        assert!(found, "the model did not find {bug:?}");
    }
}
