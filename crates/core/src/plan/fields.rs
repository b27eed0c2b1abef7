//! Lists a draft's fields under the names that problems and configurations use.

use std::fmt::Display;
use std::time::Duration;

use super::{Aimd, Circuit, Controller, Draft, Oversize, Pause};
use crate::backoff::Jitter;
use crate::retry::{Retry, WhenRefused};

/// The value of one field. Exhaustive, because code that writes fields must handle every kind.
#[derive(Debug, Clone, PartialEq)]
pub enum FieldValue {
    /// A count.
    Count(u64),
    /// A duration.
    Span(Duration),
    /// A fraction from 0 to 1.
    Fraction(f64),
    /// A floating-point number.
    Number(f64),
    /// One of several named options.
    Word(&'static str),
    /// On or off.
    Flag(bool),
    /// Named limits as text, separated by commas: `rpm:500/min, rpd:10k/day`.
    Text(String),
}

impl Draft {
    /// Lists the draft's fields by name, as in [`Problem::field`](super::Problem::field).
    ///
    /// ```
    /// use tidegate_core::plan::{Draft, FieldValue};
    ///
    /// assert!(Draft::gentle().fields().contains(&("slots.max", FieldValue::Count(5))));
    /// ```
    pub fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        // Exhaustive destructuring: a new field fails to compile until it is listed here.
        let Self {
            slots,
            recovery_slots,
            bytes,
            pace,
            rate,
            rates,
            budget,
            budgets,
            circuit,
            pause,
            controller,
            retry,
            total,
            milestone_percent,
            waiters_max,
        } = self;
        let mut list = List::default();
        if let Some(slots) = slots {
            list.count("slots.min", slots.min)
                .count("slots.start", slots.start)
                .count("slots.max", slots.max);
        }
        if let Some(slots) = recovery_slots {
            list.count("recovery_slots", *slots);
        }
        if let Some(bytes) = bytes {
            list.count("bytes.capacity", bytes.capacity);
            list.count("bytes.recovering_price", bytes.recovering_price);
        }
        if let Some(pace) = pace {
            list.span("pace.interval_min", pace.interval_min).span("pace.interval_max", pace.interval_max);
            list.fraction("pace.jitter", pace.jitter);
        }
        if let Some(rate) = rate {
            list.count("rate.amount", rate.amount).span("rate.period", rate.period);
            list.count("rate.burst", rate.burst);
        }
        list.texts("rates", rates);
        if let Some(budget) = budget {
            list.count("budget.tokens", budget.tokens).span("budget.window", budget.window);
            list.word("budget.oversize", oversize(budget.oversize));
        }
        list.texts("budgets", budgets);
        if let Some(circuit) = circuit {
            list.circuit(circuit);
        }
        list.pause(pause);
        list.controller(controller);
        list.retry(retry);
        if let Some(total) = total {
            list.count("total", *total);
        }
        list.count("milestone_percent", *milestone_percent).count("waiters_max", *waiters_max);
        list.0
    }
}

