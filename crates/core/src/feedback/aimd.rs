//! The adaptive rate: a steady increase while all is well, a cut when it is too much.
//!
//! An overload, or a success that took `latency_factor` times the target or more, cuts the rate to `decrease` of
//! it, once per wave. A fast success, one below the target, lets it grow by the time that passed, whatever the
//! number of successes: before the first cut by doubling each second, where a slow start is asked for; then, while
//! the last bad rate is remembered, by a quarter each second below nine tenths of it and by a fiftieth above; else
//! by `increase`. It grows only if it was used, and a step never more than doubles it.
//!
//! What was too much is what was sent: a rate on its way up passes a far side's capacity while that lives off its
//! reserves, and remembered as it stood at the cut it would be passed again at full speed. And of cuts with no success
//! between them it is the first that counts: where nothing is answered any more, how little was sent says nothing.
//!
//! Latency is judged against a learned baseline: the first success's latency, or the configured one if that is longer. It
//! falls with faster successes and rises by a hundredth of the difference with slower ones, so that an upstream that is
//! always slow is not taken for an overloaded one. The target follows the latency of successes between the baseline and
//! twice that; a sample is compared with the target before it moves it. What lies between fast and too slow, and what fails,
//! moves nothing, and the time before it does not count as healthy.

use std::time::Duration;

use super::lately::Lately;
use super::{Advice, Sample, Tuning};
use crate::bucket::Shape;
use crate::event::Why;
use crate::outcome::Kind;
use crate::per_second::PerSecond;
use crate::plan::AimdLimits;
use crate::time::{Instant, nanos};

/// Healthy time is turned into growth when there is this much of it.
const STEP: Duration = Duration::from_secs(1);
/// More healthy time than this does not count in one step.
const STEP_MAX: Duration = Duration::from_secs(60);
const MILLION: u64 = 1_000_000;
/// A slower success raises the baseline by this part of the difference.
const BASELINE_RISE: u64 = 100;
/// What a cut that ends a slow start leaves at the most: the last doubling was one too many.
const HALF: u64 = MILLION / 2;

/// What the adaptive rate remembers.
#[derive(Debug, Clone)]
pub(crate) struct AimdState {
    rate: PerSecond,
    /// The bucket of that rate.
    shape: Shape,
    /// The latency of an upstream that is not overloaded; none before the first success.
    baseline: Option<Duration>,
    /// The latency below which a success is fast.
    target: Duration,
    /// Since the last step; none before the first outcome.
    stretch: Option<Stretch>,
    /// The last rate that was too much, and when it was.
    bad: Option<(PerSecond, Instant)>,
    /// Whether nothing has succeeded since the last cut.
    is_falling: bool,
    lately: Lately,
    /// The highest rate that was cut and is not reached again yet.
    cut_from: Option<PerSecond>,
    is_starting: bool,
}

/// What happened since the last step.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    since: Instant,
    /// Requests admitted before it.
    admitted: u64,
    /// The last outcome in it.
    latest: Instant,
    /// Time that ended with a fast success.
    healthy: Duration,
}

impl AimdState {
    pub(super) fn new(limits: &AimdLimits) -> Self {
        Self {
            rate: limits.start,
            shape: limits.shape(limits.start),
            baseline: None,
            target: limits.latency_target,
            stretch: None,
            bad: None,
            is_falling: false,
            lately: Lately::default(),
            cut_from: None,
            is_starting: limits.slow_start,
        }
    }

    pub(super) fn learn(&mut self, limits: &AimdLimits, tuning: Tuning, sample: Sample) -> Option<Advice> {
        // What was sent at another rate says nothing about this one.
        if !sample.is_current {
            return None;
        }
        self.lately.see(sample.admitted, sample.now);
        match sample.kind {
            Kind::Ignored => None,
            Kind::Failure => {
                self.stretch.get_or_insert(Stretch::new(sample.admitted, sample.now)).end(sample.now);
                None
            }
            Kind::Overload => Some(self.cut(limits, tuning, Why::Overload, sample)),
            Kind::Success => self.succeed(limits, tuning, sample),
        }
    }

