//! The parameters of the AIMD controller, drafted and checked.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::Rate;
use super::check::{Problems, SPAN_MAX};
use crate::bucket::Shape;
use crate::duration::Exact;
use crate::per_second::PerSecond;

/// The lowest rate or step, per second.
const LEAST: f64 = 1e-6;
/// The highest rate or step, per second.
const MOST: f64 = 1e6;
/// The highest latency factor.
const FACTOR_MAX: f64 = 1_000.0;

/// An adaptive rate (AIMD): additive increase while healthy, multiplicative decrease on overload.
///
/// It moves the [`Rate`] of the throttle, which sets the start and the burst.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::plan::{Aimd, Controller, Draft};
///
/// let aimd = Aimd::default().within(0.5..=20.0).latency_target(Duration::from_millis(300));
/// let draft = Draft { rate: Some(Aimd::RATE), controller: Controller::Aimd(aimd), ..Draft::default() };
/// assert!(draft.check().is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Aimd {
    pub(crate) rate_min: f64,
    pub(crate) rate_max: f64,
    pub(crate) increase: f64,
    pub(crate) decrease: f64,
    pub(crate) latency_target: Duration,
    pub(crate) latency_factor: f64,
    pub(crate) latency_weight: f64,
    pub(crate) slow_start: bool,
    pub(crate) memory: Duration,
}

impl Default for Aimd {
    /// 0.25 to 8 per second, increased by a quarter per second and halved by a cut. The latency target is one
    /// second, and twice that is too slow. The last bad rate is remembered for three minutes. No slow start.
    fn default() -> Self {
        Self {
            rate_min: 0.25,
            rate_max: 8.0,
            increase: 0.25,
            decrease: 0.5,
            latency_target: Duration::from_secs(1),
            latency_factor: 2.0,
            latency_weight: 0.2,
            slow_start: false,
            memory: Duration::from_secs(180),
        }
    }
}

impl Aimd {
    /// The default initial rate: two per second with a burst of four.
    pub const RATE: Rate = Rate::per_second(2).burst(4);

    /// Sets the lowest and the highest rate, per second.
    #[must_use]
    pub const fn within(mut self, per_second: RangeInclusive<f64>) -> Self {
        self.rate_min = *per_second.start();
        self.rate_max = *per_second.end();
        self
    }

    /// Sets the increase of the rate per second, in entries per second.
    #[must_use]
    pub const fn increase(mut self, per_second: f64) -> Self {
        self.increase = per_second;
        self
    }

    /// Sets the fraction of the rate that remains after a cut.
    #[must_use]
    pub const fn decrease(mut self, fraction: f64) -> Self {
        self.decrease = fraction;
        self
    }

    /// Sets the expected latency. Anything below it counts as fast; measured latencies may raise it to at
    /// most twice this.
    #[must_use]
    pub const fn latency_target(mut self, latency: Duration) -> Self {
        self.latency_target = latency;
        self
    }

    /// Sets how many times the target counts as too slow.
    #[must_use]
    pub const fn latency_factor(mut self, factor: f64) -> Self {
        self.latency_factor = factor;
        self
    }

    /// Sets the weight of each sample in the target (exponential moving average): a fraction.
    #[must_use]
    pub const fn latency_weight(mut self, fraction: f64) -> Self {
        self.latency_weight = fraction;
        self
    }

    /// Doubles the rate each second until the first cut.
    #[must_use]
    pub const fn slow_start(mut self) -> Self {
        self.slow_start = true;
        self
    }

    /// Sets how long the last bad rate is remembered; zero disables the memory.
    #[must_use]
    pub const fn memory(mut self, span: Duration) -> Self {
        self.memory = span;
        self
    }
}

/// The checked parameters of [`Aimd`], as integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AimdLimits {
    pub(crate) min: PerSecond,
    pub(crate) start: PerSecond,
    pub(crate) max: PerSecond,
    pub(crate) burst: u64,
    /// Entries per second, gained each second.
    pub(crate) increase: PerSecond,
    /// In millionths, like all fractions here.
    pub(crate) decrease: u64,
    pub(crate) latency_target: Duration,
    pub(crate) latency_factor: u64,
    pub(crate) latency_weight: u64,
    pub(crate) slow_start: bool,
    pub(crate) memory: Duration,
}

impl AimdLimits {
    /// The bucket of a rate within the bounds.
    pub(crate) fn shape(&self, rate: PerSecond) -> Shape {
        let Ok(shape) = rate.shape(self.burst) else {
            unreachable!("the lowest and the highest rate were checked with the plan");
        };
        shape
    }
}

