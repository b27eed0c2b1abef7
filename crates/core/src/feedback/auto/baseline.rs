//! Latency against a learned baseline, by cohorts.
//!
//! A cohort is the requests sent from its start on, until there are enough of them to know their mean (of the
//! logarithm) to about 6 %. A cohort that is significantly slower than the baseline, with several requests in
//! flight, cuts the slots to a little less than the baseline calls for, so that the upstream's queue drains
//! and the true baseline is seen again, as in BBR's `ProbeRTT`. If fewer requests in flight do not lower the
//! latency, this client is not its cause, and the baseline moves.

use super::narrow;

/// A cohort is slow from this multiple of the baseline on.
const SLOW: f32 = 1.3;
/// The same if a quota or a cap holds callers back: then the load is known not to be the cause.
const SLOW_PACED: f32 = 2.0;
/// Slots may grow up to this multiple of the baseline.
const FAST: f32 = 1.2;
/// A cut goes to this share of the slots that the baseline calls for.
const DRAIN: f32 = 0.95;
/// Slots grow by this share per cohort.
const GROW: f32 = 0.05;
/// The wanted error of a cohort's mean, in the logarithm.
const ERROR: f32 = 0.06;
/// The fewest and the most requests of a cohort.
const COHORT: (f32, f32) = (8.0, 400.0);
/// A cohort of this many is read after [`COHORT_TIME`] though more are wanted.
const COHORT_SLOW: f32 = 24.0;
const COHORT_TIME: f32 = 3.0;
/// A cohort lasts at least this long, in seconds.
const COHORT_TIME_MIN: f32 = 0.1;
/// A cohort that is not back this many seconds after its last request, or this many times the baseline if that is
/// longer, is abandoned.
const COHORT_STALE: f64 = 60.0;
const COHORT_STALE_LATENCIES: f64 = 10.0;
/// A cohort is read when this share of it is back.
const BACK: f32 = 0.9;

/// The cohort of the moment, and the baseline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Baseline {
    /// The baseline in seconds; the first success's latency until a cohort is back, and 0 before.
    latency: f32,
    /// Requests the baseline rests on, until there are enough.
    known: f32,
    /// Variance of the logarithm within cohorts.
    variance: f32,
    /// The cohort of the moment; permits carry the one they belong to.
    cohort: u16,
    sent: f32,
    done: f32,
    sum: f32,
    squares: f32,
    since: f64,
    /// When the last request of the cohort was sent.
    last_at: f64,
    /// Mean latency and number in flight at the last slow cohort, if the one before this was slow.
    slow_latency: f32,
    slow_in_flight: f32,
    /// Before the first slow cohort: slots double per round trip.
    pub(super) is_starting: bool,
}

/// The effect of a complete cohort on the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Reading {
    /// At most this many, because requests took this long.
    Cut {
        slots: f32,
        /// Seconds.
        latency: f64,
    },
    /// Fewer did not help: back to this many.
    Restore(f32),
    /// By this many more.
    Grow(f32),
}

/// The load when a cohort is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Requests in flight, the one that just ended included.
    pub(super) in_flight: f32,
    pub(super) slots: f32,
    /// When slots last held a caller back.
    pub(super) held_at: f64,
    pub(super) is_cap: bool,
    /// Whether a known quota or a cap holds callers back.
    pub(super) is_paced: bool,
}

impl Default for Baseline {
    fn default() -> Self {
        Self {
            latency: 0.0,
            known: 0.0,
            variance: 0.25,
            cohort: 1,
            sent: 0.0,
            done: 0.0,
            sum: 0.0,
            squares: 0.0,
            since: 0.0,
            last_at: 0.0,
            slow_latency: 0.0,
            slow_in_flight: 0.0,
            is_starting: true,
        }
    }
}

impl Baseline {
    /// The baseline in seconds; 0 before the first success.
    pub(super) fn latency(&self) -> f64 {
        f64::from(self.latency)
    }

    /// A request is sent; returns its cohort, or 0 if it belongs to none.
    pub(super) fn join(&mut self, now: f64) -> u16 {
        if self.sent == 0.0 {
            self.since = now;
        }
        if self.is_closed(now) {
            return 0;
        }
        self.sent += 1.0;
        self.last_at = now;
        self.cohort
    }

    pub(super) const fn is_current(&self, cohort: u16) -> bool {
        cohort == self.cohort
    }

    /// A request of the cohort ended without a latency that counts.
    pub(super) fn leave(&mut self) {
        self.sent = (self.sent - 1.0).max(0.0);
    }

    /// The first success, before any cohort is back.
    pub(super) fn first(&mut self, latency: f64) {
        if self.latency == 0.0 {
            self.latency = narrow(latency).max(1e-6);
        }
    }

    /// A request of the cohort succeeded.
    pub(super) fn sample(&mut self, latency: f64) {
        let log = narrow(latency).max(1e-6).ln();
        self.done += 1.0;
        self.sum += log;
        self.squares += log * log;
    }

