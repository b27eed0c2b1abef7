//! The limits of a throttle: a free-form [`Draft`], checked once into a [`Plan`].
//!
//! A [`Draft`] is plain data. [`Draft::check`] turns it into a [`Plan`] or reports every number that is out
//! of bounds. Gates receive the plan with each call and store only mutable state, so that many throttles
//! share one plan, and a running throttle can switch to a new one.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::bucket::Shape;
use crate::feedback::headers::Dimension;
use crate::plan::check::{COUNT_MAX, Problems};
use crate::retry::Retry;

mod aimd;
mod auto;
mod check;
mod fields;
mod moved;
mod named;
mod presets;

pub use aimd::Aimd;
pub(crate) use aimd::AimdLimits;
pub use auto::Auto;
pub(crate) use auto::AutoLimits;
pub use check::{InvalidPlan, Problem};
pub use fields::FieldValue;
pub(crate) use named::NamedPlan;
pub use named::{InvalidNamed, NAMED_MAX, Named};

/// Slots: how many requests may be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    pub(crate) min: u32,
    pub(crate) start: u32,
    pub(crate) max: u32,
}

impl Slots {
    /// Counts requests in flight without limiting them.
    pub const fn unlimited() -> Self {
        Self::fixed(COUNT_MAX)
    }

    /// Always `slots`.
    pub const fn fixed(slots: u32) -> Self {
        Self { min: slots, start: slots, max: slots }
    }

    /// As many as the controller chooses within the range, starting at its end. Needs one that moves slots:
    /// [`Controller::Auto`] or [`Controller::Brake`].
    pub const fn adaptive(range: RangeInclusive<u32>) -> Self {
        Self { min: *range.start(), start: *range.end(), max: *range.end() }
    }

    /// Whether a controller may change them.
    pub const fn is_adaptive(&self) -> bool {
        self.min < self.max
    }

    /// Starts at `slots`.
    #[must_use]
    pub const fn start(mut self, slots: u32) -> Self {
        self.start = slots;
        self
    }
}

/// The minimum interval between entries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    pub(crate) interval_min: Duration,
    pub(crate) interval_max: Duration,
    pub(crate) jitter: f64,
}

impl Pace {
    /// One entry per `interval`.
    pub const fn every(interval: Duration) -> Self {
        Self { interval_min: interval, interval_max: interval, jitter: 0.0 }
    }

    /// The longest interval that a controller may set. Needs one that moves the pace: [`Controller::Brake`].
    #[must_use]
    pub const fn slowest(mut self, interval: Duration) -> Self {
        self.interval_max = interval;
        self
    }

    /// Lengthens each gap by a random fraction of the interval, at most this one.
    #[must_use]
    pub const fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = fraction;
        self
    }
}

/// Requests per period, with a burst (token bucket).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub(crate) amount: u64,
    pub(crate) period: Duration,
    pub(crate) burst: u64,
}

impl Rate {
    /// `amount` per `period`, with an equal burst.
    pub const fn new(amount: u64, period: Duration) -> Self {
        Self { amount, period, burst: amount }
    }

    /// `amount` per second, with an equal burst.
    pub const fn per_second(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(1))
    }

    /// `amount` per minute, with an equal burst.
    pub const fn per_minute(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(60))
    }

    /// `amount` per hour, with an equal burst.
    pub const fn per_hour(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(3_600))
    }

    /// `amount` per day, with an equal burst.
    pub const fn per_day(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(86_400))
    }

    /// Sets how many entries are allowed at once.
    #[must_use]
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = burst;
        self
    }
}

/// Bytes in flight. A request of any size may overdraw the capacity on entry, so the excess is at most one
/// request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    pub(crate) capacity: u64,
    pub(crate) recovering_price: u16,
}

impl Bytes {
    /// At most `capacity` bytes in flight.
    pub const fn in_flight(capacity: u64) -> Self {
        Self { capacity, recovering_price: 1 }
    }

    /// Charges `price` bytes per byte while recovering from a pause.
    #[must_use]
    pub const fn recovering_price(mut self, price: u16) -> Self {
        self.recovering_price = price;
        self
    }
}

/// Tokens per sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    pub(crate) tokens: u64,
    pub(crate) window: Duration,
    pub(crate) oversize: Oversize,
    /// The kind of token; never requests.
    pub(crate) counts: Dimension,
}

