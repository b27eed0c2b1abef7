//! `Auto`, the default controller: turns accepted and rejected requests (429, 503) into a rate and a number of
//! slots.
//!
//! Per [`Dimension`] (requests, tokens, input and output tokens) a [`Quota`] estimates what the upstream grants, and a
//! pace swings around it; quota headers replace it while they are fresh. [`Outage`], [`Cap`] and [`Baseline`] exist
//! once: they detect an outage, a cap on requests in flight, and rising latency.
//!
//! Nothing is stored per request: its permit carries a [`Dispatch`]. Only the first rejection, the first request of a
//! dimension and its first header allocate. Times are seconds since the clock's origin, rates units per second.

mod baseline;
mod cap;
mod dimension;
mod header_law;
mod outage;
mod probe;
mod quota;
mod report;
#[cfg(test)]
mod tests;
mod wait;

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use self::baseline::{Baseline, Load, Reading};
use self::cap::Cap;
pub(crate) use self::dimension::index_of;
use self::dimension::{Dimension, distinct_levels};
use self::outage::OutageState;
use self::quota::{ESTIMATE_MIN, Quota, Wave};
use self::report::LastReport;
use crate::control::Reason;
use crate::cost::{Charge, Cost, DIMENSIONS, Dispatch};
use crate::event::Why;
use crate::feedback::headers::Dimension as Metered;
use crate::outcome::{Kind, Outcome};
use crate::per_second::PerSecond;
use crate::plan::AutoLimits;
use crate::random::Random;
use crate::time::Instant;

/// Requests after which a first measure of the quota counts.
const KNOWN: f64 = 5.0;
/// A pace rises by at most this many seconds at a time.
const RISE_MAX: f64 = 10.0;
/// How often the head of the queue is evaluated while a pace delays it: the pace rises while it waits.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(250);

/// What `Auto` has learned about one upstream.
#[derive(Debug, Clone)]
pub(crate) struct AutoState {
    /// Requests first; tokens once a request costs any; input and output tokens once one names any.
    dimensions: SmallVec<[Dimension; 1]>,
    outage: OutageState,
    cap: Cap,
    baseline: Baseline,
    /// When the paces were last refilled.
    at: f64,
    /// When the last wave caused a cut.
    cut_at: f64,
    /// The most requests that were in flight when slots were cut for latency; 0 once there are more slots.
    slow_slots: f32,
    reported: LastReport,
}

/// The response to a request, as input to the controller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reply<'a> {
    /// When the work started.
    pub(crate) sent_at: Instant,
    pub(crate) sent: Dispatch,
    /// Units sent before it, per dimension: the low 32 bits.
    pub(crate) before: [u32; DIMENSIONS],
    /// Units per dimension that were counted as sent with it; none for a request without a permit.
    pub(crate) units: [u64; DIMENSIONS],
    pub(crate) outcome: &'a Outcome,
    pub(crate) latency: Option<Duration>,
    /// Requests in flight, this one included.
    pub(crate) in_flight: u32,
    pub(crate) now: Instant,
}

/// The advice of `Auto` after an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Advice {
    /// Whether a wave caused a cut of rate or slots.
    pub(crate) is_cut: bool,
    why: Why,
    /// Whether the outcome's hint stops all requests.
    pub(crate) stops_all: bool,
}

impl Default for Advice {
    fn default() -> Self {
        Self { is_cut: false, why: Why::Overload, stops_all: false }
    }
}

impl AutoState {
    pub(crate) fn new(limits: &AutoLimits) -> Self {
        Self {
            dimensions: smallvec![Dimension::new(limits.rate_start, 1.0, 0)],
            outage: OutageState::default(),
            cap: Cap::starting_at(limits.slots_start),
            baseline: Baseline::default(),
            at: 0.0,
            cut_at: f64::NEG_INFINITY,
            slow_slots: 0.0,
            reported: LastReport {
                reason: Reason::Probing,
                at: f32::NEG_INFINITY,
                rate: narrow(limits.rate_start),
                slots: limits.slots_start,
            },
        }
    }

    /// Slots now.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the limits of a u32")]
    pub(crate) fn slots(&self, limits: &AutoLimits) -> u32 {
        (self.cap.slots as u32).clamp(limits.slots_min, limits.slots_max)
    }

    /// Requests per second that the upstream is estimated to grant; `None` before its first rejection.
    pub(crate) fn quota(&self) -> Option<PerSecond> {
        let estimate = self.dimensions[0].quota.estimate;
        (estimate > 0.0).then(|| per_second(estimate))
    }