    /// Reads the cohort if it is complete, and begins the next.
    pub(super) fn read(&mut self, now: f64, load: Load) -> Option<Reading> {
        if self.done == 0.0 || !self.is_closed(now) || self.done < BACK * self.sent {
            // Requests that hang must not end the measurement.
            let stale = COHORT_STALE.max(COHORT_STALE_LATENCIES * self.latency());
            if self.is_closed(now) && now - self.last_at > stale {
                self.next_cohort();
            }
            return None;
        }
        let (count, wanted, mean) = (self.done, self.wanted(), self.sum / self.done);
        let latency = mean.exp();
        self.variance += 0.3 * ((self.squares / count - mean * mean).max(0.01) - self.variance);
        self.next_cohort();
        self.learn(latency, count, wanted);
        let ratio = latency / self.latency;
        let gain = match ratio {
            ..1.0 => 0.5,
            ..FAST => 0.02,
            _ => 0.0,
        };
        self.latency += (latency - self.latency) * gain;
        let error = (self.variance / count.min(self.known)).sqrt();
        let noise = (4.0 * (error - ERROR)).max(0.0).exp();
        let slow = if load.is_paced { SLOW_PACED } else { SLOW };
        if ratio > noise * slow && load.in_flight >= 3.0 {
            return self.slow(latency, ratio, now, load);
        }
        self.slow_latency = 0.0;
        self.slow_in_flight = 0.0;
        let is_held = now - load.held_at < self.latency().max(0.1);
        let may_grow = ratio < FAST && !self.is_starting && !load.is_cap && is_held;
        may_grow.then(|| Reading::Grow((GROW * load.slots).max(1.0)))
    }

    /// Requests after which a cohort is closed.
    fn wanted(&self) -> f32 {
        if self.known == 0.0 { COHORT.0 } else { (self.variance / (ERROR * ERROR)).clamp(COHORT.0, COHORT.1) }
    }

    fn is_closed(&self, now: f64) -> bool {
        let (wanted, age) = (self.wanted(), narrow(now - self.since));
        (self.sent >= wanted && age >= COHORT_TIME_MIN)
            || (self.sent >= wanted.min(COHORT_SLOW) && age >= COHORT_TIME)
    }

    fn next_cohort(&mut self) {
        self.cohort = self.cohort.wrapping_add(1).max(1);
        (self.sent, self.done, self.sum, self.squares) = (0.0, 0.0, 0.0, 0.0);
    }

    /// The baseline is the geometric mean of the first cohorts, unless one is slow.
    fn learn(&mut self, latency: f32, count: f32, wanted: f32) {
        if self.known == 0.0 {
            self.latency = latency;
            self.known = count;
            return;
        }
        let bound = self.latency * SLOW * (2.0 * (self.variance / self.known).sqrt()).exp();
        if self.known < wanted && latency < bound {
            let total = self.known + count;
            self.latency = ((self.known * self.latency.ln() + count * latency.ln()) / total).exp();
            self.known = total;
        }
    }