/// What happens to a request for more tokens than the budget's capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Oversize {
    /// Refuse it immediately.
    #[default]
    Refuse,
    /// Admit it when the window is empty.
    Alone,
}

impl Budget {
    /// At most `tokens` within any `window`.
    pub const fn tokens(tokens: u64, window: Duration) -> Self {
        Self { tokens, window, oversize: Oversize::Refuse, counts: Dimension::Tokens }
    }

    /// At most `tokens` input tokens within any `window`. Needs a name: [`Draft::budget_named`].
    pub const fn input_tokens(tokens: u64, window: Duration) -> Self {
        Self { counts: Dimension::InputTokens, ..Self::tokens(tokens, window) }
    }

    /// At most `tokens` output tokens within any `window`. Needs a name: [`Draft::budget_named`].
    pub const fn output_tokens(tokens: u64, window: Duration) -> Self {
        Self { counts: Dimension::OutputTokens, ..Self::tokens(tokens, window) }
    }

    /// Sets what happens to requests that are larger than the budget.
    #[must_use]
    pub const fn oversize(mut self, oversize: Oversize) -> Self {
        self.oversize = oversize;
        self
    }
}

/// A circuit breaker: when to stop sending requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Circuit {
    pub(crate) consecutive: Option<u32>,
    pub(crate) error_rate: Option<ErrorRate>,
    pub(crate) slices: u32,
    pub(crate) open_for: Duration,
    pub(crate) probes: u32,
}

/// The default number of slices of an error window.
const SLICES: u32 = 15;

/// The share of errors at which a circuit opens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ErrorRate {
    pub(crate) threshold: f64,
    pub(crate) samples_min: u32,
    pub(crate) window: Duration,
}

impl Default for Circuit {
    /// Opens for 30 s after ten consecutive failures; one successful probe closes it.
    fn default() -> Self {
        Self::after_failures(10)
    }
}

impl Circuit {
    /// Opens after `failures` consecutive failures.
    pub const fn after_failures(failures: u32) -> Self {
        let open_for = Duration::from_secs(30);
        Self { consecutive: Some(failures), error_rate: None, slices: SLICES, open_for, probes: 1 }
    }

    /// Opens when the share of failures reaches `threshold`, with at least `samples_min` outcomes in
    /// `window`.
    pub const fn at_error_rate(threshold: f64, samples_min: u32, window: Duration) -> Self {
        let rate = ErrorRate { threshold, samples_min, window };
        Self { consecutive: None, error_rate: Some(rate), ..Self::after_failures(0) }
    }

    /// Sets the number of slices of the error window, 15 by default. An outcome expires with its slice, so up
    /// to one slice early. Needs an error rate.
    #[must_use]
    pub const fn slices(mut self, slices: u32) -> Self {
        self.slices = slices;
        self
    }

    /// Also opens after `failures` consecutive failures.
    #[must_use]
    pub const fn or_after_failures(mut self, failures: u32) -> Self {
        self.consecutive = Some(failures);
        self
    }

    /// How long it stays open the first time; each failed probe doubles this, up to five times `span`.
    #[must_use]
    pub const fn open_for(mut self, span: Duration) -> Self {
        self.open_for = span;
        self
    }

    /// How many probes may be in flight while half-open, and how many successes close the circuit.
    #[must_use]
    pub const fn probes(mut self, probes: u32) -> Self {
        self.probes = probes;
        self
    }
}

/// Pauses, requested by the upstream or by hand, and the recovery after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    pub(crate) max: Duration,
    pub(crate) tail: Duration,
    pub(crate) sizes: Option<SizeRule>,
}

/// How long to pause after an overload without a hint, by the size of the rejected request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeRule {
    pub(crate) small_max: u64,
    pub(crate) small: Duration,
    pub(crate) large: Duration,
}

impl SizeRule {
    /// Requests of up to `small_max` bytes pause for `small`, larger ones for `large`.
    pub const fn new(small_max: u64, small: Duration, large: Duration) -> Self {
        Self { small_max, small, large }
    }
}

impl Default for Pause {
    /// Follows hints of up to ten minutes; no tail, no size rule.
    fn default() -> Self {
        Self { max: Duration::from_secs(600), tail: Duration::ZERO, sizes: None }
    }
}

impl Pause {
    /// Caps longer hints at this length, and emits an event for each.
    #[must_use]
    pub const fn max(mut self, max: Duration) -> Self {
        self.max = max;
        self
    }

