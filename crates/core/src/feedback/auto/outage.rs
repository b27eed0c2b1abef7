//! Outages and windows: what to do while the upstream rejects everything.
//!
//! After two waves in which nothing was accepted all requests rest, twice as long each time and at most 5 s.
//! Then one request goes as a probe. When the upstream accepts again, the units accepted since the last such
//! return distinguish an outage from a quota that is granted in windows.

use std::ops::Deref;

use super::narrow;
use crate::random::Random;

/// The first rest is twice this, in seconds.
const REST: f64 = 0.1;
/// The longest rest in seconds: the end of a window is met within it.
const REST_MAX: f64 = 5.0;
/// Hints are rounded up to whole seconds: up to this much of one is no part of a window.
const HINT_ROUNDING: f64 = 1.0;
/// Waves without anything accepted after which all requests rest.
const WAVES: u32 = 2;
/// Windows are not believed to be longer than this, in seconds.
const WINDOW_MAX: f64 = 120.0;
/// A darkness longer than this, in seconds, is the rest of a window.
const WINDOW_DARK: f64 = 2.0;

/// What rejections have shown: allocated with the first one, so that a key without any stays small.
#[derive(Debug, Clone, Default)]
pub(super) struct OutageState(Option<Box<Outage>>);

impl OutageState {
    /// The state, for a rejection; the first request was sent at `started_at`.
    pub(super) fn of_rejection(&mut self, started_at: f64) -> &mut Outage {
        self.0.get_or_insert_with(|| Box::new(Outage { back_at: started_at, ..Outage::NONE }))
    }

    /// The state, if there was a rejection.
    pub(super) fn get_mut(&mut self) -> Option<&mut Outage> {
        self.0.as_deref_mut()
    }
}

impl Deref for OutageState {
    type Target = Outage;

    fn deref(&self) -> &Outage {
        self.0.as_deref().unwrap_or(&Outage::NONE)
    }
}

/// The state of an outage, or the rhythm of a window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outage {
    /// Waves in a row in which nothing was accepted.
    waves: u32,
    /// When the probe entered that is out.
    probe_at: Option<f64>,
    /// Whether the upstream has accepted again before.
    has_returned: bool,
    /// The dimension of `back_accepted`.
    back_index: u8,
    /// Nothing is sent before this.
    pub(super) rest_until: f64,
    /// Requests accepted before the last wave.
    last_accepted: f64,
    /// When the upstream last accepted again, and the units accepted by then.
    back_at: f64,
    back_accepted: f64,
    /// Seconds by which the last hint may have exceeded the actual wait.
    excess: f32,
    /// The length of the quota's window in seconds; 0 if it has none.
    window: f32,
}

impl Outage {
    const NONE: Self = Self {
        waves: 0,
        probe_at: None,
        has_returned: false,
        back_index: 0,
        rest_until: 0.0,
        last_accepted: 0.0,
        back_at: 0.0,
        back_accepted: 0.0,
        excess: 0.0,
        window: 0.0,
    };

    pub(super) fn window(&self) -> f64 {
        f64::from(self.window)
    }

    /// Whether nothing is accepted: requests go one at a time.
    pub(super) const fn is_dark(&self) -> bool {
        self.waves >= WAVES
    }

    /// Whether the last rejection was not followed by another without anything accepted in between.
    pub(super) const fn is_quiet(&self) -> bool {
        self.waves == 0
    }

    /// A wave begins with a rejected request before which `accepted` requests were accepted. Returns whether
    /// that is more than before the last wave.
    pub(super) fn wave(&mut self, accepted: f64) -> bool {
        let has_some = accepted - self.last_accepted >= 0.5;
        if has_some && !self.is_dark() {
            self.waves = 0;
        }
        self.last_accepted = accepted;
        has_some
    }

    /// The wave's cut is made; `is_empty` if nothing was accepted since the last. Returns whether a hint
    /// stops all requests.
    pub(super) fn count(&mut self, is_empty: bool, hint: Option<f64>, now: f64, random: &mut Random) -> bool {
        self.waves = if is_empty { self.waves.saturating_add(1) } else { 0 };
        if self.is_dark() {
            let doubled = (REST * f64::from(1_u32 << self.waves.min(12))).min(REST_MAX);
            self.rest(now + doubled * (0.75 + 0.5 * random.fraction()));
        }
        let Some(hint) = hint.filter(|_| self.waves >= 1) else { return false };
        // Waiting it out is the only probe needed.
        self.waves = self.waves.max(WAVES);
        self.excess = narrow(hint.min(HINT_ROUNDING));
        self.probe_at = None;
        true
    }

    fn rest(&mut self, until: f64) {
        self.rest_until = self.rest_until.max(until);
        self.probe_at = None;
    }

    /// A request was sent. In the dark it is a probe, and others wait for its response.
    pub(super) fn sent(&mut self, now: f64, latency: f64) {
        if self.is_dark() {
            self.probe_at = Some(now);
            self.rest_until = now + (2.0 * latency).clamp(0.1, 1.0);
        }
    }

    /// Whether a probe is out that was not rejected in time.
    pub(super) fn has_passed(&self, now: f64) -> bool {
        self.is_probing() && now >= self.rest_until
    }

    pub(super) const fn has_returned(&self) -> bool {
        self.has_returned
    }

    pub(super) const fn is_probing(&self) -> bool {
        self.probe_at.is_some()
    }

