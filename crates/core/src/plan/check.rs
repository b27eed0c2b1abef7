//! Bounds for every number in a draft, and an error message for each violation.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::{Controller, Draft, Rate};
use crate::backoff::Jitter;
use crate::bucket::{AMOUNT_MAX, InvalidShape, PERIOD_MAX, REFILL_MAX, Shape};
use crate::duration::Exact;
use crate::retry::Retry;

/// The longest span in a draft: 366 days.
pub(super) const SPAN_MAX: Duration = PERIOD_MAX;
/// The most slots, probes or waiters.
pub(super) const COUNT_MAX: u32 = 1 << 30;
/// The most attempts.
const ATTEMPTS_MAX: u32 = 1_000;
/// The most slices of a window.
const SLICES_MAX: u32 = 1_024;
/// The most bytes or tokens: doubles represent integers exactly up to this.
pub(super) const UNITS_MAX: u64 = 1 << 53;

/// All problems of a draft.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}", sentences(problems))]
pub struct InvalidPlan {
    problems: Vec<Problem>,
}

impl InvalidPlan {
    /// One entry for each number that is out of bounds.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

/// A number that is out of bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The field, by its configuration key: `slots.max`.
    pub field: &'static str,
    /// The field's value.
    pub value: String,
    /// The allowed values.
    pub bound: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {}, and must be {}", self.field, self.value, self.bound)
    }
}