#[derive(Default)]
struct List(Vec<(&'static str, FieldValue)>);

impl List {
    fn circuit(&mut self, circuit: &Circuit) {
        if let Some(failures) = circuit.consecutive {
            self.count("circuit.failures", failures);
        }
        if let Some(rate) = circuit.error_rate {
            self.fraction("circuit.error_rate", rate.threshold);
            self.count("circuit.samples_min", rate.samples_min).span("circuit.window", rate.window);
            self.count("circuit.slices", circuit.slices);
        }
        self.span("circuit.open_for", circuit.open_for).count("circuit.probes", circuit.probes);
    }

    fn pause(&mut self, pause: &Pause) {
        self.span("pause.max", pause.max).span("pause.tail", pause.tail);
        if let Some(sizes) = pause.sizes {
            self.count("pause.sizes.small_max", sizes.small_max);
            self.span("pause.sizes.small", sizes.small).span("pause.sizes.large", sizes.large);
        }
    }

    fn controller(&mut self, controller: &Controller) {
        self.word("controller", controller.word());
        match controller {
            Controller::Fixed => self,
            Controller::Brake(brake) => self
                .count("brake.failures", brake.failures)
                .fraction("brake.share", brake.share)
                .span("brake.within", brake.within)
                .span("brake.cooling", brake.cooling)
                .count("brake.ceiling_periods", brake.ceiling_periods),
            Controller::Aimd(aimd) => self.aimd(aimd),
            Controller::Auto(auto) => self
                .number("auto.rate_min", auto.rate_min)
                .number("auto.rate_start", auto.rate_start)
                .number("auto.rate_max", auto.rate_max),
        };
    }

    fn aimd(&mut self, aimd: &Aimd) -> &mut Self {
        self.number("aimd.rate_min", aimd.rate_min).number("aimd.rate_max", aimd.rate_max);
        self.number("aimd.increase", aimd.increase).number("aimd.decrease", aimd.decrease);
        self.span("aimd.latency_target", aimd.latency_target);
        self.number("aimd.latency_factor", aimd.latency_factor);
        self.number("aimd.latency_weight", aimd.latency_weight);
        self.word("aimd.slow_start", if aimd.slow_start { "on" } else { "off" });
        self.span("aimd.memory", aimd.memory)
    }

    fn retry(&mut self, retry: &Retry) {
        self.count("retry.attempts", retry.attempts);
        if !retry.is_off() {
            self.delays(retry);
        }
        let when_refused = match retry.when_refused {
            WhenRefused::Stop => "stop",
            WhenRefused::Wait => "wait",
        };
        self.word("retry.when_refused", when_refused);
    }

    fn delays(&mut self, retry: &Retry) {
        let (base, max) = retry.backoff.span();
        if retry.backoff.is_exponential() {
            self.word("retry.backoff", "exponential").span("retry.backoff_base", base);
            self.span("retry.backoff_max", max);
        } else {
            self.word("retry.backoff", "fixed").span("retry.backoff_base", base);
        }
        match retry.backoff.spread() {
            Jitter::None => self.word("retry.jitter", "none"),
            Jitter::Full => self.word("retry.jitter", "full"),
            Jitter::Range(range) => self
                .word("retry.jitter", "range")
                .fraction("retry.jitter_min", *range.start())
                .fraction("retry.jitter_max", *range.end()),
        };
        let budget = retry.budget;
        self.fraction("retry.budget.share", budget.share);
        self.count("retry.budget.at_least", budget.at_least).span("retry.budget.window", budget.window);
    }

    fn count(&mut self, name: &'static str, value: impl Into<u64>) -> &mut Self {
        self.push(name, FieldValue::Count(value.into()))
    }

    fn span(&mut self, name: &'static str, value: Duration) -> &mut Self {
        self.push(name, FieldValue::Span(value))
    }

    fn fraction(&mut self, name: &'static str, value: f64) -> &mut Self {
        self.push(name, FieldValue::Fraction(value))
    }

    fn number(&mut self, name: &'static str, value: f64) -> &mut Self {
        self.push(name, FieldValue::Number(value))
    }

    fn word(&mut self, name: &'static str, value: &'static str) -> &mut Self {
        self.push(name, FieldValue::Word(value))
    }

    fn texts(&mut self, name: &'static str, all: &[impl Display]) {
        if !all.is_empty() {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            self.push(name, FieldValue::Text(all.join(", ")));
        }
    }

    fn push(&mut self, name: &'static str, value: FieldValue) -> &mut Self {
        self.0.push((name, value));
        self
    }
}

const fn oversize(oversize: Oversize) -> &'static str {
    match oversize {
        Oversize::Refuse => "refuse",
        Oversize::Alone => "alone",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Budget, Bytes, Rate, SizeRule};
    use super::*;
    use crate::backoff::Backoff;
    use crate::retry::RetryBudget;

    const SECOND: Duration = Duration::from_secs(1);

    fn assert_has(draft: &Draft, wanted: &[(&'static str, FieldValue)]) {
        let fields = draft.fields();
        for field in wanted {
            assert!(fields.contains(field), "{field:?} is not in {fields:?}");
        }
    }

    #[test]
    fn every_group_is_listed_under_its_problem_names() {
        use FieldValue::{Count, Fraction, Span, Word};

        let draft = Draft {
            recovery_slots: Some(3),
            bytes: Some(Bytes::in_flight(9).recovering_price(20)),
            rate: Some(Rate::per_second(4).burst(7)),
            budget: Some(Budget::tokens(8, SECOND).oversize(Oversize::Alone)),
            circuit: Some(Circuit::at_error_rate(0.5, 6, SECOND).slices(4).or_after_failures(2)),
            pause: Pause::default().sizes(SizeRule::new(1, SECOND, SECOND)),
            retry: Retry::attempts(3)
                .backoff(Backoff::fixed(SECOND).jitter(Jitter::Range(0.5..=1.0)))
                .budget(RetryBudget::default())
                .when_refused(WhenRefused::Wait),
            total: Some(0),
            ..Draft::gentle()
        };
        assert_has(&draft, &[("slots.min", Count(1)), ("recovery_slots", Count(3)), ("total", Count(0))]);
        assert_has(&draft, &[("bytes.recovering_price", Count(20)), ("pace.jitter", Fraction(0.5))]);
        assert_has(&draft, &[("rate.burst", Count(7)), ("budget.oversize", Word("alone"))]);
        assert_has(&draft, &[("circuit.failures", Count(2)), ("circuit.error_rate", Fraction(0.5))]);
        assert_has(&draft, &[("circuit.samples_min", Count(6)), ("circuit.slices", Count(4))]);
        assert_has(&draft, &[("pause.sizes.large", Span(SECOND)), ("controller", Word("brake"))]);
        assert_has(&draft, &[("retry.backoff", Word("fixed")), ("retry.jitter", Word("range"))]);
        assert_has(&draft, &[("retry.jitter_min", Fraction(0.5)), ("retry.budget.at_least", Count(10))]);
        assert_has(&draft, &[("retry.when_refused", Word("wait")), ("waiters_max", Count(65_536))]);
    }

    #[test]
    fn an_adaptive_rate_is_listed_number_by_number() {
        use FieldValue::{Number, Span, Word};

        let aimd = |aimd| Draft { controller: Controller::Aimd(aimd), ..Draft::default() };
        let usual = aimd(Aimd::default());
        assert_has(&usual, &[("controller", Word("aimd")), ("aimd.slow_start", Word("off"))]);
        assert_has(&usual, &[("aimd.rate_min", Number(0.25)), ("aimd.rate_max", Number(8.0))]);
        assert_has(&usual, &[("aimd.increase", Number(0.25)), ("aimd.decrease", Number(0.5))]);
        assert_has(&usual, &[("aimd.latency_target", Span(SECOND)), ("aimd.memory", Span(180 * SECOND))]);
        assert_has(&usual, &[("aimd.latency_factor", Number(2.0)), ("aimd.latency_weight", Number(0.2))]);
        assert_has(&aimd(Aimd::default().slow_start()), &[("aimd.slow_start", Word("on"))]);
    }

    #[test]
    fn unset_fields_are_not_listed() {
        let names: Vec<_> = Draft::default().fields().into_iter().map(|(name, _)| name).collect();
        let retry = ["retry.attempts", "retry.backoff", "retry.backoff_base", "retry.backoff_max"];
        let budget = ["retry.budget.share", "retry.budget.at_least", "retry.budget.window"];
        let wanted = [&["pause.max", "pause.tail", "controller"][..], &retry, &["retry.jitter"]].concat();
        assert_eq!(
            names,
            [&wanted[..], &budget, &["retry.when_refused", "milestone_percent", "waiters_max"]].concat()
        );
        let off = Draft { retry: Retry::off(), ..Draft::default() }.fields();
        let listed: Vec<_> =
            off.iter().map(|(name, _)| *name).filter(|name| name.starts_with("retry.")).collect();
        assert_eq!(listed, ["retry.attempts", "retry.when_refused"]);
        let full = Draft {
            retry: Retry::default().backoff(Backoff::fixed(SECOND).jitter(Jitter::Full)),
            budget: Some(Budget::tokens(1, SECOND)),
            ..Draft::default()
        };
        assert_has(&full, &[("retry.jitter", FieldValue::Word("full"))]);
        assert_has(&full, &[("budget.oversize", FieldValue::Word("refuse"))]);
    }
}