    /// Units accepted and seconds passed since the last return, if the upstream accepts again at `now`. The
    /// units are unknown if they were counted in another dimension then.
    pub(super) fn since_back(&self, accepted: f64, index: usize, now: f64) -> (Option<f64>, f64) {
        let is_same = usize::from(self.back_index) == index || !self.has_returned;
        let elapsed = now - self.back_at;
        let elapsed = (elapsed - f64::from(self.excess)).max(elapsed / 2.0);
        (is_same.then_some(accepted - self.back_accepted), elapsed)
    }

    /// A request that entered at `entered` ended without a response. If that was the probe, the next request is one.
    pub(super) fn stop_probing(&mut self, entered: f64, now: f64) {
        if self.probe_at.is_some_and(|at| entered >= at) {
            self.probe_at = None;
            self.rest_until = now;
        }
    }

    /// The upstream accepts again; `is_window` if that is how the quota is granted.
    pub(super) fn end(&mut self, (accepted, index): (f64, usize), is_window: bool, dark: f64, now: f64) {
        if is_window && dark > WINDOW_DARK && self.has_returned {
            self.window = narrow((now - self.back_at).min(WINDOW_MAX));
        }
        self.back_at = now;
        self.back_accepted = accepted;
        self.back_index = u8::try_from(index).unwrap_or(u8::MAX);
        self.has_returned = true;
        self.excess = 0.0;
        self.waves = 0;
        self.probe_at = None;
        self.rest_until = self.rest_until.min(now);
    }

    /// A cut outside of any window: the window counts for less.
    pub(super) fn fade_window(&mut self) {
        self.window *= 0.7;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(outage: &mut Outage, accepted: f64, hint: Option<f64>, now: f64) -> bool {
        let has_some = outage.wave(accepted);
        outage.count(!has_some, hint, now, &mut Random::fixed(0.5))
    }

    #[test]
    fn rests_double_while_nothing_is_accepted() {
        let mut outage = Outage::NONE;
        assert!(!rejected(&mut outage, 10.0, None, 0.0));
        let rests: Vec<f64> = (0..8)
            .map(|_| {
                rejected(&mut outage, 10.0, None, 100.0);
                (outage.rest_until - 100.0).max(0.0)
            })
            .collect();
        for (rest, wanted) in rests.iter().zip([0.0, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]) {
            assert!((rest - wanted).abs() < 1e-9, "{rests:?}");
        }
    }

    #[test]
    fn hint_stops_all_only_if_nothing_was_accepted() {
        let mut outage = Outage::NONE;
        assert!(!rejected(&mut outage, 10.0, Some(30.0), 0.0), "ten were accepted before it");
        assert!(!rejected(&mut outage, 20.0, Some(30.0), 1.0), "ten more were accepted");
        assert!(!outage.is_dark());
        assert!(rejected(&mut outage, 20.0, Some(1.0), 2.0), "none was");
        assert!(outage.is_dark(), "one request goes after the hint");
    }

    #[test]
    fn one_probe_goes_at_a_time_in_the_dark() {
        let mut outage = Outage::NONE;
        for _ in 0..3 {
            rejected(&mut outage, 1.0, None, 0.0);
        }
        assert!(outage.is_dark() && !outage.has_passed(10.0));
        outage.sent(10.0, 0.2);
        assert!((outage.rest_until - 10.4).abs() < 1e-9);
        assert!(!outage.has_passed(10.3) && outage.has_passed(10.4));
        outage.end((2.0, 0), false, 10.0, 10.4);
        assert!(!outage.is_dark() && !outage.has_passed(10.5));
    }

    /// Regression: with windows of 1 s and hints of 1 s, a third of the time counted as time without quota.
    #[test]
    fn hint_counts_without_its_rounding() {
        for (hint, elapsed) in [(0.3, 9.7), (1.0, 9.0), (8.0, 9.0)] {
            let mut outage = Outage::NONE;
            outage.end((100.0, 0), true, 1.0, 10.0);
            assert!(!rejected(&mut outage, 150.0, Some(hint), 12.0));
            assert!(rejected(&mut outage, 150.0, Some(hint), 12.1));
            let (accepted, seconds) = outage.since_back(180.0, 0, 20.0);
            assert_eq!(accepted, Some(80.0));
            assert!((seconds - elapsed).abs() < 1e-6, "{hint}: {seconds}");
            outage.end((180.0, 0), true, 1.0, 20.0);
            assert!((outage.since_back(180.0, 0, 25.0).1 - 5.0).abs() < 1e-6, "the next is counted in full");
        }
    }

    #[test]
    fn window_is_the_time_between_two_returns() {
        let mut outage = Outage::NONE;
        outage.end((100.0, 0), true, 30.0, 60.0);
        assert!(outage.window() == 0.0, "the first return has none before it");
        outage.end((200.0, 0), true, 1.0, 110.0);
        assert!(outage.window() == 0.0, "a short darkness is no window's rest");
        outage.end((300.0, 0), true, 30.0, 170.0);
        assert!((outage.window() - 60.0).abs() < 1e-4);
        outage.fade_window();
        assert!((outage.window() - 42.0).abs() < 1e-4);
        outage.end((400.0, 0), true, 30.0, 1_000.0);
        assert!((outage.window() - 120.0).abs() < 1e-4);
    }
}