    pub(super) const fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) const fn rate(&self) -> PerSecond {
        self.rate
    }

    /// Whether it knows anything that a new one would not. The last bad rate counts as long as it is remembered.
    pub(super) fn has_learned(&self, limits: &AimdLimits, now: Instant) -> bool {
        self.rate != limits.start
            || self.target != limits.latency_target
            || self.is_starting != limits.slow_start
            || self.is_cooling()
            || self.bad.is_some_and(|(_, at)| now.since(at) < limits.memory)
    }

    /// Whether a cut has not yet been given back.
    pub(super) const fn is_cooling(&self) -> bool {
        self.cut_from.is_some()
    }

    /// The advice was followed.
    pub(super) fn set(&mut self, limits: &AimdLimits, rate: PerSecond) {
        self.rate = rate;
        self.shape = limits.shape(rate);
        self.cut_from = self.cut_from.filter(|from| *from > rate);
    }

    /// A pause is no time at all: neither healthy nor unused.
    pub(super) fn rest(&mut self, from: Instant, until: Instant) {
        if let Some(stretch) = &mut self.stretch {
            stretch.since = stretch.since + until.since(from);
            stretch.latest = until;
        }
        self.lately.rest(until.since(from));
    }

    /// What is left of the pause does not take place.
    pub(super) fn wake(&mut self, now: Instant, until: Instant) {
        if let Some(stretch) = &mut self.stretch {
            stretch.since = stretch.since.minus_nanos(until.nanos_since(now));
            stretch.latest = now;
        }
        self.lately.wake(until.nanos_since(now));
    }

    /// Goes on within other bounds. A rate is climbed to and not jumped to: what is allowed is not yet borne. One that
    /// has learned nothing starts where the new limits start.
    pub(super) fn tune(&mut self, old: Option<&AimdLimits>, new: &AimdLimits, now: Instant) {
        if old.is_some_and(|old| !self.has_learned(old, now)) {
            (self.rate, self.target) = (new.start, new.latency_target);
            self.is_starting = new.slow_start;
        }
        let rate = self.rate.clamp(new.min, new.max);
        self.cut_from = self.cut_from.map(|from| from.min(new.max));
        let baseline = self.baseline.unwrap_or_default().max(new.latency_target);
        self.target = self.target.clamp(baseline, baseline.saturating_mul(2));
        self.is_starting &= new.slow_start;
        self.set(new, rate);
    }

    fn cut(&mut self, limits: &AimdLimits, tuning: Tuning, why: Why, sample: Sample) -> Advice {
        let left = if self.is_starting { limits.decrease.min(HALF) } else { limits.decrease };
        self.bad = Some((self.too_much(limits, sample), sample.now));
        self.is_falling = true;
        self.cut_from = self.cut_from.max(Some(self.rate));
        self.is_starting = false;
        self.stretch = Some(Stretch::new(sample.admitted, sample.now));
        let to = part(self.rate.millionths(), left, MILLION);
        let rate = PerSecond::from_millionths(to).clamp(limits.min, limits.max);
        Advice::Cut(Tuning { rate: Some(rate), ..tuning }, why)
    }

    /// What a cut says was too much.
    fn too_much(&self, limits: &AimdLimits, sample: Sample) -> PerSecond {
        if let Some((bad, _)) = self.bad.filter(|_| self.is_falling) {
            return bad;
        }
        // While it doubles each second what was sent lags far behind; and where less was asked for than there was, nobody
        // knows what would have been sent.
        let is_used = self.stretch.is_some_and(|stretch| stretch.is_used(self.rate, sample));
        let sent = self.lately.per_second(sample.admitted, sample.now);
        sent.filter(|_| is_used && !self.is_starting)
            .map_or(self.rate, |sent| sent.clamp(limits.min, self.rate))
    }

    fn succeed(&mut self, limits: &AimdLimits, tuning: Tuning, sample: Sample) -> Option<Advice> {
        // A latency that nobody knows is not held against it.
        let latency = sample.latency.unwrap_or_default();
        if self.baseline.is_none() && sample.latency.is_some() {
            self.target = self.target.max(latency.saturating_add(Duration::from_nanos(1)));
        }
        let target = self.target;
        if sample.latency.is_some() {
            let baseline = settle(limits, self.baseline, latency);
            self.baseline = Some(baseline);
            self.target = follow(limits, baseline, target, latency);
        }
        let too_slow = part(nanos(target), limits.latency_factor, MILLION);
        if nanos(latency) >= too_slow {
            return Some(self.cut(limits, tuning, Why::Latency { latency, target }, sample));
        }
        self.is_falling = false;
        let stretch = self.stretch.get_or_insert(Stretch::new(sample.admitted, sample.now));
        if latency < target {
            stretch.healthy += sample.now.since(stretch.latest);
        }
        stretch.end(sample.now);
        if latency >= target || stretch.healthy < STEP {
            return None;
        }
        let done = *stretch;
        *stretch = Stretch::new(sample.admitted, sample.now);
        if !done.is_used(self.rate, sample) {
            self.lately.forget();
            return None;
        }
        let rate = self.grown(limits, done.healthy, sample.now);
        (rate > self.rate).then_some(Advice::Grow(Tuning { rate: Some(rate), ..tuning }))
    }

    /// What the rate is after so much healthy time: second by second, for each second looks at where it is.
    fn grown(&self, limits: &AimdLimits, healthy: Duration, now: Instant) -> PerSecond {
        let most = self.rate.millionths().saturating_mul(2).min(limits.max.millionths());
        let second = nanos(STEP);
        let mut left = nanos(healthy.min(STEP_MAX));
        let mut rate = self.rate.millionths();
        while left > 0 && rate < most {
            let slice = left.min(second);
            rate += part(self.gain(limits, rate, now), slice, second).max(1);
            left -= slice;
        }
        PerSecond::from_millionths(rate.min(most)).max(self.rate)
    }

    /// How much is gained in a second at `rate`, in millionths.
    fn gain(&self, limits: &AimdLimits, rate: u64, now: Instant) -> u64 {
        if self.is_starting {
            return rate;
        }
        match self.bad {
            Some((bad, at)) if now.since(at) < limits.memory => {
                let is_far = u128::from(rate) * 10 < u128::from(bad.millionths()) * 9;
                if is_far { rate / 4 } else { rate / 50 }
            }
            _ => limits.increase.millionths(),
        }
    }
}

