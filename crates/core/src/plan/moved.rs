//! Which limits a controller moves. A range that nothing moves is refused, because it would have no effect, and so are
//! a controller that moves nothing and numbers of a phase or a window that does not exist.

use super::check::Problems;
use super::{Controller, Draft, Pace, SLICES, Slots};
use crate::duration::Exact;

impl Controller {
    /// Its name in configurations.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Brake(_) => "brake",
            Self::Aimd(_) => "aimd",
            Self::Auto(_) => "auto",
        }
    }

    /// Whether it moves slots within their range.
    const fn moves_slots(&self) -> bool {
        matches!(self, Self::Brake(_) | Self::Auto(_))
    }

    /// Whether it slows the pace within its range.
    const fn moves_pace(&self) -> bool {
        matches!(self, Self::Brake(_))
    }
}

impl Draft {
    /// Switches the controller. Limits that the new one does not move are fixed: adaptive slots at their
    /// maximum, a pace at its shortest interval, which is none if that is zero.
    ///
    /// ```
    /// use tidegate_core::plan::{Controller, Draft, Slots};
    ///
    /// let draft = Draft::gentle().controlled_by(Controller::Fixed);
    /// assert_eq!(draft.slots, Some(Slots::fixed(5)));
    /// assert!(draft.check().is_ok());
    /// ```
    #[must_use]
    pub fn controlled_by(mut self, controller: Controller) -> Self {
        if !controller.moves_slots() {
            self.slots = self.slots.map(|slots| Slots::fixed(slots.max));
        }
        if !controller.moves_pace() {
            let pace = self.pace.filter(|pace| !pace.interval_min.is_zero());
            self.pace = pace.map(|pace| Pace { interval_max: pace.interval_min, ..pace });
        }
        self.controller = controller;
        self
    }
}

impl Problems {
    /// Checks that the controller moves every limit that has a range.
    pub(super) fn check_moved(&mut self, draft: &Draft) {
        let controller = &draft.controller;
        if let Some(slots) = draft.slots.filter(Slots::is_adaptive)
            && !controller.moves_slots()
        {
            let bound = format!(
                "{}, as `slots.max` is, because controller `{}` does not move slots",
                slots.max,
                controller.word()
            );
            self.add("slots.min", &slots.min.to_string(), &bound);
        }
        if let Some(pace) = draft.pace.filter(|pace| pace.interval_min < pace.interval_max)
            && !controller.moves_pace()
        {
            let bound = format!(
                "{}, as `pace.interval_min` is, because controller `{}` does not move the pace",
                Exact(pace.interval_min),
                controller.word()
            );
            self.add("pace.interval_max", &Exact(pace.interval_max).to_string(), &bound);
        }
        let has_range = draft.slots.is_some_and(|slots| slots.is_adaptive())
            || draft.pace.is_some_and(|pace| pace.interval_min < pace.interval_max);
        if matches!(controller, Controller::Brake(_)) && !has_range {
            let bound = "`fixed`, because neither slots nor the pace has a range in which it could move them";
            self.add("controller", controller.word(), bound);
        }
    }

