//! The time of a store whose engine tells none: this machine's, corrected by what the engine's answers say.
//!
//! An answer is dated to the second. Whatever the engine's clock showed when it dated one, this machine's showed something
//! between the sending of the request and the arrival of the answer, so that each answer bounds how far the two are apart.
//! The bounds of several answers together are narrower than a second: they come at different parts of it. As long as being
//! right is within the bounds, this machine's clock is believed. An answer that contradicts them may be dated wrongly, by
//! something on its way say; several in a row that agree with each other mean that one of the clocks was set.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tidegate_core::time::Stamp;

use crate::clock::{HostWall, WallClock};
use crate::sync::lock;

/// This machine's time, corrected.
#[derive(Debug)]
pub(super) struct Corrected<C = HostWall> {
    clock: C,
    /// By how many microseconds it is corrected.
    offset: AtomicI64,
    learned: Mutex<Learned>,
    answers: AtomicU64,
}

/// After so many answers in a row that contradict what is known, they are believed.
const CONTRADICTIONS: u32 = 3;

/// What is known of how far the clocks are apart, and what answers say of it that contradict that: how many in a row.
#[derive(Debug, Default)]
struct Learned {
    known: Option<Bounds>,
    doubt: Option<(Bounds, u32)>,
}

/// How much later than this machine's clock the engine's shows, in microseconds: at least, and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounds {
    least: i64,
    most: i64,
}

impl Bounds {
    /// What both of them say, if they do not contradict each other.
    fn and(self, other: Self) -> Option<Self> {
        let joined = Self { least: self.least.max(other.least), most: self.most.min(other.most) };
        (joined.least <= joined.most).then_some(joined)
    }
}

impl<C: WallClock> Corrected<C> {
    pub(super) fn new(clock: C) -> Self {
        Self { clock, offset: AtomicI64::new(0), learned: Mutex::default(), answers: AtomicU64::new(0) }
    }

    /// This machine's clock as it is.
    pub(super) fn uncorrected(&self) -> Stamp {
        self.clock.now()
    }

    /// An answer to what was sent at `sent` arrived at `arrived`, both uncorrected, and is dated `date`, to the second.
    pub(super) fn learn(&self, sent: Stamp, date: Stamp, arrived: Stamp) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        let micros = |stamp: Stamp| i64::try_from(stamp.as_micros()).unwrap_or(i64::MAX);
        let least = micros(date).saturating_sub(micros(arrived));
        let most = micros(date).saturating_add(1_000_000).saturating_sub(micros(sent));
        if most < least {
            // The clock was set back meanwhile: nothing is learned.
            return;
        }
        let said = Bounds { least, most };
        let mut learned = lock(&self.learned);
        let joined = learned.known.map_or(Some(said), |known| known.and(said)).or_else(|| {
            let doubt = learned.doubt.and_then(|(doubt, count)| Some((doubt.and(said)?, count + 1)));
            let (doubt, count) = *learned.doubt.insert(doubt.unwrap_or((said, 1)));
            (count >= CONTRADICTIONS).then_some(doubt)
        });
        if let Some(joined) = joined {
            *learned = Learned { known: Some(joined), doubt: None };
            self.offset.store(0_i64.clamp(joined.least, joined.most), Ordering::Relaxed);
        }
    }
}

impl<C: WallClock> WallClock for Corrected<C> {
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

    /// Sends something every so often to an engine whose clock shows `ahead` microseconds more.
    fn after_answers(count: u64, ahead: i64) -> i64 {
        let wall = ManualWall::new(START);
        let clock = Corrected::new(wall.clone());
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
    fn a_clock_that_is_two_seconds_off_is_right_within_a_second_at_once_and_within_a_trip_soon() {
        for ahead in [2_000_000, -2_000_000, 3_600_000_000] {
            assert!(after_answers(1, ahead).abs() <= 1_004_000, "{ahead}");
            assert!(after_answers(60, ahead).abs() <= 50_000, "{ahead}: {}", after_answers(60, ahead));
        }
    }

    #[test]
    fn a_clock_that_may_be_right_is_believed() {
        assert_eq!(after_answers(60, 0), 0);
    }

    #[test]
    fn a_clock_that_was_set_is_learned_anew() {
        let wall = ManualWall::new(START);
        let clock = Corrected::new(wall.clone());
        let learn = || {
            let now = clock.uncorrected();
            clock.learn(now, Stamp::from_secs(START.as_micros() / 1_000_000), now);
        };
        learn();
        assert_eq!(clock.now(), START);
        wall.set(START + Duration::from_secs(300));
        for _ in 0..CONTRADICTIONS {
            assert_eq!(clock.now(), START + Duration::from_secs(300), "it takes several to say so");
            learn();
        }
        assert!(clock.now().since(START) <= Duration::from_secs(1));
    }

    #[test]
    fn an_answer_that_is_dated_wrongly_moves_nothing_nor_do_several_that_do_not_agree() {
        let wall = ManualWall::new(START);
        let clock = Corrected::new(wall.clone());
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