    /// Requests per second now.
    pub(crate) fn rate(&self, limits: &AutoLimits, now: Instant) -> PerSecond {
        per_second(self.pace(limits, 0, secs(now)))
    }

    /// Advances time: paces that delay callers rise, and their buckets refill.
    pub(crate) fn advance(&mut self, limits: &AutoLimits, is_paused: bool, now: Instant) {
        let now = secs(now);
        let elapsed = now - self.at;
        if elapsed <= 0.0 {
            return;
        }
        let rests = is_paused || now < self.outage.rest_until;
        let (latency, window) = (self.baseline.latency(), self.outage.window());
        for index in 0..self.dimensions.len() {
            if !self.is_counted(index) {
                continue;
            }
            let unit = self.unit(index);
            let by_law = self.dimensions[index].law_pace(now, latency);
            let dimension = &mut self.dimensions[index];
            let quota = &mut dimension.quota;
            let is_held = now - quota.held_at <= (3.0 * unit / quota.rate).max(0.1);
            if by_law.is_none() && !rests && !self.outage.is_dark() && is_held {
                // In steps, because the increase depends on the current pace.
                let mut left = elapsed.min(RISE_MAX);
                while left > 0.0 {
                    quota.rise(left.min(1.0), latency, unit, window);
                    left -= 1.0;
                }
                if index == 0 {
                    quota.rate = limits.clamp(quota.rate);
                }
            }
            let pace = by_law.unwrap_or(quota.rate);
            let pace = self.bounded(limits, index, pace);
            let dimension = &mut self.dimensions[index];
            dimension.level = dimension.refilled(pace, unit, elapsed);
            if let Some(law) = &mut dimension.law {
                law.refill(elapsed);
            }
        }
        self.cap.rise(elapsed.min(1.0), self.dimensions[0].quota.estimate, latency, now);
        self.cap.slots = limits.clamp_slots(self.cap.slots);
        self.at = now;
        if !rests && self.outage.has_passed(now) {
            self.recover(limits, now);
        }
    }

    /// Sends a request as the `in_flight`th; returns the record that its permit carries, and the units sent before
    /// it.
    pub(crate) fn take(
        &mut self,
        limits: &AutoLimits,
        cost: Cost,
        in_flight: u32,
        now: Instant,
    ) -> (Dispatch, [u32; DIMENSIONS]) {
        let at = secs(now);
        let requests = self.dimensions[0].quota.sent;
        if requests == 0 {
            self.dimensions[0].quota.start(at);
        }
        let costs = cost.estimated();
        while costs.iter().skip(self.dimensions.len()).any(|cost| *cost > 0) {
            self.dimensions.push(Dimension::new(0.0, 0.0, 0));
        }
        let in_flight = u16::try_from(in_flight).unwrap_or(u16::MAX);
        let mut before = [0; DIMENSIONS];
        let sent = Dispatch { in_flight, cohort: self.baseline.join(at), ..Dispatch::default() };
        for (index, (dimension, cost)) in self.dimensions.iter_mut().zip(costs).enumerate() {
            if index > 0 && cost > 0 && dimension.quota.sent == 0 {
                let first = units(cost);
                let law = dimension.law.take();
                *dimension = Dimension { law, ..Dimension::new(limits.rate_start * first, first, requests) };
            }
            before[index] = low_bits(dimension.quota.sent);
            dimension.quota.sent = dimension.quota.sent.saturating_add(cost);
            dimension.level -= units(cost);
            if let Some(law) = &mut dimension.law {
                law.spend(units(cost));
            }
        }
        if let Some(outage) = self.outage.get_mut() {
            outage.sent(at, self.baseline.latency());
        }
        (sent, before)
    }

    /// Undoes a request that was never sent.
    pub(crate) fn undo(&mut self, sent_at: Instant, cost: Cost) {
        let costs = cost.estimated();
        for (index, dimension) in self.dimensions.iter_mut().enumerate() {
            let cost = costs[index];
            dimension.quota.reject(cost, secs(sent_at));
            dimension.level += units(cost);
            if let Some(law) = &mut dimension.law {
                law.spend(-units(cost));
            }
        }
    }

