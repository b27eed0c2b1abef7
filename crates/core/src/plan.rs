//! What a throttle is asked to be: drafted freely, checked once, never wrong after that.
//!
//! A [`Draft`] is plain data. [`Draft::check`] turns it into a [`Plan`] or names every number that is out of
//! its bounds. Gates are handed the plan with each call and keep only what changes, so that many throttles of
//! a kind share one plan and a new plan can be put under a living state.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::bucket::Shape;
use crate::plan::check::{COUNT_MAX, Problems};
use crate::retry::Retry;

mod aimd;
mod auto;
mod check;
mod fields;
mod presets;

pub use aimd::Aimd;
pub(crate) use aimd::AimdLimits;
pub use auto::Auto;
pub(crate) use auto::AutoLimits;
pub use check::{InvalidPlan, Problem};
pub use fields::FieldValue;

/// Slots: how many requests may be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    pub(crate) min: u32,
    pub(crate) start: u32,
    pub(crate) max: u32,
}

impl Slots {
    /// As many as come: they are counted, and not limited.
    pub const fn unlimited() -> Self {
        Self::fixed(COUNT_MAX)
    }

    /// Always `slots`.
    pub const fn fixed(slots: u32) -> Self {
        Self { min: slots, start: slots, max: slots }
    }

    /// As many as the controller finds right, within the range; it starts at the most.
    pub const fn adaptive(range: RangeInclusive<u32>) -> Self {
        Self { min: *range.start(), start: *range.end(), max: *range.end() }
    }

    /// Whether a controller may move them.
    pub const fn is_adaptive(&self) -> bool {
        self.min < self.max
    }

    /// The same, starting at `slots`.
    #[must_use]
    pub const fn start(mut self, slots: u32) -> Self {
        self.start = slots;
        self
    }
}

/// The least gap between entries.
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

    /// The longest interval to which a controller may slow it.
    #[must_use]
    pub const fn slowest(mut self, interval: Duration) -> Self {
        self.interval_max = interval;
        self
    }

    /// Lengthens each gap by a random part of the interval, up to this fraction of it.
    #[must_use]
    pub const fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = fraction;
        self
    }
}

/// Entries per period, with a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub(crate) amount: u64,
    pub(crate) period: Duration,
    pub(crate) burst: u64,
}

impl Rate {
    /// `amount` per `period`, and as many at once.
    pub const fn new(amount: u64, period: Duration) -> Self {
        Self { amount, period, burst: amount }
    }

    /// `amount` per second, and as many at once.
    pub const fn per_second(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(1))
    }

    /// `amount` per minute, and as many at once.
    pub const fn per_minute(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(60))
    }

    /// `amount` per hour, and as many at once.
    pub const fn per_hour(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(3_600))
    }

    /// `amount` per day, and as many at once.
    pub const fn per_day(amount: u64) -> Self {
        Self::new(amount, Duration::from_secs(86_400))
    }

    /// The same, with at most `burst` at once.
    #[must_use]
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = burst;
        self
    }
}

/// Bytes in flight. They may overdraw on entry: nothing is too large, and the excess is at most one request.
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

    /// While recovering from a pause, a byte costs as much as `price` bytes.
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
}

/// What happens to a request that asks for more tokens than the budget ever holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Oversize {
    /// It is refused at once.
    #[default]
    Refuse,
    /// It is admitted when the window is empty.
    Alone,
}

impl Budget {
    /// `tokens` in any `window` of time.
    pub const fn tokens(tokens: u64, window: Duration) -> Self {
        Self { tokens, window, oversize: Oversize::Refuse }
    }

    /// The same, with a rule for requests that are larger than the budget.
    #[must_use]
    pub const fn oversize(mut self, oversize: Oversize) -> Self {
        self.oversize = oversize;
        self
    }
}

/// A circuit breaker: when to stop asking at all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Circuit {
    pub(crate) consecutive: Option<u32>,
    pub(crate) error_rate: Option<ErrorRate>,
    pub(crate) open_for: Duration,
    pub(crate) probes: u32,
}

/// The slices of a window of errors, unless said otherwise.
const SLICES: u32 = 15;

/// The share of errors at which a circuit opens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ErrorRate {
    pub(crate) threshold: f64,
    pub(crate) samples_min: u32,
    pub(crate) window: Duration,
    pub(crate) slices: u32,
}

impl Default for Circuit {
    /// Ten failures in a row open it for 30 s; one probe closes it.
    fn default() -> Self {
        Self::after_failures(10)
    }
}

