//! The probe schedule: how far and how slowly the pace swings around its estimate to test it.
//!
//! Alone, a client meets one rejection per swing, so swings are small and rejections rare. Clients that share
//! a quota meet rejections of each other's making: they swing further, and all with the same period, which is
//! what makes their shares converge.

use super::narrow;

/// How far the pace swings around the estimate once settled: the smallest that still uses a bucket without
/// depth to 97 %.
const SWING: f64 = 0.03;
/// How far it swings while little is known or others compete: the largest that costs no shared use.
const SWING_NEW: f64 = 0.2;
/// Requests per swing once settled: one rejection in 150 requests.
pub(super) const REQUESTS: f64 = 150.0;
/// The shortest swing in seconds: raised limits are found within 7 s.
pub(super) const PERIOD_MIN: f64 = 3.0;
/// The swing of clients that are not settled: shorter ones cost rejections, longer ones converge too slowly.
const PERIOD_NEW: f64 = 6.0;
/// Settled after this many swings that ended as expected.
const SETTLED: f64 = 3.0;
/// A swing counts in full from this many requests on: a short swing of a slow client proves nothing.
const COUNTS_IN_FULL: f64 = 25.0;
/// Confidence does not grow beyond this.
const CONFIDENCE_MAX: f64 = 12.0;
/// The weight of the last rejection in the share of those that came soon after another.
const WEIGHT: f32 = 0.25;
/// Above this share others take from the same quota: more than a lone client meets at its start.
const SHARED: f32 = 0.5;

/// How much the estimate is trusted, counted in swings that ended as expected.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Probe {
    confidence: f32,
    /// The share of the last rejections that came soon after another.
    pressed: f32,
}

impl Probe {
    pub(super) fn confidence(self) -> f64 {
        f64::from(self.confidence)
    }

    /// 0 if little is known or others compete, 1 if the quota is given to this client alone.
    pub(super) fn settled(self) -> f64 {
        (self.confidence() / SETTLED).min(1.0)
    }

    /// Whether others take from the same quota.
    pub(super) fn is_shared(self) -> bool {
        self.pressed > SHARED && self.confidence < 1.0
    }

    /// How far the pace swings to either side of the estimate, as a share of it.
    pub(super) fn swing(self) -> f64 {
        between(SWING_NEW, SWING, self.settled())
    }

    /// How long one swing takes at an estimate of `requests` per second, in seconds, if quota comes in
    /// windows of `window` seconds (0 if it does not).
    pub(super) fn period(self, requests: f64, window: f64) -> f64 {
        let longest = PERIOD_NEW * (1.0 + self.confidence()).powi(2);
        let alone = PERIOD_MIN.max((REQUESTS / requests).min(longest));
        between(PERIOD_NEW, alone, self.settled()).max(window)
    }

    /// A swing of `requests` ended with a rejection where one was expected.
    pub(super) fn confirm(&mut self, requests: f64) {
        self.confidence =
            narrow((self.confidence() + (requests / COUNTS_IN_FULL).min(1.0)).min(CONFIDENCE_MAX));
        self.pressed -= WEIGHT * self.pressed;
    }

    /// The limit is elsewhere.
    pub(super) const fn lower_confidence(&mut self) {
        self.confidence = self.confidence.min(1.0);
    }

    /// A rejection soon after another: others take from the same quota.
    pub(super) const fn press(&mut self) {
        self.confidence *= 0.5;
        self.pressed += WEIGHT * (1.0 - self.pressed);
    }

    /// `requests` were accepted between two returns from darkness: that measures a window as swings measure a
    /// bucket.
    pub(super) fn trust(&mut self, requests: f64) {
        self.confidence = narrow(self.confidence().max((requests / COUNTS_IN_FULL / 2.0).min(SETTLED)));
    }
}

/// The geometric mean of two numbers, weighted by `share` towards the second.
fn between(first: f64, second: f64, share: f64) -> f64 {
    first * (second / first).powf(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(confidence: f64) -> Probe {
        Probe { confidence: narrow(confidence), ..Probe::default() }
    }

    fn near(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-5 * (1.0 + other)
    }

    #[test]
    fn swing_shrinks_with_confidence() {
        for (confidence, wanted) in [(0.0, 0.2), (1.5, 0.006_f64.sqrt()), (3.0, 0.03), (12.0, 0.03)] {
            assert!(near(with(confidence).swing(), wanted), "{confidence}");
        }
    }

    #[test]
    fn unsettled_clients_share_one_period() {
        // Confidence, requests per second, window, seconds.
        let table = [
            (0.0, 0.2, 0.0, 6.0),
            (0.0, 5_000.0, 0.0, 6.0),
            (3.0, 5_000.0, 0.0, 3.0),
            (3.0, 10.0, 0.0, 15.0),
            // A slow client does not wait for 150 requests before it is sure.
            (3.0, 0.2, 0.0, 96.0),
            (12.0, 0.2, 0.0, 750.0),
            (3.0, 5_000.0, 60.0, 60.0),
        ];
        for (confidence, requests, window, wanted) in table {
            let period = with(confidence).period(requests, window);
            assert!(near(period, wanted), "{confidence} {requests} {window}: {period}");
        }
    }

    #[test]
    fn confidence_grows_by_swings_and_falls_at_once() {
        let mut probe = Probe::default();
        probe.confirm(5.0);
        assert!(near(probe.confidence(), 0.2));
        (0..20).for_each(|_| probe.confirm(1_000.0));
        assert!(near(probe.confidence(), 12.0));
        probe.press();
        assert!(near(probe.confidence(), 6.0));
        probe.lower_confidence();
        assert!(near(probe.confidence(), 1.0));
        probe.trust(100.0);
        assert!(near(probe.confidence(), 2.0));
        probe.trust(1e9);
        assert!(near(probe.confidence(), 3.0));
    }
}
