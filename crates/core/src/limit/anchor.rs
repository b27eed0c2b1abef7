//! Wall time that never runs back.
//!
//! Buckets are points in wall time, and a wall clock can be set back: an hour less on the clock would be an hour
//! in which nothing refills. A step back of more than a second is therefore taken as a new setting of the clock:
//! time goes on from where it was, without credit. A smaller one is a correction: time stands still until it is
//! caught up with.

use crate::time::Stamp;

/// A smaller step back is waited out.
const STEP_MIN: u64 = 1_000_000;

/// The latest time seen, and how far the clock has been set back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Anchor {
    latest: u64,
    ahead: u64,
}

impl Anchor {
    /// The anchor that an engine kept: the latest time seen, and how far the clock had been set back by then.
    pub const fn restored(latest: Stamp, ahead: u64) -> Self {
        Self { latest: latest.as_micros(), ahead }
    }

    /// The latest time seen.
    pub const fn latest(&self) -> Stamp {
        Stamp::from_micros(self.latest)
    }

    /// By how many microseconds the clock has been set back.
    pub const fn ahead(&self) -> u64 {
        self.ahead
    }

    /// What time it is by a reading that others have overtaken: it moves time forward, and is no setting back.
    pub fn read_late(&mut self, wall: Stamp) -> Stamp {
        self.latest = self.latest.max(wall.as_micros().saturating_add(self.ahead));
        Stamp::from_micros(self.latest)
    }

    /// What time it is when the clock reads `wall`.
    pub fn read(&mut self, wall: Stamp) -> Stamp {
        let read = wall.as_micros().saturating_add(self.ahead);
        if read < self.latest {
            let step = self.latest - read;
            if step > STEP_MIN {
                self.ahead = self.ahead.saturating_add(step);
            }
            return Stamp::from_micros(self.latest);
        }
        self.latest = read;
        Stamp::from_micros(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_set_back_goes_on_from_where_it_was() {
        let mut anchor = Anchor::default();
        // What the clock reads, and what time it is, in milliseconds.
        let table = [
            (10_000, 10_000),
            (11_000, 11_000),
            // A correction is waited out.
            (10_500, 11_000),
            (11_200, 11_200),
            // A setting is followed, without credit and without a standstill.
            (5_000, 11_200),
            (5_300, 11_500),
            (1_000, 11_500),
            (2_000, 12_500),
            // Forward is believed.
            (60_000, 70_500),
        ];
        for (wall, time) in table {
            let millis = |stamp: u64| Stamp::from_micros(stamp * 1_000);
            assert_eq!(anchor.read(millis(wall)), millis(time), "the clock reads {wall} ms");
        }
    }
}