    fn slow(&mut self, latency: f32, ratio: f32, now: f64, load: Load) -> Option<Reading> {
        let in_flight = load.in_flight;
        if self.slow_in_flight == 0.0 {
            self.slow_in_flight = in_flight;
            // One slow cohort may be chance if it is not very slow and slots hold no caller back.
            if ratio < 1.5 && now - load.held_at > 2.0 * f64::from(latency) {
                return None;
            }
        } else if self.slow_latency == 0.0 {
            self.slow_latency = latency;
        } else if in_flight < 0.7 * self.slow_in_flight {
            let gain = (self.slow_latency / latency).ln();
            if gain < 0.25 * (self.slow_in_flight / in_flight).ln() {
                let slots = self.slow_in_flight;
                self.latency = latency;
                (self.slow_latency, self.slow_in_flight) = (0.0, 0.0);
                return Some(Reading::Restore(slots));
            }
            (self.slow_latency, self.slow_in_flight) = (latency, in_flight);
        }
        self.is_starting = false;
        let slots = (in_flight * (DRAIN / ratio).clamp(0.4, 0.9)).max(1.0);
        Some(Reading::Cut { slots, latency: f64::from(latency) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load =
        Load { in_flight: 20.0, slots: 20.0, held_at: f64::NEG_INFINITY, is_cap: false, is_paced: false };

    /// Sends cohorts of equal latency, one after the other, each read when it is back.
    fn cohort(baseline: &mut Baseline, now: &mut f64, latency: f64, load: Load) -> Option<Reading> {
        let mut members = 0;
        let mut sent_at = *now;
        while baseline.join(sent_at) != 0 {
            members += 1;
            sent_at += 0.02;
            assert!(members < 1_000, "a cohort ends");
        }
        *now = sent_at + latency;
        (0..members).for_each(|_| baseline.sample(latency));
        baseline.read(*now, load)
    }

    fn learned(now: &mut f64) -> Baseline {
        let mut baseline = Baseline::default();
        for _ in 0..12 {
            cohort(&mut baseline, now, 0.2, LOAD);
        }
        assert!((baseline.latency() - 0.2).abs() < 1e-6, "{baseline:?}");
        baseline
    }

    #[test]
    fn constant_latency_of_any_size_is_healthy() {
        for latency in [0.001, 0.2, 2.0, 20.0] {
            let (mut baseline, mut now) = (Baseline::default(), 0.0);
            for _ in 0..50 {
                let reading = cohort(&mut baseline, &mut now, latency, LOAD);
                assert!(!matches!(reading, Some(Reading::Cut { .. })), "{latency} s: {reading:?}");
            }
            assert!((baseline.latency() / latency - 1.0).abs() < 0.01);
        }
    }

    #[test]
    fn slow_cohort_cuts_slots_below_the_baseline() {
        let mut now = 0.0;
        let mut baseline = learned(&mut now);
        // Ratio and what is left of 20 in flight.
        let reading = cohort(&mut baseline, &mut now, 0.4, LOAD);
        assert!(
            matches!(reading, Some(Reading::Cut { slots, .. }) if (slots - 9.5).abs() < 0.1),
            "{reading:?}"
        );
        assert!(!baseline.is_starting);
    }

    #[test]
    fn few_in_flight_are_never_the_cause() {
        let mut now = 0.0;
        let mut baseline = learned(&mut now);
        let load = Load { in_flight: 2.0, ..LOAD };
        assert_eq!(cohort(&mut baseline, &mut now, 1.0, load), None);
    }

    #[test]
    fn paced_load_must_double_its_latency() {
        let mut now = 0.0;
        let mut baseline = learned(&mut now);
        let load = Load { is_paced: true, held_at: now, ..LOAD };
        assert!(!matches!(cohort(&mut baseline, &mut now, 0.36, load), Some(Reading::Cut { .. })));
        assert!(matches!(cohort(&mut baseline, &mut now, 0.7, load), Some(Reading::Cut { .. })));
    }

    #[test]
    fn baseline_moves_if_fewer_do_not_help() {
        let mut now = 0.0;
        let mut baseline = learned(&mut now);
        let mut in_flight = 40.0;
        for _ in 0..20 {
            match cohort(&mut baseline, &mut now, 0.8, Load { in_flight, slots: in_flight, ..LOAD }) {
                Some(Reading::Cut { slots, .. }) => in_flight = slots,
                Some(Reading::Restore(slots)) => {
                    assert!(slots > 10.0, "{slots}");
                    assert!((baseline.latency() - 0.8).abs() < 0.01);
                    return;
                }
                _ => {}
            }
        }
        panic!("the baseline never moved: {baseline:?}");
    }

    #[test]
    fn slots_grow_by_a_twentieth_under_demand() {
        let mut now = 0.0;
        let mut baseline = learned(&mut now);
        baseline.is_starting = false;
        let held = |now: f64| Load { slots: 60.0, held_at: now + 1.0, ..LOAD };
        let load = held(now);
        assert_eq!(cohort(&mut baseline, &mut now, 0.2, load), Some(Reading::Grow(3.0)));
        assert_eq!(cohort(&mut baseline, &mut now, 0.2, LOAD), None, "no caller is held back");
        let load = Load { is_cap: true, ..held(now) };
        assert_eq!(cohort(&mut baseline, &mut now, 0.2, load), None, "a cap grows by itself");
    }

    /// Regression: one request without a response ended latency control.
    #[test]
    fn hung_request_ends_its_cohort_only() {
        for (latency, is_stale) in [(0.1, [false, true]), (20.0, [false, false])] {
            let (mut baseline, sent_at) = (Baseline::default(), 1_000.0);
            (0..8).for_each(|_| assert_eq!(baseline.join(sent_at), 1));
            baseline.first(latency);
            (0..7).for_each(|_| baseline.sample(latency));
            for (age, is_stale) in [59.0, 61.0].into_iter().zip(is_stale) {
                assert_eq!(baseline.read(sent_at + age, LOAD), None);
                assert_eq!(baseline.is_current(1), !is_stale, "{latency} s, after {age} s");
            }
        }
    }

    #[test]
    fn requests_that_leave_do_not_hold_up_a_cohort() {
        let (mut baseline, mut now) = (Baseline::default(), 0.0);
        (0..8).for_each(|_| assert_eq!(baseline.join(0.0), 1));
        now += 1.0;
        (0..6).for_each(|_| baseline.sample(0.1));
        assert_eq!(baseline.read(now, LOAD), None, "two are out");
        baseline.leave();
        baseline.leave();
        assert_eq!(baseline.join(now), 1, "and two more may join");
    }
}