impl Circuit {
    /// Opens after `failures` in a row.
    pub const fn after_failures(failures: u32) -> Self {
        Self { consecutive: Some(failures), error_rate: None, open_for: Duration::from_secs(30), probes: 1 }
    }

    /// Opens when, of at least `samples_min` outcomes in `window`, this share are failures.
    pub const fn at_error_rate(threshold: f64, samples_min: u32, window: Duration) -> Self {
        let rate = ErrorRate { threshold, samples_min, window, slices: SLICES };
        Self { consecutive: None, error_rate: Some(rate), ..Self::after_failures(0) }
    }

    /// How finely an error rate's window is counted: an outcome leaves it with its slice, so up to one slice early.
    /// 15 unless said otherwise; where no error rate opens the circuit, there is no window to slice.
    #[must_use]
    pub const fn slices(mut self, slices: u32) -> Self {
        if let Some(rate) = &mut self.error_rate {
            rate.slices = slices;
        }
        self
    }

    /// Opens after `failures` in a row as well.
    #[must_use]
    pub const fn or_after_failures(mut self, failures: u32) -> Self {
        self.consecutive = Some(failures);
        self
    }

    /// How long it stays open the first time; each failed probe doubles that, up to five times this.
    #[must_use]
    pub const fn open_for(mut self, span: Duration) -> Self {
        self.open_for = span;
        self
    }

    /// How many probes are out at a time while half-open, and how many successes close it.
    #[must_use]
    pub const fn probes(mut self, probes: u32) -> Self {
        self.probes = probes;
        self
    }
}

/// Pauses asked for by the far side or by hand, and the cautious time after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    pub(crate) max: Duration,
    pub(crate) tail: Duration,
    pub(crate) sizes: Option<SizeRule>,
}

/// How long to pause after an overload without a hint, by the size of the request that met it.
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
    /// Hints count for up to ten minutes; no tail, no size rule.
    fn default() -> Self {
        Self { max: Duration::from_secs(600), tail: Duration::ZERO, sizes: None }
    }
}

impl Pause {
    /// Hints longer than this are capped, and the cap is an event.
    #[must_use]
    pub const fn max(mut self, max: Duration) -> Self {
        self.max = max;
        self
    }

    /// The longest pause that a hint may ask for.
    pub const fn longest(&self) -> Duration {
        self.max
    }

    /// How long the recovering phase lasts after a pause.
    #[must_use]
    pub const fn tail(mut self, tail: Duration) -> Self {
        self.tail = tail;
        self
    }

    /// Pauses after overloads that bring no hint.
    #[must_use]
    pub const fn sizes(mut self, rule: SizeRule) -> Self {
        self.sizes = Some(rule);
        self
    }
}

/// Brakes on failures, and releases step by step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Brake {
    pub(crate) failures: u32,
    pub(crate) share: f64,
    pub(crate) within: Duration,
    pub(crate) cooling: Duration,
    pub(crate) ceiling_periods: u32,
}

impl Default for Brake {
    /// Three failures within 60 s that are at least a tenth of the outcomes; cooling periods of 60 s; the ceiling is lifted
    /// after five without failure.
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

    /// Brakes only if the failures are at least this share of the outcomes in the same span: a few in many say little.
    #[must_use]
    pub const fn share(mut self, fraction: f64) -> Self {
        self.share = fraction;
        self
    }

    /// Each healthy period of this length gives one slot back and halves the interval.
    #[must_use]
    pub const fn cooling(mut self, period: Duration) -> Self {
        self.cooling = period;
        self
    }

    /// Cooling periods without failure after which the ceiling is the maximum again.
    #[must_use]
    pub const fn ceiling_periods(mut self, periods: u32) -> Self {
        self.ceiling_periods = periods;
        self
    }
}

/// Which controller learns from outcomes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Controller {
    /// None: limits move by hand only.
    #[default]
    Fixed,
    /// Brakes on failures.
    Brake(Brake),
    /// Moves the rate.
    Aimd(Aimd),
    /// Moves rate and slots together.
    Auto(Auto),
}