    /// The longest pause that a hint can cause.
    pub const fn longest(&self) -> Duration {
        self.max
    }

    /// How long the recovering phase lasts after a pause.
    #[must_use]
    pub const fn tail(mut self, tail: Duration) -> Self {
        self.tail = tail;
        self
    }

    /// Pauses after overloads without a hint.
    #[must_use]
    pub const fn sizes(mut self, rule: SizeRule) -> Self {
        self.sizes = Some(rule);
        self
    }
}

/// Cuts the limits on failures, and restores them step by step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Brake {
    pub(crate) failures: u32,
    pub(crate) share: f64,
    pub(crate) within: Duration,
    pub(crate) cooling: Duration,
    pub(crate) ceiling_periods: u32,
}

impl Default for Brake {
    /// Brakes at three failures within 60 s that are at least a tenth of the outcomes, cools in periods of 60
    /// s, and lifts the ceiling after five periods without failure.
    fn default() -> Self {
        let minute = Duration::from_secs(60);
        Self { failures: 3, share: 0.1, within: minute, cooling: minute, ceiling_periods: 5 }
    }
}

impl Brake {
    /// Brakes at `failures` within `span`.
    #[must_use]
    pub const fn at(mut self, failures: u32, span: Duration) -> Self {
        self.failures = failures;
        self.within = span;
        self
    }

    /// Brakes only if the failures are at least this share of the outcomes in the same span.
    #[must_use]
    pub const fn share(mut self, fraction: f64) -> Self {
        self.share = fraction;
        self
    }

    /// Each healthy period of this length restores one slot and halves the interval.
    #[must_use]
    pub const fn cooling(mut self, period: Duration) -> Self {
        self.cooling = period;
        self
    }

    /// After this many cooling periods without failure, the ceiling is the maximum again.
    #[must_use]
    pub const fn ceiling_periods(mut self, periods: u32) -> Self {
        self.ceiling_periods = periods;
        self
    }
}

/// The controller that learns from outcomes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Controller {
    /// None: limits change by hand only.
    #[default]
    Fixed,
    /// Cuts slots and pace on failures.
    Brake(Brake),
    /// Adapts the rate.
    Aimd(Aimd),
    /// Adapts rate and slots together.
    Auto(Auto),
}

/// The unchecked limits of a throttle.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Requests in flight; `None` is unlimited.
    pub slots: Option<Slots>,
    /// Requests in flight that entered while recovering; `None` means the number of slots.
    pub recovery_slots: Option<u32>,
    /// Bytes in flight.
    pub bytes: Option<Bytes>,
    /// The minimum interval between entries.
    pub pace: Option<Pace>,
    /// Requests per period; the one that a controller may move.
    pub rate: Option<Rate>,
    /// Further rates, each with a name.
    pub rates: Vec<Named<Rate>>,
    /// Tokens per window.
    pub budget: Option<Budget>,
    /// Further budgets, each with a name.
    pub budgets: Vec<Named<Budget>>,
    /// The circuit breaker.
    pub circuit: Option<Circuit>,
    /// Pauses.
    pub pause: Pause,
    /// The controller.
    pub controller: Controller,
    /// The retry policy.
    pub retry: Retry,
    /// The expected number of requests, for progress; `Some(0)` counts without a total.
    pub total: Option<u64>,
    /// The step, in percent of the total, at which progress is reported.
    pub milestone_percent: u32,
    /// The most callers that may wait at the same time.
    pub waiters_max: u32,
}

impl Default for Draft {
    /// No gates.
    fn default() -> Self {
        Self {
            slots: None,
            recovery_slots: None,
            bytes: None,
            pace: None,
            rate: None,
            rates: Vec::new(),
            budget: None,
            budgets: Vec::new(),
            circuit: None,
            pause: Pause::default(),
            controller: Controller::Fixed,
            retry: Retry::default(),
            total: None,
            milestone_percent: 10,
            waiters_max: 65_536,
        }
    }
}