    /// Checks that there is what each limit applies to.
    pub(super) fn check_inert(&mut self, draft: &Draft) {
        const TAIL: &str =
            "used with a `pause.tail` above 0s, because it counts only in the phase after a pause";
        if draft.pause.tail.is_zero() {
            if let Some(slots) = draft.recovery_slots {
                self.add("recovery_slots", &slots.to_string(), TAIL);
            }
            if let Some(price) = draft.bytes.map(|bytes| bytes.recovering_price).filter(|price| *price > 1) {
                self.add("bytes.recovering_price", &price.to_string(), TAIL);
            }
        }
        let has_price = draft.bytes.is_some_and(|bytes| bytes.recovering_price > 1);
        if !draft.pause.tail.is_zero() && draft.recovery_slots.is_none() && !has_price {
            let bound = "used with `recovery_slots` or a `bytes.recovering_price` above 1, because nothing else limits in \
                         the phase after a pause";
            self.add("pause.tail", &Exact(draft.pause.tail).to_string(), bound);
        }
        if draft.pace.is_some_and(|pace| pace.interval_max.is_zero()) {
            self.add("pace.interval_max", "0s", "above 0s, because an interval of 0s delays nothing");
        }
        if draft.milestone_percent != Draft::default().milestone_percent && draft.total.unwrap_or(0) == 0 {
            let bound = "used with a `total` above 0, because it is a part of it";
            self.add("milestone_percent", &draft.milestone_percent.to_string(), bound);
        }
        if let Some(circuit) = draft.circuit.filter(|circuit| circuit.slices != SLICES)
            && circuit.error_rate.is_none()
        {
            let bound = "used with a `circuit.error_rate`, because they divide its window";
            self.add("circuit.slices", &circuit.slices.to_string(), bound);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Aimd, Auto, Brake, Bytes, Circuit, Pause};
    use super::*;

    fn all() -> [Controller; 4] {
        [
            Controller::Fixed,
            Controller::Brake(Brake::default()),
            Controller::Aimd(Aimd::default()),
            Controller::Auto(Auto::default()),
        ]
    }

    fn ranges(controller: Controller) -> Draft {
        let pace = Pace::every(Duration::from_millis(200)).slowest(Duration::from_secs(30));
        Draft {
            slots: Some(Slots::adaptive(1..=8)),
            pace: Some(pace),
            rate: Some(Aimd::RATE),
            controller,
            ..Draft::default()
        }
    }

    /// Regression: such slots never adapted and such a pace never slowed, and nothing reported it.
    #[test]
    fn range_that_no_controller_moves_is_refused() {
        let slots = "`slots.min` is 1, and must be 8, as `slots.max` is, because controller `fixed` does not move slots";
        let pace = "`pace.interval_max` is 30s, and must be 200ms, as `pace.interval_min` is, because controller `fixed` does not move the pace";
        let wanted = [
            Some(format!("{slots}; {pace}")),
            None,
            Some(format!("{slots}; {pace}").replace("fixed", "aimd")),
            Some(pace.replace("fixed", "auto")),
        ];
        for (controller, wanted) in all().into_iter().zip(wanted) {
            assert_eq!(ranges(controller).check().err().map(|error| error.to_string()), wanted);
        }
    }

    /// Regression: each of these was accepted, and limited nothing.
    #[test]
    fn number_without_effect_is_refused() {
        const SECOND: Duration = Duration::from_secs(1);
        const TAIL: &str =
            "used with a `pause.tail` above 0s, because it counts only in the phase after a pause";
        let base = Draft::default;
        let brake = Controller::Brake(Brake::default());
        let still = "`controller` is brake, and must be `fixed`, because neither slots nor the pace has a range in which it could move them";
        let slices = |circuit: Circuit| Draft { circuit: Some(circuit.slices(30)), ..base() };
        let table = [
            (Draft { controller: brake, ..base() }, still.to_owned()),
            (Draft { slots: Some(Slots::fixed(8)), controller: brake, ..base() }, still.to_owned()),
            (Draft { pace: Some(Pace::every(SECOND)), controller: brake, ..base() }, still.to_owned()),
            (
                Draft { recovery_slots: Some(5), ..base() },
                format!("`recovery_slots` is 5, and must be {TAIL}"),
            ),
            (
                Draft { bytes: Some(Bytes::in_flight(9).recovering_price(20)), ..base() },
                format!("`bytes.recovering_price` is 20, and must be {TAIL}"),
            ),
            (
                Draft { pause: Pause::default().tail(SECOND), bytes: Some(Bytes::in_flight(9)), ..base() },
                "`pause.tail` is 1s, and must be used with `recovery_slots` or a `bytes.recovering_price` above 1, \
                 because nothing else limits in the phase after a pause"
                    .to_owned(),
            ),
            (
                Draft { pace: Some(Pace::every(Duration::ZERO).jitter(0.5)), ..base() },
                "`pace.interval_max` is 0s, and must be above 0s, because an interval of 0s delays nothing".to_owned(),
            ),
            (
                Draft { milestone_percent: 25, total: Some(0), ..base() },
                "`milestone_percent` is 25, and must be used with a `total` above 0, because it is a part of it"
                    .to_owned(),
            ),
            (
                slices(Circuit::after_failures(3)),
                "`circuit.slices` is 30, and must be used with a `circuit.error_rate`, because they divide its window"
                    .to_owned(),
            ),
        ];
        for (draft, wanted) in table {
            assert_eq!(draft.check().unwrap_err().to_string(), wanted);
        }
        let tail = || Draft { pause: Pause::default().tail(SECOND), ..base() };
        let pace = Some(Pace::every(Duration::ZERO).slowest(SECOND));
        for draft in [
            Draft { recovery_slots: Some(5), ..tail() },
            Draft { bytes: Some(Bytes::in_flight(9).recovering_price(20)), ..tail() },
            Draft { pace, controller: brake, ..base() },
            Draft { pace, controller: brake, ..base() }.controlled_by(Controller::Fixed),
            Draft { milestone_percent: 25, total: Some(1), ..base() },
            Draft { bytes: Some(Bytes::in_flight(9)), ..base() },
            slices(Circuit::at_error_rate(0.5, 1, SECOND)),
        ] {
            assert!(draft.check().is_ok());
        }
    }

    #[test]
    fn switched_controller_fixes_what_it_does_not_move() {
        for controller in all() {
            let draft = ranges(Controller::Brake(Brake::default())).controlled_by(controller);
            assert_eq!(draft.controller, controller);
            assert!(draft.check().is_ok());
        }
        let fixed = ranges(Controller::default()).controlled_by(Controller::Fixed);
        let pace = Some(Pace::every(Duration::from_millis(200)));
        assert_eq!((fixed.slots, fixed.pace), (Some(Slots::fixed(8)), pace));
    }
}
