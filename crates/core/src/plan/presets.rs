//! Presets: complete drafts whose numbers have proved to work together.

use std::time::Duration;

use super::{Auto, Brake, Bytes, Circuit, Controller, Draft, Pace, Pause, SizeRule, Slots};

impl Draft {
    /// Rate and slots controlled by [`Auto`], limited only to 1,024 slots.
    pub fn auto() -> Self {
        Self { slots: Some(Auto::SLOTS), controller: Controller::Auto(Auto::default()), ..Self::default() }
    }

    /// Gentle, with fixed ceilings: up to five slots, 0.2–30 s between entries with 50 % jitter (at most five
    /// requests per second), braking at three failures in a minute that are a tenth of the outcomes.
    pub fn gentle() -> Self {
        let pace = Pace::every(Duration::from_millis(200)).slowest(Duration::from_secs(30)).jitter(0.5);
        Self {
            slots: Some(Slots::adaptive(1..=5)),
            pace: Some(pace),
            controller: Controller::Brake(Brake::default()),
            ..Self::default()
        }
    }

    /// Layered dispatch: 400 slots (10 while recovering), 5 MiB in flight (at twenty times the price while
    /// recovering), a tail of 10 s, and after an overload a pause of 1 s for requests of up to 128 KiB, 5 s
    /// for larger ones.
    pub fn layered() -> Self {
        let sizes = SizeRule::new(128 << 10, Duration::from_secs(1), Duration::from_secs(5));
        Self {
            slots: Some(Slots::fixed(400)),
            recovery_slots: Some(10),
            bytes: Some(Bytes::in_flight(5 << 20).recovering_price(20)),
            pause: Pause::default().tail(Duration::from_secs(10)).sizes(sizes),
            ..Self::default()
        }
    }

    /// One of many hosts: rate and slots controlled by [`Auto`]; a circuit that opens for 15 s after five
    /// consecutive failures, or at 40 % failures among at least ten outcomes in 30 s, and closes after three
    /// probes.
    pub fn host() -> Self {
        let circuit = Circuit::at_error_rate(0.4, 10, Duration::from_secs(30)).slices(15);
        Self {
            circuit: Some(circuit.or_after_failures(5).open_for(Duration::from_secs(15)).probes(3)),
            ..Self::auto()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::FieldValue::{self, Count, Fraction, Number, Span, Word};

    #[test]
    fn the_gentle_draft_has_its_documented_defaults() {
        let draft = Draft::gentle();
        assert_eq!(draft.slots, Some(Slots { min: 1, start: 5, max: 5 }));
        let pace = draft.pace.expect("the gentle draft has a pace");
        assert_eq!(
            (pace.interval_min, pace.interval_max),
            (Duration::from_millis(200), Duration::from_secs(30))
        );
        assert!((pace.jitter - 0.5).abs() < f64::EPSILON);
        assert_eq!(draft.controller, Controller::Brake(Brake::default()));
        let circuit = Circuit::default();
        assert_eq!(
            (circuit.consecutive, circuit.open_for, circuit.probes),
            (Some(10), Duration::from_secs(30), 1)
        );
        assert!(draft.check().is_ok_and(|plan| plan.is_timed() && plan.settles_timed()));
    }

    /// A field that is not listed has the default of every draft.
    #[test]
    fn the_host_draft_has_these_fields_and_no_others() {
        const SECOND: Duration = Duration::from_secs(1);
        let wanted: [(&str, FieldValue); 27] = [
            ("slots.min", Count(1)),
            ("slots.start", Count(32)),
            ("slots.max", Count(1_024)),
            ("circuit.failures", Count(5)),
            ("circuit.error_rate", Fraction(0.4)),
            ("circuit.samples_min", Count(10)),
            ("circuit.window", Span(30 * SECOND)),
            // Two seconds each.
            ("circuit.slices", Count(15)),
            ("circuit.open_for", Span(15 * SECOND)),
            ("circuit.probes", Count(3)),
            ("pause.max", Span(600 * SECOND)),
            ("pause.tail", Span(Duration::ZERO)),
            ("controller", Word("auto")),
            ("auto.rate_min", Number(0.001)),
            ("auto.rate_start", Number(10.0)),
            ("auto.rate_max", Number(1e9)),
            ("retry.attempts", Count(3)),
            ("retry.backoff", Word("exponential")),
            ("retry.backoff_base", Span(Duration::from_millis(200))),
            ("retry.backoff_max", Span(5 * SECOND)),
            ("retry.jitter", Word("full")),
            ("retry.budget.share", Fraction(0.2)),
            ("retry.budget.at_least", Count(10)),
            ("retry.budget.window", Span(10 * SECOND)),
            ("retry.when_refused", Word("stop")),
            ("milestone_percent", Count(10)),
            ("waiters_max", Count(65_536)),
        ];
        assert_eq!(Draft::host().fields(), wanted);
        let plan = Draft::host().check().expect("within the bounds");
        assert!(plan.is_timed() && plan.settles_timed() && plan.counts_in_flight());
    }
}