impl Problems {
    /// Checks the parameters; returns them as integers, with the initial bucket.
    pub(super) fn aimd(&mut self, aimd: &Aimd, rate: Option<Rate>) -> Option<(AimdLimits, Shape)> {
        self.number("aimd.rate_max", aimd.rate_max, LEAST, MOST);
        // Report each mistake once: do not check the minimum against an invalid maximum.
        let max = if (LEAST..=MOST).contains(&aimd.rate_max) { aimd.rate_max } else { MOST };
        self.number("aimd.rate_min", aimd.rate_min, LEAST, max);
        self.number("aimd.increase", aimd.increase, LEAST, MOST);
        self.number("aimd.decrease", aimd.decrease, LEAST, 1.0 - LEAST);
        self.span("aimd.latency_target", aimd.latency_target, Duration::from_nanos(1), SPAN_MAX);
        self.number("aimd.latency_factor", aimd.latency_factor, 1.0, FACTOR_MAX);
        self.number("aimd.latency_weight", aimd.latency_weight, LEAST, 1.0);
        self.span("aimd.memory", aimd.memory, Duration::ZERO, SPAN_MAX);
        let Some(rate) = rate else {
            self.add("rate.amount", "missing", "given, since `aimd` moves it");
            return None;
        };
        self.shape(rate)?;
        if !self.is_empty() {
            return None;
        }
        let limits = AimdLimits {
            min: PerSecond::from_millionths(millionths(aimd.rate_min)),
            start: PerSecond::of(rate.amount, rate.period),
            max: PerSecond::from_millionths(millionths(aimd.rate_max)),
            burst: rate.burst,
            increase: PerSecond::from_millionths(millionths(aimd.increase)),
            decrease: millionths(aimd.decrease),
            latency_target: aimd.latency_target,
            latency_factor: millionths(aimd.latency_factor),
            latency_weight: millionths(aimd.latency_weight),
            slow_start: aimd.slow_start,
            memory: aimd.memory,
        };
        let AimdLimits { min, start, max, burst, .. } = limits;
        if start < min || start > max {
            let value = format!("{} in {}", rate.amount, Exact(rate.period));
            self.add("rate.amount", &value, &format!("from {min} to {max}, where `aimd` moves it"));
            return None;
        }
        if min.shape(burst).is_err() {
            self.add("rate.burst", &burst.to_string(), &format!("refilled within 100 years at {min}"));
            return None;
        }
        let shape = limits.shape(start);
        Some((limits, shape))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 10¹², as checked")]
fn millionths(number: f64) -> u64 {
    (number * 1e6).round() as u64
}

#[cfg(test)]
mod tests {
    use super::super::{Controller, Draft};
    use super::*;

    fn draft(rate: Option<Rate>, aimd: Aimd) -> Draft {
        Draft { rate, controller: Controller::Aimd(aimd), ..Draft::default() }
    }

    #[test]
    fn the_default_starts_at_two_per_second() {
        let plan = draft(Some(Aimd::RATE), Aimd::default()).check().unwrap();
        let limits = plan.aimd.unwrap();
        let shown = [limits.min, limits.start, limits.max, limits.increase].map(|rate| rate.to_string());
        assert_eq!(shown, ["0.25/s", "2/s", "8/s", "0.25/s"]);
        assert_eq!((limits.burst, limits.decrease, limits.slow_start), (4, 500_000, false));
        assert_eq!((limits.latency_target, limits.latency_factor), (Duration::from_secs(1), 2_000_000));
        assert_eq!((limits.latency_weight, limits.memory), (200_000, Duration::from_secs(180)));
    }

    #[test]
    fn numbers_out_of_bounds_are_named_in_a_sentence() {
        let aimd = Aimd::default;
        let table = [
            (aimd().within(0.5..=f64::NAN), "`aimd.rate_max` is NaN, and must be from 0.000001 to 1000000"),
            (aimd().within(0.0..=8.0), "`aimd.rate_min` is 0, and must be from 0.000001 to 8"),
            (aimd().within(-1.0..=8.0), "`aimd.rate_min` is -1, and must be from 0.000001 to 8"),
            (aimd().within(9.0..=8.0), "`aimd.rate_min` is 9, and must be from 0.000001 to 8"),
            (
                aimd().within(1.0..=f64::INFINITY),
                "`aimd.rate_max` is inf, and must be from 0.000001 to 1000000",
            ),
            (aimd().increase(-0.1), "`aimd.increase` is -0.1, and must be from 0.000001 to 1000000"),
            (aimd().decrease(1.0), "`aimd.decrease` is 1, and must be from 0.000001 to 0.999999"),
            (aimd().decrease(f64::NAN), "`aimd.decrease` is NaN, and must be from 0.000001 to 0.999999"),
            (
                aimd().latency_target(Duration::ZERO),
                "`aimd.latency_target` is 0s, and must be from 1ns to 366d",
            ),
            (aimd().latency_factor(0.5), "`aimd.latency_factor` is 0.5, and must be from 1 to 1000"),
            (aimd().latency_weight(0.0), "`aimd.latency_weight` is 0, and must be from 0.000001 to 1"),
            (aimd().memory(Duration::MAX), "from 0s to 366d"),
            (
                aimd().within(3.0..=8.0),
                "`rate.amount` is 2 in 1s, and must be from 3/s to 8/s, where `aimd` moves it",
            ),
            (
                aimd().within(0.5..=1.0),
                "`rate.amount` is 2 in 1s, and must be from 0.5/s to 1/s, where `aimd` moves it",
            ),
        ];
        for (aimd, wanted) in table {
            let message = draft(Some(Aimd::RATE), aimd).check().unwrap_err().to_string();
            assert!(message.ends_with(wanted), "{message}");
            assert!(!message.contains(';'), "one mistake is reported once: {message}");
        }
    }

    #[test]
    fn the_rate_is_needed_and_must_fit() {
        let message =
            |rate| draft(rate, Aimd::default().within(0.000_001..=8.0)).check().unwrap_err().to_string();
        assert_eq!(message(None), "`rate.amount` is missing, and must be given, since `aimd` moves it");
        assert_eq!(
            message(Some(Rate::per_second(2).burst(4_000))),
            "`rate.burst` is 4000, and must be refilled within 100 years at 0.000001/s"
        );
        assert_eq!(
            message(Some(Rate::per_second(2).burst(0))),
            "`rate.burst` is 0, and must be at least 1 and refilled within 36525d"
        );
    }
}