impl Stretch {
    const fn new(admitted: u64, since: Instant) -> Self {
        Self { since, admitted, latest: since, healthy: Duration::ZERO }
    }

    /// An outcome came. While paused the stretch has not begun.
    fn end(&mut self, now: Instant) {
        self.latest = self.latest.max(now);
    }

    /// Whether nine tenths of the rate were sent; to whom the rate held back, less than a unit is forgiven, since a
    /// stretch need not end when one enters.
    fn is_used(&self, rate: PerSecond, sample: Sample) -> bool {
        let sent = u128::from(sample.admitted.saturating_sub(self.admitted));
        let time = u128::from(sample.now.nanos_since(self.since));
        let wanted = u128::from(rate.millionths()) * time * 9 / 10;
        let unit = u128::from(MILLION) * u128::from(nanos(STEP));
        if sample.has_demand { sent >= wanted / unit } else { sent * unit >= wanted }
    }
}

/// The baseline after a sample: at least the configured latency.
fn settle(limits: &AimdLimits, baseline: Option<Duration>, latency: Duration) -> Duration {
    let moved = match baseline.map(nanos) {
        None => nanos(latency),
        Some(baseline) if nanos(latency) > baseline => {
            baseline.saturating_add((nanos(latency) - baseline) / BASELINE_RISE)
        }
        Some(baseline) => baseline - part(baseline - nanos(latency), limits.latency_weight, MILLION),
    };
    Duration::from_nanos(moved).max(limits.latency_target)
}

/// The target after a sample: between the baseline and twice that.
fn follow(limits: &AimdLimits, baseline: Duration, target: Duration, latency: Duration) -> Duration {
    let (target, latency) = (nanos(target), nanos(latency));
    let step = part(target.abs_diff(latency), limits.latency_weight, MILLION);
    let moved = if latency > target { target.saturating_add(step) } else { target - step };
    Duration::from_nanos(moved).clamp(baseline, baseline.saturating_mul(2))
}

/// `value × times / of`, rounded down.
fn part(value: u64, times: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(times) / u128::from(of)).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "aimd_tests.rs"]
mod tests;
