//! Which limits a controller moves: a range that nothing moves is refused, because it would have no effect.

use super::check::Problems;
use super::{Controller, Draft, Pace, Slots};
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
    /// maximum, a pace at its shortest interval.
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
            self.pace = self.pace.map(|pace| Pace { interval_max: pace.interval_min, ..pace });
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
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Aimd, Auto, Brake};
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
