//! The brake controller: halves the limits after a few failures, then restores them step by step.
//!
//! Enough failures in the window that are also a large enough share of its outcomes, or one overload, trigger
//! a cut: slots halve (down to their minimum), the interval doubles, and the previous slots become the
//! ceiling. Each cooling period without another cut restores one slot up to the ceiling while slots are in
//! use, and halves the interval while slots are in use or a caller waits. After `ceiling_periods` cooling
//! periods without a failure, the ceiling is the maximum again. Under demand, 64 slots cut to 32 take 32
//! cooling periods to recover.

use std::time::Duration;

use super::{Advice, Sample, Tuning};
use crate::event::Why;
use crate::outcome::Kind;
use crate::plan::{Brake, Controller, Plan};
use crate::time::Instant;
use crate::window::{Tally, Window};

/// The first interval after a cut, if there was none.
const INTERVAL_FIRST: Duration = Duration::from_millis(50);

/// Slices of the window of outcomes.
const SLICES: u32 = 15;

/// The state of the brake.
#[derive(Debug, Clone)]
pub(crate) struct BrakeState {
    failures: Window,
    /// Outcomes in the window, counted in slices.
    outcomes: Tally,
    ceiling: u32,
    /// The start of the current cooling period.
    cooling_since: Option<Instant>,
    last_failure: Option<Instant>,
    is_cooling: bool,
}

/// The bounds of the brake's limits.
struct Bounds {
    slots_min: u32,
    slots_max: u32,
    interval_min: Duration,
    interval_max: Duration,
}

impl BrakeState {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            failures: Window::default(),
            outcomes: Tally::new(within(plan), SLICES),
            ceiling: bounds(plan).slots_max,
            cooling_since: None,
            last_failure: None,
            is_cooling: false,
        }
    }

    pub(super) fn learn(
        &mut self,
        plan: &Plan,
        brake: &Brake,
        tuning: Tuning,
        sample: Sample,
    ) -> Option<Advice> {
        let now = sample.now;
        if sample.is_current && sample.kind != Kind::Ignored {
            self.outcomes.record(now, false);
        }
        match sample.kind {
            Kind::Ignored => None,
            Kind::Success => self.cool(plan, brake, tuning, sample),
            Kind::Failure | Kind::Overload if !sample.is_current => None,
            Kind::Overload => {
                self.last_failure = Some(now);
                Some(self.cut(plan, tuning, Why::Overload, now))
            }
            Kind::Failure => {
                self.last_failure = Some(now);
                self.failures.record(brake.within, now, 1);
                let count = self.failures.total(brake.within, now);
                let is_share = exceeds(count, brake.share, self.outcomes.counts(now).total);
                (count >= u64::from(brake.failures) && is_share)
                    .then(|| self.cut(plan, tuning, Why::Failures { count, within: brake.within }, now))
            }
        }
    }

    pub(super) const fn ceiling(&self) -> u32 {
        self.ceiling
    }

    pub(super) const fn is_cooling(&self) -> bool {
        self.is_cooling
    }

    pub(super) fn failures(&self, brake: &Brake, now: Instant) -> u64 {
        self.failures.total(brake.within, now)
    }

    pub(super) fn tune(&mut self, old: &Plan, new: &Plan) {
        if within(old) != within(new) {
            self.outcomes = Tally::new(within(new), SLICES);
        }
        let (old, new) = (bounds(old), bounds(new));
        self.ceiling = if self.ceiling == old.slots_max {
            new.slots_max
        } else {
            self.ceiling.clamp(new.slots_min, new.slots_max)
        };
    }

    fn cut(&mut self, plan: &Plan, tuning: Tuning, why: Why, now: Instant) -> Advice {
        let bounds = bounds(plan);
        self.failures.clear();
        self.outcomes.clear();
        self.ceiling = tuning.slots;
        self.cooling_since = Some(now);
        self.is_cooling = true;
        let slower = if tuning.interval.is_zero() { INTERVAL_FIRST } else { tuning.interval * 2 };
        let interval = slower.min(bounds.interval_max);
        let slots = (tuning.slots / 2).max(bounds.slots_min);
        Advice::Cut(Tuning { slots, interval, ..tuning }, why)
    }

    /// Handles a success, which may complete a cooling period.
    fn cool(&mut self, plan: &Plan, brake: &Brake, tuning: Tuning, sample: Sample) -> Option<Advice> {
        let (bounds, now) = (bounds(plan), sample.now);
        self.lift_ceiling(brake, &bounds, now);
        let since = *self.cooling_since.get_or_insert(now);
        let is_used = sample.in_flight.saturating_mul(2) >= u64::from(tuning.slots);
        // A long interval can keep slots idle, so a caller waiting for it counts as demand too.
        if now.since(since) < brake.cooling || !(is_used || sample.has_demand) {
            return None;
        }
        self.cooling_since = Some(now);
        let mut interval = (tuning.interval / 2).max(bounds.interval_min);
        if bounds.interval_min.is_zero() && tuning.interval <= INTERVAL_FIRST {
            // Halving never reaches zero, so the last step mirrors the first one of a cut.
            interval = Duration::ZERO;
        }
        let more = tuning.slots.saturating_add(u32::from(is_used));
        let slots = more.min(self.ceiling.max(tuning.slots));
        let grown = Tuning { slots, interval, ..tuning };
        self.is_cooling &= grown.slots < bounds.slots_max || grown.interval > bounds.interval_min;
        (grown != tuning).then_some(Advice::Grow(grown))
    }

    fn lift_ceiling(&mut self, brake: &Brake, bounds: &Bounds, now: Instant) {
        let quiet_time = brake.cooling.saturating_mul(brake.ceiling_periods);
        if self.ceiling < bounds.slots_max
            && self.last_failure.is_none_or(|failure| now.since(failure) >= quiet_time)
        {
            self.ceiling = bounds.slots_max;
        }
    }
}

/// The window of a plan's brake.
const fn within(plan: &Plan) -> Duration {
    match plan.draft.controller {
        Controller::Brake(brake) => brake.within,
        _ => Duration::ZERO,
    }
}

/// Whether `count` is at least this share of `total`.
#[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
fn exceeds(count: u64, share: f64, total: u64) -> bool {
    count as f64 >= share * total as f64
}

fn bounds(plan: &Plan) -> Bounds {
    // Without slots there is nothing to halve, and without a pace nothing to double.
    let (slots_min, slots_max) =
        plan.draft.slots.map_or((u32::MAX, u32::MAX), |slots| (slots.min, slots.max));
    let (interval_min, interval_max) = plan
        .draft
        .pace
        .map_or((Duration::ZERO, Duration::ZERO), |pace| (pace.interval_min, pace.interval_max));
    Bounds { slots_min, slots_max, interval_min, interval_max }
}

#[cfg(test)]
#[path = "brake_tests.rs"]
mod tests;
