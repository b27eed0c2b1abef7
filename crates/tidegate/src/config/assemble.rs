//! Assembles keys into a draft: constraints between keys, and the required keys of each group.
//!
//! A group is present if any of its keys is. Keys with a default in core may be omitted; other missing keys
//! are reported.

use std::collections::BTreeMap;
use std::mem::discriminant;
use std::str::FromStr;
use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::plan::{
    Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, FieldValue, Named, Oversize, Pace, Pause,
    Problem, Rate, SizeRule, Slots,
};
use tidegate_core::retry::{Retry, RetryBudget, WhenRefused};

use super::Entry;
use super::codec::to_text;
use super::error::{ConfigError, ConfigProblem, Fault, Origin};
use crate::keyed::KeyedOptions;

/// Keys whose preset value is dropped if the other key is given: they follow it.
const FOLLOWERS: [(&str, &str); 2] = [("slots.max", "slots.start"), ("rate.amount", "rate.burst")];
/// Bounds of a start value: without a given start, the preset's is clamped to them.
const STARTS: [(&str, &str); 2] =
    [("auto.rate_min", "auto.rate_start"), ("auto.rate_max", "auto.rate_start")];

const BRAKE: [&str; 5] =
    ["brake.failures", "brake.share", "brake.within", "brake.cooling", "brake.ceiling_periods"];
const AUTO: [&str; 3] = ["auto.rate_min", "auto.rate_start", "auto.rate_max"];
const AIMD: [&str; 9] = [
    "aimd.rate_min",
    "aimd.rate_max",
    "aimd.increase",
    "aimd.decrease",
    "aimd.latency_target",
    "aimd.latency_factor",
    "aimd.latency_weight",
    "aimd.slow_start",
    "aimd.memory",
];

/// The prefix of the keys for keyed throttles.
const KEYED: &str = "keyed.";

/// The draft for `given`, on top of its preset.
///
/// # Errors
/// Keys that are missing, without effect or out of bounds.
pub(super) fn draft(given: &BTreeMap<&'static str, Entry>) -> Result<Draft, ConfigError> {
    let mut assembly = Assembly::new(given, Draft::auto);
    for (key, entry) in given.iter().filter(|(key, _)| key.starts_with(KEYED)) {
        assembly.problems.push(ConfigProblem::new(entry.origin.clone(), *key, Fault::OfMany));
    }
    let draft = assembly.checked();
    ConfigError::unless_any(assembly.problems, draft)
}

/// The draft of each key for `given`, and the registry's options.
///
/// # Errors
/// Keys that are missing, without effect or out of bounds.
pub(super) fn keyed(given: &BTreeMap<&'static str, Entry>) -> Result<(Draft, KeyedOptions), ConfigError> {
    let mut assembly = Assembly::new(given, Draft::host);
    let draft = assembly.checked();
    let options = assembly.keyed();
    for problem in options.problems() {
        assembly.out_of_bounds(&problem);
    }
    ConfigError::unless_any(assembly.problems, (draft, options))
}

