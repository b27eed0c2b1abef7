//! The quota estimate of one dimension: how many units per second the upstream accepts.
//!
//! A rejection means that the upstream's bucket or window is empty. Between two such moments it accepted
//! exactly what it grants, whatever its depth, so units accepted over the time between them are the quota,
//! exact to one request. The measure is too low only if quota went unused in between: it is the lower bound,
//! and the pace at the rejection is the upper one.

use super::probe::{Probe, REQUESTS};
use super::units;

/// Above the swing the excess grows by this much per second: it doubles in 0.35 s.
const DEPART: f64 = 2.0;
/// The same at slow rates, times the requests per second: feedback is a few requests away.
const DEPART_SLOW: f64 = 0.15;
/// How fast the pace returns to what is known to be granted, as a share of it per second: faster overshoots
/// if rejected requests use up quota.
const RETURN: f64 = 0.3;
/// One step up if a rejection came above the swing though no more was accepted than before; larger than the
/// error of the measure.
const STEP: f64 = 1.1;
/// What the first cut leaves of a pace that was doubling.
const FIRST_CUT: f64 = 0.7;
/// An estimate is at least this many requests per second.
pub(super) const ESTIMATE_MIN: f64 = 1e-3;
/// An anchor this many seconds old that saw enough requests is replaced during a wave too.
const ANCHOR_AGE: f64 = 2.0;

/// The quota estimate of one dimension.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Quota {
    /// The pace now, in units per second.
    pub(super) rate: f64,
    /// What the pace swings around; 0 before the first rejection.
    pub(super) estimate: f64,
    /// The estimate at the last cut that was not part of a wave: where the pace returns to after deep cuts.
    pub(super) calm: f64,
    /// Units sent so far.
    pub(super) sent: u64,
    /// Units that were rejected or never went out.
    rejected: u64,
    /// When the upstream was last known to be empty, and the units accepted before that.
    anchor_at: f64,
    anchor_accepted: f64,
    /// When this pace last held a caller back.
    pub(super) held_at: f64,
    pub(super) probe: Probe,
    /// Requests sent before the dimension was first seen: the low 32 bits.
    pub(super) since: u32,
}

/// How a rejection relates to those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wave {
    /// The first in this dimension.
    First,
    /// The first after a quiet time: the measure is good.
    Calm,
    /// Soon after another, with or without anything accepted in between.
    Pressed { accepted_some: bool },
}

impl Quota {
    pub(super) fn starting_at(rate: f64, since: u32) -> Self {
        Self { rate, held_at: f64::NEG_INFINITY, since, ..Self::default() }
    }

    /// When the first request was sent, until the first cut.
    pub(super) const fn started_at(&self) -> f64 {
        self.anchor_at
    }

    /// Starts the measurement with the first request.
    pub(super) const fn start(&mut self, now: f64) {
        self.anchor_at = now;
    }

    /// Raises the pace while it holds callers back: back to what is known, slowly through the swing, then
    /// away.
    ///
    /// `latency` is 0 while unknown, `unit` the mean cost of a request, `window` 0 if quota does not come in
    /// windows.
    pub(super) fn rise(&mut self, dt: f64, latency: f64, unit: f64, window: f64) {
        let (estimate, swing) = (self.estimate, self.probe.swing());
        if estimate == 0.0 {
            if latency > 0.0 {
                self.rate *= 2_f64.powf(dt / latency.clamp(0.1, 1.0));
            }
        } else if self.rate < estimate * (1.0 - swing) {
            self.rate = (self.rate + RETURN * estimate * dt).min(estimate * (1.0 - swing));
        } else if self.rate < self.calm * (1.0 - swing) {
            self.rate += RETURN * self.calm * dt;
            if self.rate >= self.calm * (1.0 - swing) {
                self.estimate = self.calm;
            }
        } else if self.rate < estimate * (1.0 + swing) {
            self.rate += 2.0 * swing * estimate / self.period(unit, window) * dt;
        } else {
            let mut gain = DEPART.min(DEPART_SLOW * estimate / unit);
            if window > 0.0 {
                gain = gain.min(2.0 / window);
            }
            self.rate += gain * (self.rate - estimate) * dt;
        }
    }

    pub(super) fn period(&self, unit: f64, window: f64) -> f64 {
        self.probe.period(self.estimate / unit, window)
    }

    /// Units accepted so far; requests in flight count as accepted.
    pub(super) fn accepted(&self) -> f64 {
        units(self.sent) - units(self.rejected)
    }

