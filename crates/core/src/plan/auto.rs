//! The bounds of [`Auto`](super::Auto), drafted and checked.

use std::ops::RangeInclusive;

use super::Slots;
use super::check::Problems;

/// The lowest rate allowed, per second: one request in eleven days.
const RATE_LEAST: f64 = 1e-6;
/// The highest rate allowed, per second.
const RATE_MOST: f64 = 1e9;
/// The default range of slots and their start.
const SLOTS: Slots = Slots::adaptive(1..=1_024).start(32);

/// Rate and slots together, learned from what the upstream accepts: the default controller.
///
/// Only floors, ceilings and the start can be tuned. Slots move within [`Draft::slots`](super::Draft::slots),
/// by default 1 to 1,024; a [`Draft::rate`](super::Draft::rate) remains an exact limit in addition.
///
/// ```
/// use tidegate_core::plan::{Auto, Controller, Draft};
///
/// let draft = Draft { controller: Controller::Auto(Auto::default().rate_max(200.0)), ..Draft::default() };
/// assert!(draft.check().is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(clippy::struct_field_names, reason = "the keys of the configuration")]
pub struct Auto {
    pub(crate) rate_min: f64,
    pub(crate) rate_start: f64,
    pub(crate) rate_max: f64,
}

impl Default for Auto {
    /// From one request in 1,000 s to 10⁹ per second, starting at ten per second.
    fn default() -> Self {
        Self { rate_min: 1e-3, rate_start: 10.0, rate_max: RATE_MOST }
    }
}

impl Auto {
    /// The default slots.
    pub const SLOTS: Slots = SLOTS;

    /// Sets the lowest and the highest rate in requests per second.
    #[must_use]
    pub const fn within(self, per_second: RangeInclusive<f64>) -> Self {
        self.rate_min(*per_second.start()).rate_max(*per_second.end())
    }

    /// Sets the lowest rate in requests per second.
    #[must_use]
    pub const fn rate_min(mut self, per_second: f64) -> Self {
        self.rate_min = per_second;
        if self.rate_start < per_second {
            self.rate_start = per_second;
        }
        self
    }

    /// Sets the highest rate in requests per second. When it is reached, the reported reason is the ceiling.
    #[must_use]
    pub const fn rate_max(mut self, per_second: f64) -> Self {
        self.rate_max = per_second;
        if self.rate_start > per_second {
            self.rate_start = per_second;
        }
        self
    }

    /// Sets the initial rate in requests per second.
    #[must_use]
    pub const fn rate_start(mut self, per_second: f64) -> Self {
        self.rate_start = per_second;
        self
    }
}

/// Checked limits of [`Auto`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AutoLimits {
    pub(crate) rate_min: f64,
    pub(crate) rate_start: f64,
    pub(crate) rate_max: f64,
    pub(crate) slots_min: u32,
    pub(crate) slots_start: u32,
    pub(crate) slots_max: u32,
}

impl AutoLimits {
    pub(crate) const fn clamp(&self, rate: f64) -> f64 {
        rate.clamp(self.rate_min, self.rate_max)
    }

    #[expect(clippy::cast_precision_loss, reason = "a limit of 2^24 slots need not be exact")]
    pub(crate) const fn clamp_slots(&self, slots: f32) -> f32 {
        slots.clamp(self.slots_min as f32, self.slots_max as f32)
    }
}

impl Problems {
    /// Checks the limits of `auto`.
    pub(super) fn auto(&mut self, auto: &Auto, slots: Slots) -> Option<AutoLimits> {
        let Auto { rate_min, rate_start, rate_max } = *auto;
        self.number("auto.rate_max", rate_max, RATE_LEAST, RATE_MOST);
        let highest = if rate_max.is_nan() { RATE_MOST } else { rate_max.clamp(RATE_LEAST, RATE_MOST) };
        self.number("auto.rate_min", rate_min, RATE_LEAST, highest);
        if self.is_empty() {
            self.number("auto.rate_start", rate_start, rate_min, rate_max);
        }
        self.is_empty().then_some(AutoLimits {
            rate_min,
            rate_start,
            rate_max,
            slots_min: slots.min,
            slots_start: slots.start,
            slots_max: slots.max,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Controller, Draft};
    use super::*;

    fn draft(auto: Auto) -> Draft {
        Draft { controller: Controller::Auto(auto), ..Draft::default() }
    }

    #[test]
    fn numbers_out_of_bounds_are_named_in_a_sentence() {
        let auto = Auto::default;
        let table = [
            (auto().within(0.0..=5.0), "`auto.rate_min` is 0, and must be from 0.000001 to 5"),
            (auto().within(6.0..=5.0), "`auto.rate_min` is 6, and must be from 0.000001 to 5"),
            (auto().rate_max(f64::NAN), "`auto.rate_max` is NaN, and must be from 0.000001 to 1000000000"),
            (auto().within(1.0..=5.0).rate_start(9.0), "`auto.rate_start` is 9, and must be from 1 to 5"),
        ];
        for (auto, wanted) in table {
            assert_eq!(draft(auto).check().unwrap_err().to_string(), wanted);
        }
    }

    #[test]
    fn start_follows_the_range() {
        let limits = |auto| draft(auto).check().unwrap().auto.unwrap();
        assert!((limits(Auto::default()).rate_start - 10.0).abs() < 1e-9);
        assert!((limits(Auto::default().rate_max(2.0)).rate_start - 2.0).abs() < 1e-9);
        assert!((limits(Auto::default().rate_min(50.0)).rate_start - 50.0).abs() < 1e-9);
        let slots = limits(Auto::default());
        assert_eq!((slots.slots_min, slots.slots_start, slots.slots_max), (1, 32, 1_024));
    }
}