    /// A request ended without a response. A probe without one proves nothing.
    pub(crate) fn leave(&mut self, limits: &AutoLimits, charge: &Charge, in_flight: u32, now: Instant) {
        if self.baseline.is_current(charge.sent.cohort) {
            self.baseline.leave();
        }
        if let Some(outage) = self.outage.get_mut() {
            outage.stop_probing(secs(charge.entered), secs(now));
        }
        self.read_cohort(limits, in_flight, secs(now));
        self.cap.slots = limits.clamp_slots(self.cap.slots);
    }

    /// Learns from the response to a request.
    pub(crate) fn learn(&mut self, limits: &AutoLimits, reply: &Reply<'_>, random: &mut Random) -> Advice {
        let now = secs(reply.now);
        self.update_laws(reply, now);
        let is_member = self.baseline.is_current(reply.sent.cohort);
        let mut advice = Advice::default();
        match reply.outcome.kind {
            Kind::Success => self.succeed(limits, reply, is_member, now),
            Kind::Overload => {
                if is_member {
                    self.baseline.leave();
                }
                advice = self.reject(limits, reply, now, random);
            }
            Kind::Failure | Kind::Ignored => {
                if is_member {
                    self.baseline.leave();
                }
                // The upstream answers, and the request was at fault: it accepts.
                if reply.outcome.kind == Kind::Ignored {
                    self.accept(limits, reply, now);
                }
            }
        }
        if let Some(why) = self.read_cohort(limits, reply.in_flight, now) {
            advice = Advice { is_cut: true, why, ..advice };
        }
        self.cap.slots = limits.clamp_slots(self.cap.slots);
        advice
    }

    /// Whether the state differs from that of a new controller.
    pub(crate) fn has_learned(&self, limits: &AutoLimits) -> bool {
        let Dimension { quota, law, .. } = &self.dimensions[0];
        let is_moved = |one: f64, other: f64| (one - other).abs() > f64::EPSILON * other;
        quota.estimate > 0.0
            || law.is_some()
            || self.dimensions.len() > 1
            || is_moved(quota.rate, limits.rate_start)
            || self.slots(limits) != limits.slots_start
    }

    /// Whether earlier requests would delay a caller at `now`.
    pub(crate) fn is_busy(&self, limits: &AutoLimits, now: Instant) -> bool {
        self.rests_until(now).max(self.ready_at(limits, Cost::request(), now).1) > now
    }

    /// Applies new limits. A controller that has learned nothing restarts at the new start.
    pub(crate) fn tune(&mut self, old: Option<&AutoLimits>, new: &AutoLimits) {
        if old.is_some_and(|old| !self.has_learned(old)) {
            self.dimensions[0].quota.rate = new.rate_start;
            self.cap = Cap::starting_at(new.slots_start);
        }
        let quota = &mut self.dimensions[0].quota;
        quota.rate = new.clamp(quota.rate);
        self.cap.slots = new.clamp_slots(self.cap.slots);
    }

    /// Units per second of a dimension, from headers or the estimate, within the configured limits.
    fn pace(&self, limits: &AutoLimits, index: usize, now: f64) -> f64 {
        let dimension = &self.dimensions[index];
        let pace = dimension.law_pace(now, self.baseline.latency()).unwrap_or(dimension.quota.rate);
        self.bounded(limits, index, pace)
    }

    fn bounded(&self, limits: &AutoLimits, index: usize, pace: f64) -> f64 {
        let pace = pace.max(ESTIMATE_MIN * self.unit(index));
        if index == 0 { limits.clamp(pace) } else { pace }
    }

    /// Whether requests have cost units of a dimension; requests always count.
    fn is_counted(&self, index: usize) -> bool {
        index == 0 || self.dimensions.get(index).is_some_and(|dimension| dimension.quota.sent > 0)
    }

    /// The mean cost of a request in a dimension.
    fn unit(&self, index: usize) -> f64 {
        let quota = &self.dimensions[index].quota;
        let requests = self.dimensions[0].quota.sent.saturating_sub(u64::from(quota.since));
        if index == 0 {
            return 1.0;
        }
        if requests == 0 || quota.sent == 0 {
            self.dimensions[index].level.max(1.0)
        } else {
            units(quota.sent) / units(requests)
        }
    }

    /// Applies the quota headers of a response.
    fn update_laws(&mut self, reply: &Reply<'_>, now: f64) {
        for (index, level) in distinct_levels(reply).into_iter().enumerate() {
            let (Some(level), Some(dimension)) = (level, self.dimensions.get_mut(index)) else { continue };
            let before = dimension.quota.sent_before(reply.before[index], reply.units[index]);
            let since = dimension.quota.sent.saturating_sub(before.saturating_add(reply.units[index]));
            let law = dimension.law.get_or_insert_default();
            law.update(level.level(), secs(reply.sent_at), units(since), now);
        }
    }