impl Draft {
    /// Checks every number, that a controller moves every limit that has a range, and that nothing is without effect.
    ///
    /// # Errors
    /// [`InvalidPlan`] lists every problem with field, value and bound.
    pub fn check(mut self) -> Result<Plan, InvalidPlan> {
        let mut problems = Problems::default();
        if let Controller::Auto(_) = self.controller {
            self.slots.get_or_insert(Auto::SLOTS);
        }
        problems.check(&self);
        let auto = match (&self.controller, self.slots) {
            (Controller::Auto(auto), Some(slots)) => problems.auto(auto, slots),
            _ => None,
        };
        let (aimd, rate) = match (&self.controller, self.rate) {
            (Controller::Aimd(aimd), rate) => problems.aimd(aimd, rate).unzip(),
            (_, rate) => (None, rate.and_then(|rate| problems.shape(rate))),
        };
        let named = problems.named(&self);
        // Only for bounds that hold: their own problems come first.
        if problems.is_empty() {
            problems.check_moved(&self);
            problems.check_inert(&self);
        }
        problems.into_result()?;
        let has_rate = self.rate.is_some() || !self.rates.is_empty();
        let has_budget = self.budget.is_some() || !self.budgets.is_empty();
        let timed = self.pace.is_some() || has_rate || has_budget || self.circuit.is_some();
        let learns = self.circuit.is_some() || self.controller != Controller::Fixed || self.total.is_some();
        let settles_timed = learns || has_budget || self.pause.sizes.is_some();
        let counts = self.slots.is_some() || self.bytes.is_some() || settles_timed;
        let plain = !settles_timed && self.pace.is_none() && self.bytes.is_none() && named.is_none();
        Ok(Plan {
            draft: self,
            rate,
            named,
            aimd,
            auto,
            timed: timed || learns,
            settles_timed,
            counts,
            plain,
        })
    }
}

/// A checked [`Draft`].
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "properties computed once, each read by name")]
pub struct Plan {
    pub(crate) draft: Draft,
    /// The bucket of the rate; the initial one if a controller moves it.
    pub(crate) rate: Option<Shape>,
    /// The named rates and budgets.
    pub(crate) named: Option<Box<NamedPlan>>,
    /// The limits of [`Controller::Aimd`].
    pub(crate) aimd: Option<AimdLimits>,
    /// The limits of [`Controller::Auto`].
    pub(crate) auto: Option<AutoLimits>,
    timed: bool,
    settles_timed: bool,
    counts: bool,
    plain: bool,
}

impl Plan {
    /// The draft, which can be changed and checked again.
    pub const fn draft(&self) -> &Draft {
        &self.draft
    }

    /// Whether admission needs the time.
    pub const fn is_timed(&self) -> bool {
        self.timed
    }

    /// Whether requests in flight are counted. Pace and rate alone hold nothing and never wait for a
    /// completion, so they do not count; [`Slots::unlimited`] counts explicitly.
    pub const fn counts_in_flight(&self) -> bool {
        self.counts
    }

    /// Whether only slots and a rate limit: the fast path in `gates.rs`.
    #[inline]
    pub const fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether a rate limits, and nothing else: no request in flight is counted, and nothing learns.
    #[inline]
    pub const fn is_rate_alone(&self) -> bool {
        self.plain && !self.counts && self.rate.is_some()
    }

    /// Whether a rejection cuts the quota that it names: [`Controller::Auto`] learns each by itself.
    pub const fn cuts_quotas(&self) -> bool {
        self.auto.is_some()
    }

    /// Whether settling needs the time: something learns from it, or a window records it.
    pub const fn settles_timed(&self) -> bool {
        self.settles_timed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_is_timed_only_if_a_gate_needs_time() {
        let slots = Draft { slots: Some(Slots::fixed(3)), ..Draft::default() };
        let table = [
            (slots.clone(), false, false),
            (Draft { rate: Some(Rate::per_second(3)), ..slots.clone() }, true, false),
            (Draft { pace: Some(Pace::every(Duration::from_secs(1))), ..slots.clone() }, true, false),
            (Draft { budget: Some(Budget::tokens(9, Duration::from_secs(1))), ..slots.clone() }, true, true),
            (slots.clone().rate_named("rpd", Rate::per_day(3)), true, false),
            (slots.clone().budget_named("itpm", Budget::input_tokens(9, Duration::from_secs(1))), true, true),
            (Draft { circuit: Some(Circuit::default()), ..slots.clone() }, true, true),
            (Draft { total: Some(0), ..slots }, true, true),
        ];
        for (draft, timed, settles) in table {
            let plan = draft.check().expect("within the bounds");
            assert_eq!((plan.is_timed(), plan.settles_timed()), (timed, settles), "{:?}", plan.draft());
        }
    }
}
