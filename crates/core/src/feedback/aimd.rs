//! The AIMD controller of an adaptive rate: additive increase while healthy, multiplicative decrease on
//! overload.
//!
//! An overload, or a success that took at least `latency_factor` times the target, cuts the rate to a
//! `decrease` fraction, once per wave. Fast successes (below the target) raise the rate with elapsed time,
//! independent of their number: with a slow start it doubles each second until the first cut; while the last
//! bad rate is remembered, it grows per second by 1/4 below 9/10 of that rate and by 1/50 above; otherwise by
//! `increase`. The rate grows only if it was used, and a step at most doubles it.
//!
//! The bad rate is the measured send rate, not the allowed one: a growing rate exceeds the upstream's
//! capacity while the upstream lives off its reserves, and the rate at the cut would be too high to remember.
//! Of several cuts without a success in between, the first counts: during an outage the send rate is
//! meaningless.
//!
//! Latency is compared with a learned baseline: the first success's latency, or the configured one if longer.
//! The baseline falls with faster successes and rises by 1/100 of the difference with slower ones, so that a
//! constantly slow upstream does not look overloaded. The target follows the latency of successes between one
//! and two baselines; a sample is compared with the target before it moves the target. Failures, and
//! successes between fast and too slow, move nothing, and the time before them does not count as healthy.

use std::time::Duration;

use super::send_rate::SendRate;
use super::{Advice, Sample, Tuning};
use crate::bucket::Shape;
use crate::event::Why;
use crate::outcome::Kind;
use crate::per_second::PerSecond;
use crate::plan::AimdLimits;
use crate::time::{Instant, nanos};

/// The healthy time after which the rate grows.
const STEP: Duration = Duration::from_secs(1);
/// The most healthy time that counts in one step.
const STEP_MAX: Duration = Duration::from_secs(60);
const MILLION: u64 = 1_000_000;
/// A slower success raises the baseline by one part in this many of the difference.
const BASELINE_RISE: u64 = 100;
/// The largest fraction left by a cut that ends a slow start, because the last doubling was one too many.
const HALF: u64 = MILLION / 2;

/// The state of the AIMD controller.
#[derive(Debug, Clone)]
pub(crate) struct AimdState {
    rate: PerSecond,
    /// The bucket of `rate`.
    shape: Shape,
    /// The latency of the upstream without overload; `None` before the first success.
    baseline: Option<Duration>,
    /// The latency below which a success is fast.
    target: Duration,
    /// The time since the last step; `None` before the first outcome.
    stretch: Option<Stretch>,
    /// The last bad rate, and when it was cut.
    bad: Option<(PerSecond, Instant)>,
    /// Whether no request has succeeded since the last cut.
    is_falling: bool,
    send_rate: SendRate,
    /// The highest rate that was cut and has not been reached again.
    cut_from: Option<PerSecond>,
    is_starting: bool,
}

