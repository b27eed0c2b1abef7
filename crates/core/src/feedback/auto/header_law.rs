//! Quota headers of one dimension: the pace is proportional to what is left.
//!
//! Clients that read the same number get the same pace, so they share without meeting a rejection. What is
//! left is what the upstream reported, less the units sent since.

use super::units;
use crate::feedback::headers::Reset;
use crate::outcome::QuotaLevel;

/// Headers older than this are stale, in seconds.
const STALE: f64 = 120.0;
/// Headers of a window count until its end, but not longer than this.
const WINDOW_STALE: f64 = 3_600.0;
/// What a rejection leaves of the trust in headers.
const DISTRUST: f64 = 0.7;
const TRUST_MIN: f64 = 0.01;
/// The pace keeps at least this share of the refill.
const TRICKLE: f64 = 0.01;
/// The shortest time to a window's end that is counted with.
const RESET_MIN: f64 = 0.25;

/// The last headers of one dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeaderLaw {
    /// When the request was sent whose response carried them.
    at: f64,
    left: f64,
    limit: f64,
    /// Units per second (time to full), or the length of the window in seconds: as reported, or the longest
    /// reset seen lately.
    fill: f64,
    /// The end of the window.
    reset_at: f64,
    trust: f64,
    is_to_full: bool,
}

impl Default for HeaderLaw {
    fn default() -> Self {
        Self {
            at: f64::NEG_INFINITY,
            left: 0.0,
            limit: 0.0,
            fill: 0.0,
            reset_at: 0.0,
            trust: 1.0,
            is_to_full: false,
        }
    }
}

impl HeaderLaw {
    /// Whether the headers still count.
    pub(super) fn is_fresh(&self, now: f64) -> bool {
        now <= self.stale_at() && self.fill > 0.0
    }

    /// Until when the headers count.
    pub(super) fn stale_at(&self) -> f64 {
        let stale = self.at + STALE;
        if self.is_to_full { stale } else { stale.max(self.reset_at.min(self.at + WINDOW_STALE)) }
    }

    /// Units per second at `now`; `None` if nothing fresh is known.
    pub(super) fn pace(&self, now: f64, latency: f64) -> Option<f64> {
        if !self.is_fresh(now) {
            return None;
        }
        Some(if self.is_to_full {
            self.fill * (self.gain(latency) * self.left / self.limit).max(TRICKLE)
        } else if now < self.reset_at {
            self.trust * self.left.max(0.0) / (self.reset_at - now).max(RESET_MIN)
        } else {
            self.limit / self.fill.max(1.0)
        })
    }

    /// Seconds in which the paces from `now` on grant `lack` units at the earliest, if nothing else is sent; `None` if
    /// nothing fresh is known. What is left grows, or the window ends: the pace of the moment does not last.
    pub(super) fn wait(&self, lack: f64, now: f64, latency: f64) -> Option<f64> {
        let pace = self.pace(now, latency)?;
        Some(if self.is_to_full {
            let (trickle, share) = (TRICKLE * self.fill, self.fill * self.gain(latency) / self.limit);
            // The trickle, until units are left again; then a pace that grows with them.
            let empty = (-self.left / self.fill).max(0.0);
            let (lack, linear) = (lack - trickle * empty, trickle + share * self.left.max(0.0));
            let grown = (linear * linear + 2.0 * share * self.fill * lack.max(0.0)).sqrt() - linear;
            if lack > 0.0 { empty + grown / (share * self.fill) } else { empty + lack / trickle }
        } else if now < self.reset_at {
            let span = self.reset_at - now;
            let left = self.trust * self.left;
            if left > 0.0 {
                // The pace rises towards the end of the window if nothing is sent.
                span * (1.0 - (-lack / left).exp())
            } else {
                span + lack * self.fill.max(1.0) / self.limit
            }
        } else {
            lack / pace
        })
    }

    fn gain(&self, latency: f64) -> f64 {
        (self.limit / self.fill / (4.0 * latency.max(0.05))).clamp(1.0, 10.0) * self.trust
    }