    /// Units sent before a request, of which the low bits are known; all of them if it was not counted.
    pub(super) fn sent_before(&self, low_bits: u32, cost: u64) -> u64 {
        let since = super::low_bits(self.sent).wrapping_sub(low_bits);
        if cost == 0 { self.sent } else { self.sent.saturating_sub(u64::from(since)) }
    }

    /// Units accepted before a rejected request.
    pub(super) fn accepted_before(&self, before: u64, cost: u64) -> f64 {
        units(before) - units(self.rejected.saturating_sub(cost))
    }

    /// `cost` units sent at `sent_at` were rejected, or never went out.
    pub(super) fn reject(&mut self, cost: u64, sent_at: f64) {
        self.rejected = self.rejected.saturating_add(cost);
        // Taken out of the anchor too if it counted them as accepted.
        if sent_at < self.anchor_at {
            self.anchor_accepted -= units(cost);
        }
    }

    /// Cuts the pace to the measured quota as of a rejected request.
    pub(super) fn cut(&mut self, wave: Wave, before: u64, cost: u64, sent_at: f64, unit: f64) {
        let accepted = self.accepted_before(before, cost);
        let count = (accepted - self.anchor_accepted).max(0.0);
        let dt = (sent_at - self.anchor_at).max(1e-6);
        match wave {
            Wave::First => self.estimate = FIRST_CUT * self.rate,
            Wave::Calm => self.cut_calm(count, dt, unit),
            Wave::Pressed { accepted_some } => self.cut_pressed(count, dt, unit, accepted_some),
        }
        let is_pressed = matches!(wave, Wave::Pressed { .. });
        if !is_pressed || (count > REQUESTS * unit && dt > ANCHOR_AGE) {
            self.anchor_at = sent_at;
            self.anchor_accepted = accepted;
        }
        self.rate = self.estimate * (1.0 - self.probe.swing());
    }

    fn cut_calm(&mut self, count: f64, dt: f64, unit: f64) {
        let (measured, swing, rate) = (count / dt, self.probe.swing(), self.rate);
        let is_near = rate < self.estimate * (1.0 + swing) * 1.05;
        let has_moved = measured > self.estimate * STEP;
        if is_near {
            let is_early = rate < self.estimate * (1.0 - swing / 4.0 - unit / count.max(unit));
            if !is_early {
                self.probe.confirm(count / unit);
            }
            self.estimate = measured.clamp(rate * (1.0 - swing / 2.0), rate);
            self.calm = self.estimate;
        } else if has_moved {
            self.probe.lower_confidence();
            self.estimate = (measured * rate).sqrt().clamp(rate / 2.0, rate);
            self.calm = measured;
        } else {
            // The bucket was full, or a window was not used up.
            self.estimate = (measured.max(self.estimate) * STEP).min(rate);
            self.calm = self.estimate;
        }
    }

    fn cut_pressed(&mut self, count: f64, dt: f64, unit: f64, accepted_some: bool) {
        let (swing, rate) = (self.probe.swing(), self.rate);
        if accepted_some {
            self.probe.press();
            self.calm = self.calm.min(rate) * (1.0 - swing / 2.0);
        }
        let lower = (self.estimate.min(rate) * (1.0 - swing / 2.0)).min((count + unit) / dt);
        self.estimate = lower.max(ESTIMATE_MIN * unit);
    }

    /// The upstream accepts again after it rejected everything, and accepted `accepted` units in the
    /// `elapsed` seconds since the last time it did. Returns whether that is how the quota is granted (a
    /// window), and not an outage.
    pub(super) fn recover(&mut self, accepted: Option<f64>, elapsed: f64, unit: f64, start: f64) -> bool {
        let Some(accepted) = accepted else {
            // Nothing is known about the quota: restart, or continue as before.
            self.estimate = self.calm;
            self.rate = if self.calm > 0.0 { self.calm * (1.0 - self.probe.swing()) } else { start * unit };
            return false;
        };
        let got = accepted.max(0.0) / elapsed;
        let is_window = self.probe.confidence() < 2.0 || got > 0.7 * self.calm;
        self.estimate = if is_window { self.calm.clamp(got, 1.05 * got).max(0.02 * unit) } else { self.calm };
        self.probe.trust(accepted / unit);
        self.calm = self.estimate;
        self.rate = self.estimate * (1.0 - self.probe.swing());
        is_window
    }

    /// How long the upstream has been known to be empty at `now`.
    pub(super) fn dark_for(&self, now: f64) -> f64 {
        now - self.anchor_at
    }
}

#[cfg(test)]
#[path = "quota_tests.rs"]
mod tests;
