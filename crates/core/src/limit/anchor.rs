//! Monotonic wall time over a clock that can be set back.
//!
//! Bucket states are points in wall time: if the clock were set back by an hour, nothing would refill for an
//! hour. After a step back of more than a second, time therefore continues from the latest reading, at an
//! offset to the clock. During a smaller step back time stands still. A forward gap of more than a second is
//! first deducted from the offset: otherwise a clock that is corrected would credit the same time twice. Idle
//! time looks like a correction, so it may be deducted too, once and at most the offset. `vectors/clock.txt`
//! lists test vectors.

use std::time::Duration;

use crate::time::Stamp;

/// Smaller steps do not count as the clock being set.
const STEP_MIN: u64 = 1_000_000;
/// While there is an offset, the latest time is persisted at least this often: gaps are measured from it.
const PERSIST_EVERY: u64 = 250_000;

/// The latest time seen, and how far it is ahead of the clock, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Anchor {
    latest: u64,
    offset: u64,
}

impl Anchor {
    /// An anchor read back from an engine.
    pub const fn restored(latest: Stamp, offset_micros: u64) -> Self {
        Self { latest: latest.as_micros(), offset: offset_micros }
    }

    /// The latest time seen.
    pub const fn latest(&self) -> Stamp {
        Stamp::from_micros(self.latest)
    }

    /// How far time is ahead of the clock because the clock was set back.
    pub const fn offset(&self) -> Duration {
        Duration::from_micros(self.offset)
    }

    /// Whether an engine that has persisted `kept` must persist this anchor, even if it writes nothing else.
    pub const fn is_due(&self, kept: &Self) -> bool {
        self.offset != kept.offset
            || self.offset > 0 && self.latest.saturating_sub(kept.latest) >= PERSIST_EVERY
    }

    /// The time by a reading that is older than one already applied. It may move time forward, and never
    /// counts as a step back.
    pub fn read_late(&mut self, wall: Stamp) -> Stamp {
        let gap = wall.as_micros().saturating_add(self.offset).saturating_sub(self.latest);
        let absorbed = if gap > STEP_MIN { gap.min(self.offset) } else { 0 };
        self.offset -= absorbed;
        self.latest += gap - absorbed;
        Stamp::from_micros(self.latest)
    }

    /// The time when the clock reads `wall`.
    pub fn read(&mut self, wall: Stamp) -> Stamp {
        let step = self.latest.saturating_sub(wall.as_micros().saturating_add(self.offset));
        if step > STEP_MIN {
            self.offset += step;
        }
        self.read_late(wall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a clock that flapped was credited with the time of every correction.
    #[test]
    fn anchor_follows_the_vectors() {
        let mut anchor = Anchor::default();
        let mut case = "";
        for line in include_str!("../../vectors/clock.txt").lines() {
            if let Some(name) = line.strip_prefix("case ") {
                (anchor, case) = (Anchor::default(), name);
            }
            let numbers: Vec<u64> = line.split(' ').map_while(|number| number.parse().ok()).collect();
            let [wall, time, offset] = numbers[..] else { continue };
            let now = anchor.read(Stamp::from_micros(wall * 1_000));
            assert_eq!(
                (now.as_micros(), anchor.offset()),
                (time * 1_000, Duration::from_millis(offset)),
                "{case}: {line}"
            );
        }
    }
}