    /// Applies the headers of the response to a request sent at `sent_at`; `since` units were sent after it.
    pub(super) fn update(&mut self, level: QuotaLevel, sent_at: f64, since: f64, now: f64) {
        if sent_at < self.at || level.remaining > level.limit || level.limit == 0 {
            return;
        }
        let (limit, remaining) = (units(level.limit), units(level.remaining));
        let is_to_full = matches!(level.reset, Reset::Full(_));
        let reset = level.reset.after().as_secs_f64();
        if !is_to_full {
            // A new limit has another window, and one long reset counts for less in each later window.
            let known = if self.is_to_full || limit.total_cmp(&self.limit).is_ne() {
                0.0
            } else if sent_at >= self.reset_at {
                self.fill / 2.0
            } else {
                self.fill
            };
            self.fill = level.window.map_or(known.max(reset), |window| window.as_secs_f64());
        } else if limit - remaining >= 2.0 && reset > 0.0 {
            let fill = (limit - remaining) / reset;
            let is_first = self.fill == 0.0 || !self.is_to_full;
            self.fill = if is_first { fill } else { self.fill + 0.2 * (fill - self.fill) };
        }
        let gain = if remaining > 0.8 * limit { 0.5 } else { 0.01 };
        self.trust = (self.trust * (1.0 + gain * (sent_at - self.at).clamp(0.0, 1.0))).min(1.0);
        self.at = sent_at;
        self.is_to_full = is_to_full;
        self.limit = limit;
        self.reset_at = sent_at + reset;
        let refilled = if self.is_to_full { self.fill * (now - sent_at) } else { 0.0 };
        self.left = remaining + refilled - since;
    }

    /// A request was rejected though headers allowed it.
    pub(super) fn distrust(&mut self) {
        self.trust = (self.trust * DISTRUST).max(TRUST_MIN);
    }

    pub(super) fn refill(&mut self, dt: f64) {
        if self.is_to_full {
            self.left = (self.left + self.fill * dt).min(self.limit);
        }
    }