fn sentences(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

/// Problems found so far.
#[derive(Debug, Default)]
pub(super) struct Problems(Vec<Problem>);

impl Problems {
    pub(super) fn check(&mut self, draft: &Draft) {
        if let Some(slots) = draft.slots {
            self.count("slots.max", slots.max, 1, COUNT_MAX);
            self.count("slots.min", slots.min, 1, slots.max.max(1));
            self.count("slots.start", slots.start, slots.min.max(1), slots.max.max(1));
        }
        if let Some(slots) = draft.recovery_slots {
            self.count("recovery_slots", slots, 1, COUNT_MAX);
        }
        if let Some(bytes) = draft.bytes {
            self.units("bytes.capacity", bytes.capacity);
            self.count("bytes.recovering_price", u32::from(bytes.recovering_price), 1, u32::from(u16::MAX));
        }
        if let Some(pace) = draft.pace {
            self.span("pace.interval_min", pace.interval_min, Duration::ZERO, SPAN_MAX);
            self.span("pace.interval_max", pace.interval_max, pace.interval_min, SPAN_MAX);
            self.fraction("pace.jitter", pace.jitter, 0.0);
        }
        if let Some(budget) = draft.budget {
            self.units("budget.tokens", budget.tokens);
            self.span("budget.window", budget.window, Duration::from_nanos(1), SPAN_MAX);
        }
        self.check_circuit(draft);
        self.span("pause.max", draft.pause.max, Duration::ZERO, SPAN_MAX);
        self.span("pause.tail", draft.pause.tail, Duration::ZERO, SPAN_MAX);
        if let Some(sizes) = draft.pause.sizes {
            self.span("pause.sizes.small", sizes.small, Duration::ZERO, SPAN_MAX);
            self.span("pause.sizes.large", sizes.large, Duration::ZERO, SPAN_MAX);
        }
        if let Controller::Brake(brake) = draft.controller {
            self.count("brake.failures", brake.failures, 1, COUNT_MAX);
            self.fraction("brake.share", brake.share, 0.0);
            self.span("brake.within", brake.within, Duration::from_nanos(1), SPAN_MAX);
            self.span("brake.cooling", brake.cooling, Duration::from_nanos(1), SPAN_MAX);
            self.count("brake.ceiling_periods", brake.ceiling_periods, 1, COUNT_MAX);
        }
        self.check_retry(&draft.retry);
        self.count("milestone_percent", draft.milestone_percent, 1, 100);
        self.count("waiters_max", draft.waiters_max, 1, COUNT_MAX);
    }

    fn check_circuit(&mut self, draft: &Draft) {
        let Some(circuit) = draft.circuit else { return };
        if let Some(failures) = circuit.consecutive {
            self.count("circuit.failures", failures, 1, COUNT_MAX);
        }
        if let Some(rate) = circuit.error_rate {
            self.fraction("circuit.error_rate", rate.threshold, f64::MIN_POSITIVE);
            self.count("circuit.samples_min", rate.samples_min, 1, COUNT_MAX);
            self.span("circuit.window", rate.window, Duration::from_nanos(1), SPAN_MAX);
            self.count("circuit.slices", circuit.slices, 1, SLICES_MAX);
        }
        self.span("circuit.open_for", circuit.open_for, Duration::ZERO, SPAN_MAX);
        self.count("circuit.probes", circuit.probes, 1, COUNT_MAX);
    }

    fn check_retry(&mut self, retry: &Retry) {
        self.count("retry.attempts", retry.attempts, 1, ATTEMPTS_MAX);
        let (base, max) = retry.backoff.span();
        self.span("retry.backoff_base", base, Duration::ZERO, SPAN_MAX);
        self.span("retry.backoff_max", max, base.min(SPAN_MAX), SPAN_MAX);
        if let Jitter::Range(range) = retry.backoff.spread() {
            self.fraction("retry.jitter_min", *range.start(), 0.0);
            let (min, max) = (*range.start(), *range.end());
            self.unless((min..=1.0).contains(&max), "retry.jitter_max", &max, || format!("from {min} to 1"));
        }
        self.fraction("retry.budget.share", retry.budget.share, 0.0);
        self.count("retry.budget.at_least", retry.budget.at_least, 0, COUNT_MAX);
        self.span("retry.budget.window", retry.budget.window, Duration::from_nanos(1), SPAN_MAX);
    }

    /// Checks a rate and returns its bucket.
    pub(super) fn shape(&mut self, rate: Rate) -> Option<Shape> {
        let (part, value, bound) = match Shape::new(rate.amount, rate.period, rate.burst) {
            Ok(shape) => return Some(shape),
            Err(invalid) => out_of_bounds(invalid),
        };
        let field = match part {
            "amount" => "rate.amount",
            "period" => "rate.period",
            _ => "rate.burst",
        };
        self.0.push(Problem { field, value, bound });
        None
    }

    pub(super) fn into_result(self) -> Result<(), InvalidPlan> {
        if self.0.is_empty() { Ok(()) } else { Err(InvalidPlan { problems: self.0 }) }
    }

    fn count(&mut self, field: &'static str, value: u32, min: u32, max: u32) {
        self.unless((min..=max).contains(&value), field, &value, || format!("from {min} to {max}"));
    }

    fn units(&mut self, field: &'static str, value: u64) {
        self.unless((1..=UNITS_MAX).contains(&value), field, &value, || format!("from 1 to {UNITS_MAX}"));
    }

    pub(super) fn span(&mut self, field: &'static str, value: Duration, min: Duration, max: Duration) {
        self.unless((min..=max).contains(&value), field, &Exact(value), || {
            format!("from {} to {}", Exact(min), Exact(max))
        });
    }

    /// NaN is outside every range.
    pub(super) fn number(&mut self, field: &'static str, value: f64, min: f64, max: f64) {
        self.unless((min..=max).contains(&value), field, &value, || format!("from {min} to {max}"));
    }

    /// Adds a problem other than a number outside a range.
    pub(super) fn add(&mut self, field: &'static str, value: &str, bound: &str) {
        self.0.push(Problem { field, value: value.to_owned(), bound: bound.to_owned() });
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn fraction(&mut self, field: &'static str, value: f64, min: f64) {
        self.unless((min..=1.0).contains(&value), field, &value, || {
            if min > 0.0 { "above 0 and at most 1".to_owned() } else { "from 0 to 1".to_owned() }
        });
    }

    fn unless(
        &mut self,
        good: bool,
        field: &'static str,
        value: &dyn fmt::Display,
        bound: impl FnOnce() -> String,
    ) {
        if !good {
            self.0.push(Problem { field, value: value.to_string(), bound: bound() });
        }
    }
}

/// The number of a rate that is out of bounds: its name, its value and its bound.
pub(super) fn out_of_bounds(invalid: InvalidShape) -> (&'static str, String, String) {
    match invalid {
        InvalidShape::Amount { amount } => ("amount", amount.to_string(), format!("from 1 to {AMOUNT_MAX}")),
        InvalidShape::Period { period, .. } => {
            ("period", Exact(period).to_string(), format!("from 1ns to {}", Exact(PERIOD_MAX)))
        }
        InvalidShape::Burst { burst } => {
            ("burst", burst.to_string(), format!("at least 1 and refilled within {}", Exact(REFILL_MAX)))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use crate::backoff::Backoff;
    use crate::retry::RetryBudget;

    use super::super::{Brake, Budget, Bytes, Circuit, Pace, Pause, SizeRule, Slots};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const AGES: Duration = Duration::MAX;

    fn fields(draft: Draft) -> Vec<&'static str> {
        let invalid = draft.check().expect_err("out of bounds");
        invalid.problems().iter().map(|problem| problem.field).collect()
    }

    #[test]
    fn numbers_out_of_bounds_are_named() {
        let base = Draft::default;
        let circuit = |circuit| Draft { circuit: Some(circuit), ..base() };
        let pace = |pace| Draft { pace: Some(pace), ..base() };
        let rate = |rate| Draft { rate: Some(rate), ..base() };
        let table: Vec<(Draft, &[&str])> = vec![
            (Draft { slots: Some(Slots::fixed(0)), ..base() }, &["slots.max", "slots.min", "slots.start"]),
            (
                Draft { slots: Some(Slots::adaptive(RangeInclusive::new(3, 2))), ..base() },
                &["slots.min", "slots.start"],
            ),
            (Draft { slots: Some(Slots::adaptive(2..=4).start(5)), ..base() }, &["slots.start"]),
            (Draft { recovery_slots: Some(0), ..base() }, &["recovery_slots"]),
            (Draft { bytes: Some(Bytes::in_flight(0)), ..base() }, &["bytes.capacity"]),
            (
                Draft { bytes: Some(Bytes::in_flight(1).recovering_price(0)), ..base() },
                &["bytes.recovering_price"],
            ),
            (pace(Pace::every(SECOND).slowest(Duration::ZERO)), &["pace.interval_max"]),
            (pace(Pace::every(AGES)), &["pace.interval_min", "pace.interval_max"]),
            (pace(Pace::every(SECOND).jitter(f64::NAN)), &["pace.jitter"]),
            (pace(Pace::every(SECOND).jitter(-0.1)), &["pace.jitter"]),
            (pace(Pace::every(SECOND).jitter(1.5)), &["pace.jitter"]),
            (rate(Rate::per_second(0)), &["rate.amount"]),
            (rate(Rate::new(1, Duration::ZERO)), &["rate.period"]),
            (rate(Rate::per_second(1).burst(0)), &["rate.burst"]),
            (
                Draft { budget: Some(Budget::tokens(0, Duration::ZERO)), ..base() },
                &["budget.tokens", "budget.window"],
            ),
            (circuit(Circuit::after_failures(0)), &["circuit.failures"]),
            (circuit(Circuit::default().probes(0).open_for(AGES)), &["circuit.open_for", "circuit.probes"]),
            (
                circuit(Circuit::at_error_rate(0.0, 0, Duration::ZERO).slices(0)),
                &["circuit.error_rate", "circuit.samples_min", "circuit.window", "circuit.slices"],
            ),
            (circuit(Circuit::at_error_rate(f64::NAN, 1, SECOND)), &["circuit.error_rate"]),
            (circuit(Circuit::at_error_rate(0.5, 1, SECOND).slices(1_025)), &["circuit.slices"]),
            (Draft { pause: Pause::default().max(AGES).tail(AGES), ..base() }, &["pause.max", "pause.tail"]),
            (
                Draft { pause: Pause::default().sizes(SizeRule::new(1, AGES, AGES)), ..base() },
                &["pause.sizes.small", "pause.sizes.large"],
            ),
            (Draft { waiters_max: 0, milestone_percent: 0, ..base() }, &["milestone_percent", "waiters_max"]),
            (
                Draft {
                    retry: Retry::attempts(0)
                        .backoff(
                            Backoff::exponential(SECOND, Duration::ZERO).jitter(Jitter::Range(0.9..=0.1)),
                        )
                        .budget(RetryBudget::new(f64::NAN, 0, Duration::ZERO)),
                    ..base()
                },
                &[
                    "retry.attempts",
                    "retry.backoff_max",
                    "retry.jitter_max",
                    "retry.budget.share",
                    "retry.budget.window",
                ],
            ),
        ];
        for (draft, wanted) in table {
            assert_eq!(fields(draft), wanted);
        }
    }

    #[test]
    fn numbers_of_the_brake_have_bounds() {
        let brake =
            Brake::default().at(0, Duration::ZERO).share(2.0).cooling(Duration::ZERO).ceiling_periods(0);
        let draft = Draft { controller: Controller::Brake(brake), ..Draft::default() };
        assert_eq!(
            fields(draft),
            ["brake.failures", "brake.share", "brake.within", "brake.cooling", "brake.ceiling_periods"]
        );
    }

    #[test]
    fn problems_are_reported_together() {
        let draft = Draft {
            slots: Some(Slots::adaptive(2..=4).start(9)),
            pace: Some(Pace::every(SECOND).jitter(2.0)),
            ..Draft::default()
        };
        assert_eq!(
            draft.check().expect_err("two problems").to_string(),
            "`slots.start` is 9, and must be from 2 to 4; `pace.jitter` is 2, and must be from 0 to 1"
        );
    }
}