    fn succeed(&mut self, limits: &AutoLimits, reply: &Reply<'_>, is_member: bool, now: f64) {
        self.accept(limits, reply, now);
        self.cap.accept(reply.sent.in_flight);
        match reply.latency {
            Some(latency) if is_member => self.baseline.sample(latency.as_secs_f64()),
            None if is_member => self.baseline.leave(),
            _ => {}
        }
        let is_held = now - self.cap.held_at < self.baseline.latency().max(0.05);
        if self.baseline.is_starting && is_held {
            self.cap.slots += 1.0;
        }
    }

    /// The upstream accepted a request.
    fn accept(&mut self, limits: &AutoLimits, reply: &Reply<'_>, now: f64) {
        if let Some(latency) = reply.latency {
            self.baseline.first(latency.as_secs_f64());
        }
        if self.outage.is_probing() && secs(reply.sent_at) > self.cut_at {
            self.recover(limits, now);
        }
    }

    fn reject(&mut self, limits: &AutoLimits, reply: &Reply<'_>, now: f64, random: &mut Random) -> Advice {
        let Reply { sent, before: sent_before, units: cost, outcome, .. } = *reply;
        let sent_at = secs(reply.sent_at);
        for (index, dimension) in self.dimensions.iter_mut().enumerate() {
            dimension.quota.reject(cost[index], sent_at);
        }
        // One cut per wave: rejections of requests sent before the last cut do not count.
        if sent_at <= self.cut_at {
            return Advice::default();
        }
        let index = self.blame(outcome.exceeded, now);
        let started_at = self.dimensions[0].quota.started_at();
        if let Some(law) = &mut self.dimensions[index].law
            && law.is_fresh(now)
        {
            law.distrust();
            self.cut_at = now;
            let accepted = self.requests_accepted_before(sent_before[0], cost[0]);
            let outage = self.outage.of_rejection(started_at);
            let is_empty = !outage.wave(accepted);
            let hint = outcome.retry_after.map(|hint| hint.as_secs_f64());
            let stops_all = outage.count(is_empty, hint, now, random);
            return Advice { is_cut: true, stops_all, ..Advice::default() };
        }
        let unit = self.unit(index);
        let before = |index: usize| self.dimensions[index].quota.sent_before(sent_before[index], cost[index]);
        let (before_it, requests_before) = (before(index), before(0));
        let accepted = self.dimensions[0].quota.accepted_before(requests_before, cost[0]);
        let accepted_some = self.outage.of_rejection(started_at).wave(accepted);
        let gap = now - self.cut_at;
        let quota = &self.dimensions[index].quota;
        let wave = if quota.estimate == 0.0 {
            Wave::First
        } else if gap >= quota.period(unit, self.outage.window()) / 4.0 && self.outage.is_quiet() {
            Wave::Calm
        } else {
            Wave::Pressed { accepted_some }
        };
        if self.cap.has_accepted() && gap > 2.0 * self.baseline.latency() && self.outage.is_quiet() {
            self.cap.weigh(sent.in_flight);
        }
        self.cut_at = now;
        if self.cap.cut(sent.in_flight) {
            self.baseline.is_starting = false;
            let quota = &mut self.dimensions[index].quota;
            if wave == Wave::First {
                quota.estimate = quota.rate;
            }
            return Advice { is_cut: true, ..Advice::default() };
        }
        if wave == Wave::Calm {
            self.outage.of_rejection(started_at).fade_window();
        }
        let dimension = &mut self.dimensions[index];
        dimension.quota.cut(wave, before_it, cost[index], sent_at, unit);
        dimension.level = dimension.level.min(0.0);
        if index == 0 {
            dimension.quota.rate = limits.clamp(dimension.quota.rate);
        }
        let is_empty = wave == Wave::Pressed { accepted_some: false };
        let hint = outcome.retry_after.map(|hint| hint.as_secs_f64());
        let stops_all = self.outage.of_rejection(started_at).count(is_empty, hint, now, random);
        Advice { is_cut: true, stops_all, ..Advice::default() }
    }

    /// Requests accepted before a rejected one.
    fn requests_accepted_before(&self, low_bits: u32, cost: u64) -> f64 {
        let quota = &self.dimensions[0].quota;
        quota.accepted_before(quota.sent_before(low_bits, cost), cost)
    }