/// The given values, on top of the preset's.
fn over_preset(given: &BTreeMap<&'static str, Entry>, preset: &Draft) -> BTreeMap<&'static str, Entry> {
    let mut entries = BTreeMap::new();
    for (key, value) in preset.fields() {
        let mut leads = FOLLOWERS.iter().chain(&STARTS);
        let follows = leads.any(|(lead, led)| *led == key && given.contains_key(lead));
        if !follows {
            entries.insert(key, Entry::new(value, Origin::Default));
        }
    }
    entries.extend(given.iter().map(|(key, entry)| (*key, entry.clone())));
    // If the preset's slots are fixed, another given number of slots is fixed too.
    let is_fixed = preset.slots.is_some_and(|slots| !slots.is_adaptive());
    if let Some(max) = given.get("slots.max").filter(|_| is_fixed && !given.contains_key("slots.min")) {
        entries.insert("slots.min", Entry::new(max.value.clone(), Origin::Default));
    }
    entries
}

struct Assembly {
    entries: BTreeMap<&'static str, Entry>,
    problems: Vec<ConfigProblem>,
}

impl Assembly {
    /// The given values, on top of the preset they name or the default one.
    fn new(given: &BTreeMap<&'static str, Entry>, usual: fn() -> Draft) -> Self {
        let preset = match given.get("preset").map(|entry| &entry.value) {
            Some(FieldValue::Word("auto")) => Draft::auto(),
            Some(FieldValue::Word("gentle")) => Draft::gentle(),
            Some(FieldValue::Word("layered")) => Draft::layered(),
            Some(FieldValue::Word("host")) => Draft::host(),
            Some(FieldValue::Word("empty")) => Draft::default(),
            _ => usual(),
        };
        Self { entries: over_preset(given, &preset), problems: Vec::new() }
    }

    /// The draft, after adding the problems that core finds to the list.
    fn checked(&mut self) -> Draft {
        let draft = self.draft();
        if let Err(invalid) = draft.clone().check() {
            for problem in invalid.problems() {
                self.out_of_bounds(problem);
            }
        }
        draft
    }

    fn keyed(&self) -> KeyedOptions {
        let mut options = KeyedOptions::default();
        let whole = |key| self.units(key).map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        options.enabled = self.flag("keyed.enabled").unwrap_or(options.enabled);
        options.keys_max = whole("keyed.keys_max").unwrap_or(options.keys_max);
        options.idle_ttl = self.span("keyed.idle_ttl").unwrap_or(options.idle_ttl);
        options.shards = whole("keyed.shards").unwrap_or(options.shards);
        options.throttled_after = self.span("keyed.throttled_after").unwrap_or(options.throttled_after);
        options
    }

    fn draft(&mut self) -> Draft {
        let slots = self.slots();
        let controller = self.controller(slots.is_some_and(|slots| slots.is_adaptive()));
        if matches!(controller, Controller::Aimd(_)) && self.any_of("rate.").is_none() {
            self.complete("rate.", &Draft { rate: Some(Aimd::RATE), ..Draft::default() });
        }
        let empty = Draft::default();
        // A range that only the preset has follows the controller; one that was given is checked.
        let fixed = Draft { slots, pace: self.pace(), ..Draft::default() }.controlled_by(controller);
        let slots = if self.is_given("slots.min") { slots } else { fixed.slots };
        let pace = if self.is_given("pace.interval_max") { self.pace() } else { fixed.pace };
        Draft {
            slots,
            recovery_slots: self.count("recovery_slots").filter(|_| self.is_used_in_tail("recovery_slots")),
            bytes: self.bytes(),
            pace,
            rate: self.rate(),
            rates: self.named("rates"),
            budget: self.budget(),
            budgets: self.named("budgets"),
            circuit: self.circuit(),
            pause: self.pause(),
            controller,
            retry: self.retry(),
            total: self.units("total"),
            milestone_percent: self.count("milestone_percent").unwrap_or(empty.milestone_percent),
            waiters_max: self.count("waiters_max").unwrap_or(empty.waiters_max),
        }
    }

    fn slots(&mut self) -> Option<Slots> {
        let because = self.any_of("slots.")?;
        let min = self.needed("slots.min", because, Self::count);
        let max = self.needed("slots.max", because, Self::count);
        let slots = Slots::adaptive(min?..=max?);
        Some(self.count("slots.start").map_or(slots, |start| slots.start(start)))
    }

    fn bytes(&mut self) -> Option<Bytes> {
        let because = self.any_of("bytes.")?;
        let bytes = Bytes::in_flight(self.needed("bytes.capacity", because, Self::units)?);
        let price = self.count("bytes.recovering_price");
        let price = price.filter(|_| self.is_used_in_tail("bytes.recovering_price"));
        Some(price.map_or(bytes, |price| bytes.recovering_price(u16::try_from(price).unwrap_or(u16::MAX))))
    }

    /// A number of the tail that only the preset has follows the tail; one that was given is checked.
    fn is_used_in_tail(&self, key: &str) -> bool {
        self.is_given(key) || self.span("pause.tail").is_some_and(|tail| !tail.is_zero())
    }

    fn pace(&mut self) -> Option<Pace> {
        let because = self.any_of("pace.")?;
        let mut pace = Pace::every(self.needed("pace.interval_min", because, Self::span)?);
        if let Some(interval) = self.span("pace.interval_max") {
            pace = pace.slowest(interval);
        }
        Some(self.fraction("pace.jitter").map_or(pace, |fraction| pace.jitter(fraction)))
    }

    fn rate(&mut self) -> Option<Rate> {
        let because = self.any_of("rate.")?;
        let amount = self.needed("rate.amount", because, Self::units);
        let period = self.needed("rate.period", because, Self::span);
        let rate = Rate::new(amount?, period?);
        Some(self.units("rate.burst").map_or(rate, |burst| rate.burst(burst)))
    }

    /// The named limits of a key: their text was checked when it was read.
    fn named<L>(&self, key: &str) -> Vec<Named<L>>
    where
        Named<L>: FromStr,
    {
        match self.entries.get(key).map(|entry| &entry.value) {
            Some(FieldValue::Text(text)) => {
                text.split(',').filter_map(|text| text.trim().parse().ok()).collect()
            }
            _ => Vec::new(),
        }
    }

    fn budget(&mut self) -> Option<Budget> {
        let because = self.any_of("budget.")?;
        let tokens = self.needed("budget.tokens", because, Self::units);
        let window = self.needed("budget.window", because, Self::span);
        let budget = Budget::tokens(tokens?, window?);
        let is_alone = self.word("budget.oversize") == Some("alone");
        Some(budget.oversize(if is_alone { Oversize::Alone } else { Oversize::Refuse }))
    }

    fn circuit(&mut self) -> Option<Circuit> {
        const RATE: [&str; 4] =
            ["circuit.error_rate", "circuit.samples_min", "circuit.window", "circuit.slices"];
        self.any_of("circuit.")?;
        let failures = self.count("circuit.failures");
        // One given or preset key of the group is enough to require a rate.
        let because = self.any_given(&RATE).or_else(|| self.any_present(&RATE));
        let mut circuit = if let Some(because) = because {
            let threshold = self.needed("circuit.error_rate", because, Self::fraction);
            let samples_min = self.needed("circuit.samples_min", because, Self::count);
            let window = self.needed("circuit.window", because, Self::span);
            let circuit = Circuit::at_error_rate(threshold?, samples_min?, window?);
            let circuit = self.count("circuit.slices").map_or(circuit, |slices| circuit.slices(slices));
            failures.map_or(circuit, |failures| circuit.or_after_failures(failures))
        } else {
            failures.map_or_else(Circuit::default, Circuit::after_failures)
        };
        if let Some(span) = self.span("circuit.open_for") {
            circuit = circuit.open_for(span);
        }
        Some(self.count("circuit.probes").map_or(circuit, |probes| circuit.probes(probes)))
    }

    fn pause(&mut self) -> Pause {
        let mut pause = Pause::default();
        if let Some(max) = self.span("pause.max") {
            pause = pause.max(max);
        }
        if let Some(tail) = self.span("pause.tail") {
            pause = pause.tail(tail);
        }
        self.size_rule().map_or(pause, |rule| pause.sizes(rule))
    }

    fn size_rule(&mut self) -> Option<SizeRule> {
        let because = self.any_of("pause.sizes.")?;
        let small_max = self.needed("pause.sizes.small_max", because, Self::units);
        let small = self.needed("pause.sizes.small", because, Self::span);
        let large = self.needed("pause.sizes.large", because, Self::span);
        Some(SizeRule::new(small_max?, small?, large?))
    }

    /// Like the builder, adaptive slots use `Auto` unless a controller is named; the keys of a controller
    /// select it too.
    fn controller(&mut self, slots_move: bool) -> Controller {
        if !self.is_given("controller") {
            let groups: [(&str, &[&str]); 3] = [("aimd", &AIMD), ("brake", &BRAKE), ("auto", &AUTO)];
            let named = groups.into_iter().find(|(_, keys)| self.any_given(keys).is_some());
            let is_fixed = self.word("controller").is_none_or(|word| word == "fixed");
            let implied = named.map(|(word, _)| word).or((slots_move && is_fixed).then_some("auto"));
            let implied = implied.map(|word| Entry::new(FieldValue::Word(word), Origin::Default));
            self.entries.extend(implied.map(|entry| ("controller", entry)));
        }
        match self.word("controller") {
            Some("brake") => {
                self.report_useless(&[&AIMD[..], &AUTO].concat(), "controller");
                Controller::Brake(self.brake())
            }
            Some("aimd") => {
                self.report_useless(&[&BRAKE[..], &AUTO].concat(), "controller");
                Controller::Aimd(self.aimd())
            }
            Some("auto") => {
                self.report_useless(&[&BRAKE[..], &AIMD].concat(), "controller");
                Controller::Auto(self.auto())
            }
            _ => {
                self.report_useless(&[&BRAKE[..], &AIMD, &AUTO].concat(), "controller");
                Controller::Fixed
            }
        }
    }

    fn auto(&self) -> Auto {
        let mut auto = Auto::default();
        if let Some(min) = self.number("auto.rate_min") {
            auto = auto.rate_min(min);
        }
        if let Some(max) = self.number("auto.rate_max") {
            auto = auto.rate_max(max);
        }
        self.number("auto.rate_start").map_or(auto, |start| auto.rate_start(start))
    }

    fn aimd(&mut self) -> Aimd {
        let mut aimd = Aimd::default();
        self.complete("aimd.", &Draft { controller: Controller::Aimd(aimd), ..Draft::default() });
        if let (Some(min), Some(max)) = (self.number("aimd.rate_min"), self.number("aimd.rate_max")) {
            aimd = aimd.within(min..=max);
        }
        if let Some(increase) = self.number("aimd.increase") {
            aimd = aimd.increase(increase);
        }
        if let Some(decrease) = self.number("aimd.decrease") {
            aimd = aimd.decrease(decrease);
        }
        if let Some(target) = self.span("aimd.latency_target") {
            aimd = aimd.latency_target(target);
        }
        if let Some(factor) = self.number("aimd.latency_factor") {
            aimd = aimd.latency_factor(factor);
        }
        if let Some(weight) = self.number("aimd.latency_weight") {
            aimd = aimd.latency_weight(weight);
        }
        if let Some(span) = self.span("aimd.memory") {
            aimd = aimd.memory(span);
        }
        if self.word("aimd.slow_start") == Some("on") { aimd.slow_start() } else { aimd }
    }

    fn brake(&mut self) -> Brake {
        let mut brake = Brake::default();
        self.complete("brake.", &Draft { controller: Controller::Brake(brake), ..Draft::default() });
        if let (Some(failures), Some(within)) = (self.count("brake.failures"), self.span("brake.within")) {
            brake = brake.at(failures, within);
        }
        if let Some(share) = self.fraction("brake.share") {
            brake = brake.share(share);
        }
        if let Some(period) = self.span("brake.cooling") {
            brake = brake.cooling(period);
        }
        if let Some(periods) = self.count("brake.ceiling_periods") {
            brake = brake.ceiling_periods(periods);
        }
        brake
    }

    fn retry(&mut self) -> Retry {
        self.report_without_retries();
        let mut retry = self.count("retry.attempts").map_or_else(Retry::default, Retry::attempts);
        if let Some(backoff) = self.backoff() {
            retry = retry.backoff(backoff);
        }
        if let Some(budget) = self.retry_budget() {
            retry = retry.budget(budget);
        }
        let waits = self.word("retry.when_refused") == Some("wait");
        retry.when_refused(if waits { WhenRefused::Wait } else { WhenRefused::Stop })
    }

    /// Nothing is delayed or budgeted with one attempt. What another source has is kept: that is how retries of a file are
    /// turned off by a variable.
    fn report_without_retries(&mut self) {
        const KEYS: [&str; 9] = [
            "retry.backoff",
            "retry.backoff_base",
            "retry.backoff_max",
            "retry.jitter",
            "retry.jitter_min",
            "retry.jitter_max",
            "retry.budget.share",
            "retry.budget.at_least",
            "retry.budget.window",
        ];
        const ATTEMPTS: &str = "retry.attempts";
        if self.count(ATTEMPTS) == Some(1) {
            let source = |key| discriminant(&self.origin(key));
            let keys: Vec<_> = KEYS.into_iter().filter(|key| source(key) == source(ATTEMPTS)).collect();
            self.report_useless(&keys, ATTEMPTS);
        }
    }

    fn backoff(&mut self) -> Option<Backoff> {
        let base = self.span("retry.backoff_base")?;
        let backoff = if self.word("retry.backoff") == Some("fixed") {
            self.report_useless(&["retry.backoff_max"], "retry.backoff");
            Backoff::fixed(base)
        } else {
            Backoff::exponential(base, self.span("retry.backoff_max")?)
        };
        Some(backoff.jitter(self.jitter()?))
    }

    /// A given range selects jitter from that range, unless another jitter is named.
    fn jitter(&mut self) -> Option<Jitter> {
        const KEYS: [&str; 2] = ["retry.jitter_min", "retry.jitter_max"];
        let because = self.any_given(&KEYS).filter(|_| !self.is_given("retry.jitter"));
        if let Some(because) = because.or((self.word("retry.jitter")? == "range").then_some("retry.jitter")) {
            let min = self.needed(KEYS[0], because, Self::fraction);
            let max = self.needed(KEYS[1], because, Self::fraction);
            return Some(Jitter::Range(min?..=max?));
        }
        self.report_useless(&KEYS, "retry.jitter");
        Some(if self.word("retry.jitter") == Some("full") { Jitter::Full } else { Jitter::None })
    }

    fn retry_budget(&mut self) -> Option<RetryBudget> {
        let share = self.fraction("retry.budget.share")?;
        Some(RetryBudget::new(share, self.count("retry.budget.at_least")?, self.span("retry.budget.window")?))
    }
}

/// Accessors for entries, and error reporting.
impl Assembly {
    /// Adds the draft's values for the missing keys of a group.
    fn complete(&mut self, group: &str, draft: &Draft) {
        for (key, value) in draft.fields().into_iter().filter(|(key, _)| key.starts_with(group)) {
            self.entries.entry(key).or_insert_with(|| Entry::new(value, Origin::Default));
        }
    }

    fn units(&self, key: &str) -> Option<u64> {
        match self.entries.get(key)?.value {
            FieldValue::Count(count) => Some(count),
            _ => None,
        }
    }

    fn count(&self, key: &str) -> Option<u32> {
        self.units(key).map(|count| u32::try_from(count).unwrap_or(u32::MAX))
    }

    fn span(&self, key: &str) -> Option<Duration> {
        match self.entries.get(key)?.value {
            FieldValue::Span(span) => Some(span),
            _ => None,
        }
    }

    fn fraction(&self, key: &str) -> Option<f64> {
        match self.entries.get(key)?.value {
            FieldValue::Fraction(fraction) => Some(fraction),
            _ => None,
        }
    }

    fn number(&self, key: &str) -> Option<f64> {
        match self.entries.get(key)?.value {
            FieldValue::Number(number) => Some(number),
            _ => None,
        }
    }

    fn word(&self, key: &str) -> Option<&'static str> {
        match self.entries.get(key)?.value {
            FieldValue::Word(word) => Some(word),
            _ => None,
        }
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.entries.get(key)?.value {
            FieldValue::Flag(flag) => Some(flag),
            _ => None,
        }
    }

    /// Whether the key was given, rather than set by the preset.
    fn is_given(&self, key: &str) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.origin != Origin::Default)
    }

    fn any_given(&self, keys: &[&'static str]) -> Option<&'static str> {
        keys.iter().copied().find(|key| self.is_given(key))
    }

    fn any_present(&self, keys: &[&'static str]) -> Option<&'static str> {
        keys.iter().copied().find(|key| self.entries.contains_key(key))
    }

    /// A key that is present in the group; a given one, if there is one.
    fn any_of(&self, group: &str) -> Option<&'static str> {
        let keys = || self.entries.keys().copied().filter(|key| key.starts_with(group));
        keys().find(|key| self.is_given(key)).or_else(|| keys().next())
    }

    fn needed<T>(
        &mut self,
        key: &'static str,
        because: &'static str,
        read: impl Fn(&Self, &str) -> Option<T>,
    ) -> Option<T> {
        let value = read(self, key);
        if value.is_none() {
            let fault = Fault::Missing { because: because.to_owned() };
            self.problems.push(ConfigProblem::new(self.origin(because), key, fault));
        }
        value
    }

    /// Reports those of `keys` that were given but have no effect because of the value of `because`.
    fn report_useless(&mut self, keys: &[&'static str], because: &'static str) {
        let says = self.entries.get(because).map(|entry| to_text(&entry.value)).unwrap_or_default();
        let faults = keys.iter().filter(|key| self.is_given(key)).map(|key| {
            let fault = Fault::Useless { because: because.to_owned(), says: says.clone() };
            ConfigProblem::new(self.origin(key), *key, fault)
        });
        let faults: Vec<_> = faults.collect();
        self.problems.extend(faults);
    }

    fn out_of_bounds(&mut self, problem: &Problem) {
        let entry = self.entries.get(problem.field);
        // As written, if it was given.
        let value = entry.map_or_else(|| problem.value.clone(), |entry| entry.shown.clone());
        let fault = Fault::OutOfBounds { value, bound: problem.bound.clone() };
        self.problems.push(ConfigProblem::new(self.origin(problem.field), problem.field, fault));
    }

    fn origin(&self, key: &str) -> Origin {
        self.entries.get(key).map_or(Origin::Default, |entry| entry.origin.clone())
    }
}
