//! Slots, and whether the upstream caps how many requests are in flight.
//!
//! A cap is detected by where rejections occur: above every recently accepted number in flight. A
//! rate quota rejects at any number, and accepts at that number again.

use super::narrow;
use super::probe::{PERIOD_MIN, REQUESTS};

/// How much a rejection above all accepted numbers adds to the score of a cap, as a share of what is missing.
const AGREE: f32 = 0.3;
/// What a rejection among accepted numbers leaves of the score.
const DISAGREE: f32 = 0.7;
/// Above this score it is a cap: three agreeing rejections of the last few.
const IS_CAP: f32 = 0.6;
/// What each success leaves of the highest number that was accepted.
const FADE: f32 = 0.999;

/// A cap rejects the first request above it: slots that grow by more than this without a rejection are not
/// capped there.
const MARGIN: f32 = 2.0;
/// Beyond that the excess grows by this much per second.
const DEPART: f32 = 0.5;
/// The score falls by this share per second while slots exceed the margin: in the end only latency limits them.
const DENY: f32 = 0.05;

/// Slots now, and the evidence of a cap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cap {
    /// Slots now; whole ones count.
    pub(super) slots: f32,
    score: f32,
    /// The number in flight whose rejection last agreed with a cap; infinite once a request was accepted
    /// there.
    agreed: f32,
    /// The highest recently accepted number in flight.
    high: f32,
    /// Slots after the last cut.
    cut: f32,
    /// When slots last held a caller back.
    pub(super) held_at: f64,
}

impl Cap {
    pub(super) fn starting_at(slots: u32) -> Self {
        Self {
            slots: as_number(slots),
            score: 0.0,
            agreed: f32::INFINITY,
            high: 0.0,
            cut: 0.0,
            held_at: f64::NEG_INFINITY,
        }
    }

    pub(super) fn is_cap(&self) -> bool {
        self.score > IS_CAP
    }

    /// Whether anything was accepted yet: what is accepted is known only when it is back.
    pub(super) fn has_accepted(&self) -> bool {
        self.high > 0.0
    }

    /// A request was accepted as the `in_flight`th. Where one was rejected before, that was not for a cap.
    pub(super) fn accept(&mut self, in_flight: u16) {
        let in_flight = f32::from(in_flight);
        self.high = in_flight.max(self.high * FADE);
        if in_flight >= self.agreed {
            self.score *= DISAGREE;
            self.agreed = f32::INFINITY;
        }
    }

    /// A request was rejected as the `in_flight`th: evidence for or against a cap.
    pub(super) fn weigh(&mut self, in_flight: u16) {
        if f32::from(in_flight) > self.high {
            self.score += AGREE * (1.0 - self.score);
            self.agreed = f32::from(in_flight);
        } else {
            self.score *= DISAGREE;
        }
    }

    /// Cuts the slots if the `in_flight`th request was rejected for the number in flight; returns whether it
    /// was.
    pub(super) fn cut(&mut self, in_flight: u16) -> bool {
        let in_flight = f32::from(in_flight);
        let is_for_slots =
            self.is_cap() && in_flight > 1.0 && (in_flight >= self.slots.floor() || in_flight > self.high);
        if is_for_slots {
            self.slots = self.slots.min(in_flight - 1.0).max(1.0);
            self.cut = self.slots;
        }
        is_for_slots
    }

    /// Slots of a cap grow by one per swing while they hold callers back. Beyond [`MARGIN`] the cap has
    /// moved, or was none: the excess doubles every 1.4 s.
    pub(super) fn rise(&mut self, dt: f64, requests: f64, latency: f64, now: f64) {
        // A head of the queue that waits for a slot is evaluated again with every response.
        if self.is_cap() && now - self.held_at < (2.0 * latency).max(0.1) {
            let steady = narrow(1.0 / PERIOD_MIN.max(REQUESTS / requests.max(1e-9)));
            let excess = (self.slots - self.cut - MARGIN).max(0.0);
            self.slots += narrow(dt) * (steady + DEPART * excess);
            if excess > 0.0 {
                self.score *= (-DENY * narrow(dt)).exp();
            }
        }
    }
}

/// Slots as a number; those above 2^24 need not be exact.
#[expect(clippy::cast_precision_loss, reason = "more slots than that are no limit")]
const fn as_number(slots: u32) -> f32 {
    slots as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_rejections_above_all_accepted_make_a_cap() {
        let mut cap = Cap::starting_at(32);
        cap.accept(10);
        let scores: Vec<bool> = (0..3)
            .map(|_| {
                cap.weigh(11);
                cap.is_cap()
            })
            .collect();
        assert_eq!(scores, [false, false, true]);
        cap.weigh(9);
        assert!(!cap.is_cap(), "a rejection among accepted numbers speaks against it");
    }

    /// Regression: a bucket of one request was mistaken for a cap; requests were no longer paced, and most were
    /// rejected.
    #[test]
    fn requests_accepted_at_a_rejected_number_deny_a_cap() {
        let mut cap = Cap::starting_at(32);
        for number in [11, 12, 13, 14, 15, 16] {
            cap.accept(number - 1);
            cap.weigh(number);
            assert!(!cap.is_cap(), "{number}");
            cap.accept(number);
            cap.accept(number);
        }
    }

    #[test]
    fn cut_goes_below_the_rejected_number() {
        let mut cap = Cap::starting_at(32);
        cap.accept(10);
        assert!(!cap.cut(11), "nothing is known of a cap yet");
        (0..3).for_each(|_| cap.weigh(11));
        assert!(cap.cut(11));
        assert!((cap.slots - 10.0).abs() < 1e-5);
        assert!(!cap.cut(5), "a rejection well below the slots is for the rate");
        assert!(cap.cut(10));
        assert!((cap.slots - 9.0).abs() < 1e-5);
        assert!(!cap.cut(1), "one in flight is never too many");
    }

    #[test]
    fn slots_of_a_cap_grow_by_one_per_swing() {
        let mut cap = Cap::starting_at(4);
        cap.accept(4);
        (0..3).for_each(|_| cap.weigh(5));
        assert!(cap.cut(5));
        cap.rise(3.0, 50.0, 0.2, 100.0);
        assert!((cap.slots - 4.0).abs() < 1e-5, "no caller is held back");
        cap.held_at = 100.0;
        cap.rise(3.0, 50.0, 0.2, 100.0);
        assert!((cap.slots - 5.0).abs() < 1e-5);
        cap.rise(3.0, 10.0, 0.2, 100.0);
        assert!((cap.slots - 5.2).abs() < 1e-5, "slower where 150 requests take longer");
    }

    /// Regression: a bucket of one request was mistaken for a cap, and slots grew by one in 3 s for minutes.
    #[test]
    fn slots_that_meet_no_rejection_depart() {
        let mut cap = Cap::starting_at(32);
        cap.accept(10);
        (0..3).for_each(|_| cap.weigh(11));
        assert!(cap.cut(11));
        let mut now = 0.0;
        while cap.is_cap() {
            now += 0.1;
            cap.held_at = now;
            cap.rise(0.1, 100.0, 0.2, now);
        }
        assert!(now < 20.0 && cap.slots > 12.0, "{} slots after {now} s", cap.slots);
    }
}