    /// The dimension that a rejection is for: the one it names, or else the one that last delayed a caller.
    fn blame(&self, named: Option<Metered>, now: f64) -> usize {
        if let Some(index) = named.and_then(index_of) {
            // A kind that no request names is a part of all tokens; without tokens only requests are counted.
            return [index, index.min(1)].into_iter().find(|index| self.is_counted(*index)).unwrap_or(0);
        }
        let was_named = |(index, dimension): &(usize, &Dimension)| {
            let is_known = dimension.quota.estimate > 0.0 || dimension.has_headers(now);
            *index == 0 || (is_known && self.is_counted(*index))
        };
        let excess = |quota: &Quota| quota.rate / quota.estimate;
        let by_hold = |one: &(usize, &Dimension), other: &(usize, &Dimension)| {
            let (one, other) = (&one.1.quota, &other.1.quota);
            one.held_at.total_cmp(&other.held_at).then(excess(one).total_cmp(&excess(other)))
        };
        self.dimensions.iter().enumerate().filter(was_named).max_by(by_hold).map_or(0, |(index, _)| index)
    }

    /// The upstream accepts again after it rejected everything.
    fn recover(&mut self, limits: &AutoLimits, now: f64) {
        let index = self.blame(None, now);
        let unit = self.unit(index);
        let quota = &mut self.dimensions[index].quota;
        let (dark, accepted) = (quota.dark_for(now), quota.accepted());
        let (since, elapsed) = self.outage.since_back(accepted, index, now);
        // If almost nothing was accepted before the first return, the upstream was down from the start.
        let is_known = quota.calm > 0.0 || self.outage.has_returned();
        let since = since.filter(|since| is_known || *since >= KNOWN * unit);
        let is_window = quota.recover(since, elapsed.max(1e-6), unit, limits.rate_start);
        if index == 0 {
            quota.rate = limits.clamp(quota.rate);
        }
        if let Some(outage) = self.outage.get_mut() {
            outage.end((accepted, index), is_window, dark, now);
        }
    }

    /// Reads the cohort if it is complete; returns why slots were cut, if they were.
    fn read_cohort(&mut self, limits: &AutoLimits, in_flight: u32, now: f64) -> Option<Why> {
        let recent = self.baseline.latency().max(0.1);
        let holds = |dimension: &Dimension| {
            (dimension.quota.estimate > 0.0 || dimension.has_headers(now))
                && now - dimension.quota.held_at < recent
        };
        let load = Load {
            in_flight: narrow(f64::from(in_flight)),
            slots: self.cap.slots,
            held_at: self.cap.held_at,
            is_cap: self.cap.is_cap(),
            is_paced: self.cap.is_cap() || self.dimensions.iter().any(holds),
        };
        let reading = self.baseline.read(now, load);
        match reading {
            Some(Reading::Cut { slots, .. }) => {
                self.slow_slots = self.slow_slots.max(load.in_flight);
                self.cap.slots = self.cap.slots.min(slots);
            }
            Some(Reading::Restore(slots)) => {
                self.slow_slots = 0.0;
                self.cap.slots = slots;
            }
            Some(Reading::Grow(slots)) => self.cap.slots += slots,
            None => {}
        }
        if self.cap.slots > self.slow_slots || self.slots(limits) >= limits.slots_max {
            self.slow_slots = 0.0;
        }
        let Some(Reading::Cut { latency, .. }) = reading else { return None };
        Some(Why::Latency {
            latency: Duration::try_from_secs_f64(latency).unwrap_or(Duration::MAX),
            target: Duration::try_from_secs_f64(self.baseline.latency()).unwrap_or(Duration::MAX),
        })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the high bits follow from the units sent since")]
const fn low_bits(count: u64) -> u32 {
    count as u32
}

#[expect(clippy::cast_precision_loss, reason = "an estimate; counters are exact up to 2^53")]
const fn units(count: u64) -> f64 {
    count as f64
}

#[expect(clippy::cast_precision_loss, reason = "a microsecond in 285 years")]
fn secs(at: Instant) -> f64 {
    at.as_nanos() as f64 / 1e9
}

/// Narrows a number that needs at most seven digits.
#[expect(clippy::cast_possible_truncation, reason = "rounded")]
const fn narrow(number: f64) -> f32 {
    number as f32
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` from a float saturates")]
fn per_second(rate: f64) -> PerSecond {
    PerSecond::from_millionths((rate * 1e6) as u64)
}