/// The history since the last step.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    since: Instant,
    /// Requests admitted before the stretch.
    admitted: u64,
    /// The time of the last outcome in the stretch.
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
            send_rate: SendRate::default(),
            cut_from: None,
            is_starting: limits.slow_start,
        }
    }

    pub(super) fn learn(&mut self, limits: &AimdLimits, tuning: Tuning, sample: Sample) -> Option<Advice> {
        // Requests sent at an earlier rate carry no information about the current one.
        if !sample.is_current {
            return None;
        }
        self.send_rate.record(sample.admitted, sample.now);
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

    /// Whether the state differs from a new one. The last bad rate counts while it is remembered.
    pub(super) fn has_learned(&self, limits: &AimdLimits, now: Instant) -> bool {
        self.rate != limits.start
            || self.target != limits.latency_target
            || self.is_starting != limits.slow_start
            || self.is_cooling()
            || self.bad.is_some_and(|(_, at)| now.since(at) < limits.memory)
    }

    /// Whether a cut has not been fully reverted.
    pub(super) const fn is_cooling(&self) -> bool {
        self.cut_from.is_some()
    }

    /// Applies the advised rate.
    pub(super) fn set(&mut self, limits: &AimdLimits, rate: PerSecond) {
        self.rate = rate;
        self.shape = limits.shape(rate);
        self.cut_from = self.cut_from.filter(|from| *from > rate);
    }

    /// Excludes a pause, which counts neither as healthy nor as unused time.
    pub(super) fn suspend(&mut self, from: Instant, until: Instant) {
        if let Some(stretch) = &mut self.stretch {
            stretch.since = stretch.since + until.since(from);
            stretch.latest = until;
        }
        self.send_rate.exclude(until.since(from));
    }

    /// Includes the rest of a pause that ended early.
    pub(super) fn resume(&mut self, now: Instant, until: Instant) {
        if let Some(stretch) = &mut self.stretch {
            stretch.since = stretch.since.minus_nanos(until.nanos_since(now));
            stretch.latest = now;
        }
        self.send_rate.include(until.nanos_since(now));
    }

    /// Applies new bounds. The rate is clamped and then grows; it does not jump, because an allowed rate is
    /// not yet a proven one. A controller that has learned nothing restarts at the new start.
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
        self.bad = Some((self.bad_rate(limits, sample), sample.now));
        self.is_falling = true;
        self.cut_from = self.cut_from.max(Some(self.rate));
        self.is_starting = false;
        self.stretch = Some(Stretch::new(sample.admitted, sample.now));
        let to = part(self.rate.millionths(), left, MILLION);
        let rate = PerSecond::from_millionths(to).clamp(limits.min, limits.max);
        Advice::Cut(Tuning { rate: Some(rate), ..tuning }, why)
    }

    /// The rate to remember as bad after a cut.
    fn bad_rate(&self, limits: &AimdLimits, sample: Sample) -> PerSecond {
        if let Some((bad, _)) = self.bad.filter(|_| self.is_falling) {
            return bad;
        }
        // The measured rate is no use in a slow start, where it lags far behind the doubling, or if callers
        // did not use the whole rate.
        let is_used = self.stretch.is_some_and(|stretch| stretch.is_used(self.rate, sample));
        let sent = self.send_rate.per_second(sample.admitted, sample.now);
        sent.filter(|_| is_used && !self.is_starting)
            .map_or(self.rate, |sent| sent.clamp(limits.min, self.rate))
    }

    fn succeed(&mut self, limits: &AimdLimits, tuning: Tuning, sample: Sample) -> Option<Advice> {
        // An unknown latency counts as fast.
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
            self.send_rate.reset();
            return None;
        }
        let rate = self.grown(limits, done.healthy, sample.now);
        (rate > self.rate).then_some(Advice::Grow(Tuning { rate: Some(rate), ..tuning }))
    }

    /// The rate after `healthy` time, computed second by second because the gain depends on the rate.
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

    /// The gain per second at `rate`, in millionths.
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

    /// Records the time of an outcome. During a pause `latest` is in the future, and stays.
    fn end(&mut self, now: Instant) {
        self.latest = self.latest.max(now);
    }

    /// Whether nine tenths of the rate were sent. If the rate held callers back, the count may be short by
    /// less than one unit, because a stretch need not end when a request enters.
    fn is_used(&self, rate: PerSecond, sample: Sample) -> bool {
        let sent = u128::from(sample.admitted.saturating_sub(self.admitted));
        let time = u128::from(sample.now.nanos_since(self.since));
        let wanted = u128::from(rate.millionths()) * time * 9 / 10;
        let unit = u128::from(MILLION) * u128::from(nanos(STEP));
        if sample.has_demand { sent >= wanted / unit } else { sent * unit >= wanted }
    }
}

/// The baseline after a sample; at least the configured latency.
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

/// The target after a sample; between one and two baselines.
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