/// What a throttle shall be, not yet checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Requests in flight; `None` is no limit.
    pub slots: Option<Slots>,
    /// Requests in flight that entered while recovering; `None` is as many as there are slots.
    pub recovery_slots: Option<u32>,
    /// Bytes in flight.
    pub bytes: Option<Bytes>,
    /// The least gap between entries.
    pub pace: Option<Pace>,
    /// Entries per period.
    pub rate: Option<Rate>,
    /// Tokens per window.
    pub budget: Option<Budget>,
    /// The circuit breaker.
    pub circuit: Option<Circuit>,
    /// Pauses.
    pub pause: Pause,
    /// Who learns.
    pub controller: Controller,
    /// When work is tried again.
    pub retry: Retry,
    /// How many requests there will be in all, for progress; `Some(0)` counts without a total.
    pub total: Option<u64>,
    /// Progress is told whenever so many percent of the total are completed.
    pub milestone_percent: u32,
    /// Callers that may wait at the same time.
    pub waiters_max: u32,
}

impl Default for Draft {
    /// No gate at all.
    fn default() -> Self {
        Self {
            slots: None,
            recovery_slots: None,
            bytes: None,
            pace: None,
            rate: None,
            budget: None,
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
    /// Checks every number.
    ///
    /// # Errors
    /// [`InvalidPlan`] lists everything that is wrong, each with field, value and bound.
    pub fn check(mut self) -> Result<Plan, InvalidPlan> {
        let mut problems = Problems::default();
        if let Controller::Auto(_) = self.controller {
            self.slots.get_or_insert(Auto::SLOTS);
        }
        problems.look_at(&self);
        let auto = match (&self.controller, self.slots) {
            (Controller::Auto(auto), Some(slots)) => problems.auto(auto, slots),
            _ => None,
        };
        let (aimd, rate) = match (&self.controller, self.rate) {
            (Controller::Aimd(aimd), rate) => problems.aimd(aimd, rate).unzip(),
            (_, rate) => (None, rate.and_then(|rate| problems.shape(rate))),
        };
        problems.into_result()?;
        let timed =
            self.pace.is_some() || self.rate.is_some() || self.budget.is_some() || self.circuit.is_some();
        let learns = self.circuit.is_some() || self.controller != Controller::Fixed || self.total.is_some();
        let settles_timed = learns || self.budget.is_some() || self.pause.sizes.is_some();
        let counts = self.slots.is_some() || self.bytes.is_some() || settles_timed;
        let plain = !settles_timed && self.pace.is_none() && self.bytes.is_none();
        Ok(Plan { draft: self, rate, aimd, auto, timed: timed || learns, settles_timed, counts, plain })
    }
}

/// A checked [`Draft`].
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "answers worked out once, each asked for by name")]
pub struct Plan {
    pub(crate) draft: Draft,
    /// The bucket of the rate; where a controller moves it, the one to start with.
    pub(crate) rate: Option<Shape>,
    /// Where the controller is one that moves the rate.
    pub(crate) aimd: Option<AimdLimits>,
    /// Where the controller is `Auto`.
    pub(crate) auto: Option<AutoLimits>,
    timed: bool,
    settles_timed: bool,
    counts: bool,
    plain: bool,
}

impl Plan {
    /// The draft it came from, to be changed and checked anew.
    pub const fn draft(&self) -> &Draft {
        &self.draft
    }

    /// Whether admission needs the time.
    pub const fn is_timed(&self) -> bool {
        self.timed
    }

    /// Whether requests in flight are counted. Pace and rate alone hold nothing and wait for nobody's return,
    /// so there it would be work for nothing; [`Slots::unlimited`] asks for it.
    pub const fn counts_in_flight(&self) -> bool {
        self.counts
    }

    /// Whether nothing but slots and a rate limits: the common case, which `gates.rs` decides in a few steps.
    #[inline]
    pub const fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether settling needs the time, because something learns or a window is stamped.
    pub const fn settles_timed(&self) -> bool {
        self.settles_timed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_the_time_is_timed() {
        let slots = Draft { slots: Some(Slots::fixed(3)), ..Draft::default() };
        let table = [
            (slots.clone(), false, false),
            (Draft { rate: Some(Rate::per_second(3)), ..slots.clone() }, true, false),
            (Draft { pace: Some(Pace::every(Duration::from_secs(1))), ..slots.clone() }, true, false),
            (Draft { budget: Some(Budget::tokens(9, Duration::from_secs(1))), ..slots.clone() }, true, true),
            (Draft { circuit: Some(Circuit::default()), ..slots.clone() }, true, true),
            (Draft { total: Some(0), ..slots }, true, true),
        ];
        for (draft, timed, settles) in table {
            let plan = draft.check().expect("within the bounds");
            assert_eq!((plan.is_timed(), plan.settles_timed()), (timed, settles), "{:?}", plan.draft());
        }
    }
}
