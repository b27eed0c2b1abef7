//! The time of a store whose engine has no clock: this host's, corrected by the dates of the engine's
//! responses.
//!
//! A response is dated to the second, and was dated between the sending of its request and its arrival, so
//! each one bounds the offset between the two clocks. The intersection of the bounds of several responses is
//! narrower than a second, because they fall at different parts of one. The host's clock is corrected only as
//! far as the bounds require. A response that contradicts them may be misdated, for example by a proxy;
//! several consecutive ones that agree with each other mean that a clock was set.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tidegate_core::time::Stamp;

use crate::clock::{HostWall, WallClock};
use crate::sync::lock;

/// The host's clock, corrected.
#[derive(Debug)]
pub(super) struct CorrectedClock<C = HostWall> {
    clock: C,
    /// The correction in microseconds.
    offset: AtomicI64,
    estimate: Mutex<OffsetEstimate>,
    responses: AtomicU64,
}

/// The number of consecutive contradicting responses that replace the estimate.
const CONTRADICTIONS: u32 = 3;

/// The bounds of the offset, and those of consecutive responses that contradict them, with their number.
#[derive(Debug, Default)]
struct OffsetEstimate {
    known: Option<Bounds>,
    contradiction: Option<(Bounds, u32)>,
}

/// Bounds of the engine's clock minus the host's, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounds {
    least: i64,
    most: i64,
}

impl Bounds {
    /// The intersection, if it is not empty.
    fn and(self, other: Self) -> Option<Self> {
        let joined = Self { least: self.least.max(other.least), most: self.most.min(other.most) };
        (joined.least <= joined.most).then_some(joined)
    }
}

impl<C: WallClock> CorrectedClock<C> {
    pub(super) fn new(clock: C) -> Self {
        Self { clock, offset: AtomicI64::new(0), estimate: Mutex::default(), responses: AtomicU64::new(0) }
    }

    /// The host's clock, uncorrected.
    pub(super) fn uncorrected(&self) -> Stamp {
        self.clock.now()
    }

    /// Learns from a response that is dated `date`, to the second. `sent` and `arrived` are uncorrected.
    pub(super) fn learn(&self, sent: Stamp, date: Stamp, arrived: Stamp) {
        self.responses.fetch_add(1, Ordering::Relaxed);
        let micros = |stamp: Stamp| i64::try_from(stamp.as_micros()).unwrap_or(i64::MAX);
        let least = micros(date).saturating_sub(micros(arrived));
        let most = micros(date).saturating_add(1_000_000).saturating_sub(micros(sent));
        if most < least {
            // The clock was set back in between: nothing is learned.
            return;
        }
        let observed = Bounds { least, most };
        let mut estimate = lock(&self.estimate);
        let joined = estimate.known.map_or(Some(observed), |known| known.and(observed)).or_else(|| {
            let contradiction = estimate
                .contradiction
                .and_then(|(contradiction, count)| Some((contradiction.and(observed)?, count + 1)));
            let (contradiction, count) =
                *estimate.contradiction.insert(contradiction.unwrap_or((observed, 1)));
            (count >= CONTRADICTIONS).then_some(contradiction)
        });
        if let Some(joined) = joined {
            *estimate = OffsetEstimate { known: Some(joined), contradiction: None };
            self.offset.store(0_i64.clamp(joined.least, joined.most), Ordering::Relaxed);
        }
    }
}

impl<C: WallClock> WallClock for CorrectedClock<C> {
    fn now(&self) -> Stamp {
        let now = self.clock.now().as_micros();
        Stamp::from_micros(now.saturating_add_signed(self.offset.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ManualWall;

    const START: Stamp = Stamp::from_secs(1_800_000_000);

    /// Exchanges messages with an engine whose clock is `ahead` microseconds ahead; returns the remaining
    /// error. With it the clock is right within a second at once, and within a round trip soon.
    fn error_after_responses(count: u64, ahead: i64) -> i64 {
        let wall = ManualWall::new(START);
        let clock = CorrectedClock::new(wall.clone());
        for _ in 0..count {
            let sent = clock.uncorrected();
            wall.advance(Duration::from_millis(2));
            let engine = clock.uncorrected().as_micros().saturating_add_signed(ahead);
            let date = Stamp::from_secs(engine / 1_000_000);
            wall.advance(Duration::from_millis(2));
            clock.learn(sent, date, clock.uncorrected());
            wall.advance(Duration::from_millis(37));
        }
        let (now, true_now) = (clock.now(), clock.uncorrected().as_micros().saturating_add_signed(ahead));
        i64::try_from(now.as_micros()).unwrap() - i64::try_from(true_now).unwrap()
    }

    #[test]
    fn wrong_clock_is_corrected_by_response_dates() {
        for ahead in [2_000_000, -2_000_000, 3_600_000_000] {
            assert!(error_after_responses(1, ahead).abs() <= 1_004_000, "{ahead}");
            assert!(
                error_after_responses(60, ahead).abs() <= 50_000,
                "{ahead}: {}",
                error_after_responses(60, ahead)
            );
        }
    }

    #[test]
    fn clock_within_bounds_is_not_corrected() {
        assert_eq!(error_after_responses(60, 0), 0);
    }

    #[test]
    fn clock_step_is_learned_after_contradictions() {
        let wall = ManualWall::new(START);
        let clock = CorrectedClock::new(wall.clone());
        let learn = || {
            let now = clock.uncorrected();
            clock.learn(now, Stamp::from_secs(START.as_micros() / 1_000_000), now);
        };
        learn();
        assert_eq!(clock.now(), START);
        wall.set(START + Duration::from_secs(300));
        for _ in 0..CONTRADICTIONS {
            assert_eq!(clock.now(), START + Duration::from_secs(300), "it takes several responses");
            learn();
        }
        assert!(clock.now().since(START) <= Duration::from_secs(1));
    }

    #[test]
    fn inconsistent_dates_do_not_move_the_clock() {
        let wall = ManualWall::new(START);
        let clock = CorrectedClock::new(wall.clone());
        let dated = |ahead: i64| {
            let now = clock.uncorrected();
            let date = START.as_micros().saturating_add_signed(ahead * 1_000_000) / 1_000_000;
            clock.learn(now, Stamp::from_secs(date), now);
        };
        for ahead in [0, 3_600, 0, 3_600, 3_600, 0, 3_600, -3_600, 7_200, 3_600, 86_400, 0] {
            dated(ahead);
            assert_eq!(clock.now(), START, "{ahead} seconds");
        }
    }
}