    pub(super) fn spend(&mut self, cost: f64) {
        self.left -= cost;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn to_full(limit: u64, remaining: u64, reset: f64) -> QuotaLevel {
        QuotaLevel { limit, remaining, reset: Reset::Full(Duration::from_secs_f64(reset)), window: None }
    }

    fn window(limit: u64, remaining: u64, reset: f64) -> QuotaLevel {
        QuotaLevel { limit, remaining, reset: Reset::More(Duration::from_secs_f64(reset)), window: None }
    }

    #[track_caller]
    fn near(pace: Option<f64>, wanted: f64) {
        assert!(pace.is_some_and(|pace| (pace - wanted).abs() < 1e-6), "{pace:?}, not {wanted}");
    }

    #[test]
    fn pace_is_proportional_to_the_remaining_units() {
        // 3,000 per minute, responses in 0.2 s: the gain is bounded at 10.
        for (remaining, pace) in [(3_000, None), (2_700, Some(450.0)), (300, Some(50.0)), (0, Some(0.5))] {
            let mut law = HeaderLaw::default();
            law.update(to_full(3_000, remaining, units(3_000 - remaining) / 50.0), 1.0, 0.0, 1.0);
            match pace {
                Some(pace) => near(law.pace(1.0, 0.2), pace),
                None => assert_eq!(law.pace(1.0, 0.2), None, "a full quota says nothing of its refill"),
            }
        }
    }

    #[test]
    fn window_spreads_remaining_units_until_its_end() {
        let mut law = HeaderLaw::default();
        law.update(window(100, 60, 30.0), 10.0, 0.0, 10.0);
        near(law.pace(10.0, 0.2), 2.0);
        law.spend(30.0);
        near(law.pace(25.0, 0.2), 2.0);
        near(law.pace(39.99, 0.2), 30.0 / 0.25);
        // A new window without a header yet: the limit over the longest reset seen.
        near(law.pace(41.0, 0.2), 100.0 / 30.0);
        // Or over the window, if that is reported.
        law.update(
            QuotaLevel { window: Some(Duration::from_secs(50)), ..window(100, 0, 1.0) },
            41.0,
            0.0,
            41.0,
        );
        near(law.pace(41.5, 0.2), 0.0);
        near(law.pace(42.1, 0.2), 2.0);
    }

    /// Regression: after one long reset the pace of all later windows was near zero until their first header.
    #[test]
    fn long_reset_is_forgotten_over_windows() {
        let mut law = HeaderLaw::default();
        law.update(window(100, 60, 3_600.0), 0.0, 0.0, 0.0);
        let mut now = 3_600.0;
        for _ in 0..6 {
            law.update(window(100, 60, 60.0), now, 0.0, now);
            law.update(window(100, 50, 30.0), now + 30.0, 0.0, now + 30.0);
            now += 60.0;
        }
        near(law.pace(now, 0.2), 100.0 / 60.0);
        law.update(window(200, 60, 10.0), now + 50.0, 0.0, now + 50.0);
        near(law.pace(now + 60.0, 0.2), 200.0 / 10.0);
    }

    #[test]
    fn wait_is_for_the_refill_of_an_empty_quota() {
        // Headers, units that a request lacks, and its wait in seconds.
        let table = [
            (window(100, 0, 20.0), 1.0, 20.0 + 0.2),
            (window(100, 10, 20.0), 10.0, 20.0 * (1.0 - (-1.0_f64).exp())),
            // The pace is at least a hundredth of the refill, and a sixth of what is left.
            (to_full(60, 0, 60.0), 0.01, (0.01_f64.powi(2) + 2.0 / 6.0 * 0.01).sqrt() * 6.0 - 0.06),
            (to_full(60, 0, 60.0), 1.0, (0.01_f64.powi(2) + 2.0 / 6.0).sqrt() * 6.0 - 0.06),
        ];
        for (level, lack, wanted) in table {
            let mut law = HeaderLaw::default();
            law.update(level, 1.0, 0.0, 1.0);
            near(law.wait(lack, 1.0, 0.2), wanted);
        }
        let mut law = HeaderLaw::default();
        law.update(to_full(60, 0, 60.0), 1.0, 5.0, 1.0);
        let wait = law.wait(1.0, 1.0, 0.2).unwrap();
        assert!((7.0..9.0).contains(&wait), "five more were sent since: {wait} s");
    }

    #[test]
    fn own_requests_since_are_subtracted() {
        let mut law = HeaderLaw::default();
        law.update(to_full(100, 50, 50.0), 1.0, 10.0, 3.0);
        // One unit per second came back in the two seconds since.
        near(law.pace(3.0, 10.0), (50.0 + 2.0 - 10.0) / 100.0 * 2.5);
    }

    #[test]
    fn older_and_impossible_headers_are_ignored() {
        let mut law = HeaderLaw::default();
        law.update(window(100, 60, 30.0), 10.0, 0.0, 10.0);
        law.update(window(100, 1, 30.0), 9.0, 0.0, 10.0);
        law.update(window(100, 101, 30.0), 11.0, 0.0, 11.0);
        law.update(window(0, 0, 30.0), 11.0, 0.0, 11.0);
        near(law.pace(10.0, 0.2), 2.0);
    }

    #[test]
    fn headers_are_stale_after_two_minutes() {
        let mut law = HeaderLaw::default();
        law.update(window(100, 60, 30.0), 10.0, 0.0, 10.0);
        assert!(law.is_fresh(130.0) && !law.is_fresh(130.1));
    }

    #[test]
    fn wrong_headers_lose_trust() {
        let mut law = HeaderLaw::default();
        law.update(to_full(3_000, 2_700, 6.0), 1.0, 0.0, 1.0);
        let pace = law.pace(1.0, 0.2).unwrap();
        law.distrust();
        near(law.pace(1.0, 0.2), 0.7 * pace);
        (0..100).for_each(|_| law.distrust());
        near(law.pace(1.0, 0.2), 0.01 * pace);
        for second in 2..=20 {
            law.update(to_full(3_000, 2_700, 6.0), f64::from(second), 0.0, f64::from(second));
        }
        near(law.pace(20.0, 0.2), pace);
    }
}
